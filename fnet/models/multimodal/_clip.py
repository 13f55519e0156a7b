"""CLIP: an image encoder and a text encoder that map images and texts to the same vector space."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.nn import initializers

from fnet import layers as nn
from fnet.layers._explicit import like
from fnet.layers._sizes import at_most
from fnet.models._model import Model
from fnet.models.language._bert import Encoded
from fnet.models.vision._vit import encoder_block, gelu
from fnet.models.weights._config import SKIP, Config, Fields, Must, Use, transformers
from fnet.models.weights._images import ImageInput
from fnet.models.weights._torch_layers import torch_layers
from fnet.models.weights._weight_names import DENSE, Names, Rule, Spare
from fnet.models.weights._words import torch

small = initializers.normal(0.02)


def quick_gelu(x):
    return x * jax.nn.sigmoid(1.702 * x)


ACTIVATIONS = {"quick_gelu": quick_gelu, "gelu": gelu}
IMAGE = ImageInput(
    resize=224,
    resample="bicubic",
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)


def _blocks(ours, theirs):
    return torch_layers(
        f"{ours}blocks",
        f"{theirs}encoder.layers.{{i}}",
        {
            "attention/query": "self_attn.q_proj",
            "attention/key": "self_attn.k_proj",
            "attention/value": "self_attn.v_proj",
            "attention/out": "self_attn.out_proj",
            "fc1": "mlp.fc1",
            "fc2": "mlp.fc2",
        },
        {"norm1": "layer_norm1", "norm2": "layer_norm2"},
    )


def _text(ours="", theirs=""):
    return (
        torch.embed(f"{ours}words", f"{theirs}embeddings.token_embedding"),
        torch.embed(f"{ours}positions", f"{theirs}embeddings.position_embedding"),
        _blocks(ours, theirs),
        torch.norm(f"{ours}norm", f"{theirs}final_layer_norm"),
        Spare(f"{theirs}embeddings.position_ids"),
    )


def _vision(ours="", theirs=""):
    return (
        Rule(f"{ours}class_token", f"{theirs}embeddings.class_embedding"),
        torch.conv(f"{ours}patches", f"{theirs}embeddings.patch_embedding"),
        Rule(f"{ours}position", f"{theirs}embeddings.position_embedding.weight"),
        _blocks(ours, theirs),
        torch.norm(f"{ours}pre_norm", f"{theirs}pre_layrnorm"),
        torch.norm(f"{ours}norm", f"{theirs}post_layernorm"),
        Spare(f"{theirs}embeddings.position_ids"),
    )


def _projection(key, ours=""):
    return Rule(f"{ours}projection/kernel", key, DENSE)


def _activation(value, config):
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise ValueError(f"expected {' or '.join(map(repr, ACTIVATIONS))}")
    return {"activation": value}


def _end(value, config):
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("expected an integer")
    # Files before 2023 have 2, but the highest id is the end token.
    return {"end": None if value == 2 else value}


def _tower(prefix, width, heads, hidden, fields):
    """Returns the `Config` that defines the meaning of the fields of config.json for one encoder."""
    projected = f"{prefix}WithProjection"

    def dim(value, config):
        names = config.get("architectures")
        return {"dim": value} if isinstance(names, list) and projected in names else {}

    return transformers(
        {
            "hidden_size": Use("width", width),
            "num_hidden_layers": Use("depth", 12),
            "num_attention_heads": Use("heads", heads),
            "intermediate_size": Use("hidden", hidden),
            "hidden_act": Fields(_activation, "quick_gelu", lambda model: model.activation),
            "layer_norm_eps": Use("epsilon", 1e-5),
            "projection_dim": Fields(
                dim, 512, lambda model: SKIP if model.dim is None else model.dim, True
            ),
            **fields,
        },
        architectures={prefix: dict(dim=None), projected: dict(dim=...)},
        irrelevant="attention_dropout dropout initializer_factor tie_word_embeddings",
    )


class _Encoder(Model):
    """The fields and layers that the two encoders of CLIP share."""

    width: int
    depth: int
    heads: int
    hidden: int
    _: KW_ONLY
    dim: int | None = None
    activation: str = "quick_gelu"
    epsilon: float = 1e-5

    def _blocks(self, scope, x, causal):
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"{type(self).__name__}: activation must be {' or '.join(map(repr, ACTIVATIONS))}; "
                f"got {self.activation!r}"
            )
        block = encoder_block(
            heads=self.heads,
            hidden=self.hidden,
            dropout=0.0,
            epsilon=self.epsilon,
            causal=causal,
            activation=ACTIVATIONS[self.activation],
        )
        return nn.Stack(block, self.depth)(scope["blocks"], x)

    def _norm(self, scope, x):
        return nn.LayerNorm(epsilon=self.epsilon)(scope, x)

    def _projected(self, scope, x):
        return x if self.dim is None else nn.Dense(self.dim, use_bias=False)(scope["projection"], x)


class CLIPText(_Encoder):
    """CLIP's encoder of texts, a transformer with causal attention.

    Args:
        width: number of features of a token.
        depth: number of blocks.
        heads: number of attention heads, which must divide the width.
        hidden: number of features between the two dense layers of a block's MLP.
        vocab_size: number of tokens in the vocabulary.
        context: maximum length of a text in tokens.
        end: the id of the end token, before the padding. The features of a text are those at its
            first end token. None: the token with the highest id in the text, as in OpenAI's
            vocabulary.
        dim: number of features after the projection. None: no projection.
        activation: "gelu", or "quick_gelu", which is x * sigmoid(1.702 x).
        epsilon: epsilon of the norms.

    Input: integers [batch, time]. Output: an `Encoded` with the features of all tokens as `hidden`,
    and those of each text as `pooled`, [batch, dim], or [batch, width] without a projection.

    Source: Radford et al. (2021), Learning Transferable Visual Models From Natural Language
    Supervision.

    >>> model = models.CLIPText(4, 1, 2, 8, vocab_size=9, context=5, dim=3)
    >>> params, _ = model.init(jax.random.key(0), jnp.zeros((1, 5), jnp.int32))
    >>> model(params, jnp.array([[6, 2, 8, 8, 8]])).pooled.shape
    (1, 3)
    """

    NAMES: ClassVar = {
        "huggingface": Names(
            _text(),
            prefixes=("", "text_model."),
            metadata={"format": "pt"},
            heads=(_projection("text_projection.weight"), Spare("text_projection.weight")),
        )
    }
    CONFIGS: ClassVar = {
        "clip_text_model": _tower(
            "CLIPTextModel",
            512,
            8,
            2048,
            {
                "vocab_size": Use("vocab_size", 49408),
                "max_position_embeddings": Use("context", 77),
                "eos_token_id": Fields(
                    _end, 49407, lambda model: 2 if model.end is None else model.end
                ),
            },
        )
    }

    _: KW_ONLY
    vocab_size: int = 49408
    context: int = 77
    end: int | None = None

    def forward(self, scope: nn.Scope, tokens: jax.Array) -> Encoded:
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 2 or not at_most("CLIPText", tokens.shape[1], self.context):
            raise ValueError(
                f"CLIPText: expected tokens [batch, time] with time <= context={self.context}; got "
                f"shape {tokens.shape}"
            )
        order = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]  # [1, time]
        x = nn.Embed(self.vocab_size, self.width)(scope["words"], tokens) + nn.Embed(
            self.context, self.width
        )(scope["positions"], order)  # [batch, time, width]
        x = self._norm(scope["norm"], self._blocks(scope, x, causal=True))
        last = jnp.argmax(tokens if self.end is None else tokens == self.end, 1)  # [batch]
        pooled = jnp.take_along_axis(x, last[:, None, None], 1)[:, 0]  # [batch, width]
        return Encoded(x, self._projected(scope, pooled))

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, self.context), jnp.int32)


class CLIPVision(_Encoder):
    """CLIP's encoder of images, a vision transformer with a norm before the first block.

    Args:
        width, depth, heads, hidden, dim, activation, epsilon: as in `CLIPText`.
        patch: height and width of a patch in pixels.
        size: height and width of the images in pixels.

    Input: [batch, size, size, 3]. Output: an `Encoded` with the features of all tokens as `hidden`,
    and those of each image as `pooled`, [batch, dim], or [batch, width] without a projection.

    Source: Radford et al. (2021), Learning Transferable Visual Models From Natural Language
    Supervision.

    >>> model = models.CLIPVision(4, 1, 2, 8, patch=4, size=8, dim=3)
    >>> params, _ = model.init(jax.random.key(0), model.example())
    >>> model(params, jnp.ones((2, 8, 8, 3))).pooled.shape
    (2, 3)
    """

    NAMES: ClassVar = {
        "huggingface": Names(
            _vision(),
            prefixes=("", "vision_model."),
            metadata={"format": "pt"},
            image=IMAGE,
            heads=(_projection("visual_projection.weight"), Spare("visual_projection.weight")),
        )
    }
    CONFIGS: ClassVar = {
        "clip_vision_model": _tower(
            "CLIPVisionModel",
            768,
            12,
            3072,
            {
                "image_size": Use("size", 224, square=True),
                "patch_size": Use("patch", 32, square=True),
                "num_channels": Must((3,)),
            },
        )
    }

    _: KW_ONLY
    patch: int = 32
    size: int = 224

    def forward(self, scope: nn.Scope, x: jax.Array) -> Encoded:
        size, width, grid = self.size, self.width, self.size // self.patch
        if x.ndim != 4 or x.shape[1:] != (size, size, 3):
            raise ValueError(
                f"CLIPVision: expected images [batch, {size}, {size}, 3]; got {x.shape}"
            )
        x = nn.Conv(width, self.patch, self.patch, padding="VALID", use_bias=False)(
            scope["patches"], x
        )
        x = x.reshape(x.shape[0], -1, width)  # [batch, patches, width]
        first = scope.param("class_token", (width,), small, ("embed",), roles=("embed",)).astype(
            x.dtype
        )
        # [batch, tokens, width]
        x = jnp.concatenate(
            [jnp.broadcast_to(first, (x.shape[0], 1, width), out_sharding=like(x, 0)), x], 1
        )
        position = scope.param(
            "position", (1 + grid**2, width), small, (None, "embed"), roles=("token", "out")
        )
        x = x + position.astype(x.dtype)[None]
        x = self._blocks(scope, self._norm(scope["pre_norm"], x), causal=False)
        return Encoded(x, self._projected(scope, self._norm(scope["norm"], x[:, 0])))

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, self.size, self.size, 3), jnp.float32)


def _part(field: str, table: Config, kind: str, architecture: str) -> Fields:
    """Returns the `Fields` for "text_config" or "vision_config", the fields of CLIP's config.json
    that contain the configurations of the encoders."""
    cls = {"text": CLIPText, "vision": CLIPVision}[field]

    def read(value, config):
        # Transformers ignores `value` if this older field is present.
        replaced = config.get(f"{field}_config_dict")
        value = {} if value is None else value
        value = value if replaced is None else replaced
        if not isinstance(value, dict):
            raise ValueError("expected an object")
        try:
            return {
                field: cls(
                    **table.values(
                        {
                            **value,
                            "architectures": [architecture],
                            "projection_dim": config.get("projection_dim", 512),
                        }
                    )
                )
            }
        except ValueError as error:
            raise ValueError(f"in which {error}") from None

    def write(model):
        config = table.write(getattr(model, field))
        del config["architectures"]
        return {"model_type": kind, **config}

    return Fields(read, {}, write)


def _replaced(value, config):
    if not (value is None or isinstance(value, dict)):
        raise ValueError("expected an object or null")
    return {}


def _preset(dim, size, width, hidden, heads, depth=12, patch=32, text=(512, 12, 8, 2048), end=None):
    return dict(
        text=CLIPText(*text, dim=dim, end=end),
        vision=CLIPVision(width, depth, heads, hidden, dim=dim, patch=patch, size=size),
    )


class CLIP(Model):
    """An encoder of images and one of texts, whose features are similar where the text describes
    the image.

        model, params, _ = pretrained.load("openai/clip-vit-base-patch32")
        probabilities = jax.nn.softmax(model(params, images, tokens))                          # [images, texts]
        features = model.image_features(params, images), model.text_features(params, tokens)

    To classify an image without training, pass one text for each class, and take the softmax over
    texts. To find the image that matches a text, take it over images.

    Args:
        text: the encoder of texts, with a projection.
        vision: the encoder of images, with a projection to as many features.

    Inputs:
        images: [images, size, size, 3].
        tokens: integers [texts, time]; each text has an end token.

    Output: logits [images, texts], the cosine similarity of each image's and each text's features,
    multiplied by exp(`logit_scale`), a parameter.

    Source: Radford et al. (2021), Learning Transferable Visual Models From Natural Language
    Supervision.

    >>> model = models.CLIP.preset("clip-vit-base-patch32")
    >>> nn.count_parameters(model.spec(*model.example()).params)
    151277313
    """

    PRESETS: ClassVar = {
        "clip-vit-base-patch32": _preset(512, 224, 768, 3072, 12),
        "clip-vit-base-patch16": _preset(512, 224, 768, 3072, 12, patch=16),
        # The config.json of these two models contains text_config_dict, which sets the end token.
        "clip-vit-large-patch14": _preset(
            768, 224, 1024, 4096, 16, 24, 14, (768, 12, 12, 3072), 49407
        ),
        "clip-vit-large-patch14-336": _preset(
            768, 336, 1024, 4096, 16, 24, 14, (768, 12, 12, 3072), 49407
        ),
    }
    HUB: ClassVar = {name: (f"openai/{name}",) for name in PRESETS}
    NAMES: ClassVar = {
        "huggingface": Names(
            (
                _text("text/", "text_model."),
                _projection("text_projection.weight", "text/"),
                _vision("vision/", "vision_model."),
                _projection("visual_projection.weight", "vision/"),
                Rule("logit_scale", "logit_scale"),
            ),
            metadata={"format": "pt"},
            image=IMAGE,
        )
    }
    CONFIGS: ClassVar = {
        "clip": transformers(
            {
                "text_config": _part(
                    "text",
                    CLIPText.CONFIGS["clip_text_model"],
                    "clip_text_model",
                    "CLIPTextModelWithProjection",
                ),
                "vision_config": _part(
                    "vision",
                    CLIPVision.CONFIGS["clip_vision_model"],
                    "clip_vision_model",
                    "CLIPVisionModelWithProjection",
                ),
                "text_config_dict": Fields(_replaced),
                "vision_config_dict": Fields(_replaced),
                "projection_dim": Fields(
                    lambda value, config: {}, write=lambda model: model.text.dim
                ),
            },
            architectures=("CLIPModel",),
            irrelevant="logit_scale_init_value initializer_factor tie_word_embeddings",
        )
    }

    text: CLIPText
    vision: CLIPVision

    def forward(self, scope: nn.Scope, images: jax.Array, tokens: jax.Array) -> jax.Array:
        if self.text.dim is None or self.text.dim != self.vision.dim:
            raise ValueError(
                f"CLIP: expected projections to as many features in both encoders; got text.dim="
                f"{self.text.dim} and vision.dim={self.vision.dim}"
            )
        x, y = self.image_features(scope, images), self.text_features(scope, tokens)
        scale = jnp.exp(scope.param("logit_scale", (), initializers.constant(2.6592), ())).astype(
            x.dtype
        )
        return scale * (_unit(x) @ _unit(y).T)  # [images, texts]

    @nn.method
    def image_features(self, scope: nn.Scope, images: jax.Array) -> jax.Array:
        """Returns the features of images [images, size, size, 3] as an array [images, dim], without
        normalization."""
        return self.vision(scope["vision"], images).pooled

    @nn.method
    def text_features(self, scope: nn.Scope, tokens: jax.Array) -> jax.Array:
        """Returns the features of texts [texts, time] as an array [texts, dim], without
        normalization."""
        return self.text(scope["text"], tokens).pooled

    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.vision.example(), self.text.example()


def _unit(x):
    """Normalizes vectors to length 1. The computation is in float32, or in the dtype of x if that
    is wider."""
    wide = x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x
    return (wide / jnp.linalg.norm(wide, axis=-1, keepdims=True)).astype(x.dtype)
