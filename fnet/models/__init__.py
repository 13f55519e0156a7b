"""Model families built from `fnet.layers`, with pretrained weights, tokenizers and text generation."""

from fnet.models import pretrained
from fnet.models._blocks import unstack
from fnet.models._cnn import CNN
from fnet.models._mlp import MLP
from fnet.models._model import Model
from fnet.models.evaluation._lm_eval import lm_eval_model
from fnet.models.evaluation._score import Score, perplexity, score
from fnet.models.generation._beam import Beams, beam_search
from fnet.models.generation._generate import Generated, generate, padded
from fnet.models.generation._stream import stream, stream_text
from fnet.models.language._bert import Bert, Encoded, sentence_embedding
from fnet.models.language._distilbert import DistilBert
from fnet.models.language._gpt import GPT
from fnet.models.language._modernbert import ModernBert
from fnet.models.language._rnn import LSTMClassifier, LSTMLanguageModel
from fnet.models.language._roberta import Roberta
from fnet.models.language._tree import TreeLSTM, Trees, pack_trees
from fnet.models.language.decoder._decoder import Decoder
from fnet.models.language.decoder._rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    YarnScaling,
)
from fnet.models.multimodal._clip import CLIP, CLIPText, CLIPVision
from fnet.models.tokenizers._chat import ChatTemplate, chat
from fnet.models.tokenizers._llama_bpe import LlamaBPE
from fnet.models.tokenizers._tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    HuggingFaceTokenizer,
    read_tokenizer,
)
from fnet.models.tokenizers._wordpiece import WordPiece
from fnet.models.vision._alexnet import AlexNet
from fnet.models.vision._convnext import ConvNeXt
from fnet.models.vision._deit import DeiT
from fnet.models.vision._dinov2 import DINOv2
from fnet.models.vision._efficientnet import EfficientNet
from fnet.models.vision._mobilenet import MobileNetV2
from fnet.models.vision._resnet import ResNet, ResNet9
from fnet.models.vision._vit import ViT
from fnet.models.weights._images import ImageInput

__all__ = [
    "CLIP",
    "CNN",
    "GPT",
    "MLP",
    "AlexNet",
    "Beams",
    "Bert",
    "ByteTokenizer",
    "CLIPText",
    "CLIPVision",
    "CharTokenizer",
    "ChatTemplate",
    "ConvNeXt",
    "DINOv2",
    "Decoder",
    "DeiT",
    "DistilBert",
    "DynamicScaling",
    "EfficientNet",
    "Encoded",
    "Generated",
    "HuggingFaceTokenizer",
    "ImageInput",
    "LSTMClassifier",
    "LSTMLanguageModel",
    "LinearScaling",
    "Llama3Scaling",
    "LlamaBPE",
    "LongScaling",
    "MobileNetV2",
    "Model",
    "ModernBert",
    "ResNet",
    "ResNet9",
    "Roberta",
    "Score",
    "TreeLSTM",
    "Trees",
    "ViT",
    "WordPiece",
    "YarnScaling",
    "beam_search",
    "chat",
    "generate",
    "lm_eval_model",
    "pack_trees",
    "padded",
    "perplexity",
    "pretrained",
    "read_tokenizer",
    "score",
    "sentence_embedding",
    "stream",
    "stream_text",
    "unstack",
]
