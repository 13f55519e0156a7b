"""Random small models of each family, written by transformers, against the same folder loaded by
fnet.

    make verify-pretrained ARGS=families            # or ARGS=families=gemma,bert
    python tests/reference/verify_families.py [FAMILY ...]

For each configuration: transformers creates and saves a model with random weights;
`pretrained.load(folder)` loads it. Outputs must agree within 1e-5 of the largest, in float32. A
decoder must continue three prompts of unequal length with the same 50 tokens, without a search.
`pretrained.save` writes the weights, transformers loads them, and its outputs must be equal to the
original ones in every bit.

To add a decoder: an entry in FAMILIES. Encoders and vision models are those of encoder_families.py.
"""

import dataclasses
import pathlib
import sys
import tempfile
import warnings

import encoder_families
import jax
import numpy as np
import verify_encoders
from verifying import check, needed

from fnet import models
from fnet.models import pretrained

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
TOKENS, LENGTHS = 50, (3, 7, 12)
BOUND = 1e-5


@dataclasses.dataclass(frozen=True)
class Family:
    """Configurations of one family of decoders.

    Args:
        config, model: the classes of transformers.
        cases: fields of the configuration, one dict for each model. The sizes are random, except
            those in the dict.
        sizes: the family's names of width, depth, heads, hidden and maximum length.
    """

    config: str
    model: str
    cases: tuple[dict, ...]
    sizes: tuple[str, ...] = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
    )


def rope(kind, **fields):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


