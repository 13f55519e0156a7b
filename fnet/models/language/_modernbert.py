"""ModernBERT, an encoder of long texts, with heads for several tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp

from fnet import layers as nn
from fnet.models._blocks import Blocks
from fnet.models._model import Model
from fnet.models.language._bert import Encoded, architectures, tied
from fnet.models.language.decoder._configs import Count, Flag, Number, activation, read_by_others
from fnet.models.language.decoder._decoder import ACTIVATIONS
from fnet.models.language.decoder._rope_config import (
    FULL,
    SLIDING,
    collapsed,
    layer_types,
    layers,
    number,
    rope_by_type,
    whole,
)
from fnet.models.weights._config import SKIP, Fields, Use, transformers
from fnet.models.weights._labels import labels
from fnet.models.weights._torch_layers import fused, qkv, spare, torch_layers
from fnet.models.weights._weight_names import Names, Rule, Tied
from fnet.models.weights._words import torch

HEADS = "masked_lm", "sequence", "tokens", "questions"
_KINDS = architectures("ModernBert")
_DEPTH, _CONTEXT, _WINDOW, _BASES = 22, 8192, 128, (160000.0, 10000.0)


@nn.layer
def modernbert_block(
    scope,
    x,
    lengths=None,
    kind=0,
    *,
    attentions,
    hidden,
    activation,
    mlp_bias,
    norm,
    dropout,
    first=False,
):
    """Applies attention and an MLP, each with a residual connection. The attention layer of the
    block is `attentions[kind]`."""
    drop, width = nn.Dropout(dropout), x.shape[-1]  # [batch, time, width]
    y = x if first else norm(scope["norm1"], x)  # the embeddings have their own norm
    x = x + drop(scope["drop1"], attentions[kind](scope["attention"], y, lengths=lengths))
    y, up = norm(scope["norm2"], x), nn.Dense(hidden, use_bias=mlp_bias, axes=("embed", "mlp"))
    y = ACTIVATIONS[activation](up(scope["gate"], y)) * up(scope["up"], y)  # [batch, time, hidden]
    y = nn.Dense(width, use_bias=mlp_bias, axes=("mlp", "embed"))(
        scope["down"], drop(scope["drop2"], y)
    )
    return x + y


def _rules(ours, theirs):
    return (
        fused(qkv(ours), f"{theirs}.attn.Wqkv"),
        fused((f"{ours}/gate", f"{ours}/up"), f"{theirs}.mlp.Wi"),
        torch_layers(
            ours,
            theirs,
            {"attention/out": "attn.Wo", "down": "mlp.Wo"},
            {"norm1": "attn_norm", "norm2": "mlp_norm"},
        ),
    )


# config.json: layers with and without windows. Each of the two kinds has its own base of the rotary
# positions.
def _types(config):
    every = whole(config.get("global_attn_every_n_layers", 3))
    return [
        SLIDING if i % every else FULL
        for i in range(whole(config.get("num_hidden_layers", _DEPTH)))
    ]


def _windows(value, config):
    size = whole(config.get("local_attention", _WINDOW))
    types = layer_types(_types(config) if value is None else value, config, _DEPTH)
    return {"window": collapsed(size if each == SLIDING else None for each in types)}


def _window_written(model):
    sizes = set(layers(model, model.window)) - {None}
    if len(sizes) > 1:
        raise ValueError(
            f"config.json has one window for all blocks with windows; got {model.window}"
        )
    return next(iter(sizes), SKIP)


def _padding_written(model):
    """Returns the `pad_token_id` for config.json. The default of `pad_token_id` in transformers is
    50283. If the vocabulary of the model does not contain the token 50283, `pad_token_id` is set to
    null, because transformers would otherwise reject config.json."""
    return SKIP if model.vocab_size > 50283 else None


def _rope(config):
    """Returns `rope_parameters`. Like transformers, derives `rope_parameters` from the fields of
    older versions of config.json if necessary."""
    held, scaling = (
        {} if not isinstance(config.get(name), dict) else config[name]
        for name in ("rope_parameters", "rope_scaling")
    )
    return {
        kind: {
            "rope_theta": config.get(older, base),
            **(held.get(kind) or {"rope_type": "default"}),
            **scaling,
        }
        for kind, older, base in zip(
            (FULL, SLIDING), ("global_rope_theta", "local_rope_theta"), _BASES
        )
    }


class ModernBert(Model):
    """An encoder of texts of up to 8192 tokens, with rotary positions.

    Each block has bidirectional attention and an MLP with a gate, `down(gelu(gate(x)) * up(x))`,
    each with a LayerNorm before it and a residual connection around it. The first block has no norm
    before its attention, because the embeddings are already normalized. By default, the first block
    and every third after it attend to the whole text; the others have a window.

    `window`, `rotary_base` and `rope_scaling` may be tuples with one value for each block; a
    shorter tuple repeats.

    Args:
        vocab_size: number of tokens in the vocabulary.
        width: number of features of a token.
        depth: number of blocks, at least 2.
        heads: number of attention heads, which must divide the width.
        hidden: number of features within the MLP, the output size of `gate` and of `up`.
        context: maximum length of a text in training, in tokens.
        window: a token attends to tokens at most window // 2 positions before or after it. None: to
            all.
        rotary_base: base of the rotary embedding.
        rope_scaling: scaling of the rotary embedding, as in `Decoder`.
        head: the layers after the encoder: "masked_lm", "sequence", "tokens" or "questions", as in
            `Bert`. Default: None.
        classes: number of logits of the heads "sequence" and "tokens".
        pooling: the input of the head "sequence": the features of the first token ("cls"), or the
            mean over all valid tokens ("mean").
        activation: the activation of the MLPs: "gelu", "gelu_tanh", "silu" or "relu".
        head_activation: the activation of the dense layer with which every head begins, one of the
            same.
        norm_bias, attention_bias, mlp_bias, head_bias: whether the norms, the projections of the
            attention, the MLPs, and the dense layer with which every head begins have biases.
        decoder_bias: whether the head "masked_lm" adds a bias to the logits.
        dropout: dropout rate of the embeddings, the attention weights, the attention outputs and
            the MLPs, and before the last layer of every head except "masked_lm".
        epsilon: epsilon of the norms.
        stacked: whether the parameters of all blocks except the first are stacked and a scan
            applies these blocks. See also `models.unstack`.

    Inputs:
        tokens: integers [batch, time].
        lengths: integers [batch], the number of valid tokens in each example. Later tokens are
            padding. Default: all tokens are valid.

    Output: the logits of the head, with the shapes of `Bert`: [batch, time, vocab_size], [batch,
    classes], [batch, time, classes] or [batch, time, 2]. Without a head, an `Encoded` whose
    `pooled` is None.

    Source: Warner et al. (2024), Smarter, Better, Faster, Longer: A Modern Bidirectional Encoder
    for Fast, Memory Efficient, and Long Context Finetuning and Inference.

    >>> model = models.ModernBert.preset("modernbert-base")
    >>> nn.count_parameters(model.spec(model.example()).params)
    149014272
    """

    PRESETS: ClassVar = {
        "modernbert-base": dict(
            vocab_size=50368, width=768, depth=22, heads=12, hidden=1152, pooling="mean"
        ),
        "modernbert-large": dict(
            vocab_size=50368, width=1024, depth=28, heads=16, hidden=2624, pooling="mean"
        ),
    }
    NAMES: ClassVar = {
        "huggingface": Names(
            (
                torch.embed("embed/words", "embeddings.tok_embeddings"),
                torch.norm("embed/norm", "embeddings.norm"),
                _rules("first", "layers.0"),
                _rules("blocks", "layers.{i+1}"),
                _rules("blocks/{i}", "layers.{i+1}"),
                torch.norm("norm", "final_norm"),
            ),
            prefixes=("", "model."),
            metadata={"format": "pt"},
            heads=(
                torch.dense("head/dense", "head.dense"),
                torch.norm("head/norm", "head.norm"),
                Rule("head/bias", "decoder.bias"),
                torch.dense("classifier", "classifier"),
                Tied("decoder.weight", "embed/words/embedding"),
                spare("head.dense", "head.norm", "decoder", "classifier"),
            ),
        ),
    }
    CONFIGS: ClassVar = {
        "modernbert": transformers(
            {
                "vocab_size": Count("vocab_size", 50368),
                "hidden_size": Count("width", 768),
                "num_hidden_layers": Count("depth", _DEPTH),
                "num_attention_heads": Count("heads", 12),
                "intermediate_size": Count("hidden", 1152),
                "max_position_embeddings": Count("context", _CONTEXT, shorter=True),
                "norm_eps": Number("epsilon", 1e-5),
                "hidden_activation": activation("gelu"),
                "classifier_activation": activation("gelu", "head_activation"),
                "norm_bias": Flag("norm_bias", False),
                "attention_bias": Flag("attention_bias", False),
                "mlp_bias": Flag("mlp_bias", False),
                "classifier_bias": Flag("head_bias", False),
                "decoder_bias": Flag("decoder_bias", True),
                "classifier_pooling": Use("pooling", "cls"),
                "tie_word_embeddings": Fields(tied, write=lambda model: True),
                "layer_types": Fields(
                    _windows,
                    None,
                    lambda model: [
                        FULL if each is None else SLIDING for each in layers(model, model.window)
                    ],
                ),
                "local_attention": Fields(
                    lambda value, config: (whole(value), {})[1], write=_window_written
                ),
                "global_attn_every_n_layers": read_by_others(whole),
                "global_rope_theta": read_by_others(number),
                "local_rope_theta": read_by_others(number),
                "pad_token_id": Fields(lambda value, config: {}, write=_padding_written),
                **rope_by_type(_rope, _types, _CONTEXT),
                **labels(_KINDS),
            },
            architectures=_KINDS,
            irrelevant="attention_dropout embedding_dropout mlp_dropout classifier_dropout "
            "initializer_cutoff_factor pad_token_id cls_token_id deterministic_flash_attn "
            "sparse_prediction "
            "sparse_pred_ignore_index reference_compile repad_logits_with_grad layer_norm_eps "
            "position_embedding_type",
        ),
    }
    HUB: ClassVar = {
        "modernbert-base": ("answerdotai/ModernBERT-base",),
        "modernbert-large": ("answerdotai/ModernBERT-large",),
    }

    vocab_size: int
    width: int
    depth: int
    heads: int
    hidden: int
    _: KW_ONLY
    context: int = _CONTEXT
    window: int | tuple[int | None, ...] | None = (None, _WINDOW, _WINDOW)
    rotary_base: float | tuple[float, ...] = (_BASES[0], _BASES[1], _BASES[1])
    rope_scaling: Callable | tuple[Callable | None, ...] | None = None
    head: str | None = None
    classes: int | None = None
    pooling: str = "cls"
    activation: str = "gelu"
    head_activation: str = "gelu"
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    decoder_bias: bool = True
    dropout: float = 0.0
    epsilon: float = 1e-5
    stacked: bool = True

    def __post_init__(self):
        for field, values in (
            ("head", (*HEADS, None)),
            ("pooling", ("cls", "mean")),
            ("activation", tuple(ACTIVATIONS)),
            ("head_activation", tuple(ACTIVATIONS)),
        ):
            if getattr(self, field) not in values:
                raise ValueError(
                    f"ModernBert: {field} must be {' or '.join(map(repr, values))}; got "
                    f"{getattr(self, field)!r}"
                )
        if self.depth < 2:
            raise ValueError(f"ModernBert: depth must be at least 2; got {self.depth}")
        if (self.head in ("sequence", "tokens")) != (self.classes is not None):
            raise ValueError(
                "ModernBert: the heads 'sequence' and 'tokens' need classes, and no other head has "
                f"them; got head={self.head!r} with classes={self.classes}"
            )

    def forward(
        self, scope: nn.Scope, tokens: jax.Array, lengths: jax.Array | None = None
    ) -> Encoded | jax.Array:
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 2:
            raise ValueError(f"ModernBert: expected tokens [batch, time]; got shape {tokens.shape}")
        table, norm, drop = (
            nn.Embed(self.vocab_size, self.width),
            self._norm(),
            nn.Dropout(self.dropout),
        )
        embed = scope["embed"]
        words = embed["words"]
        x = norm(embed["norm"], table(words, tokens))  # [batch, time, width]
        x = self._encoded(scope, drop(scope["drop"], x), lengths)
        x = norm(scope["norm"], x)
        if self.head is None:
            return Encoded(x, None)
        if self.head == "sequence":
            x = self._pooled(x, lengths)  # [batch, width]
        head = scope["head"]
        x = ACTIVATIONS[self.head_activation](
            nn.Dense(self.width, use_bias=self.head_bias)(head["dense"], x)
        )
        x = norm(head["norm"], x)
        if self.head != "masked_lm":
            return nn.Dense(self.classes or 2, axes=("in", "classes"))(
                scope["classifier"], drop(head["drop"], x)
            )
        x = table.attend(words, x)  # [batch, time, vocab_size]
        if not self.decoder_bias:
            return x
        bias = head.param(
            "bias", (self.vocab_size,), jax.nn.initializers.zeros, ("vocab",), roles=("out",)
        )
        return x + bias.astype(x.dtype)[None, None]

    def _encoded(self, scope, x, lengths):
        """The output of the blocks."""
        each = [
            *zip(
                *(
                    layers(self, value)
                    for value in (self.window, self.rotary_base, self.rope_scaling)
                )
            )
        ]
        kinds = tuple(dict.fromkeys(each))
        first, *others = map(kinds.index, each)
        options = dict(
            attentions=tuple(self._attention(*kind) for kind in kinds),
            hidden=self.hidden,
            activation=self.activation,
            mlp_bias=self.mlp_bias,
            norm=self._norm(),
            dropout=self.dropout,
        )
        x = modernbert_block(**options, first=True)(scope["first"], x, lengths=lengths, kind=first)
        blocks = Blocks(
            modernbert_block(**options),
            self.depth - 1,
            self.stacked,
            tuple(others) if len(kinds) > 1 else (),
        )
        return blocks(scope["blocks"], x, lengths=lengths)

    def _attention(self, window, base, scaling):
        return nn.Attention(
            self.heads,
            rotary=nn.Rotary(base, scaling=scaling),
            use_bias=self.attention_bias,
            window=None if window is None else window // 2 + 1,
            dropout=self.dropout,
        )

    def _norm(self):
        return nn.LayerNorm(epsilon=self.epsilon, use_bias=self.norm_bias)

    def _pooled(self, x, lengths):
        if self.pooling == "cls":
            return x[:, 0]
        if lengths is None:
            return x.mean(1)
        real = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < lengths[:, None]  # [batch, time]
        return x.mean(1, where=real[..., None])

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, self.context), jnp.int32)
