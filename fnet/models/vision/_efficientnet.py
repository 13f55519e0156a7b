"""EfficientNet and EfficientNet-Lite: inverted residual blocks, scaled together in depth and width."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp

from fnet import layers as nn
from fnet.models._model import Model
from fnet.models.vision._mobilenet import _divisible, _torch
from fnet.models.weights._config import Fields, Must, Use, transformers
from fnet.models.weights._images import ImageInput
from fnet.models.weights._labels import labels
from fnet.models.weights._timm_config import name_of, timm
from fnet.models.weights._weight_names import Names
from fnet.models.weights._words import torch

STAGES = (  # expansion, channels, blocks, stride of the first, kernel size
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)
_KINDS = {"EfficientNetForImageClassification": dict(classes=...)}
# {name: (factor of the width, factor of the depth, size of the images, dropout rate)}
_SIZES = {
    "b0": (1.0, 1.0, 224, 0.2),
    "b1": (1.0, 1.1, 240, 0.2),
    "b2": (1.1, 1.2, 260, 0.3),
    "b3": (1.2, 1.4, 300, 0.3),
    "b4": (1.4, 1.8, 380, 0.4),
    "lite0": (1.0, 1.0, 224, 0.2),
}
LITE = ImageInput(resample="bicubic", mean=(127 / 255,) * 3, std=(128 / 255,) * 3)


def _fields(name):
    width, depth, size, dropout = _SIZES[name]
    return dict(width=width, depth=depth, size=size, dropout=dropout, lite=name.startswith("lite"))


_TIMM = {
    f"{prefix}efficientnet_{size}": {**_fields(size), "padding": padding, "epsilon": epsilon}
    for size in ("b0", "lite0")
    for prefix, padding, epsilon in (("", "symmetric", 1e-5), ("tf_", "same", 1e-3))
}


def _widths(value, config):
    width = config.get("width_coefficient", 2.0)
    if (
        isinstance(width, bool)
        or not isinstance(width, int | float)
        or value != _divisible(1280 * width)
    ):
        raise ValueError("expected 1280 times width_coefficient, as a multiple of 8")
    return {}


def _even(value, config):
    if not isinstance(value, list) or any(
        isinstance(each, bool) or not isinstance(each, int) for each in value
    ):
        raise ValueError("expected a list of integers")
    return {"centered": tuple(value)}


def _stage(index):
    return [stage[index] for stage in STAGES]


def _names_of_blocks(key, expand, depthwise, squeeze, project):
    """Returns the naming rules for files of weights in which the blocks of all stages are numbered
    consecutively."""
    return (
        _torch("block{b}/expand", *(f"{key}.{each}" for each in expand)),
        _torch("block{b}/depthwise", *(f"{key}.{each}" for each in depthwise)),
        torch.conv("block{b}/reduce", f"{key}.{squeeze[0]}"),
        torch.conv("block{b}/restore", f"{key}.{squeeze[1]}"),
        _torch("block{b}/project", *(f"{key}.{each}" for each in project)),
    )


def _timm():
    """Returns the naming rules for timm's keys (names of arrays). In timm's keys, the numbers of
    the blocks start
    at 0 in each stage. The naming rules are for models whose argument `depth` is 1 (B0 and
    Lite0)."""
    number = 0
    for s, (_, _, blocks, _, _) in enumerate(STAGES):
        inner = ("conv_dw", "bn1"), ("conv_pw", "bn2")
        if s:
            inner = ("conv_pw", "bn1"), ("conv_dw", "bn2"), ("conv_pwl", "bn3")
        for b in range(blocks):
            key, ours = f"blocks.{s}.{b}", f"block{number}"
            yield from (
                _torch(f"{ours}/{part}", f"{key}.{conv}", f"{key}.{norm}")
                for part, (conv, norm) in zip(
                    ("expand", "depthwise", "project")[0 if s else 1 :], inner
                )
            )
            yield torch.conv(f"{ours}/reduce", f"{key}.se.conv_reduce")
            yield torch.conv(f"{ours}/restore", f"{key}.se.conv_expand")
            number += 1


class EfficientNet(Model):
    """A convolutional network of inverted residual blocks with squeeze and excitation.

    The presets efficientnet_b0 to efficientnet_b4 grow in width, depth and the size of the images.

    Args:
        width: factor of the number of channels of each layer, which is rounded to a multiple of 8.
        depth: factor of the number of blocks of each stage, which is rounded up.
        classes: number of logits.
        size: height and width of the images with which pretrained weights were trained. The model
            also accepts images of other sizes.
        lite: whether the network is EfficientNet-Lite: ReLU6 instead of SiLU, no squeeze and
            excitation, no effect of `width` on the first and the last convolution, and none of
            `depth` on the first and the last stage.
        padding: where a convolution with stride 2 pads zeros: "symmetric", as many at the start of
            an axis as at its end, as in most of timm's models; "after", one more at the end, as in
            transformers; or "same", "after" for axes of even length and "symmetric" for odd ones,
            as in TensorFlow.
        centered: indices of the blocks whose padding is symmetric although `padding` is "after".
        dropout: dropout rate before the last layer.
        epsilon: epsilon of BatchNorm.

    Input: [batch, height, width, 3]. Output: [batch, classes].

    Source: Tan and Le (2019), EfficientNet: Rethinking Model Scaling for Convolutional Neural
    Networks, table 1.

    >>> model = models.EfficientNet.preset("efficientnet_b0")
    >>> nn.count_parameters(model.spec(model.example()).params)
    5288548
    """

    PRESETS: ClassVar = {f"efficientnet_{name}": _fields(name) for name in _SIZES}
    HUB: ClassVar = {
        f"efficientnet_{name}": (
            f"timm/tf_efficientnet_{name}.in1k",
            *((f"google/efficientnet-{name}",) if not name.startswith("lite") else ()),
        )
        for name in _SIZES
    }
    NAMES: ClassVar = {
        "huggingface": Names(
            (
                _torch(
                    "stem",
                    "efficientnet.embeddings.convolution",
                    "efficientnet.embeddings.batchnorm",
                ),
                _names_of_blocks(
                    "efficientnet.encoder.blocks.{b}",
                    ("expansion.expand_conv", "expansion.expand_bn"),
                    ("depthwise_conv.depthwise_conv", "depthwise_conv.depthwise_norm"),
                    ("squeeze_excite.reduce", "squeeze_excite.expand"),
                    ("projection.project_conv", "projection.project_bn"),
                ),
                _torch("last", "efficientnet.encoder.top_conv", "efficientnet.encoder.top_bn"),
                torch.dense("head", "classifier"),
            ),
            config={"padding": "after"},
            metadata={"format": "pt"},
            image=ImageInput(resize=None, resample="bicubic"),
        ),
        "timm": Names(
            (
                _torch("stem", "conv_stem", "bn1"),
                tuple(_timm()),
                _torch("last", "conv_head", "bn2"),
                torch.dense("head", "classifier"),
            ),
            metadata={"format": "pt"},
            image=ImageInput(resample="bicubic"),
        ),
        "lite": Names(
            (  # the package efficientnet-lite-pytorch
                _torch("stem", "_conv_stem", "_bn0"),
                _names_of_blocks(
                    "_blocks.{b}",
                    ("_expand_conv", "_bn0"),
                    ("_depthwise_conv", "_bn1"),
                    ("_se_reduce", "_se_expand"),
                    ("_project_conv", "_bn2"),
                ),
                _torch("last", "_conv_head", "_bn1"),
                torch.dense("head", "_fc"),
            ),
            config={"padding": "same", "lite": True},
            metadata={"format": "pt"},
            image=LITE,
        ),
    }
    CONFIGS: ClassVar = {
        "efficientnet": transformers(
            {
                "width_coefficient": Use("width", 2.0),
                "depth_coefficient": Use("depth", 3.1),
                "batch_norm_eps": Use("epsilon", 1e-3),
                "image_size": Use("size", 600),
                "hidden_dim": Fields(_widths, 2560, lambda model: _divisible(1280 * model.width)),
                "depthwise_padding": Fields(_even, [], lambda model: list(model.centered)),
                "depth_divisor": Must((8,)),
                "num_channels": Must((3,)),
                "hidden_act": Must(("swish", "silu")),
                "pooling_type": Must(("mean",)),
                "squeeze_expansion_ratio": Must((0.25,)),
                "kernel_sizes": Must((_stage(4),)),
                "strides": Must((_stage(3),)),
                "expand_ratios": Must((_stage(0),)),
                "in_channels": Must(([32, *_stage(1)[:-1]],)),
                "out_channels": Must((_stage(1),)),
                "num_block_repeats": Must((_stage(2),)),
                **labels(_KINDS, "EfficientNetForImageClassification"),
            },
            architectures=_KINDS,
            irrelevant="batch_norm_momentum dropout_rate drop_connect_rate num_hidden_layers",
        ),
        "timm": timm(
            _TIMM.get,
            lambda model: name_of(dataclasses.replace(model, dropout=0.2), _TIMM),
            "avg",
            "efficientnet_b0, efficientnet_lite0 and the same with tf_",
        ),
    }

    width: float
    depth: float
    _: KW_ONLY
    classes: int = 1000
    size: int = 224
    lite: bool = False
    padding: str = "same"
    centered: tuple[int, ...] = ()
    dropout: float = 0.2
    epsilon: float = 1e-3

    def forward(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        x = nn.Dropout(self.dropout)(scope["drop"], self.features(scope, x))
        return nn.Dense(self.classes, axes=("in", "classes"))(scope["head"], x)

    @nn.method
    def features(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        """Returns the features of each image, an array [batch, channels]. The model applies dropout
        and then the last layer to these features."""
        if self.padding not in ("same", "symmetric", "after"):
            raise ValueError(
                f"EfficientNet: padding must be 'same', 'symmetric' or 'after'; got "
                f"{self.padding!r}"
            )
        first, last = (
            (32, 1280)
            if self.lite
            else (_divisible(32 * self.width), _divisible(1280 * self.width))
        )
        # [batch, height / 2, width / 2, 32]
        x = self._act(self._conv(scope["stem"], x, first, 3, 2))
        number = 0
        for s, (expansion, channels, blocks, stride, kernel_size) in enumerate(STAGES):
            fixed = self.lite and s in (0, len(STAGES) - 1)
            for b in range(blocks if fixed else math.ceil(blocks * self.depth)):
                x = self._block(
                    scope[f"block{number}"],
                    x,
                    _divisible(channels * self.width),
                    expansion,
                    stride if b == 0 else 1,
                    kernel_size,
                    number,
                    b == 0,
                )
                number += 1
        x = self._act(self._conv(scope["last"], x, last))  # [batch, height / 32, width / 32, 1280]
        return nn.GlobalAvgPool()(scope["pool"], x)

    def _block(self, scope, x, channels, expansion, stride, kernel_size, number, first):
        inner, y = x.shape[-1] * expansion, x
        if expansion > 1:
            y = self._act(self._conv(scope["expand"], y, inner))
        y = self._act(
            self._conv(scope["depthwise"], y, None, kernel_size, stride, number in self.centered)
        )
        if not self.lite:
            squeezed = y.mean((1, 2), keepdims=True)  # [batch, 1, 1, inner]
            squeezed = self._act(nn.Conv(max(1, x.shape[-1] // 4), 1)(scope["reduce"], squeezed))
            y = y * jax.nn.sigmoid(nn.Conv(inner, 1)(scope["restore"], squeezed))
        y = self._conv(scope["project"], y, channels)
        # The first block of a stage has no residual connection in transformers, even if the shapes
        # are equal.
        return x + y if x.shape == y.shape and not (first and self.padding == "after") else y

    def _conv(self, scope, x, channels, kernel_size=1, stride=1, centered=False):
        """Applies a convolution and then BatchNorm. If `channels` is None, the convolution is
        depthwise."""
        half = kernel_size // 2
        after = stride == 2 and self.padding == "after" and not centered
        padding = "SAME" if self.padding == "same" else ((half - after, half),) * 2
        conv = (
            nn.DepthwiseConv(kernel_size, stride, padding=padding, use_bias=False)
            if channels is None
            else nn.Conv(channels, kernel_size, stride, padding=padding, use_bias=False)
        )
        return nn.BatchNorm(epsilon=self.epsilon)(scope["norm"], conv(scope["conv"], x))

    def _act(self, x):
        return jax.nn.relu6(x) if self.lite else jax.nn.silu(x)

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, self.size, self.size, 3), jnp.float32)
