"""fnet: neural networks as pure functions on JAX.

A model is a function of a plain parameter tree (`fnet.layers`). `fnet.transforms` contains function
transformations for models, such as the conversion to mixed precision. `fnet.hardware` describes
chips and selects the dtypes that suit each chip. The packages `fnet.compress`, `fnet.cost`,
`fnet.export`, `fnet.federated`, `fnet.introspect`, `fnet.models`, `fnet.parallel`, `fnet.report`,
`fnet.search`, `fnet.serve` and `fnet.training` are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING

from fnet import hardware, layers, transforms

if TYPE_CHECKING:  # for editors
    from fnet import (
        compress,
        cost,
        federated,
        introspect,
        models,
        parallel,
        report,
        search,
        serve,
        training,
    )

__version__ = "0.2.0"
__all__ = [
    "compress",
    "cost",
    "export",
    "federated",
    "hardware",
    "introspect",
    "layers",
    "models",
    "parallel",
    "report",
    "search",
    "serve",
    "training",
    "transforms",
]
_LAZY = (
    "compress",
    "cost",
    "export",
    "federated",
    "introspect",
    "models",
    "parallel",
    "report",
    "search",
    "serve",
    "training",
)


def __getattr__(name):
    if name in _LAZY:
        return importlib.import_module(f"fnet.{name}")
    raise AttributeError(f"module 'fnet' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
