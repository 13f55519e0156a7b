"""AlexNet, in the version for one GPU."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp

from fnet import layers as nn
from fnet.models._model import Model
from fnet.models.weights._images import TORCHVISION
from fnet.models.weights._weight_names import Names, flattened
from fnet.models.weights._words import torch


class AlexNet(Model):
    """AlexNet: five convolutions, three of them followed by max-pooling, and three dense layers.

    Args:
        classes: number of logits.
        width: number of channels of the first convolution. The second to fifth have 3, 6, 4 and 4
            times as many.
        hidden: number of output features of each of the first two dense layers.
        dropout: dropout rate before each of the first two dense layers.

    Input: [batch, 224, 224, 3], or another size that the convolutions reduce to 6 × 6. Output:
    [batch, classes].

    Source: Krizhevsky (2014), One weird trick for parallelizing convolutional neural networks,
    footnote 1. The original: Krizhevsky, Sutskever and Hinton (2012), ImageNet Classification with
    Deep Convolutional Neural Networks.

    >>> model = models.AlexNet.preset("alexnet")
    >>> nn.count_parameters(model.spec(model.example()).params)
    61100840
    """

    PRESETS: ClassVar = {"alexnet": {}}
    HUB: ClassVar = {"alexnet": ("torchvision:alexnet",)}
    NAMES: ClassVar = {
        "torchvision": Names(
            (
                *(
                    torch.conv(f"conv{i}", f"features.{at}")
                    for i, at in enumerate((0, 3, 6, 8, 10), 1)
                ),
                torch.dense("fc1", "classifier.1", flattened(6, 6)),
                torch.dense("fc2", "classifier.4"),
                torch.dense("head", "classifier.6"),
            ),
            metadata={"format": "pt"},
            image=TORCHVISION,
        ),
    }

    _: KW_ONLY
    classes: int = 1000
    width: int = 64
    hidden: int = 4096
    dropout: float = 0.5

    def forward(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        return nn.Dense(self.classes, axes=("in", "classes"))(
            scope["head"], self.features(scope, x)
        )

    @nn.method
    def features(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        """Returns the input of the last layer, an array [batch, hidden]."""

        def conv(i, x, channels, kernel_size, padding, strides=1):
            return jax.nn.relu(
                nn.Conv(channels, kernel_size, strides, padding=padding)(scope[f"conv{i}"], x)
            )

        images, width, pool = x.shape, self.width, nn.MaxPool(3, 2)
        x = pool(scope["pool1"], conv(1, x, width, 11, 2, 4))  # [batch, 27, 27, width]
        x = pool(scope["pool2"], conv(2, x, 3 * width, 5, 2))  # [batch, 13, 13, 3 width]
        x = conv(4, conv(3, x, 6 * width, 3, 1), 4 * width, 3, 1)
        x = pool(scope["pool3"], conv(5, x, 4 * width, 3, 1))  # [batch, 6, 6, 4 width]
        if x.shape[1:3] != (6, 6):
            raise ValueError(
                "AlexNet: expected images that the convolutions reduce to 6 x 6, such as 224 x "
                f"224; {images} is reduced to {x.shape[1]} x {x.shape[2]}"
            )
        x = nn.Flatten()(scope["flatten"], x)
        for i in (1, 2):
            x = nn.Dropout(self.dropout)(scope[f"drop{i}"], x)
            x = jax.nn.relu(nn.Dense(self.hidden)(scope[f"fc{i}"], x))
        return x

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
