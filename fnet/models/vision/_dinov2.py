"""DINOv2: a vision transformer with layer scale, trained without labels."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers

from fnet import layers as nn
from fnet.models.language._bert import Encoded
from fnet.models.vision._vit import CLASSIFIER, ENCODER, IRRELEVANT, ViT, gelu, sizes
from fnet.models.weights._config import Fields, Must, Use, transformers
from fnet.models.weights._images import ImageInput
from fnet.models.weights._labels import labels
from fnet.models.weights._torch_layers import fused, torch_layers
from fnet.models.weights._weight_names import Names, Rule, Spare

_KINDS = {"Dinov2Model": dict(classes=None), "Dinov2ForImageClassification": dict(classes=...)}


@nn.layer
def dino_block(scope, x, *, heads, hidden, gated, dropout, epsilon):  # [batch, tokens, width]
    def scaled(name, y):
        scale = scope.param(name, (y.shape[-1],), initializers.ones, ("embed",), roles=("out",))
        return y * scale.astype(y.dtype)[None, None]

    drop, width = nn.Dropout(dropout), x.shape[-1]
    y = nn.LayerNorm(epsilon=epsilon)(scope["norm1"], x)
    x = x + scaled("scale1", drop(scope["drop1"], nn.Attention(heads)(scope["attention"], y)))
    y = nn.LayerNorm(epsilon=epsilon)(scope["norm2"], x)
    if gated:
        y = jax.nn.silu(nn.Dense(hidden, axes=("embed", "mlp"))(scope["gate"], y)) * nn.Dense(
            hidden, axes=("embed", "mlp")
        )(scope["up"], y)  # [batch, tokens, hidden]
    else:
        y = gelu(nn.Dense(hidden, axes=("embed", "mlp"))(scope["fc1"], y))
    y = nn.Dense(width, axes=("mlp", "embed"))(scope["down" if gated else "fc2"], y)
    return x + scaled("scale2", drop(scope["drop2"], y))


def bicubic(old: int, new: int) -> np.ndarray:
    """Returns the matrix [new, old] of PyTorch's bicubic interpolation: Keys' kernel with a =
    -0.75, without antialiasing."""

    def kernel(x):
        x = np.abs(x)
        near, far = (1.25 * x - 2.25) * x * x + 1, -0.75 * (((x - 5) * x + 8) * x - 4)
        return np.where(x <= 1, near, np.where(x < 2, far, 0))

    centers, matrix = (np.arange(new) + 0.5) * old / new - 0.5, np.zeros((new, old))
    first = np.floor(centers).astype(int)
    for offset in range(-1, 3):
        at = first + offset
        np.add.at(matrix, (np.arange(new), np.clip(at, 0, old - 1)), kernel(centers - at))
    return matrix.astype(np.float32)


def _size(config):
    """Returns the fields `hidden` and `gated` of the model. `hidden` is `mlp_ratio` times the
    width, or two thirds of this product if the hidden layer is gated."""
    width, ratio, gated = (
        config.get(name, default)
        for name, default in (("hidden_size", 768), ("mlp_ratio", 4), ("use_swiglu_ffn", False))
    )
    if not isinstance(gated, bool) or any(
        isinstance(each, bool) or not isinstance(each, int | float) for each in (width, ratio)
    ):
        raise ValueError(
            "expected numbers in hidden_size and mlp_ratio, and true or false in use_swiglu_ffn"
        )
    hidden = int(width * ratio)
    return {"hidden": (int(hidden * 2 / 3) + 7) // 8 * 8 if gated else hidden, "gated": gated}


def _ratio(model):
    """Returns the value of `mlp_ratio` for config.json: the ratio for which `_size` returns the
    model's `hidden`."""
    ratio = model.hidden / model.width * (1.5 if model.gated else 1)
    for each in (round(ratio), ratio):
        if (
            _size({"hidden_size": model.width, "mlp_ratio": each, "use_swiglu_ffn": model.gated})[
                "hidden"
            ]
            == model.hidden
        ):
            return each
    raise ValueError(f"no mlp_ratio describes hidden={model.hidden}")


