"""fnet: neural networks as pure functions on JAX."""

__version__ = "0.1.0"
