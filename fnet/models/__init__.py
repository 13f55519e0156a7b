"""Models, made of `fnet.layers`."""

from fnet.models._cnn import CNN
from fnet.models._mlp import MLP

__all__ = ["CNN", "MLP"]
