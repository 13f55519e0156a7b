"""Decoders of text with rotary positions, RMSNorm, SwiGLU and grouped-query attention; published sizes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import KW_ONLY
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp

from fnet import layers as nn
from fnet.models._blocks import Blocks
from fnet.models._model import LanguageModel
from fnet.models._rope import ROPE
from fnet.models.weights import _llama2c
from fnet.models.weights._config import Must, Use, transformers
from fnet.models.weights._weight_names import DENSE, SAME, Names, Rule, Spare, Tied, torch


@nn.layer
def decoder_block(scope, x, lengths=None, *, heads, kv_heads, head_dim, hidden, rotary, window, epsilon):
    norm = nn.RMSNorm(epsilon=epsilon)                                     # [batch, time, width]
    attention = nn.Attention(heads, kv_heads=kv_heads, head_dim=head_dim, causal=True, rotary=rotary, window=window,
                             use_bias=False)
    x = x + attention(scope["attention"], norm(scope["norm1"], x), lengths=lengths)
    y = norm(scope["norm2"], x)
    gate, up = (nn.Dense(hidden, use_bias=False, axes=("embed", "mlp"))(scope[name], y) for name in ("gate", "up"))
    return x + nn.Dense(x.shape[-1], use_bias=False, axes=("mlp", "embed"))(scope["down"], jax.nn.silu(gate) * up)


def _block(ours, keys):
    """The arrays of a block: query, key, value, out, gate, down and up as [out, in], then the two norms."""
    kernels = (*(f"attention/{name}" for name in ("query", "key", "value", "out")), "gate", "down", "up")
    paths = (*(f"{ours}/{name}/kernel" for name in kernels), f"{ours}/norm1/scale", f"{ours}/norm2/scale")
    return tuple(Rule(path, key, DENSE if path.endswith("kernel") else SAME) for path, key in zip(paths, keys))


def _header(model):
    return _llama2c.Header(model.width, model.hidden, model.depth, model.heads, model.kv_heads, model.vocab_size,
                           model.context, model.tied)


_HUGGING_FACE = tuple(f"model.layers.{{i}}.{part}.weight" for part in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj",
    "mlp.up_proj", "input_layernorm", "post_attention_layernorm"))
_CONFIG = {
    "vocab_size": Use("vocab_size", 32000), "hidden_size": Use("width", 4096), "num_hidden_layers": Use("depth", 32),
    "num_attention_heads": Use("heads", 32), "num_key_value_heads": Use("kv_heads", None, lambda model: model.heads),
    "head_dim": Use("head_dim", None, lambda model: model.width // model.heads),
    "intermediate_size": Use("hidden", 11008), "rms_norm_eps": Use("epsilon", 1e-6),
    "max_position_embeddings": Use("context", 2048, shorter=True), "tie_word_embeddings": Use("tied", False),
    **ROPE, "hidden_act": Must(("silu", "swish")), "attention_bias": Must((False,)), "mlp_bias": Must((False,)),
}
_MISTRAL = _CONFIG | {
    "num_key_value_heads": Use("kv_heads", 8, lambda model: model.heads), "intermediate_size": Use("hidden", 14336),
    "max_position_embeddings": Use("context", 131072, shorter=True), "sliding_window": Use("window", 4096),
}
_LLAMA2C = ("wq", "wk", "wv", "wo", "w1", "w2", "w3", "rms_att_weight", "rms_ffn_weight")


class Decoder(LanguageModel):
    """A decoder of text: Llama 1 to 3.1, Mistral 7B, and the small models of llama2.c.

    Rotary positions; blocks of causal grouped-query attention and a SwiGLU, `down(silu(gate(x)) * up(x))`, with an
    RMSNorm before each and a residual connection; no biases.

    Args:
        vocab_size: number of tokens.
        width: features of a token.
        depth: number of blocks.
        heads: attention heads; they must divide the width.
        kv_heads: key/value heads. Each serves heads / kv_heads query heads.
        hidden: features between gate, up and down.
        context: maximum length of a text in tokens.
        rotary_base: base of the rotary embedding.
        interleaved: which features the rotary embedding pairs: (0, 1), (2, 3), ... as in the weights of Meta and
            llama2.c, or (i, i + head_dim / 2) as in those of Hugging Face.
        tied: whether the logits are computed with the embedding table.
        epsilon: epsilon of the norms.
        head_dim: features of a head. Default: width / heads.
        window: a query attends to this many of the last tokens, including its own, as in Mistral 7B v0.1. Default: all.
        rope_scaling: `LinearScaling` or `Llama3Scaling`, for models whose context was extended after training.
        stacked: whether the blocks are one `nn.Stack`; see `models.unstack`.

    Inputs:
        tokens: integers [batch, time].
        lengths: integers [batch], the number of valid tokens in each example; the rest is padding. Default: all.

    Output: logits [batch, time, vocab_size]. With a cache in `state` (from `model.cache`), the tokens are appended to
    the cached text; `models.generate` uses this.

    Source: Touvron et al. (2023), LLaMA: Open and Efficient Foundation Language Models. Grouped queries: Llama 2.
    Grattafiori et al. (2024), The Llama 3 Herd of Models. SwiGLU: Shazeer (2020), GLU Variants Improve Transformer.
    Sizes of the stories models: Karpathy's llama2.c.

    >>> model = models.Decoder.preset("stories260k")
    >>> nn.count_parameters(model.spec(model.example()).params)
    260032
    """

    PRESETS: ClassVar = {
        "stories260k": dict(vocab_size=512, width=64, depth=5, heads=8, kv_heads=4, hidden=172, context=512, tied=True,
                            interleaved=True),
        "stories15m": dict(vocab_size=32000, width=288, depth=6, heads=6, kv_heads=6, hidden=768, context=256,
                           tied=True, interleaved=True),
        "stories42m": dict(vocab_size=32000, width=512, depth=8, heads=8, kv_heads=8, hidden=1376, context=1024,
                           tied=True, interleaved=True),
        "stories110m": dict(vocab_size=32000, width=768, depth=12, heads=12, kv_heads=12, hidden=2048, context=1024,
                            tied=True, interleaved=True),
        "smollm-135m": dict(vocab_size=49152, width=576, depth=30, heads=9, kv_heads=3, hidden=1536, tied=True),
        "tinyllama-1.1b": dict(vocab_size=32000, width=2048, depth=22, heads=32, kv_heads=4, hidden=5632),
        "llama2-7b": dict(vocab_size=32000, width=4096, depth=32, heads=32, kv_heads=32, hidden=11008, context=4096),
        "llama3-8b": dict(vocab_size=128256, width=4096, depth=32, heads=32, kv_heads=8, hidden=14336, context=8192,
                          rotary_base=500000.0),
    }
    NAMES: ClassVar = {
        "huggingface": Names((
            torch.embed("embed", "model.embed_tokens"), torch.dense("head", "lm_head"),
            _block("blocks", _HUGGING_FACE), _block("blocks/{i}", _HUGGING_FACE),
            Rule("norm/scale", "model.norm.weight"), Tied("lm_head.weight", "embed/embedding"),
            Spare("model.layers.{i}.self_attn.rotary_emb.inv_freq", "blocks/norm1/scale"),
            Spare("model.layers.{i}.self_attn.rotary_emb.inv_freq", "blocks/{i}/norm1/scale"),
        ), config={"interleaved": False}, metadata={"format": "pt"}),
        "llama2c": Names((                  # stacked, as in fnet
            Rule("embed/embedding", "token_embedding_table"), Rule("head/kernel", "wcls", DENSE),
            _block("blocks", _LLAMA2C), Rule("norm/scale", "rms_final_weight"),
            Spare("freq_cis_real"), Spare("freq_cis_imag"),
        ), config={"interleaved": True, "rotary_base": 10000.0, "epsilon": 1e-5, "head_dim": None, "window": None,
                   "rope_scaling": None}, header=_header),
    }
    CONFIGS: ClassVar = {
        "llama": transformers(
            _CONFIG | {"sliding_window": Must((None,))}, architectures=("LlamaForCausalLM",),
            irrelevant="attention_dropout is_llama_config", names=("huggingface", "llama2c")),
        "mistral": transformers(_MISTRAL, architectures=("MistralForCausalLM",), irrelevant="attention_dropout"),
    }
    HUB: ClassVar = {
        "smollm-135m": ("HuggingFaceTB/SmolLM-135M",), "tinyllama-1.1b": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0",),
        "llama2-7b": ("meta-llama/Llama-2-7b-hf",), "llama3-8b": ("meta-llama/Meta-Llama-3-8B",),
    }

    vocab_size: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int
    _: KW_ONLY
    context: int = 2048
    rotary_base: float = 10000.0
    interleaved: bool = False
    tied: bool = False
    epsilon: float = 1e-5
    head_dim: int | None = None
    window: int | None = None
    rope_scaling: Callable | None = None
    stacked: bool = True

    def _body(self, scope, tokens, lengths):                               # [batch, time]
        embed, at = nn.Embed(self.vocab_size, self.width), scope["embed"]
        rotary = nn.Rotary(self.rotary_base, interleaved=self.interleaved, scaling=self.rope_scaling)
        block = decoder_block(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, hidden=self.hidden,
                            rotary=rotary, window=self.window, epsilon=self.epsilon)
        x = Blocks(block, self.depth, self.stacked)(scope["blocks"], embed(at, tokens), lengths=lengths)
        x = nn.RMSNorm(epsilon=self.epsilon)(scope["norm"], x)             # [batch, time, width]
        if self.tied:
            return embed, at, x
        return nn.Dense(self.vocab_size, use_bias=False, axes=("embed", "vocab")), scope["head"], x

    @classmethod
    def of_model_bin(cls, path: str | os.PathLike) -> Decoder:
        """Returns the configuration in the header of a model.bin of llama2.c.

        Raises:
            ValueError: the file is not a model.bin.
        """
        head = _llama2c.header(Path(path))
        return cls(head.vocab_size, head.dim, head.n_layers, head.n_heads, head.n_kv_heads, head.hidden_dim,
                   context=head.seq_len, tied=head.tied, interleaved=True)

    def example(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, self.context), jnp.int32)
