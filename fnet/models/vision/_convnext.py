"""ConvNeXt: a convolutional network with the block structure of a transformer."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.nn import initializers

from fnet import layers as nn
from fnet.models._model import Model
from fnet.models.language._bert import Encoded
from fnet.models.weights._config import Fields, Must, Use, transformers
from fnet.models.weights._images import ImageInput
from fnet.models.weights._labels import labels
from fnet.models.weights._timm_config import name_of, timm
from fnet.models.weights._torch_layers import spare, torch_layers
from fnet.models.weights._weight_names import Names, Rule
from fnet.models.weights._words import torch

_TIMM = {
    f"convnext_{size}": dict(depths=depths, widths=tuple(width * 2**s for s in range(4)))
    for size, depths, width in (
        ("tiny", (3, 3, 9, 3), 96),
        ("small", (3, 3, 27, 3), 96),
        ("base", (3, 3, 27, 3), 128),
        ("large", (3, 3, 27, 3), 192),
    )
}
_KINDS = {"ConvNextForImageClassification": dict(classes=...), "ConvNextModel": dict(classes=None)}


def _numbers(field, default):
    """Returns a `Fields` entry for a value in config.json that is a list of four positive integers."""

    def read(value, config):
        if not (
            isinstance(value, list)
            and len(value) == 4
            and all(
                isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in value
            )
        ):
            raise ValueError("expected four positive integers")
        return {field: tuple(value)}

    return Fields(read, default, lambda model: list(getattr(model, field)))


def _scaled(value, config):
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError("expected a number above 0")
    return {}


@nn.layer
def convnext_block(scope, x):  # [batch, height, width, features]
    features = x.shape[-1]
    y = nn.DepthwiseConv(7, padding=3)(scope["depthwise"], x)
    y = nn.LayerNorm(epsilon=1e-6)(scope["norm"], y)
    y = jax.nn.gelu(nn.Dense(4 * features)(scope["fc1"], y), approximate=False)
    y = nn.Dense(features)(scope["fc2"], y)
    scale = scope.param(
        "scale", (features,), initializers.constant(1e-6), ("embed",), roles=("out",)
    ).astype(y.dtype)
    return x + y * scale[None, None, None]


class ConvNeXt(Model):
    """A convolutional network whose blocks resemble those of a transformer.

    A block is a 7 x 7 depthwise convolution, a LayerNorm, and two dense layers with GELU.

    Args:
        depths: number of blocks in each of the four stages.
        widths: number of features in each stage.
        classes: number of logits. None: no last layer, and an `Encoded` as output.
        patch: kernel size and stride of the first convolution.
        epsilon: epsilon of the last LayerNorm. All others have 1e-6.

    Input: [batch, height, width, 3], with height and width multiples of 32, and 224 for pretrained
    weights. Output: logits [batch, classes]; or an `Encoded`, with the output of the last block as
    `hidden`, [batch, height / 32, width / 32, features], and its mean over positions, normalized by
    the last norm, as `pooled`, [batch, features].

    Source: Liu et al. (2022), A ConvNet for the 2020s, table 9.

    >>> model = models.ConvNeXt.preset("convnext_tiny")
    >>> nn.count_parameters(model.spec(model.example()).params)
    28589128
    """

    PRESETS: ClassVar = _TIMM
    HUB: ClassVar = {
        name: (f"timm/{name}.fb_in1k", f"facebook/{name.replace('_', '-')}-224") for name in _TIMM
    }
    NAMES: ClassVar = {
        "timm": Names(
            (
                torch.conv("stem/conv", "stem.0"),
                torch.norm("stem/norm", "stem.1"),
                torch.norm("stage{s}/down/norm", "stages.{s}.downsample.0"),
                torch.conv("stage{s}/down/conv", "stages.{s}.downsample.1"),
                torch.conv("stage{s}/block{b}/depthwise", "stages.{s}.blocks.{b}.conv_dw"),
                torch_layers(
                    "stage{s}/block{b}",
                    "stages.{s}.blocks.{b}",
                    {"fc1": "mlp.fc1", "fc2": "mlp.fc2"},
                    {"norm": "norm"},
                ),
                Rule("stage{s}/block{b}/scale", "stages.{s}.blocks.{b}.gamma"),
                torch.norm("norm", "head.norm"),
                torch.dense("head", "head.fc"),
            ),
            config={"epsilon": 1e-6},
            metadata={"format": "pt"},
            image=ImageInput(resample="bicubic"),
        ),
        "huggingface": Names(
            (
                torch.conv("stem/conv", "embeddings.patch_embeddings"),
                torch.norm("stem/norm", "embeddings.layernorm"),
                torch.norm("stage{s}/down/norm", "encoder.stages.{s}.downsampling_layer.0"),
                torch.conv("stage{s}/down/conv", "encoder.stages.{s}.downsampling_layer.1"),
                torch.conv("stage{s}/block{b}/depthwise", "encoder.stages.{s}.layers.{b}.dwconv"),
                torch_layers(
                    "stage{s}/block{b}",
                    "encoder.stages.{s}.layers.{b}",
                    {"fc1": "pwconv1", "fc2": "pwconv2"},
                    {"norm": "layernorm"},
                ),
                Rule(
                    "stage{s}/block{b}/scale", "encoder.stages.{s}.layers.{b}.layer_scale_parameter"
                ),
                torch.norm("norm", "layernorm"),
            ),
            prefixes=("", "convnext."),
            heads=(torch.dense("head", "classifier"), spare("classifier")),
            config={"epsilon": 1e-12},
            metadata={"format": "pt"},
            image=ImageInput(resample="bicubic"),
        ),
    }
    CONFIGS: ClassVar = {
        "convnext": transformers(
            {
                "depths": _numbers("depths", [3, 3, 9, 3]),
                "hidden_sizes": _numbers("widths", [96, 192, 384, 768]),
                "patch_size": Use("patch", 4),
                "layer_norm_eps": Use("epsilon", 1e-12),
                "num_stages": Must((4,)),
                "num_channels": Must((3,)),
                "hidden_act": Must(("gelu", "gelu_python")),
                "layer_scale_init_value": Fields(_scaled),
                **labels(_KINDS, "ConvNextForImageClassification"),
            },
            architectures=_KINDS,
            irrelevant="drop_path_rate image_size out_features out_indices stage_names",
        ),
        "timm": timm(
            _TIMM.get,
            lambda model: name_of(model, _TIMM),
            "avg",
            "convnext_{tiny, small, base, large}",
        ),
    }

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    _: KW_ONLY
    classes: int | None = 1000
    patch: int = 4
    epsilon: float = 1e-6

    def forward(self, scope: nn.Scope, x: jax.Array) -> Encoded | jax.Array:
        x = self._encoded(scope, x)
        pooled = self._pooled(scope, x)
        if self.classes is None:
            return Encoded(x, pooled)
        return nn.Dense(self.classes, axes=("in", "classes"))(scope["head"], pooled)

    @nn.method
    def features(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        """Returns the input of the last layer, an array [batch, features]."""
        return self._pooled(scope, self._encoded(scope, x))

    def _pooled(self, scope, x):
        return nn.LayerNorm(epsilon=self.epsilon)(
            scope["norm"], nn.GlobalAvgPool()(scope["pool"], x)
        )

    def _encoded(self, scope, x):
        if len(self.depths) != len(self.widths):
            raise ValueError(
                f"ConvNeXt: expected as many depths as widths; got {self.depths} and {self.widths}"
            )
        stem, norm = scope["stem"], nn.LayerNorm(epsilon=1e-6)
        x = norm(
            stem["norm"],
            nn.Conv(self.widths[0], self.patch, self.patch, padding="VALID")(stem["conv"], x),
        )
        for s, (depth, width) in enumerate(zip(self.depths, self.widths)):
            stage = scope[f"stage{s}"]
            if s:
                down = stage["down"]
                x = nn.Conv(width, 2, 2, padding="VALID")(down["conv"], norm(down["norm"], x))
            for b in range(depth):
                x = convnext_block()(stage[f"block{b}"], x)  # [batch, height, width, features]
        return x

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
