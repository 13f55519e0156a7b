"""Exports models to files that run without fnet and without your code.

    program = export.program(model, params, state, x=export.spec("b, 8, 8, 1", "float32"))
    program.save("digits.fnet")                  # a bundle, which needs only JAX and NumPy
    logits = export.load("digits.fnet")(x)

The same program can become an ONNX file, a LiteRT file or a web page; `docs/export.md` says which
is for what, and how far each can be trusted.
"""

from fnet._moved import moved_from
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
    "spec",
    "spec_of",
    "web",
]

__getattr__ = moved_from(__name__)
