"""CNN: stages of 3 × 3 convolutions with BatchNorm, each at half the previous resolution, similar
to VGG."""

from __future__ import annotations

import jax

from fnet import layers as nn


@nn.layer
def conv_norm_relu(
    scope, x, *, channels, kernel_size=3, stride=1
):  # [batch, height, width, channels]
    x = nn.Conv(channels, kernel_size, stride, use_bias=False)(scope["conv"], x)
    return jax.nn.relu(nn.BatchNorm()(scope["norm"], x))


class CNN(nn.Layer):
    """A convolutional classifier: stages of 3 × 3 convolutions with BatchNorm and ReLU, and 2 × 2
    max-pooling between them.

    The last stage is followed by the mean over all positions, dropout and a dense layer.

    Args:
        classes: number of logits.
        widths: number of channels in each stage.
        convs: number of convolutions in each stage: an integer for all, or a tuple with one for
            each.
        stem: (kernel size, stride) of the first convolution. Stride 2 reduces the cost of all later
            layers to a quarter.
        dropout: dropout rate before the last layer.

    Input: [batch, height, width, channels]. Output: [batch, classes].

    Source: Simonyan and Zisserman (2015), Very Deep Convolutional Networks. BatchNorm: Ioffe and
    Szegedy (2015). Global mean pooling: Lin, Chen and Yan (2014), Network In Network.

    >>> model = models.CNN(classes=10, widths=(8, 16))
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 28, 28, 1)))
    """

    classes: int
    widths: tuple[int, ...] = (32, 64, 128)
    convs: int | tuple[int, ...] = 2
    stem: tuple[int, int] = (3, 1)
    dropout: float = 0.0

    def forward(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        convs = (self.convs,) * len(self.widths) if isinstance(self.convs, int) else self.convs
        if len(convs) != len(self.widths):
            raise ValueError(
                f"CNN: expected one number of convs for each of {len(self.widths)} widths; got "
                f"{convs}"
            )
        for i, (channels, depth) in enumerate(zip(self.widths, convs)):
            if i:
                x = nn.MaxPool(2)(scope[f"pool{i}"], x)
            stage = scope[f"stage{i}"]
            for j in range(depth):
                kernel_size, stride = self.stem if i == j == 0 else (3, 1)
                block = conv_norm_relu(channels=channels, kernel_size=kernel_size, stride=stride)
                x = block(stage[f"block{j}"], x)  # [batch, height, width, channels]
        x = nn.GlobalAvgPool()(scope["pool"], x)  # [batch, channels]
        x = nn.Dropout(self.dropout)(scope["drop"], x)
        return nn.Dense(self.classes, axes=("in", "classes"))(scope["head"], x)
