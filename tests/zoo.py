"""The zoo: one small instance of every model, with symbolic shapes of its input and two sizes of
each symbolic axis."""

import dataclasses
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from fnet import models

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "experiments"))
import crepe

DRAW = np.random.default_rng(0)
VOCABULARY, CONTEXT = 11, 8
GPT = models.GPT(VOCABULARY, 8, 2, 2, context=CONTEXT)
UNSTACKED = dataclasses.replace(GPT, depth=1, stacked=False)
DECODER = models.Decoder(VOCABULARY, 8, 2, 4, 2, 12, context=CONTEXT)
BERT = models.Bert(VOCABULARY, 8, 2, 2, 16, context=CONTEXT)
ROBERTA = models.Roberta(VOCABULARY, 8, 2, 2, 16, context=CONTEXT, head="sequence", classes=3)
DISTIL = models.DistilBert(VOCABULARY, 8, 2, 2, 16, context=CONTEXT, head="masked_lm")
MODERN = models.ModernBert(
    VOCABULARY, 8, 4, 2, 12, context=CONTEXT, window=4, head="sequence", classes=3, pooling="mean"
)
LSTM = models.LSTMLanguageModel(VOCABULARY, 8)
TEXT, IMAGES = ("b, t", (f"t <= {CONTEXT}",)), ("b, h, w, 3", ("h >= 32", "w >= 32"))

# name -> model, symbolic shape of the input and its constraints, two sizes of each symbolic axis
MODELS = {
    "GPT": (GPT, TEXT, {"b": (1, 3), "t": (CONTEXT, 5)}),
    "Decoder": (DECODER, TEXT, {"b": (2, 3), "t": (1, CONTEXT)}),
    "Bert": (BERT, TEXT, {"b": (2, 3), "t": (5, CONTEXT)}),
    "Roberta": (ROBERTA, TEXT, {"b": (2, 3), "t": (5, CONTEXT)}),
    "DistilBert": (DISTIL, TEXT, {"b": (2, 3), "t": (5, CONTEXT)}),
    "ModernBert": (MODERN, TEXT, {"b": (2, 3), "t": (5, CONTEXT)}),
    "LSTMLanguageModel": (LSTM, TEXT, {"b": (2, 3), "t": (5, CONTEXT)}),
    "LSTMClassifier": (
        models.LSTMClassifier(3, VOCABULARY, 8),
        TEXT,
        {"b": (2, 3), "t": (5, CONTEXT)},
    ),
    "TreeLSTM": (models.TreeLSTM(3, VOCABULARY, 8), TEXT, {"b": (2, 3), "t": (5, CONTEXT)}),
    "MLP": (models.MLP((6, 3)), ("b, 4", ()), {"b": (2, 3)}),
    "CNN": (
        models.CNN(3, (4, 6)),
        ("b, h, w, 3", ("h >= 4", "w >= 4")),
        {"b": (2, 3), "h": (6, 9), "w": (8, 5)},
    ),
    "ResNet": (
        models.ResNet((1, 1, 1, 1), classes=3, width=4),
        IMAGES,
        {"b": (2, 3), "h": (32, 41), "w": (35, 32)},
    ),
    "ResNet9": (
        models.ResNet9(classes=3, width=4),
        IMAGES,
        {"b": (2, 3), "h": (32, 41), "w": (35, 32)},
    ),
    "MobileNetV2": (
        models.MobileNetV2(classes=3, width=0.25),
        IMAGES,
        {"b": (2, 3), "h": (32, 41), "w": (35, 32)},
    ),
    "ViT": (models.ViT(8, 2, 2, classes=3, patch=4, size=8), ("b, 8, 8, 3", ()), {"b": (2, 3)}),
    "DeiT": (models.DeiT(8, 2, 2, classes=3, patch=4, size=8), ("b, 8, 8, 3", ()), {"b": (2, 3)}),
    "DINOv2": (
        models.DINOv2(8, 2, 2, hidden=8, gated=True, patch=4, size=8),
        ("b, 8, 8, 3", ()),
        {"b": (2, 3)},
    ),
    "CLIPVision": (
        models.CLIPVision(8, 2, 2, 8, patch=4, size=8, dim=3),
        ("b, 8, 8, 3", ()),
        {"b": (2, 3)},
    ),
    "CLIPText": (
        models.CLIPText(8, 2, 2, 8, vocab_size=VOCABULARY, context=CONTEXT),
        TEXT,
        {"b": (2, 3), "t": (5, CONTEXT)},
    ),
    "ConvNeXt": (
        models.ConvNeXt((1, 1, 1, 1), (4, 4, 6, 6), classes=3),
        ("b, 32, 64, 3", ()),
        {"b": (2, 3)},
    ),
    "EfficientNet": (
        models.EfficientNet(0.1, 0.1, classes=3, padding="symmetric"),
        IMAGES,
        {"b": (2, 3), "h": (32, 41), "w": (35, 32)},
    ),
    "Crepe": (crepe.Crepe(1), ("b, 1024", ()), {"b": (2, 3)}),
    "AlexNet": (
        models.AlexNet(classes=3, width=2, hidden=8),
        ("b, 224, 224, 3", ()),
        {"b": (1, 2)},
    ),
}
# The kinds of layers in these models also occur in other models of the table, so tests of
# transforms omit them.
SIMILAR = (
    "Roberta",
    "DistilBert",
    "DeiT",
    "CLIPVision",
    "CLIPText",
    "ResNet9",
    "MobileNetV2",
    "AlexNet",
)
DISTINCT = [name for name in MODELS if name not in SIMILAR]
# Together, these models contain each kind of layer of the table. The slowest tests use only these.
FEW = "Decoder", "ModernBert", "LSTMClassifier", "TreeLSTM", "CNN", "ViT", "EfficientNet"
# with lengths
RAGGED = (
    "GPT",
    "Decoder",
    "Bert",
    "Roberta",
    "DistilBert",
    "ModernBert",
    "LSTMLanguageModel",
    "LSTMClassifier",
)
TEXTS = *RAGGED, "TreeLSTM", "CLIPText"


