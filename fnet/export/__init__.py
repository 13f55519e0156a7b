"""Exports models to files that can be run without fnet.

program = export.program(model, params, state, x=export.spec("b, 8, 8, 1", "float32"))
program.save("digits.fnet")                  # a bundle, which needs only JAX and NumPy
logits = export.load("digits.fnet")(x)
"""

from fnet.export import serve
from fnet.export._generation import generation
from fnet.export._program import Program, program
from fnet.export._rebuild import renew
from fnet.export._record import read_record, record
from fnet.export._spec import Spec, spec, spec_of
from fnet.export._web import web
from fnet.export.standalone._loaded import Bundle, load
from fnet.export.standalone._reader import BundleError

__all__ = [
    "Bundle",
    "BundleError",
    "Program",
    "Spec",
    "generation",
    "load",
    "program",
    "read_record",
    "record",
    "renew",
    "serve",
    "spec",
    "spec_of",
    "web",
]