LLAMA3 = rope(
    "llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
FAMILIES = {
    "llama": Family(
        "LlamaConfig",
        "LlamaForCausalLM",
        (
            {},
            {
                "num_key_value_heads": 2,
                "attention_bias": True,
                "tie_word_embeddings": True,
                **LLAMA3,
            },
            {
                "mlp_bias": True,
                "hidden_act": "gelu",
                "head_dim": 6,
                "num_key_value_heads": 1,
                **rope("linear", factor=2.5),
            },
            YARN | {"hidden_act": "relu"},
            {**rope("dynamic", factor=3.0), "max_position_embeddings": 64},
            rope(
                "yarn",
                factor=8.0,
                original_max_position_embeddings=16,
                beta_fast=16.0,
                beta_slow=2.0,
                truncate=False,
                mscale=0.7,
                mscale_all_dim=1.2,
            ),
        ),
    ),
    "mistral": Family(
        "MistralConfig",
        "MistralForCausalLM",
        (
            {"num_key_value_heads": 2, "sliding_window": 5},
            {"num_key_value_heads": 4, "sliding_window": None},
            {
                "num_key_value_heads": 2,
                "sliding_window": 9,
                "head_dim": 12,
                "rms_norm_eps": 1e-3,
                **rope("default"),
            },
        ),
    ),
    "qwen2": Family(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        (
            {"num_key_value_heads": 2},
            {
                "num_key_value_heads": 2,
                "use_sliding_window": True,
                "sliding_window": 6,
                "max_window_layers": 2,
                "num_hidden_layers": 5,
                "tie_word_embeddings": True,
            },
            {"num_key_value_heads": 4, **YARN},
            {
                "num_key_value_heads": 1,
                "use_sliding_window": True,
                "sliding_window": 4,
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
    ),
    "qwen3": Family(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        (
            {"num_key_value_heads": 2, "head_dim": 16},
            {
                "num_key_value_heads": 2,
                "head_dim": 8,
                "attention_bias": True,
                "tie_word_embeddings": True,
                **LLAMA3,
            },
            {
                "num_key_value_heads": 4,
                "head_dim": 10,
                "use_sliding_window": True,
                "sliding_window": 3,
                "max_window_layers": 1,
                "num_hidden_layers": 4,
                "rms_norm_eps": 1e-4,
            },
        ),
    ),
    "mixtral": Family(
        "MixtralConfig",
        "MixtralForCausalLM",
        (
            {"num_key_value_heads": 2, "num_local_experts": 4},
            {
                "num_key_value_heads": 4,
                "num_local_experts": 6,
                "num_experts_per_tok": 3,
                "sliding_window": 5,
                "head_dim": 6,
            },
            {
                "num_key_value_heads": 1,
                "num_local_experts": 3,
                "num_experts_per_tok": 1,
                "tie_word_embeddings": True,
                "hidden_act": "gelu",
                "head_dim": 8,
                **YARN,
            },
        ),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        (
            {
                "num_key_value_heads": 2,
                "moe_intermediate_size": 12,
                "num_experts": 8,
                "num_experts_per_tok": 3,
            },
            {
                "num_key_value_heads": 4,
                "moe_intermediate_size": 20,
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
                "attention_bias": True,
                "tie_word_embeddings": True,
                "head_dim": 10,
            },
            {
                "num_key_value_heads": 1,
                "moe_intermediate_size": 16,
                "num_experts": 4,
                "num_experts_per_tok": 4,
                "use_sliding_window": True,
                "sliding_window": 6,
                "rms_norm_eps": 1e-3,
                **LLAMA3,
            },
        ),
    ),
    "gemma": Family(
        "GemmaConfig",
        "GemmaForCausalLM",
        (
            {"num_key_value_heads": 1, "head_dim": 12},
            {"num_key_value_heads": 4, "head_dim": 8, "attention_bias": True},
            {
                "num_key_value_heads": 2,
                "head_dim": 16,
                "hidden_act": "gelu",
                "tie_word_embeddings": False,
            },
        ),
    ),
    "gemma2": Family(
        "Gemma2Config",
        "Gemma2ForCausalLM",
        (
            {
                "num_key_value_heads": 2,
                "head_dim": 8,
                "sliding_window": 5,
                "num_hidden_layers": 5,
                "query_pre_attn_scalar": 20,
            },
            {
                "num_key_value_heads": 4,
                "head_dim": 12,
                "sliding_window": 7,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 1.5,
                "query_pre_attn_scalar": 8,
                "attention_bias": True,
            },
            {
                "num_key_value_heads": 1,
                "head_dim": 8,
                "sliding_window": 4,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "num_hidden_layers": 3,
                "hidden_activation": "gelu",
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
        ),
    ),
    "gemma3_text": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        (
            {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 5, "num_hidden_layers": 8},
            {
                "num_key_value_heads": 2,
                "head_dim": 12,
                "sliding_window": 6,
                "num_hidden_layers": 5,
                "query_pre_attn_scalar": 10,
                "attention_bias": True,
                "final_logit_softcapping": 2.0,
                "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
                },
            },
            {
                "num_key_value_heads": 4,
                "head_dim": 8,
                "sliding_window": 4,
                "num_hidden_layers": 3,
                "tie_word_embeddings": False,
                "layer_types": ["full_attention"] * 3,
            },
        ),
    ),
    "phi3": Family(
        "Phi3Config",
        "Phi3ForCausalLM",
        (
            {"num_key_value_heads": 2},
            {"num_key_value_heads": 4, "sliding_window": 6, "tie_word_embeddings": True},
            {
                "hidden_size": 32,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "original_max_position_embeddings": 64,
                "max_position_embeddings": 200,
                **rope(
                    "longrope",
                    partial_rotary_factor=0.75,
                    short_factor=[1.0, 1.1, 1.3],
                    long_factor=[1.0, 2.5, 4.0],
                ),
            },
            {
                "hidden_size": 32,
                "num_attention_heads": 4,
                **rope("default", partial_rotary_factor=0.5),
            },
        ),
    ),
    "smollm3": Family(
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        (
            {"num_key_value_heads": 2, "num_hidden_layers": 6},
            {
                "num_key_value_heads": 4,
                "num_hidden_layers": 3,
                "no_rope_layers": [0, 1, 1],
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": False,
            },
            {
                "num_key_value_heads": 1,
                "num_hidden_layers": 4,
                "no_rope_layer_interval": 2,
                "use_sliding_window": True,
                "sliding_window": 5,
                **YARN,
            },
        ),
    ),
    "olmo2": Family(
        "Olmo2Config",
        "Olmo2ForCausalLM",
        (
            {"num_key_value_heads": 2},
            {"num_key_value_heads": 4, "attention_bias": True, **LLAMA3},
            {"num_key_value_heads": 1, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        ),
    ),
    "gpt_neox": Family(
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        (
            {"hidden_size": 32, "num_attention_heads": 2},
            {
                "hidden_size": 32,
                "num_attention_heads": 4,
                "use_parallel_residual": False,
                "attention_bias": False,
                "hidden_act": "gelu_pytorch_tanh",
                **rope("default", partial_rotary_factor=0.5),
            },
            {
                "tie_word_embeddings": True,
                "layer_norm_eps": 1e-3,
                "hidden_act": "relu",
                **rope("linear", partial_rotary_factor=1.0, factor=2.0),
            },
        ),
    ),
    "gpt2": Family(
        "GPT2Config",
        "GPT2LMHeadModel",
        (
            {},
            {
                "scale_attn_by_inverse_layer_idx": True,
                "activation_function": "gelu",
                "tie_word_embeddings": False,
                "n_inner": 28,
                "layer_norm_epsilon": 1e-3,
            },
            {
                "scale_attn_weights": False,
                "activation_function": "relu",
                "reorder_and_upcast_attn": True,
            },
            {
                "scale_attn_weights": False,
                "scale_attn_by_inverse_layer_idx": True,
                "tie_word_embeddings": False,
                "activation_function": "silu",
                "n_layer": 5,
            },
            {"activation_function": "gelu_pytorch_tanh"},
        ),
        sizes=("n_embd", "n_layer", "n_head", "n_inner", "n_positions"),
    ),
}


def random_sizes(generator, family):
    heads = int(generator.choice((2, 4)))
    head_dim = int(generator.choice((4, 6, 8)))
    width, hidden = 4 * heads // 2 * head_dim, int(generator.integers(20, 50))
    values = width, int(generator.integers(2, 5)), 2 * heads, hidden, 128
    return {"vocab_size": int(generator.integers(40, 90)), **dict(zip(family.sizes, values))}


def sizes_of(family, seed):
    """Fields of a small configuration."""
    return random_sizes(np.random.default_rng(seed), family) | dict(
        initializer_range=0.2, pad_token_id=None, bos_token_id=None, eos_token_id=None
    )


def random_weights(model):
    """transformers' model with random weights, whose norms and biases are random, too."""
    torch = needed("torch", "PyTorch, with which transformers computes,")
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 1:
                value.add_(0.3 * torch.randn_like(value))
    return model.eval()


def created(family, case, seed):
    """transformers' model of one configuration with random weights."""
    torch = needed("torch", "PyTorch, with which transformers computes,")
    transformers = needed("transformers", "transformers, the reference,")
    torch.manual_seed(seed)
    config = getattr(transformers, family.config)(**sizes_of(family, seed) | case, **EAGER)
    return random_weights(getattr(transformers, family.model)(config))


def logits(model, tokens):
    torch = needed("torch", "PyTorch")
    with torch.no_grad():
        return model(torch.tensor(tokens), use_cache=False).logits.numpy()


def difference(got, want):
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())


def decoder(family, case, seed, folder):
    """(largest relative difference of logits, whether greedy text is equal, whether saved weights
    are equal)."""
    torch, transformers = needed("torch", "PyTorch"), needed("transformers", "transformers")
    reference = created(family, case, seed)
    reference.save_pretrained(folder)
    model, params, state = pretrained.load(folder)
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, model.vocab_size, (2, 80))
    want = logits(reference, tokens)
    worst = difference(jax.jit(model)(params, tokens), want)
    prompts = [generator.integers(0, model.vocab_size, length) for length in LENGTHS]
    padded, lengths = models.padded([list(map(int, prompt)) for prompt in prompts])
    out = models.generate(model, params, padded, lengths=lengths, max_tokens=TOKENS, temperature=0)
    texts = (
        reference.generate(torch.tensor(prompt)[None], max_new_tokens=TOKENS, do_sample=False)[
            0, len(prompt) :
        ]
        for prompt in prompts
    )
    greedy = all(np.array_equal(text, row) for text, row in zip(texts, np.asarray(out.tokens)))
    back = folder / "back"
    pretrained.save(model, params, state, back, like=folder)
    again = getattr(transformers, family.model).from_pretrained(back, **EAGER).eval()
    return worst, greedy, np.array_equal(logits(again, tokens), want)


def results(name):
    """Yields what `decoder` returns for each configuration; None for the greedy text of an encoder."""
    family = FAMILIES.get(name)
    for number, case in enumerate(family.cases if family else encoder_families.CASES[name]):
        with tempfile.TemporaryDirectory() as folder:
            try:
                if family:
                    yield decoder(family, case, number, pathlib.Path(folder))
                else:
                    worst, saved = verify_encoders.one(*case, folder)
                    yield worst, None, saved
            except Exception as error:
                raise RuntimeError(f"{name}, configuration {number}: {case}: {error}") from error


@check
def families(*names):
    """Random models of every family, written by transformers: outputs, greedy text, and weights
    saved back."""
    needed("torch", "PyTorch")
    needed("transformers", "transformers, the reference,").logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    yield "| family | configurations | largest relative difference | greedy text | saved back |"
    yield "| --- | --- | --- | --- | --- |"
    wrong = []
    for name in names or (*FAMILIES, *encoder_families.CASES):
        worst, greedy, saved = zip(*results(name))
        count, worst = len(saved), float(np.max(worst))  # NaN if one is
        equal = "" if None in greedy else f"{sum(greedy)} of {count}"
        yield f"| {name} | {count} | {worst:.1e} | {equal} | {sum(saved)} of {count} |"
        if not (worst <= BOUND and all(saved) and all(each is not False for each in greedy)):
            wrong.append(name)
        jax.clear_caches()
    assert not wrong, f"differences in {', '.join(wrong)}"


if __name__ == "__main__":
    for line in families(*sys.argv[1:]):
        print(line, flush=True)
