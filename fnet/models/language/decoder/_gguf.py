"""The families of decoders in GGUF files of llama.cpp: their fields and the names of their arrays.

llama.cpp knows some properties of a family from its name alone, such as the scale of Gemma's
embeddings; src/llama-model.cpp and convert_hf_to_gguf.py are the source of what is here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fnet.models.language.decoder._decoder import Decoder
from fnet.models.language.decoder._names import block
from fnet.models.language.decoder._rope import LinearScaling, Llama3Scaling, LongScaling
from fnet.models.weights._weight_names import DENSE, SAME, Names, Rule

ROPE_FREQS = "rope_freqs.weight"  # divisors of the rotation rates
_KERNELS = "attn_q attn_k attn_v attn_output ffn_gate ffn_down ffn_up".split()
_NORMS = {
    "attention/query_norm": "attn_q_norm",
    "attention/key_norm": "attn_k_norm",
    "post_norm1": "post_attention_norm",
    "post_norm2": "post_ffw_norm",
}
NAMES = Names(
    (
        Rule("embed/embedding", "token_embd.weight", SAME),
        Rule("head/kernel", "output.weight", DENSE),
        Rule("norm/scale", "output_norm.weight"),
        *block(
            "blocks", [f"blk.{{i}}.{name}.weight" for name in (*_KERNELS, "attn_norm", "ffn_norm")]
        ),
        *(
            Rule(f"blocks/attention/{ours}/bias", f"blk.{{i}}.attn_{theirs}.bias")
            for ours, theirs in {"query": "q", "key": "k", "value": "v"}.items()
        ),
        *(
            Rule(f"blocks/{ours}/scale", f"blk.{{i}}.{theirs}.weight")
            for ours, theirs in _NORMS.items()
        ),
    )
)
_FIELDS = {
    "block_count": "depth",
    "embedding_length": "width",
    "feed_forward_length": "hidden",
    "context_length": "context",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "attention.layer_norm_rms_epsilon": "epsilon",
    "rope.freq_base": "rotary_base",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "window",
}
_REQUIRED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
# What published models of Llama 3 have: low_freq_factor, high_freq_factor, original_context.
_LLAMA3 = 1.0, 4.0, 8192


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A family of decoders.

    Attributes:
        options: the options of `Decoder` that all models of the family share.
        fields: more fields of the file, and the options that they set.
        finish: a function that completes the options.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    finish: Callable[[dict], dict] = lambda options: options


def _by_width(options: dict, depth: int) -> dict:
    """The largest model of a Gemma family, which llama.cpp recognizes by its number of blocks,
    divides attention scores by sqrt(width / heads) instead of sqrt(head_dim)."""
    if options["depth"] != depth:
        return {}
    return {"query_scalar": options["width"] / options["heads"]}


def _gemma2(options: dict) -> dict:
    period, others = _period(options)
    return (
        others | {"window": (options["window"],) * (period - 1) + (None,)} | _by_width(others, 46)
    )


def _gemma3(options: dict) -> dict:
    """The blocks with a window have another base, and no scaling."""
    period, others = _period(options | _by_width(options, 62))
    local, scaling = others.pop("local_base"), options["rope_scaling"]
    if not options.get("window"):
        return others | {"window": None}
    return others | {
        "window": (options["window"],) * (period - 1) + (None,),
        "rotary_base": (local,) * (period - 1) + (options["rotary_base"],),
        "rope_scaling": (None,) * (period - 1) + (scaling,) if scaling else None,
    }


def _period(options: dict) -> tuple[int, dict]:
    """Returns the number of blocks after which one without a window comes, and the other options."""
    others = dict(options)
    period = others.pop("period")
    if not isinstance(period, int) or period < 1:
        raise ValueError(
            f"attention.sliding_window_pattern={period!r}: expected an integer above 0"
        )
    return period, others


_GEMMA = dict(
    activation="gelu_tanh", norm_offset=1.0, post_norm=True, scale_embeddings=True, epsilon=1e-6
)
ARCHITECTURES = {
    "llama": Architecture(dict(interleaved=True)),
    "qwen2": Architecture(dict(qkv_bias=True)),
    "qwen3": Architecture(dict(qk_norm="head")),
    "gemma2": Architecture(
        _GEMMA | dict(window=4096, period=2, attention_softcap=50.0, logit_softcap=30.0),
        {
            "attn_logit_softcapping": "attention_softcap",
            "final_logit_softcapping": "logit_softcap",
            "attention.sliding_window_pattern": "period",
        },
        _gemma2,
    ),
    "gemma3": Architecture(
        _GEMMA | dict(qk_norm="head", rotary_base=1e6, local_base=1e4, period=6),
        {
            "final_logit_softcapping": "logit_softcap",
            "rope.freq_base_swa": "local_base",
            "attention.sliding_window_pattern": "period",
        },
        _gemma3,
    ),
}


def decoder(file: Path, architecture: str, fields: Mapping, tensors: Mapping) -> Decoder:
    """Returns the model that the fields of a file describe.

    Args:
        fields: the fields of the architecture, without its name.
        tensors: the arrays of the file, by name.

    Raises:
        ValueError: a field is missing, unknown, or not supported.
    """
    family, given = ARCHITECTURES[architecture], dict(fields)
    if missing := [name for name in _REQUIRED if name not in given]:
        raise ValueError(
            f"{file} lacks the fields {', '.join(f'{architecture}.{name}' for name in missing)}"
        )
    named = _FIELDS | family.fields
    options = {"rotary_base": 10000.0} | family.options
    options |= {ours: given.pop(theirs) for theirs, ours in named.items() if theirs in given}
    # GGUF: without this field, the attention is not grouped.
    options.setdefault("kv_heads", options["heads"])
    try:
        head_dim = options.get("head_dim", options["width"] // options["heads"])
        vocab_size = int(tensors["token_embd.weight"].shape[1])
    except (KeyError, IndexError, ZeroDivisionError, TypeError) as error:
        raise ValueError(
            f"{file}: the fields of the architecture are not complete ({error!r})"
        ) from None
    options["rope_scaling"] = _scaling(file, architecture, given, tensors, options, head_dim)
    known = {
        "vocab_size": vocab_size,
        "rope.dimension_count": head_dim,
        "attention.value_length": head_dim,
        "expert_count": 0,
        "expert_used_count": 0,
    }
    for name, value in given.items():
        if name not in known or value != known[name]:
            raise ValueError(
                f"{file}: {architecture}.{name}={value!r} is not supported"
                + (f"; expected {known[name]}" if name in known else "")
            )
    try:
        return Decoder(
            vocab_size=vocab_size, tied="output.weight" not in tensors, **family.finish(options)
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None


def _scaling(file, architecture, given, tensors, options, head_dim):
    """Returns the scaling of the rotation rates, whose fields are removed from `given`."""
    factor, kind = given.pop("rope.scaling.factor", 1.0), given.pop("rope.scaling.type", "none")
    divisors = tensors.get(ROPE_FREQS)
    if divisors is None:
        if kind == "linear":
            return LinearScaling(factor)
        if kind == "none" and factor == 1.0:
            return None
        raise ValueError(
            f"{file}: {architecture}.rope.scaling.type={kind!r} with factor {factor} is not "
            "supported"
        )
    if architecture != "llama" or kind != "none" or factor != 1.0:
        raise ValueError(
            f"{file} has the array {ROPE_FREQS}, expected in files of the architecture 'llama' "
            f"without another scaling; got {architecture!r} with rope.scaling.type={kind!r}"
        )
    divisors = np.asarray(divisors.data, np.float32).reshape(-1)
    if divisors.shape != (head_dim // 2,) or not (divisors > 0).all():
        raise ValueError(
            f"{file}: {ROPE_FREQS}: expected {head_dim // 2} numbers above 0; got {divisors.shape}"
        )
    rates = (options["rotary_base"] ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)
    usual = Llama3Scaling(float(divisors.max()), *_LLAMA3)
    if np.allclose(usual(rates), rates / divisors, rtol=1e-5, atol=0):
        return usual
    every = tuple(divisors.tolist())
    return LongScaling(every, every, original_context=options.get("context", 2048))
