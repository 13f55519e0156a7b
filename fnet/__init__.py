"""fnet: neural networks as pure functions on JAX.

A model is a function of a plain parameter tree (`fnet.layers`); whatever one does to it is a transform of that function
(`fnet.transforms`); what suits the chip underneath is looked up and measured (`fnet.hardware`). `fnet.training` and
`fnet.models` load on first use.
"""

import importlib

from fnet import hardware, layers, transforms

__version__ = "0.1.0"
__all__ = ["hardware", "layers", "models", "training", "transforms"]


def __getattr__(name):
    if name in ("models", "training"):
        return importlib.import_module(f"fnet.{name}")
    raise AttributeError(f"module 'fnet' has no attribute {name!r}")
