"""Defines which field of transformers' config.json sets which field of a `Decoder`, for each family
of decoders."""

from __future__ import annotations

import dataclasses
from typing import Any

from fnet.models.language.decoder._rope_config import (
    FULL,
    SLIDING,
    collapsed,
    layers,
    number,
    rope,
    rope_by_type,
    whole,
    windows,
)
from fnet.models.weights._config import SKIP, Config, Fields, Must, Use, transformers

PLAIN = dict(
    window=None,
    rotary_dim=None,
    rope_scaling=None,
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=None,
    query_scalar=None,
    attention_softcap=None,
    logit_softcap=None,
    activation="silu",
    gated=True,
    layer_norm=False,
    norm_offset=0.0,
    pre_norm=True,
    post_norm=False,
    parallel=False,
    scale_embeddings=False,
    experts=None,
    experts_per_token=2,
    normalize_experts=True,
    expert_capacity=None,
)
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
GATED = "gelu_pytorch_tanh"


@dataclasses.dataclass(frozen=True)
class Count(Use):
    """Sets a field of the model from config.json, like `Use`, but accepts only integers above 0.
    Null is also accepted if `default` is set."""

    def wanted(self, value, config) -> dict[str, Any]:
        return super().wanted(value if value is None and self.default else whole(value), config)


@dataclasses.dataclass(frozen=True)
class Number(Use):
    """Sets a field of the model from config.json, like `Use`, but accepts only numbers above 0.
    Null is also accepted if `null` is True."""

    null: bool = False

    def wanted(self, value, config) -> dict[str, Any]:
        return super().wanted(value if value is None and self.null else number(value), config)


@dataclasses.dataclass(frozen=True)
class Flag(Use):
    """Sets a field of the model from config.json, like `Use`, but accepts only true and false."""

    def wanted(self, value, config) -> dict[str, Any]:
        return super().wanted(flag(value), config)


def flag(value):
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def activation(absent, field="activation"):
    def read(value, config):
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise ValueError(f"expected {' or '.join(map(repr, ACTIVATIONS))}")
        return {field: ACTIVATIONS[value]}

    return Fields(
        read,
        absent,
        lambda model: next(
            name for name, ours in ACTIVATIONS.items() if ours == getattr(model, field)
        ),
    )


def biases(absent=False):
    return Fields(
        lambda value, config: dict.fromkeys(("qkv_bias", "out_bias"), flag(value)),
        absent,
        lambda model: model.qkv_bias,
    )


def read_by_others(check):
    """Returns a `Fields` entry that checks the value of a field of config.json, but sets no field
    of the model."""
    return Fields(lambda value, config: (check(value), {})[1])


def sizes(vocab_size, width, depth, heads, hidden, context, epsilon=1e-6, tied=False):
    return {
        "vocab_size": Count("vocab_size", vocab_size),
        "hidden_size": Count("width", width),
        "num_hidden_layers": Count("depth", depth),
        "num_attention_heads": Count("heads", heads),
        "intermediate_size": Count("hidden", hidden),
        "rms_norm_eps": Number("epsilon", epsilon),
        "max_position_embeddings": Count("context", context, shorter=True),
        "tie_word_embeddings": Flag("tied", tied),
        "rope_interleaved": Must((False,)),
    }


def kv_heads(absent=None):
    return Count("kv_heads", absent, lambda model: model.heads)


