"""MobileNetV2: inverted residual blocks with depthwise convolutions."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp

from fnet import layers as nn
from fnet.models._model import Model
from fnet.models.weights._images import TORCHVISION, ImageInput
from fnet.models.weights._timm_config import timm
from fnet.models.weights._weight_names import Names
from fnet.models.weights._words import torch

STAGES = (  # expansion, channels, blocks, stride of the first
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


@nn.layer
def conv_norm(scope, x, *, channels, kernel_size=1, stride=1, depthwise=False):
    padding = kernel_size // 2  # on both sides, for every stride
    if depthwise:
        conv = nn.DepthwiseConv(kernel_size, stride, padding=padding, use_bias=False)
    else:
        conv = nn.Conv(channels, kernel_size, stride, padding=padding, use_bias=False)
    return nn.BatchNorm()(scope["norm"], conv(scope["conv"], x))


@nn.layer
def inverted_residual(scope, x, *, channels, expansion, stride):  # [batch, height, width, in]
    inner, y = x.shape[-1] * expansion, x
    if expansion > 1:
        y = jax.nn.relu6(conv_norm(channels=inner)(scope["expand"], y))
    depthwise = conv_norm(channels=inner, kernel_size=3, stride=stride, depthwise=True)
    y = jax.nn.relu6(depthwise(scope["depthwise"], y))
    y = conv_norm(channels=channels)(scope["project"], y)
    return x + y if x.shape == y.shape else y


def _divisible(channels, by=8):
    """Rounds `channels` to the nearest multiple of `by`, or up if rounding down would remove more
    than 10 %."""
    near = max(by, int(channels + by / 2) // by * by)
    return near if near >= 0.9 * channels else near + by


def _torch(ours, conv, norm):
    return torch.conv(f"{ours}/conv", conv), torch.batch_norm(f"{ours}/norm", norm)


def _torchvision():
    yield _torch("stem", "features.0.0", "features.0.1")
    last = 1
    for s, (expansion, _, blocks, _) in enumerate(STAGES):
        for b in range(blocks):
            ours, theirs = f"stage{s}/block{b}", f"features.{last}.conv"
            inner = ("expand", "depthwise") if expansion > 1 else ("depthwise",)
            yield tuple(
                _torch(f"{ours}/{name}", f"{theirs}.{i}.0", f"{theirs}.{i}.1")
                for i, name in enumerate(inner)
            )
            yield _torch(f"{ours}/project", f"{theirs}.{len(inner)}", f"{theirs}.{len(inner) + 1}")
            last += 1
    yield (
        _torch("last", f"features.{last}.0", f"features.{last}.1"),
        torch.dense("head", "classifier.1"),
    )


def _architecture(name):
    """Returns the fields of the model for a timm architecture such as mobilenetv2_050, or None."""
    found = re.fullmatch("mobilenetv2_([0-9]{3})", name)
    return {"width": int(found[1]) / 100} if found else None


class MobileNetV2(Model):
    """A network for mobile devices: inverted residual blocks with depthwise convolutions, and
    ReLU6.

    Args:
        classes: number of logits.
        width: factor of the number of channels of each layer, which is rounded to a multiple of 8.
            The last layer always has at least 1,280 inputs.
        dropout: dropout rate before the last layer.

    Input: [batch, height, width, 3]; for pretrained weights, height and width are 224. Output:
    [batch, classes].

    Source: Sandler et al. (2018), MobileNetV2: Inverted Residuals and Linear Bottlenecks, table 2.

    >>> model = models.MobileNetV2.preset("mobilenet_v2")
    >>> nn.count_parameters(model.spec(model.example()).params)
    3504872
    """

    PRESETS: ClassVar = {"mobilenet_v2": {}}
    HUB: ClassVar = {"mobilenet_v2": ("timm/mobilenetv2_100.ra_in1k", "torchvision:mobilenet_v2")}
    CONFIGS: ClassVar = {
        "timm": timm(
            _architecture,
            lambda model: f"mobilenetv2_{round(100 * model.width):03d}",
            "avg",
            "mobilenetv2_W with a width of W percent, such as 100",
        )
    }
    NAMES: ClassVar = {
        "torchvision": Names(tuple(_torchvision()), metadata={"format": "pt"}, image=TORCHVISION),
        "timm": Names(
            (
                _torch("stem", "conv_stem", "bn1"),
                _torch("stage0/block{b}/depthwise", "blocks.0.{b}.conv_dw", "blocks.0.{b}.bn1"),
                _torch("stage0/block{b}/project", "blocks.0.{b}.conv_pw", "blocks.0.{b}.bn2"),
                _torch("stage{s}/block{b}/expand", "blocks.{s}.{b}.conv_pw", "blocks.{s}.{b}.bn1"),
                _torch(
                    "stage{s}/block{b}/depthwise", "blocks.{s}.{b}.conv_dw", "blocks.{s}.{b}.bn2"
                ),
                _torch(
                    "stage{s}/block{b}/project", "blocks.{s}.{b}.conv_pwl", "blocks.{s}.{b}.bn3"
                ),
                _torch("last", "conv_head", "bn2"),
                torch.dense("head", "classifier"),
            ),
            metadata={"format": "pt"},
            image=ImageInput(resample="bicubic"),
        ),
    }

    _: KW_ONLY
    classes: int = 1000
    width: float = 1.0
    dropout: float = 0.2

    def forward(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        x = nn.Dropout(self.dropout)(scope["drop"], self.features(scope, x))
        return nn.Dense(self.classes, axes=("in", "classes"))(scope["head"], x)

    @nn.method
    def features(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        """Returns the input of the last layer, before dropout: an array [batch, channels] with at
        least 1,280 channels."""
        stem = conv_norm(channels=_divisible(32 * self.width), kernel_size=3, stride=2)
        x = jax.nn.relu6(stem(scope["stem"], x))  # [batch, height / 2, width / 2, 32]
        for s, (expansion, channels, blocks, stride) in enumerate(STAGES):
            stage = scope[f"stage{s}"]
            for b in range(blocks):
                block = inverted_residual(
                    channels=_divisible(channels * self.width),
                    expansion=expansion,
                    stride=stride if b == 0 else 1,
                )
                x = block(stage[f"block{b}"], x)
        last = conv_norm(channels=_divisible(1280 * max(1.0, self.width)))
        x = jax.nn.relu6(last(scope["last"], x))  # [batch, height / 32, width / 32, 1280]
        return nn.GlobalAvgPool()(scope["pool"], x)

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
