"""GPT-2, a decoder of text with learned positions, with its published sizes and weights."""

from __future__ import annotations

import functools
import math
from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp

from fnet import layers as nn
from fnet.layers._sizes import at_most, sized
from fnet.models._blocks import Blocks
from fnet.models._model import LanguageModel
from fnet.models.language.decoder._configs import Count, Flag, Number, activation
from fnet.models.language.decoder._decoder import ACTIVATIONS
from fnet.models.weights._config import Must, Use, transformers
from fnet.models.weights._torch_layers import fused, qkv, torch_layers
from fnet.models.weights._weight_names import SAME, Names, Spare, Tied
from fnet.models.weights._words import torch

zeros = jax.nn.initializers.zeros
# Equal options give the same object, so layers compare equal.
normal = functools.cache(jax.nn.initializers.normal)


@nn.layer
def gpt_block(
    scope,
    x,
    lengths=None,
    kind=0,
    segments=None,
    *,
    heads,
    hidden,
    dropout,
    epsilon,
    activation,
    scales,
    kernel_init,
    residual_init,
):
    """Applies attention and an MLP, each with a residual connection. The attention scores of the
    block are multiplied by `scales[kind]`."""
    # [batch, time, width]
    norm, drop, width = (nn.LayerNorm(epsilon=epsilon), nn.Dropout(dropout), x.shape[-1])
    attention = nn.Attention(
        heads,
        causal=True,
        scale=scales[kind],
        dropout=dropout,
        kernel_init=kernel_init,
        out_init=residual_init,
    )
    y = attention(scope["attention"], norm(scope["norm1"], x), lengths=lengths, segments=segments)
    x = x + drop(scope["drop1"], y)
    y = nn.Dense(hidden, kernel_init=kernel_init, axes=("embed", "mlp"))(
        scope["fc"], norm(scope["norm2"], x)
    )
    out = nn.Dense(width, kernel_init=residual_init, axes=("mlp", "embed"))
    y = out(scope["proj"], ACTIVATIONS[activation](y))
    return x + drop(scope["drop2"], y)


def _rules(ours, theirs="h.{i}"):
    """Rules for a block. Files of GPT-2 have kernels [in, out]. In GPT-2's files, one array
    contains query, key and value."""
    # The causal mask, which old files contain.
    masks = (
        Spare(f"{theirs}.attn.{name}", f"{ours}/norm1/scale") for name in ("bias", "masked_bias")
    )
    return (
        fused(qkv(ours), f"{theirs}.attn.c_attn", SAME),
        torch_layers(
            ours,
            theirs,
            {"attention/out": "attn.c_proj", "fc": "mlp.c_fc", "proj": "mlp.c_proj"},
            {"norm1": "ln_1", "norm2": "ln_2"},
            SAME,
        ),
        *masks,
    )