def head_dim(absent=None):
    return Count(
        "head_dim", absent, (lambda model: model.width // model.heads) if absent is None else None
    )


def family(
    fields, architecture, *, irrelevant="", names=("huggingface",), sets="", **constants
) -> Config:
    """Returns the `Config` for a family of decoders, which states what each field of config.json
    means.

    The `model_type` in config.json determines each field of `Decoder` that no other field of
    config.json sets.

    Args:
        fields: {field of config.json: `Use`, `Must` or `Fields`}.
        architecture: the name of the class in transformers.
        irrelevant, names: the same as the arguments `irrelevant` and `names` of the function
            `transformers` in _config.py.
        sets: the names, separated by spaces, of the `Decoder` fields whose values are computed from
            config.json by a `Fields` object.
        constants: values of `Decoder` fields that all models of a family share, if these values
            differ from Llama's.
    """
    taken = {entry.field for entry in fields.values() if isinstance(entry, Use)} | set(sets.split())
    values = {name: value for name, value in (PLAIN | constants).items() if name not in taken}
    return transformers(
        {"model_type": Fields(lambda value, config: values, ""), **fields},
        names=names,
        architectures=(architecture,),
        irrelevant=f"attention_dropout auto_map {irrelevant}",
    )


# Llama, Mistral.
LLAMA = sizes(32000, 4096, 32, 32, 11008, 2048) | {
    "num_key_value_heads": kv_heads(),
    "head_dim": head_dim(),
    "hidden_act": activation("silu"),
    "attention_bias": biases(),
    "mlp_bias": Flag("mlp_bias", False),
    "sliding_window": Must((None,)),
    **rope(context=2048),
}
_ROPE = "rotary_base rope_scaling rotary_dim"
_WINDOW = Count("window", 4096, lambda model: None)
MISTRAL = sizes(32000, 4096, 32, 32, 14336, 131072) | {
    "num_key_value_heads": kv_heads(8),
    "head_dim": head_dim(),
    "hidden_act": activation("silu"),
    "sliding_window": _WINDOW,
    "attention_bias": Must((False,)),
    "mlp_bias": Must((False,)),
    **rope(context=131072),
}


# Qwen 2 and 3: the layers from max_window_layers on have windows.
def _qwen_types(config, window, depth):
    first = config.get("max_window_layers", 28)
    return [
        SLIDING if window is not None and i >= whole(first, 0) else FULL
        for i in range(whole(depth))
    ]


QWEN2 = sizes(151936, 4096, 32, 32, 22016, 32768) | {
    "num_key_value_heads": kv_heads(32),
    "head_dim": head_dim(),
    "hidden_act": activation("silu"),
    "use_sliding_window": Fields(
        lambda value, config: (flag(value), {})[1],
        write=lambda model: any(layers(model, model.window)),
    ),
    "max_window_layers": read_by_others(lambda value: whole(value, 0)),
    "attention_bias": Must((True,)),
    **windows(32, 4096, _qwen_types, lambda config: config.get("use_sliding_window", False)),
    **rope(context=32768),
}
QWEN3 = QWEN2 | {"head_dim": head_dim(128), "attention_bias": biases()}


# Mixtral, Qwen 3 with experts: each block has experts, and the same window.
MIXTRAL = sizes(32000, 4096, 32, 32, 14336, 131072, epsilon=1e-5) | {
    "num_key_value_heads": kv_heads(8),
    "head_dim": head_dim(),
    "hidden_act": activation("silu"),
    "sliding_window": Count("window", None, lambda model: None),
    "num_local_experts": Count("experts", 8),
    "num_experts_per_tok": Count("experts_per_token", 2),
    **rope(1e6, context=131072),
}


def _moe_window(value, config):
    used = config.get("use_sliding_window", False)
    return {"window": whole(value) if used and value is not None else None}


QWEN3_MOE = sizes(151936, 2048, 24, 32, 768, 32768) | {
    "num_key_value_heads": kv_heads(4),
    "head_dim": head_dim(),
    "hidden_act": activation("silu"),
    "attention_bias": biases(),
    "intermediate_size": read_by_others(whole),  # of blocks without experts
    "moe_intermediate_size": Count("hidden", 768),
    "num_experts": Count("experts", lambda config: config.get("num_local_experts", 128)),
    "num_local_experts": Count("experts"),
    "num_experts_per_tok": Count("experts_per_token", 8),
    "norm_topk_prob": Flag("normalize_experts", False),
    "decoder_sparse_step": Must((1,)),
    "mlp_only_layers": Must(([], None)),
    "max_window_layers": read_by_others(lambda value: whole(value, 0)),
    "use_sliding_window": Fields(
        lambda value, config: (flag(value), {})[1], write=lambda model: bool(model.window)
    ),
    "sliding_window": Fields(_moe_window, 4096, lambda model: model.window),
    **rope(context=32768),
}


# Gemma 1, 2, 3.
def _gemma_gelu(value, config):
    if value not in (GATED, "gelu", None):
        raise ValueError(f"expected {GATED!r}")
    return {}


def _query_scalar(absent):
    return Number("query_scalar", absent)


def _gemma2_types(config, window, depth):
    return [FULL if i % 2 else SLIDING for i in range(whole(depth))]


def _gemma3_types(config, window, depth):
    pattern = whole(config.get("sliding_window_pattern", 6))
    return [SLIDING if (i + 1) % pattern else FULL for i in range(whole(depth))]


GEMMA = sizes(256000, 3072, 28, 16, 24576, 8192, tied=True) | {
    "num_key_value_heads": kv_heads(16),
    "head_dim": head_dim(256),
    "attention_bias": biases(),
    # The first published files contain "gelu" but mean the tanh approximation, and transformers
    # reads them so.
    "hidden_act": Fields(
        lambda value, config: activation(GATED).read(GATED if value == "gelu" else value, config),
        GATED,
        lambda model: activation(GATED).write(model),
    ),
    "hidden_activation": Fields(_gemma_gelu),
    "use_bidirectional_attention": Must((None, False)),
    **rope(context=8192),
}
GEMMA2 = sizes(256000, 2304, 26, 8, 9216, 8192, tied=True) | {
    "num_key_value_heads": kv_heads(4),
    "head_dim": head_dim(256),
    "attention_bias": biases(),
    "hidden_activation": activation(GATED),
    "hidden_act": Fields(_gemma_gelu),
    "use_bidirectional_attention": Must((None, False)),
    "query_pre_attn_scalar": _query_scalar(256),
    "final_logit_softcapping": Number("logit_softcap", 30.0, null=True),
    "attn_logit_softcapping": Number("attention_softcap", 50.0, null=True),
    **windows(26, 4096, _gemma2_types),
    **rope(context=8192),
}


def _gemma3_rope(config):
    """Returns `rope_parameters`. Like transformers, derives `rope_parameters` from the fields of
    older versions of config.json if necessary."""
    held = config.get("rope_parameters") or {}
    full = {
        "rope_theta": config.get("rope_theta", 1e6),
        **(held.get("full_attention") or {"rope_type": "default"}),
        **(config.get("rope_scaling") or {}),
    }
    local = {
        "rope_theta": config.get("rope_local_base_freq", 1e4),
        **(held.get("sliding_attention") or {"rope_type": "default"}),
    }
    return {FULL: full, SLIDING: local}


GEMMA3: dict[str, Any] = sizes(262208, 2304, 26, 8, 9216, 131072, tied=True) | {
    "num_key_value_heads": kv_heads(4),
    "head_dim": head_dim(256),
    "attention_bias": biases(),
    "hidden_activation": activation(GATED),
    "hidden_act": Fields(_gemma_gelu),
    "use_bidirectional_attention": Must((None, False)),
    "query_pre_attn_scalar": _query_scalar(256),
    "final_logit_softcapping": Number("logit_softcap", None, null=True),
    "attn_logit_softcapping": Must((None,)),  # transformers reads this field but does not apply it
    "sliding_window_pattern": read_by_others(whole),
    **windows(26, 4096, _gemma3_types),
    "rope_theta": read_by_others(number),
    "rope_local_base_freq": read_by_others(number),
    **rope_by_type(_gemma3_rope, lambda config: GEMMA3["layer_types"].absent(config), 131072),
}

# Phi-3.
PHI3 = sizes(32064, 3072, 32, 32, 8192, 4096, epsilon=1e-5) | {
    "num_key_value_heads": kv_heads(),
    "head_dim": head_dim(),
    "hidden_act": activation("silu"),
    "sliding_window": Count("window", None, lambda model: None),
    "attention_bias": Must((False,)),
    "mlp_bias": Must((False,)),
    "lm_head_bias": Must((False,)),
    "original_max_position_embeddings": Fields(
        lambda value, config: (whole(value), {})[1],
        write=lambda model: getattr(model.rope_scaling, "original_context", SKIP),
    ),
    **rope(context=4096, turns=True, long=("su", "yarn"), original=4096),
}


# SmolLM3: layers without positions.
def _no_rope(config):
    """Returns a list with 1 for each layer with a position embedding, and 0 for each other layer."""
    held, depth = config.get("no_rope_layers"), whole(config.get("num_hidden_layers", 36))
    if held is None:
        interval = whole(config.get("no_rope_layer_interval", 4))
        return [int((i + 1) % interval != 0) for i in range(depth)]
    if (
        not isinstance(held, list)
        or len(held) < depth
        or not all(isinstance(each, int) and each in (0, 1) for each in held)
    ):
        raise ValueError(f"expected at least {depth} times 0 or 1")
    return held[:depth]


def _smollm3_types(config, window, depth):
    return [SLIDING if window is not None and not each else FULL for each in _no_rope(config)]


def _positions(config, base):
    try:
        return collapsed(base if each else None for each in _no_rope(config))
    except ValueError:
        return base  # the check of no_rope_layers raises the error


def _any_rope(value, config):
    if not any(_no_rope(config)):
        raise ValueError("expected a 1, a layer with positions")
    return {}


SMOLLM3 = sizes(128256, 2048, 36, 16, 11008, 32768, tied=True) | {
    "num_key_value_heads": kv_heads(4),
    "head_dim": head_dim(),
    "hidden_act": activation("silu"),
    "attention_bias": biases(),
    "mlp_bias": Flag("mlp_bias", False),
    "use_sliding_window": QWEN2["use_sliding_window"],
    "no_rope_layers": Fields(
        _any_rope,
        _no_rope,
        lambda model: [int(base is not None) for base in layers(model, model.rotary_base)],
    ),
    "no_rope_layer_interval": read_by_others(whole),
    **windows(36, None, _smollm3_types, lambda config: config.get("use_sliding_window", False)),
    **rope(2000000.0, context=32768, spread=_positions),
}

# OLMo 2.
OLMO2 = sizes(50304, 4096, 32, 32, 11008, 2048, epsilon=1e-5) | {
    "num_key_value_heads": kv_heads(),
    "head_dim": head_dim(),
    "hidden_act": activation("silu"),
    "attention_bias": biases(),
    **rope(context=2048),
}

# GPT-NeoX, Pythia.
GPT_NEOX: dict[str, Any] = sizes(50432, 6144, 44, 64, 24576, 2048) | {
    "layer_norm_eps": Number("epsilon", 1e-5),
    "hidden_act": activation("gelu"),
    "attention_bias": biases(True),
    "use_parallel_residual": Flag("parallel", True),
    "num_attention_heads": Fields(
        lambda value, config: dict.fromkeys(("heads", "kv_heads"), whole(value)),
        64,
        lambda model: model.heads,
    ),
    **rope(partial=0.25, context=2048, names=("rotary_emb_base", "rotary_pct"), turns=True),
}
del GPT_NEOX["rms_norm_eps"]

_HEADS = f"{_ROPE} activation"
_BIASED = f"{_HEADS} qkv_bias out_bias"
_ROUTER = "output_router_logits router_aux_loss_coef router_jitter_noise"
_GEMMA = dict(norm_offset=1.0, scale_embeddings=True)
CONFIGS = {
    "llama": family(
        LLAMA,
        "LlamaForCausalLM",
        irrelevant="is_llama_config",
        sets=_BIASED,
    ),
    "mistral": family(MISTRAL, "MistralForCausalLM", sets=_HEADS),
    "qwen2": family(QWEN2, "Qwen2ForCausalLM", sets=f"{_HEADS} window", qkv_bias=True),
    "qwen3": family(QWEN3, "Qwen3ForCausalLM", sets=f"{_BIASED} window", qk_norm="head"),
    "mixtral": family(
        MIXTRAL, "MixtralForCausalLM", irrelevant=_ROUTER, names=("mixtral",), sets=_HEADS
    ),
    "qwen3_moe": family(
        QWEN3_MOE,
        "Qwen3MoeForCausalLM",
        irrelevant=_ROUTER,
        sets=f"{_BIASED} window",
        qk_norm="head",
    ),
    "gemma": family(GEMMA, "GemmaForCausalLM", sets=_BIASED, **_GEMMA),
    "gemma2": family(
        GEMMA2,
        "Gemma2ForCausalLM",
        irrelevant="cache_implementation",
        sets=f"{_BIASED} window",
        post_norm=True,
        **_GEMMA,
    ),
    "gemma3_text": family(
        GEMMA3,
        "Gemma3ForCausalLM",
        irrelevant="cache_implementation _sliding_window_pattern",
        sets=f"{_BIASED} window",
        qk_norm="head",
        post_norm=True,
        **_GEMMA,
    ),
    "phi3": family(
        PHI3,
        "Phi3ForCausalLM",
        irrelevant="resid_pdrop embd_pdrop",
        names=("phi3", "huggingface"),
        sets=_HEADS,
    ),
    "smollm3": family(SMOLLM3, "SmolLM3ForCausalLM", sets=f"{_BIASED} window"),
    "olmo2": family(
        OLMO2, "Olmo2ForCausalLM", sets=_BIASED, qk_norm="all", pre_norm=False, post_norm=True
    ),
    "gpt_neox": family(
        GPT_NEOX,
        "GPTNeoXForCausalLM",
        irrelevant="hidden_dropout classifier_dropout",
        names=("gpt_neox",),
        sets=f"{_BIASED} heads kv_heads",
        layer_norm=True,
        gated=False,
        mlp_bias=True,
    ),
}
