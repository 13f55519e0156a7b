"""CNN: stages of 3 × 3 convolutions, each halving the image, in the manner of VGG with BatchNorm."""

from __future__ import annotations

import jax

from fnet import layers as nn


@nn.layer
def conv_norm_relu(scope, x, *, channels, kernel_size=3, stride=1):        # [batch, height, width, channels]
    x = nn.Conv(channels, kernel_size, stride, use_bias=False)(scope["conv"], x)
    return jax.nn.relu(nn.BatchNorm()(scope["norm"], x))


class CNN(nn.Layer):
    """A convolutional classifier: stages of (3 × 3 convolution, BatchNorm, ReLU), 2 × 2 max-pooling between them.

    After the last stage the mean over space, dropout, and a dense layer.

    Args:
        classes: how many logits.
        widths: channels of each stage.
        convs: convolutions in each stage: one number for all or one for each.
        stem: (kernel size, stride) of the first convolution. A stride of 2 costs a quarter everywhere after it.
        dropout: rate before the last layer.

    Input [batch, height, width, channels], output [batch, classes].

    Source: Simonyan and Zisserman (2015), Very Deep Convolutional Networks; Ioffe and Szegedy (2015), Batch
    Normalization; the mean over space is Lin, Chen and Yan's (2014), Network In Network.
    """

    classes: int
    widths: tuple[int, ...] = (32, 64, 128)
    convs: int | tuple[int, ...] = 2
    stem: tuple[int, int] = (3, 1)
    dropout: float = 0.0

    def forward(self, scope: nn.Scope, x):
        convs = (self.convs,) * len(self.widths) if isinstance(self.convs, int) else self.convs
        if len(convs) != len(self.widths):
            raise ValueError(f"CNN: {len(self.widths)} widths {self.widths} but {len(convs)} numbers of convs {convs}")
        for i, (channels, depth) in enumerate(zip(self.widths, convs)):
            if i:
                x = nn.MaxPool(2)(scope[f"pool{i}"], x)
            stage = scope[f"stage{i}"]
            for j in range(depth):
                kernel_size, stride = self.stem if i == j == 0 else (3, 1)
                block = conv_norm_relu(channels=channels, kernel_size=kernel_size, stride=stride)
                x = block(stage[f"block{j}"], x)                            # [batch, height, width, channels]
        x = nn.GlobalAvgPool()(scope["pool"], x)                            # [batch, channels]
        x = nn.Dropout(self.dropout)(scope["drop"], x)
        return nn.Dense(self.classes)(scope["head"], x)
