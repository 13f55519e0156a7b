"""Decoders of text with rotary positions: Llama, Mistral, Qwen, Gemma, Phi-3, SmolLM, OLMo 2,
GPT-NeoX."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import ClassVar

import jax
import jax.numpy as jnp

from fnet import layers as nn
from fnet.models._blocks import Blocks
from fnet.models._model import LanguageModel
from fnet.models.language.decoder._configs import CONFIGS
from fnet.models.language.decoder._names import NAMES

ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


@nn.layer
def decoder_mlp(scope, x, *, hidden, activation, gated, use_bias):
    act, width = ACTIVATIONS[activation], x.shape[-1]  # [batch, time, width]
    up = nn.Dense(hidden, use_bias=use_bias, axes=("embed", "mlp"))
    gate = act(up(scope["gate"], x)) if gated else None
    y = up(scope["up"], x)
    y = act(y) if gate is None else gate * y
    return nn.Dense(width, use_bias=use_bias, axes=("mlp", "embed"))(scope["down"], y)


@nn.layer
def decoder_block(
    scope,
    x,
    lengths=None,
    kind=0,
    segments=None,
    *,
    attentions,
    mlp,
    norm,
    pre_norm,
    post_norm,
    parallel,
):
    """Applies attention and an MLP, each with a residual connection. `kind` is the kind of the
    block, and `attentions[kind]` is its attention layer."""

    def branch(f, x, number):
        y = norm(scope[f"norm{number}"], x) if pre_norm else x
        y = f(y)
        return norm(scope[f"post_norm{number}"], y) if post_norm else y

    def attention(y):
        return attentions[kind](scope["attention"], y, lengths=lengths, segments=segments)

    attended = branch(attention, x, 1)
    if parallel:
        return x + attended + branch(lambda y: mlp.forward(scope, y), x, 2)
    x = x + attended
    return x + branch(lambda y: mlp.forward(scope, y), x, 2)


_GEMMA3 = dict(
    vocab_size=262144,
    context=32768,
    head_dim=256,
    window=(512,) * 5 + (None,),
    tied=True,
    epsilon=1e-6,
    rotary_base=(1e4,) * 5 + (1e6,),
    qk_norm="head",
    query_scalar=256,
    activation="gelu_tanh",
    norm_offset=1.0,
    post_norm=True,
    scale_embeddings=True,
)
_PYTHIA = dict(
    vocab_size=50304,
    rotary_dim=16,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    activation="gelu",
    gated=False,
    layer_norm=True,
    parallel=True,
)


class Decoder(LanguageModel):
    """A decoder of text with rotary positions: Llama, and the families that differ from it by
    options.

        model = models.Decoder.preset("smollm2-135m")
        model, params, _ = pretrained.load("path/to/folder")           # the options, from config.json

    It covers Llama, Mistral, Mixtral, Qwen 2 and 3 (with or without experts), Gemma 1 to
    3, Phi-3, SmolLM 2 and 3, OLMo 2, GPT-NeoX, Pythia, and the small models of llama2.c. The
    guide's page "Models" lists the options of each.

    Each block has causal grouped-query attention and an MLP, `down(silu(gate(x)) * up(x))`, each
    with an RMSNorm before it and a residual connection around it. Defaults are those of Llama; the
    options after `stacked` are for other families.

    `window`, `rotary_base` and `rope_scaling` may be tuples with one value for each block; a
    shorter tuple repeats. window=(4096, None) alternates blocks with and without a window.

    Args:
        vocab_size: number of tokens in the vocabulary.
        width: number of features of a token.
        depth: number of blocks.
        heads: number of attention heads, which must divide the width, unless `head_dim` is set.
        kv_heads: number of key/value heads, each shared by heads / kv_heads query heads.
        hidden: number of features within the MLP, the output size of `gate` and of `up`.
        context: maximum length of a text in tokens.
        rotary_base: base of the rotary embedding. None in a tuple: the block has no position
            embedding (SmolLM 3).
        interleaved: whether the rotary embedding rotates the features (0, 1), (2, 3), ... as pairs,
            as in the weights of Meta and llama2.c. If False, the pairs are (i, i + n / 2), where n
            is the number of rotated features of a head, as in the weights of Hugging Face.
        tied: whether the logits are computed with the embedding table.
        epsilon: epsilon of the norms.
        head_dim: number of features of a head. Default: width / heads.
        window: the maximum number of tokens to which a query attends: its own and those directly
            before it (Mistral 7B v0.1). Default: no maximum.
        rope_scaling: `LinearScaling`, `Llama3Scaling`, `YarnScaling`, `DynamicScaling` or
            `LongScaling`, if the context was extended after training. Default: no scaling.
        stacked: whether the parameters of all blocks are stacked and a scan applies the blocks
            (`nn.Stack`). See also `models.unstack`. Where kinds of blocks repeat, such as five with
            a window and one without, each iteration applies one whole pattern.
        rotary_dim: number of features of each head that are rotated, counted from the first (Phi-3,
            GPT-NeoX). Default: all.
        qkv_bias, out_bias, mlp_bias: whether the projections to queries, keys and values, the
            output projection of the attention, and the MLP have biases. Qwen 2 has only `qkv_bias`,
            GPT-NeoX all three.
        qk_norm: how queries and keys are normalized: "head", each head separately (Qwen 3, Gemma
            3); "all", all heads together (OLMo 2); or None, not at all.
        query_scalar: attention scores are divided by its square root. Default: head_dim.
        attention_softcap, logit_softcap: bounds on the attention scores and on the logits: x
            becomes softcap * tanh(x / softcap) (Gemma 2). Default: no bounds.
        activation: activation of the MLP: "silu", "gelu", "gelu_tanh" (Gemma) or "relu".
        gated: whether the MLP has a gate. If not, it is `down(activation(up(x)))` (GPT-NeoX).
        layer_norm: whether the norms are LayerNorms with bias (GPT-NeoX).
        norm_offset: a number that is added to the scales of the RMSNorms, 1 in Gemma.
        pre_norm, post_norm: whether attention and MLP have a norm before them, and one after them.
            Gemma 2 and 3 have both, OLMo 2 only the latter.
        parallel: whether attention and MLP both see the input of the block (GPT-NeoX). If False,
            the MLP comes after the attention.
        scale_embeddings: whether the embeddings are multiplied by sqrt(width) (Gemma).
        experts: the number of experts of an `nn.MixtureOfExperts` in place of the MLP, with
            `hidden` features in each (Mixtral, Qwen 3). Default: None, a single MLP.
        experts_per_token, normalize_experts, expert_capacity: `top_k`, `normalize` and `capacity`
            of the `nn.MixtureOfExperts`.

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

    Source: Touvron et al. (2023), LLaMA: Open and Efficient Foundation Language Models. Grouped
    queries: Llama 2. Grattafiori et al. (2024), The Llama 3 Herd of Models. SwiGLU: Shazeer (2020),
    GLU Variants Improve Transformer. Gemma Team (2024, 2025), Gemma 2 and Gemma 3. Yang et al.
    (2025), Qwen3 Technical Report. Abdin et al. (2024), Phi-3 Technical Report. Jiang et al.
    (2024), Mixtral of Experts. Walsh et al. (2024), 2 OLMo 2 Furious. Black et al. (2022),
    GPT-NeoX-20B. Biderman et al. (2023), Pythia. The presets "stories..." have the sizes of
    Karpathy's llama2.c.

    >>> model = models.Decoder.preset("stories260k")
    >>> nn.count_parameters(model.spec(model.example()).params)
    260032
    """

    PRESETS: ClassVar = {
        "stories260k": dict(
            vocab_size=512,
            width=64,
            depth=5,
            heads=8,
            kv_heads=4,
            hidden=172,
            context=512,
            tied=True,
            interleaved=True,
        ),
        "stories15m": dict(
            vocab_size=32000,
            width=288,
            depth=6,
            heads=6,
            kv_heads=6,
            hidden=768,
            context=256,
            tied=True,
            interleaved=True,
        ),
        "stories42m": dict(
            vocab_size=32000,
            width=512,
            depth=8,
            heads=8,
            kv_heads=8,
            hidden=1376,
            context=1024,
            tied=True,
            interleaved=True,
        ),
        "stories110m": dict(
            vocab_size=32000,
            width=768,
            depth=12,
            heads=12,
            kv_heads=12,
            hidden=2048,
            context=1024,
            tied=True,
            interleaved=True,
        ),
        "smollm-135m": dict(
            vocab_size=49152, width=576, depth=30, heads=9, kv_heads=3, hidden=1536, tied=True
        ),
        "tinyllama-1.1b": dict(
            vocab_size=32000, width=2048, depth=22, heads=32, kv_heads=4, hidden=5632
        ),
        "llama2-7b": dict(
            vocab_size=32000,
            width=4096,
            depth=32,
            heads=32,
            kv_heads=32,
            hidden=11008,
            context=4096,
        ),
        "llama3-8b": dict(
            vocab_size=128256,
            width=4096,
            depth=32,
            heads=32,
            kv_heads=8,
            hidden=14336,
            context=8192,
            rotary_base=500000.0,
        ),
        "smollm2-135m": dict(
            vocab_size=49152,
            width=576,
            depth=30,
            heads=9,
            kv_heads=3,
            hidden=1536,
            context=8192,
            rotary_base=100000.0,
            tied=True,
        ),
        "smollm2-360m": dict(
            vocab_size=49152,
            width=960,
            depth=32,
            heads=15,
            kv_heads=5,
            hidden=2560,
            context=8192,
            rotary_base=100000.0,
            tied=True,
        ),
        "qwen3-0.6b": dict(
            vocab_size=151936,
            width=1024,
            depth=28,
            heads=16,
            kv_heads=8,
            hidden=3072,
            context=40960,
            rotary_base=1e6,
            head_dim=128,
            qk_norm="head",
            epsilon=1e-6,
            tied=True,
        ),
        "gemma3-270m": dict(_GEMMA3, width=640, depth=18, heads=4, kv_heads=1, hidden=2048),
        "gemma3-1b": dict(_GEMMA3, width=1152, depth=26, heads=4, kv_heads=1, hidden=6912),
        "pythia-70m": dict(_PYTHIA, width=512, depth=6, heads=8, kv_heads=8, hidden=2048),
        "pythia-160m": dict(_PYTHIA, width=768, depth=12, heads=12, kv_heads=12, hidden=3072),
    }
    NAMES: ClassVar = NAMES
    CONFIGS: ClassVar = CONFIGS
    HUB: ClassVar = {
        "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M",),
        "smollm2-360m": ("HuggingFaceTB/SmolLM2-360M",),
        "qwen3-0.6b": ("Qwen/Qwen3-0.6B",),
        "gemma3-270m": ("google/gemma-3-270m",),
        "gemma3-1b": ("google/gemma-3-1b-pt",),
        "pythia-70m": ("EleutherAI/pythia-70m",),
        "pythia-160m": ("EleutherAI/pythia-160m",),
        "smollm-135m": ("HuggingFaceTB/SmolLM-135M",),
        "tinyllama-1.1b": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0",),
        "llama2-7b": ("meta-llama/Llama-2-7b-hf",),
        "llama3-8b": ("meta-llama/Meta-Llama-3-8B",),
    }

    vocab_size: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    _: KW_ONLY
    context: int = 2048
    rotary_base: float | tuple[float | None, ...] = 10000.0
    interleaved: bool = False
    tied: bool = False
    epsilon: float = 1e-5
    head_dim: int | None = None
    window: int | tuple[int | None, ...] | None = None
    rope_scaling: Callable | tuple[Callable | None, ...] | None = None
    stacked: bool = True
    rotary_dim: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    query_scalar: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    activation: str = "silu"
    gated: bool = True
    layer_norm: bool = False
    norm_offset: float = 0.0
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    scale_embeddings: bool = False
    experts: int | None = None
    experts_per_token: int = 2
    normalize_experts: bool = True
    expert_capacity: float | None = None

    def __post_init__(self):
        for field, values in ("activation", tuple(ACTIVATIONS)), ("qk_norm", ("head", "all", None)):
            if getattr(self, field) not in values:
                raise ValueError(
                    f"Decoder: {field} must be {' or '.join(map(repr, values))}; got "
                    f"{getattr(self, field)!r}"
                )
        if self.experts is not None and (self.mlp_bias or not self.gated):
            raise ValueError(
                "Decoder: experts have a gate and no biases; got "
                f"gated={self.gated}, mlp_bias={self.mlp_bias}"
            )

    def _body(self, scope, tokens, lengths, segments):  # [batch, time]
        embed, at = nn.Embed(self.vocab_size, self.width), scope["embed"]
        x = embed(at, tokens)  # [batch, time, width]
        if self.scale_embeddings:
            x = x * jnp.asarray(math.sqrt(self.width), x.dtype)
        x = self._blocks()(scope["blocks"], x, lengths=lengths, segments=segments)
        x = self._norm()(scope["norm"], x)
        if self.tied:
            return embed, at, x
        return nn.Dense(self.vocab_size, use_bias=False, axes=("embed", "vocab")), scope["head"], x

    def _blocks(self):
        layers = [
            tuple(
                value[number % len(value)] if isinstance(value, tuple) else value
                for value in (self.window, self.rotary_base, self.rope_scaling)
            )
            for number in range(self.depth)
        ]
        kinds = tuple(dict.fromkeys(layers))
        block = decoder_block(
            attentions=tuple(self._attention(*kind) for kind in kinds),
            mlp=self._mlp(),
            norm=self._norm(),
            pre_norm=self.pre_norm,
            post_norm=self.post_norm,
            parallel=self.parallel,
        )
        return Blocks(
            block,
            self.depth,
            self.stacked,
            tuple(map(kinds.index, layers)) if len(kinds) > 1 else (),
        )

    def _attention(self, window, base, scaling):
        rotary = (
            None
            if base is None
            else nn.Rotary(
                base, interleaved=self.interleaved, scaling=scaling, features=self.rotary_dim
            )
        )
        return nn.Attention(
            self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            causal=True,
            rotary=rotary,
            window=window,
            scale=None if self.query_scalar is None else self.query_scalar**-0.5,
            softcap=self.attention_softcap,
            qk_norm=None if self.qk_norm is None else self._norm(),
            norm_heads=self.qk_norm != "all",
            use_bias=self.qkv_bias,
            out_bias=self.out_bias,
        )

    def _mlp(self):
        if self.experts is not None:
            return nn.MixtureOfExperts(
                self.experts,
                self.hidden,
                top_k=self.experts_per_token,
                normalize=self.normalize_experts,
                capacity=self.expert_capacity,
                activation=ACTIVATIONS[self.activation],
            )
        return decoder_mlp(
            hidden=self.hidden, activation=self.activation, gated=self.gated, use_bias=self.mlp_bias
        )

    def _norm(self):
        if self.layer_norm:
            return nn.LayerNorm(epsilon=self.epsilon)
        return nn.RMSNorm(epsilon=self.epsilon, offset=self.norm_offset)

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, self.context), jnp.int32)
