"""ViT: a transformer on the patches of an image. The class `ViT` has presets for the sizes Ti, S
and B."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection
from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.nn import initializers

from fnet import layers as nn
from fnet.layers._explicit import like
from fnet.models._model import Model
from fnet.models.language._bert import Encoded
from fnet.models.weights._config import Fields, Must, Use, transformers
from fnet.models.weights._images import AUGREG, TORCHVISION, ImageInput
from fnet.models.weights._labels import labels
from fnet.models.weights._timm_config import name_of, timm
from fnet.models.weights._torch_layers import fused, qkv, spare, torch_layers
from fnet.models.weights._weight_names import Names, Rule
from fnet.models.weights._words import torch

gelu = functools.partial(jax.nn.gelu, approximate=False)
small = initializers.normal(0.02)


@nn.layer
def encoder_block(scope, x, *, heads, hidden, dropout, epsilon, activation=gelu, causal=False):
    drop = nn.Dropout(dropout)
    y = nn.LayerNorm(epsilon=epsilon)(scope["norm1"], x)  # [batch, tokens, width]
    x = x + drop(scope["drop1"], nn.Attention(heads, causal=causal)(scope["attention"], y))
    y = nn.LayerNorm(epsilon=epsilon)(scope["norm2"], x)
    y = nn.Dense(hidden, axes=("embed", "mlp"))(scope["fc1"], y)  # [batch, tokens, hidden]
    y = drop(scope["drop2"], activation(y))
    return x + drop(scope["drop3"], nn.Dense(x.shape[-1], axes=("mlp", "embed"))(scope["fc2"], y))


SIZES = {
    "tiny": dict(width=192, depth=12, heads=3),
    "small": dict(width=384, depth=12, heads=6),
    "base": dict(width=768, depth=12, heads=12),
    "large": dict(width=1024, depth=24, heads=16),
}


def architectures(pattern, name, sizes, **others):
    """Returns two functions, `read` and `write`, for timm's architectures such as
    vit_small_patch16_224. `read` maps the name of an architecture to the fields of the model, or to
    None. `write` maps a model to the name of its architecture. In `pattern` and `name`, `{}` is the
    size of the model."""
    pattern = pattern.format(f"({'|'.join(sizes)})") + "_patch([0-9]{1,3})_([0-9]{1,4})"

    def read(text):
        found = re.fullmatch(pattern, text)
        return found and {
            **sizes[found[1]],
            "patch": int(found[2]),
            "size": int(found[3]),
            **others,
        }

    def write(model):
        return f"{name.format(name_of(model, sizes))}_patch{model.patch}_{model.size}"

    return read, write


TIMM = (
    Rule("class_token", "cls_token"),
    Rule("position", "pos_embed"),
    torch.conv("patches", "patch_embed.proj"),
    fused(qkv("blocks"), "blocks.{i}.attn.qkv"),
    torch_layers(
        "blocks",
        "blocks.{i}",
        {"attention/out": "attn.proj", "fc1": "mlp.fc1", "fc2": "mlp.fc2"},
        {"norm1": "norm1", "norm2": "norm2"},
    ),
    torch.norm("norm", "norm"),
    torch.dense("head", "head"),
)
ENCODER = (  # transformers' keys
    Rule("class_token", "embeddings.cls_token"),
    Rule("position", "embeddings.position_embeddings"),
    torch.conv("patches", "embeddings.patch_embeddings.projection"),
    torch_layers(
        "blocks",
        "encoder.layer.{i}",
        {
            "attention/query": "attention.attention.query",
            "attention/key": "attention.attention.key",
            "attention/value": "attention.attention.value",
            "attention/out": "attention.output.dense",
            "fc1": "intermediate.dense",
            "fc2": "output.dense",
        },
        {"norm1": "layernorm_before", "norm2": "layernorm_after"},
    ),
    torch.norm("norm", "layernorm"),
)
POOLING = torch.dense("pooler", "pooler.dense"), spare("pooler.dense")
CLASSIFIER = torch.dense("head", "classifier"), spare("classifier")
HALF = ImageInput(resize=None, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def sizes(intermediate=True):
    """Returns entries for the fields of config.json that ViT and models derived from it share."""
    hidden = (
        {"intermediate_size": Use("hidden", 3072, lambda model: 4 * model.width)}
        if intermediate
        else {}
    )
    return hidden | {
        "hidden_size": Use("width", 768),
        "num_hidden_layers": Use("depth", 12),
        "num_attention_heads": Use("heads", 12),
        "layer_norm_eps": Use("epsilon", 1e-12),
        "image_size": Use("size", 224, square=True),
        "patch_size": Use("patch", 16, square=True),
        "num_channels": Must((3,)),
        "qkv_bias": Must((True,)),
        "hidden_act": Must(("gelu", "gelu_python")),
    }


def pooled_size(value, config):
    """Checks `pooler_output_size`, which affects only models with a pooler."""
    if (
        "pooler_output_size" in config
        and value not in (None, config.get("hidden_size", 768))
        and _bare(config)
    ):
        raise ValueError("expected the value of hidden_size, or null")
    return {}


def pooled_act(value, config):
    if value != "tanh" and _bare(config):
        raise ValueError("expected 'tanh'")
    return {}


def _bare(config):
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("Model") for name in names)


POOLER = {"pooler_output_size": Fields(pooled_size), "pooler_act": Fields(pooled_act)}
IRRELEVANT = "hidden_dropout_prob attention_probs_dropout_prob encoder_stride"
_KINDS = {"ViTForImageClassification": dict(classes=...), "ViTModel": dict(classes=None)}


class ViT(Model):
    """A vision transformer: patches, a class token, learned positions, encoder blocks and a dense
    layer.

    Args:
        width: number of features of a token.
        depth: number of blocks.
        heads: number of attention heads, which must divide the width.
        classes: number of logits. None: no classification layer, and an `Encoded` as output.
        patch: height and width of a patch in pixels.
        size: height and width of the images in pixels.
        hidden: number of features between the two dense layers of a block's MLP. Default: four
            times the width.
        pooler: whether a model with `classes=None` has a pooler, a dense layer and tanh on the
            class token.
        dropout: dropout rate after the position embeddings, after attention and after each dense
            layer of the blocks.
        epsilon: epsilon of the norms.

    Input: [batch, size, size, 3]. Output: logits [batch, classes], or an `Encoded` (the features of
    the tokens).

    Source: Dosovitskiy et al. (2021), An Image is Worth 16x16 Words, eq. 1 to 4. The presets Ti and
    S are from Touvron, Cord, Douze, Massa, Sablayrolles and Jégou (2021), Training data-efficient
    image transformers, table 1.

    >>> model = models.ViT.preset("vit_ti_16")
    >>> nn.count_parameters(model.spec(model.example()).params)
    5717416
    """

    PRESETS: ClassVar = {
        "vit_ti_16": SIZES["tiny"],
        "vit_s_16": SIZES["small"],
        "vit_b_16": SIZES["base"],
        "vit_b_32": dict(SIZES["base"], patch=32),
    }
    HUB: ClassVar = {
        "vit_ti_16": ("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",),
        "vit_s_16": ("timm/vit_small_patch16_224.augreg_in21k_ft_in1k",),
        "vit_b_16": (
            "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k",
            "google/vit-base-patch16-224",
            "torchvision:vit_b_16",
        ),
        "vit_b_32": ("timm/vit_base_patch32_224.augreg_in21k_ft_in1k", "torchvision:vit_b_32"),
    }
    NAMES: ClassVar = {
        "torchvision": Names(
            (
                Rule("class_token", "class_token"),
                Rule("position", "encoder.pos_embedding"),
                torch.conv("patches", "conv_proj"),
                fused(
                    qkv("blocks"),
                    "encoder.layers.encoder_layer_{i}.self_attention.in_proj",
                    join="_",
                ),
                torch_layers(
                    "blocks",
                    "encoder.layers.encoder_layer_{i}",
                    {
                        "attention/out": "self_attention.out_proj",
                        "fc1": "mlp.0",
                        "fc2": "mlp.3",
                    },
                    {"norm1": "ln_1", "norm2": "ln_2"},
                ),
                torch.norm("norm", "encoder.ln"),
                torch.dense("head", "heads.head"),
            ),
            config={"epsilon": 1e-6},
            metadata={"format": "pt"},
            image=TORCHVISION,
        ),
        "timm": Names(TIMM, config={"epsilon": 1e-6}, metadata={"format": "pt"}, image=AUGREG),
        "huggingface": Names(
            (ENCODER, POOLING),
            prefixes=("", "vit."),
            heads=CLASSIFIER,
            config={"epsilon": 1e-12},
            metadata={"format": "pt"},
            image=HALF,
        ),
    }

    CONFIGS: ClassVar = {
        "vit": transformers(
            {**sizes(), **POOLER, **labels(_KINDS, "ViTForImageClassification")},
            architectures=_KINDS,
            irrelevant=IRRELEVANT,
        ),
        "timm": timm(
            *architectures("(?:vit|deit)_{}", "vit_{}", SIZES),
            "token",
            "{vit, deit}_{tiny, small, base, large}_patchP_S, such as vit_base_patch16_224",
        ),
    }

    width: int
    depth: int
    heads: int
    _: KW_ONLY
    classes: int | None = 1000
    patch: int = 16
    size: int = 224
    hidden: int | None = None
    pooler: bool = False
    dropout: float = 0.0
    epsilon: float = 1e-6

    def forward(self, scope: nn.Scope, x: jax.Array) -> Encoded | jax.Array:
        if self.classes is None:
            x = nn.LayerNorm(epsilon=self.epsilon)(scope["norm"], self._encoded(scope, x))
            return Encoded(x, self._pooled(scope, x) if self.pooler else None)
        return nn.Dense(self.classes, axes=("in", "classes"))(
            scope["head"], self.features(scope, x)
        )

    @nn.method
    def features(self, scope: nn.Scope, x: jax.Array) -> jax.Array:
        """Returns the input of the last layer, an array [batch, width]: the class token of each
        image after the last norm."""
        return nn.LayerNorm(epsilon=self.epsilon)(scope["norm"], self._encoded(scope, x)[:, 0])

    def _encoded(self, scope, x):
        """Returns the tokens after all blocks, an array [batch, tokens, width]."""
        self._check(x)
        width = self.width
        x = nn.Conv(width, self.patch, self.patch, padding="VALID")(scope["patches"], x)
        grid = x.shape[1:3]
        x = x.reshape(x.shape[0], -1, width)  # [batch, patches, width]
        token = functools.partial(
            scope.param, axes=(None, None, "embed"), roles=("batch", "token", "out")
        )
        tokens = [
            token(name, (1, 1, width), initializers.zeros).astype(x.dtype)
            for name in self._tokens()
        ]
        x = jnp.concatenate(
            [
                *(
                    jnp.broadcast_to(token, (x.shape[0], 1, width), out_sharding=like(x, 0))
                    for token in tokens
                ),
                x,
            ],
            1,
        )
        count = len(tokens) + (self.size // self.patch) ** 2
        position = token("position", (1, count, width), small).astype(x.dtype)
        x = x + self._positions(position, grid)  # [batch, tokens, width]
        x = nn.Dropout(self.dropout)(scope["drop"], x)
        return nn.Stack(self._block(), self.depth)(scope["blocks"], x)

    def _check(self, x):
        if x.ndim != 4 or x.shape[1:3] != (self.size, self.size) or self.size % self.patch:
            raise ValueError(
                f"{type(self).__name__}: expected images [batch, {self.size}, {self.size}, "
                f"channels], with a size that is a multiple of patch={self.patch}; got {x.shape}"
            )

    def _tokens(self):
        return ("class_token",)

    def _positions(self, position, grid):
        return position

    def _block(self):
        return encoder_block(
            heads=self.heads,
            hidden=self.hidden or 4 * self.width,
            dropout=self.dropout,
            epsilon=self.epsilon,
        )

    def _pooled(self, scope, x):
        return jnp.tanh(nn.Dense(self.width)(scope["pooler"], x[:, 0]))

    def of_keys(self, keys: Collection[str]) -> ViT:
        held = any(key.endswith("pooler.dense.weight") for key in keys)
        return dataclasses.replace(self, pooler=held) if self.classes is None else self

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, self.size, self.size, 3), jnp.float32)