def inputs(name, shape):
    """The inputs of a model after its parameters: specs for a symbolic shape, arrays for any other."""
    shapes = (
        (shape, shape, shape[:1])
        if name == "TreeLSTM"
        else (shape, shape[:1])
        if name in RAGGED
        else (shape,)
    )
    dtype = jnp.int32 if name in TEXTS else jnp.float32
    if any(map(export.is_symbolic_dim, shape)):
        return [jax.ShapeDtypeStruct(each, dtype) for each in shapes]
    if name not in TEXTS:
        return [jnp.asarray(DRAW.normal(size=shape), dtype)]
    tokens = DRAW.integers(0, VOCABULARY, shape)
    parents = np.broadcast_to(
        np.arange(1, shape[1] + 1), shape
    )  # a chain: each node is the child of the next
    lengths = DRAW.integers(1, shape[1] + 1, shape[0])
    return [
        jnp.asarray(x, dtype)
        for x in ((tokens, parents, lengths) if len(shapes) == 3 else (tokens, lengths))
    ][: len(shapes)]


@functools.cache
def build(name):
    """(a function of params and inputs, params, the symbolic shape, two concrete shapes)."""
    model, (shape, constraints), sizes = MODELS[name]
    shape = export.symbolic_shape(shape, constraints=constraints)
    shapes = [
        tuple(sizes[str(n)][i] if export.is_symbolic_dim(n) else n for n in shape) for i in (0, 1)
    ]
    params, state = model.init(jax.random.key(0), *inputs(name, shapes[0]))
    if state:
        return lambda params, x: model(params, x, state=state)[0], params, shape, shapes
    return lambda params, *x: model(params, *x), params, shape, shapes