class DINOv2(ViT):
    """A vision transformer trained without labels, for classification, retrieval and dense
    prediction.

    Unlike in `ViT`, the output of each residual branch has a learned scale for each feature (layer
    scale). MLPs of the largest preset have a gate (SwiGLU). The classification layer sees the class
    token concatenated with the mean of the other tokens.

    Args:
        width, depth, heads, patch, size, dropout, epsilon: as in `ViT`.
        classes: number of logits. None: no classification layer, and an `Encoded` as output.
        hidden: number of features between the two dense layers of a block's MLP.
        gated: whether the MLPs have a gate with SiLU.
        interpolate: whether the model accepts images of other sizes than `size`, by interpolating
            the position embeddings as PyTorch does.

    Input: [batch, size, size, 3]; with `interpolate`, height and width are any multiples of
    `patch`. Output: logits [batch, classes], or an `Encoded` with all tokens as `hidden` and the
    class token as `pooled`.

    Source: Oquab et al. (2023), DINOv2: Learning Robust Visual Features without Supervision.

    >>> model = models.DINOv2.preset("dinov2_s_14")
    >>> nn.count_parameters(model.spec(model.example()).params)
    22056192
    """

    PRESETS: ClassVar = {
        "dinov2_s_14": dict(width=384, depth=12, heads=6, hidden=1536),
        "dinov2_b_14": dict(width=768, depth=12, heads=12, hidden=3072),
        "dinov2_l_14": dict(width=1024, depth=24, heads=16, hidden=4096),
        "dinov2_g_14": dict(width=1536, depth=40, heads=24, hidden=4096, gated=True),
    }
    HUB: ClassVar = {
        "dinov2_s_14": ("facebook/dinov2-small",),
        "dinov2_b_14": ("facebook/dinov2-base",),
        "dinov2_l_14": ("facebook/dinov2-large",),
        "dinov2_g_14": ("facebook/dinov2-giant",),
    }
    NAMES: ClassVar = {
        "huggingface": Names(
            (
                torch_layers(
                    "blocks",
                    "encoder.layer.{i}",
                    {"fc1": "mlp.fc1", "fc2": "mlp.fc2", "down": "mlp.weights_out"},
                    {"norm1": "norm1", "norm2": "norm2"},
                ),
                Rule("blocks/scale1", "encoder.layer.{i}.layer_scale1.lambda1"),
                Rule("blocks/scale2", "encoder.layer.{i}.layer_scale2.lambda1"),
                fused(("blocks/gate", "blocks/up"), "encoder.layer.{i}.mlp.weights_in"),
                ENCODER,
                Spare("embeddings.mask_token"),
            ),
            prefixes=("", "dinov2."),
            heads=CLASSIFIER,
            metadata={"format": "pt"},
            image=ImageInput(resample="bicubic"),
        ),
    }
    CONFIGS: ClassVar = {
        "dinov2": transformers(
            {
                **sizes(intermediate=False),
                "layer_norm_eps": Use("epsilon", 1e-6),
                "patch_size": Use("patch", 14, square=True),
                "mlp_ratio": Fields(lambda value, config: _size(config), 4, _ratio),
                "use_swiglu_ffn": Fields(
                    lambda value, config: _size(config), write=lambda model: model.gated
                ),
                "use_mask_token": Fields(lambda value, config: {}, write=lambda model: False),
                "interpolate_pos_encoding": Must((True, None)),
                **labels(_KINDS),
            },
            architectures=_KINDS,
            irrelevant=f"{IRRELEVANT} layerscale_value drop_path_rate apply_layernorm stage_names "
            "reshape_hidden_states out_features out_indices",
        ),
    }

    _: KW_ONLY
    classes: int | None = None
    patch: int = 14
    size: int = 518
    gated: bool = False
    interpolate: bool = False

    def forward(self, scope: nn.Scope, x: jax.Array) -> Encoded | jax.Array:
        x = nn.LayerNorm(epsilon=self.epsilon)(scope["norm"], self._encoded(scope, x))
        if self.classes is None:
            return Encoded(x, x[:, 0])
        pooled = jnp.concatenate([x[:, 0], x[:, 1:].mean(1)], -1)
        return nn.Dense(self.classes, axes=("in", "classes"))(scope["head"], pooled)

    @nn.method
    def features(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        """Returns the class token concatenated with the mean of the other tokens, an array [batch,
        2 * width]."""
        x = nn.LayerNorm(epsilon=self.epsilon)(scope["norm"], self._encoded(scope, x))
        return jnp.concatenate([x[:, 0], x[:, 1:].mean(1)], -1)

    def _check(self, x):
        if not self.interpolate:
            super()._check(x)
        elif (
            x.ndim != 4
            or x.shape[1] % self.patch
            or x.shape[2] % self.patch
            or self.size % self.patch
        ):
            raise ValueError(
                f"DINOv2: expected images [batch, height, width, channels] with multiples of patch="
                f"{self.patch} as height and width; got {x.shape}"
            )

    def _positions(self, position, grid):
        count = self.size // self.patch
        if grid == (count, count):
            return position
        table = position[:, 1:].reshape(count, count, -1).astype(jnp.float32)
        rows, columns = (jnp.asarray(bicubic(count, new)) for new in grid)
        table = jnp.einsum("yh,xw,hwf->yxf", rows, columns, table, precision="highest")
        table = table.reshape(1, -1, self.width).astype(position.dtype)
        return jnp.concatenate([position[:, :1], table], 1)

    def _block(self):
        return dino_block(
            heads=self.heads,
            hidden=self.hidden or 4 * self.width,
            gated=self.gated,
            dropout=self.dropout,
            epsilon=self.epsilon,
        )

    def of_keys(self, keys: Collection[str]) -> DINOv2:
        return self
