"""Models, made of `fnet.layers`."""

from fnet.models import pretrained
from fnet.models._cnn import CNN
from fnet.models._mlp import MLP
from fnet.models._model import Model
from fnet.models._resnet import ResNet

__all__ = ["CNN", "MLP", "Model", "ResNet", "pretrained"]
