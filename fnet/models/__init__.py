"""Models, made of `fnet.layers`."""

from fnet.models import pretrained
from fnet.models._bert import Bert, Encoded, sentence_embedding
from fnet.models._blocks import unstack
from fnet.models._cnn import CNN
from fnet.models._generate import Generated, generate, padded
from fnet.models._gpt import GPT
from fnet.models._llama import Llama
from fnet.models._mlp import MLP
from fnet.models._model import Model
from fnet.models._resnet import ResNet
from fnet.models._rnn import LSTMClassifier, LSTMLanguageModel
from fnet.models._tree import TreeLSTM, Trees, pack_trees

__all__ = [
    "CNN", "GPT", "MLP", "Bert", "Encoded", "Generated", "LSTMClassifier", "LSTMLanguageModel", "Llama", "Model",
    "ResNet", "TreeLSTM", "Trees", "generate", "pack_trees", "padded", "pretrained", "sentence_embedding", "unstack",
]
