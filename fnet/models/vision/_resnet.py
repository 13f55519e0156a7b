"""ResNet with 18, 34, 50 and 101 layers, in versions 1 and 1.5, and the small ResNet-9 for 32 × 32
images."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp

from fnet import layers as nn
from fnet.models._model import Model
from fnet.models.weights._images import CAFFE, TORCHVISION
from fnet.models.weights._timm_config import name_of, timm
from fnet.models.weights._weight_names import Names
from fnet.models.weights._words import keras, torch


@nn.layer
def residual_block(scope, x, *, channels, stride, bottleneck, version, use_bias, epsilon):
    """Applies two convolutions, or three in a bottleneck, with a residual connection around them.

    The last of the three convolutions of a bottleneck has four times as many channels as the first
    two.
    """

    def conv_norm(at, i, x, features, kernel_size, stride=1):
        padding = kernel_size // 2  # on both sides, for every stride
        x = nn.Conv(features, kernel_size, stride, padding=padding, use_bias=use_bias)(
            at[f"conv{i}"], x
        )
        return nn.BatchNorm(epsilon=epsilon)(at[f"norm{i}"], x)

    out = 4 * channels if bottleneck else channels
    if bottleneck:
        first, second = (stride, 1) if version == "v1" else (1, stride)
        y = jax.nn.relu(conv_norm(scope, 1, x, channels, 1, first))
        y = jax.nn.relu(conv_norm(scope, 2, y, channels, 3, second))
        y = conv_norm(scope, 3, y, out, 1)
    else:
        y = jax.nn.relu(conv_norm(scope, 1, x, channels, 3, stride))
        y = conv_norm(scope, 2, y, out, 3)
    if x.shape != y.shape:
        x = conv_norm(scope["shortcut"], "", x, out, 1, stride)
    return jax.nn.relu(x + y)


_DEPTHS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
_TIMM = {
    f"resnet{layers}": dict(depths=depths, bottleneck=layers >= 50, width=64)
    for layers, depths in _DEPTHS.items()
}


class ResNet(Model):
    """A residual network for large images.

        model = models.ResNet.preset("resnet50", classes=10)

    A 7 × 7 convolution with stride 2 and 3 × 3 max-pooling with stride 2 come first, then stages of
    residual blocks, the mean over all positions, and a dense layer. Each stage after the first
    halves the resolution and doubles the channels.

    Args:
        depths: number of blocks in each stage.
        bottleneck: whether a block has three convolutions (in networks with 50 or more layers)
            instead of two.
        classes: number of logits.
        width: number of channels of the first stage's 3 × 3 convolutions.
        version: where a bottleneck that halves the resolution has stride 2: in the first
            convolution ("v1", as in the paper and Keras), or in the 3 × 3 convolution ("v1.5", as
            in torchvision), which is about half a percent more accurate.
        use_bias: whether convolutions have a bias. It has no effect before BatchNorm, but the
            weights of Keras include it.
        epsilon: epsilon of BatchNorm.

    Input: [batch, height, width, 3]; for pretrained weights, height and width are 224. Output:
    [batch, classes].

    Source: He et al. (2016), Deep Residual Learning for Image Recognition, table 1. Version 1.5:
    Gross and Wilber (2016), Training and investigating Residual Nets.

    >>> from fnet import models
    >>> model = models.ResNet.preset("resnet18", classes=10)
    >>> model.spec(model.example()).params["head"]["kernel"].shape
    (512, 10)
    """

    depths: tuple[int, ...]
    _: KW_ONLY
    bottleneck: bool = True
    classes: int = 1000
    width: int = 64
    version: str = "v1.5"
    use_bias: bool = False
    epsilon: float = 1e-5

    PRESETS: ClassVar = {
        "resnet18": dict(depths=(2, 2, 2, 2), bottleneck=False),
        "resnet34": dict(depths=(3, 4, 6, 3), bottleneck=False),
        "resnet50": dict(depths=(3, 4, 6, 3)),
        "resnet101": dict(depths=(3, 4, 23, 3)),
    }
    HUB: ClassVar = {name: (f"timm/{name}.tv_in1k", f"torchvision:{name}") for name in PRESETS}
    CONFIGS: ClassVar = {
        "timm": timm(_TIMM.get, lambda model: name_of(model, _TIMM), "avg", ", ".join(_TIMM))
    }
    NAMES: ClassVar = {
        "torchvision": Names(
            (
                torch.conv("stem/conv", "conv1"),
                torch.batch_norm("stem/norm", "bn1"),
                torch.conv("stage{s}/block{b}/conv{i}", "layer{s}.{b}.conv{i}"),
                torch.batch_norm("stage{s}/block{b}/norm{i}", "layer{s}.{b}.bn{i}"),
                torch.conv("stage{s}/block{b}/shortcut/conv", "layer{s}.{b}.downsample.0"),
                torch.batch_norm("stage{s}/block{b}/shortcut/norm", "layer{s}.{b}.downsample.1"),
                torch.dense("head", "fc"),
            ),
            config=dict(version="v1.5", use_bias=False, epsilon=1e-5),
            metadata={"format": "pt"},
            image=TORCHVISION,
        ),
        "keras": Names(
            (  # Keras' ResNet50 (v1), converted from Caffe
                keras.conv("stem/conv", "conv1"),
                keras.batch_norm("stem/norm", "bn_conv1"),
                keras.conv("stage{s}/block{b}/shortcut/conv", "res{s+1}{b:letter}_branch1"),
                keras.batch_norm("stage{s}/block{b}/shortcut/norm", "bn{s+1}{b:letter}_branch1"),
                keras.conv("stage{s}/block{b}/conv{i}", "res{s+1}{b:letter}_branch2{i-1:letter}"),
                keras.batch_norm(
                    "stage{s}/block{b}/norm{i}", "bn{s+1}{b:letter}_branch2{i-1:letter}"
                ),
                keras.dense("head", "fc1000"),
            ),
            config=dict(version="v1", use_bias=True, epsilon=1e-3),
            image=CAFFE,
        ),
    }

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)

    def forward(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        return nn.Dense(self.classes, axes=("in", "classes"))(
            scope["head"], self.features(scope, x)
        )

    @nn.method
    def features(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        """Returns the input of the last layer, an array [batch, channels]."""
        if self.version not in ("v1", "v1.5"):
            raise ValueError(f"ResNet: version must be 'v1' or 'v1.5'; got {self.version!r}")
        stem = scope["stem"]
        x = nn.Conv(self.width, 7, 2, padding=3, use_bias=self.use_bias)(stem["conv"], x)
        x = jax.nn.relu(nn.BatchNorm(epsilon=self.epsilon)(stem["norm"], x))
        x = nn.MaxPool(3, 2, padding=1)(stem["pool"], x)  # [batch, height / 4, width / 4, width]
        for s, depth in enumerate(self.depths, 1):
            stage = scope[f"stage{s}"]
            for b in range(depth):
                x = residual_block(
                    channels=self.width * 2 ** (s - 1),
                    stride=2 if s > 1 and b == 0 else 1,
                    bottleneck=self.bottleneck,
                    version=self.version,
                    use_bias=self.use_bias,
                    epsilon=self.epsilon,
                )(stage[f"block{b}"], x)
        return nn.GlobalAvgPool()(scope["pool"], x)


class ResNet9(Model):
    """A small residual network for 32 × 32 images: 94 % accuracy on CIFAR-10 in a few dozen epochs.

    Each of its four stages has a 3 × 3 convolution, BatchNorm and ReLU, and max-pooling except in
    the first. The second and the last stage end with a residual block of two more such
    convolutions. The last layer sees the maximum over all positions.

    Args:
        classes: number of logits.
        width: number of channels of the first stage. Each later stage has twice as many as the one
            before.
        scale: factor of the logits, which keeps the softmax smooth early in training.

    Input: [batch, height, width, channels]; 32 × 32 × 3 in the original network. Output: [batch,
    classes].

    Source: Page (2018), How to Train Your ResNet, part 4, the network of Page's entry to DAWNBench.

    >>> model = models.ResNet9.preset("resnet9")
    >>> nn.count_parameters(model.spec(model.example()).params)
    6573120
    """

    PRESETS: ClassVar = {"resnet9": {}}

    _: KW_ONLY
    classes: int = 10
    width: int = 64
    scale: float = 0.125

    def forward(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        x = self.features(scope, x)
        return (
            nn.Dense(self.classes, use_bias=False, axes=("in", "classes"))(scope["head"], x)
            * self.scale
        )

    @nn.method
    def features(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        """Returns the input of the last layer, an array [batch, 8 width]."""

        def conv(at, x, channels):
            x = nn.Conv(channels, 3, use_bias=False)(at["conv"], x)
            return jax.nn.relu(nn.BatchNorm()(at["norm"], x))

        for s in range(4):
            stage, channels = scope[f"stage{s}"], self.width * 2**s
            x = conv(stage, x, channels)  # [batch, height, width, channels]
            if s:
                x = nn.MaxPool(2)(stage["pool"], x)
            if s in (1, 3):
                x = x + conv(stage["residual2"], conv(stage["residual1"], x, channels), channels)
        return x.max((1, 2))

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32)