class GPT(LanguageModel):
    """GPT-2 of any size, a decoder of text with learned positions.

        model = models.GPT.preset("gpt2")
        model = models.GPT(vocab_size=65, width=128, depth=4, heads=4, context=256)

    Each block has causal attention and an MLP, each with a LayerNorm before it and a residual
    connection around it. The defaults are those of the published GPT-2: GELU in its tanh
    approximation, and logits from the embedding table. Kernels and embeddings are initialized with
    standard deviation 0.02; for the last kernel of each residual branch, it is 0.02 / sqrt(2 *
    depth).

    Args:
        vocab_size: number of tokens in the vocabulary.
        width: number of features of a token.
        depth: number of blocks.
        heads: number of attention heads, which must divide the width.
        context: maximum length of a text in tokens.
        hidden: number of features within the MLP. Default: four times the width.
        dropout: dropout rate of embeddings, attention weights and residual branches.
        epsilon: epsilon of the norms.
        stacked: whether the parameters of all blocks are stacked and a scan applies the blocks
            (`nn.Stack`). See also `models.unstack`.
        tied: whether the logits are computed with the embedding table.
        activation: activation of the MLP: "gelu_tanh", "gelu", "silu" or "relu".
        scale_scores: whether the attention scores are divided by sqrt(width / heads).
        scale_by_depth: whether the scores of block i = 1, 2, ... are also divided by i, which keeps
            them small in low precision (as in Mistral of Stanford CRFM). XLA then compiles each
            block separately, even if `stacked` is True.

    Inputs:
        tokens: integers [batch, time].
        lengths: integers [batch], the number of valid tokens in each example. Later tokens are
            padding. Default: all tokens are valid.
        segments: integers [batch, time], for texts that are packed into rows (`tr.Packed`): the
            number of the text of each token, or 0 for padding. No text sees another, and positions
            restart with each. Default: one text in each row.

    Output: logits [batch, time, vocab_size]. With a cache from `model.cache` as `state`, as
    `models.generate` passes it, the tokens continue the text in the cache, and the result is
    (logits, cache).

    Source: Radford et al. (2019), Language Models are Unsupervised Multitask Learners.

    >>> model = models.GPT(vocab_size=64, width=32, depth=2, heads=2, context=16)
    >>> jax.eval_shape(model, model.spec(model.example()).params, jnp.zeros((4, 16), jnp.int32)).shape
    (4, 16, 64)
    """

    PRESETS: ClassVar = {
        "gpt2": dict(vocab_size=50257, width=768, depth=12, heads=12),
        "gpt2-medium": dict(vocab_size=50257, width=1024, depth=24, heads=16),
        "gpt2-large": dict(vocab_size=50257, width=1280, depth=36, heads=20),
        "gpt2-xl": dict(vocab_size=50257, width=1600, depth=48, heads=25),
    }
    NAMES: ClassVar = {
        "huggingface": Names(
            (
                torch.embed("embed", "wte"),
                torch.embed("positions", "wpe"),
                torch.norm("norm", "ln_f"),
                _rules("blocks"),
                _rules("blocks/{i}"),
                Tied("lm_head.weight", "embed/embedding"),
            ),
            prefixes=("", "transformer."),
            heads=(torch.dense("head", "lm_head"),),
            config={"epsilon": 1e-5},
            metadata={"format": "pt"},
        ),
    }
    CONFIGS: ClassVar = {
        "gpt2": transformers(
            {
                "vocab_size": Count("vocab_size", 50257),
                "n_embd": Count("width", 768),
                "hidden_size": Use("width"),
                "n_layer": Count("depth", 12),
                "num_hidden_layers": Use("depth"),
                "n_head": Count("heads", 12),
                "num_attention_heads": Use("heads"),
                "n_inner": Count("hidden", None, lambda model: 4 * model.width),
                "n_positions": Count("context", 1024),
                "n_ctx": Use("context"),
                "max_position_embeddings": Use("context"),
                "layer_norm_epsilon": Number("epsilon", 1e-5),
                "tie_word_embeddings": Flag("tied", True),
                "activation_function": activation("gelu_new"),
                "scale_attn_weights": Flag("scale_scores", True),
                "scale_attn_by_inverse_layer_idx": Flag("scale_by_depth", False),
                "n_special": Must((0,)),
            },
            architectures=("GPT2LMHeadModel", "GPT2Model"),
            irrelevant="resid_pdrop embd_pdrop attn_pdrop reorder_and_upcast_attn summary_type summary_use_proj "
            "summary_activation summary_proj_to_labels summary_first_dropout "
            "predict_special_tokens "
            "output_past",
        ),
    }
    HUB: ClassVar = {name: (f"openai-community/{name}", name) for name in PRESETS}

    vocab_size: int
    width: int
    depth: int
    heads: int
    _: KW_ONLY
    context: int = 1024
    hidden: int | None = None
    dropout: float = 0.0
    epsilon: float = 1e-5
    stacked: bool = True
    tied: bool = True
    activation: str = "gelu_tanh"
    scale_scores: bool = True
    scale_by_depth: bool = False

    def __post_init__(self):
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"GPT: activation must be {' or '.join(map(repr, ACTIVATIONS))}; got "
                f"{self.activation!r}"
            )

    def _body(self, scope, tokens, lengths, segments):  # [batch, time]
        tokens = jnp.asarray(tokens)
        embed, at = nn.Embed(self.vocab_size, self.width), scope["embed"]
        x = embed(at, tokens) + self._positions(scope, tokens, lengths, segments)
        x = nn.Dropout(self.dropout)(scope["drop"], x)  # [batch, time, width]
        scale = (self.width // self.heads) ** -0.5 if self.scale_scores else 1.0
        numbers = range(self.depth) if self.scale_by_depth else ()
        block = gpt_block(
            heads=self.heads,
            hidden=self.hidden or 4 * self.width,
            dropout=self.dropout,
            epsilon=self.epsilon,
            activation=self.activation,
            scales=tuple(scale / (number + 1) for number in numbers) or (scale,),
            kernel_init=normal(0.02),
            residual_init=normal(0.02 / math.sqrt(2 * self.depth)),
        )
        x = Blocks(block, self.depth, self.stacked, tuple(numbers))(
            scope["blocks"], x, lengths=lengths, segments=segments
        )
        x = nn.LayerNorm(epsilon=self.epsilon)(scope["norm"], x)
        if self.tied:
            return embed, at, x
        head = nn.Dense(
            self.vocab_size, use_bias=False, kernel_init=normal(0.02), axes=("embed", "vocab")
        )
        return head, scope["head"], x

    def _positions(self, scope, tokens, lengths, segments):
        """Returns the position embeddings. With a cache, the positions continue those of the cached
        text, and padding has position 0. They restart with each segment."""
        if tokens.ndim != 2 or not at_most("GPT", tokens.shape[1], self.context):
            raise ValueError(
                f"GPT: expected tokens [batch, time] with time <= context={self.context}; got "
                f"shape {tokens.shape}"
            )
        table, at = nn.Embed(self.context, self.width), scope["positions"]
        start = scope.state("index", tokens.shape[:1], zeros, "cache", dtype=jnp.int32)
        if start is None and segments is not None:
            return table(at, nn.segment_positions(segments))
        if start is None and sized(
            tokens.shape[1]
        ):  # a slice, because the gradient of a lookup is a scatter
            return table.first(at, tokens.shape[1])[None]  # [1, time, width]
        order = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        if start is None:
            return table(at, order)
        count = (
            jnp.full_like(start, tokens.shape[1])
            if lengths is None
            else jnp.asarray(lengths).astype(start.dtype)
        )
        scope.update("index", start + count)
        return table(at, jnp.where(order < count[:, None], start[:, None] + order, 0))

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, self.context), jnp.int32)
