"""The families of decoders: files of transformers, its logits, and the same model through every use
of a decoder."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import compress, models
from fnet import layers as nn
from fnet import transforms as ft
from fnet.models import pretrained
from fnet.models._blocks import periods
from fnet.models.language.decoder._rope_config import collapsed

FOLDERS = {
    path.name: path
    for path in sorted((pathlib.Path(__file__).parents[1] / "reference/families").iterdir())
}
ALTERNATING = ("qwen2", "gemma2", "smollm3", "gpt2")


@pytest.fixture(scope="module", params=sorted(FOLDERS))
def loaded(request):
    """(name, model, params, tokens, logits of every eighth token)"""
    model, params, state = pretrained.load(FOLDERS[request.param], dtype=jnp.float32)
    assert state == {}
    with np.load(FOLDERS[request.param] / "logits.npz") as arrays:
        return request.param, model, params, arrays["tokens"].astype(np.int32), arrays["logits"]


def close(a, b, bound=1e-5):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape and np.abs(a - b).max() <= bound * np.abs(b).max()


@pytest.mark.quick_cases(3)
def test_logits_and_text(loaded, tmp_path):
    name, model, params, tokens, want = loaded
    logits = jax.jit(model)(params, tokens)
    close(logits[:, ::8], want)
    losses = jax.jit(model.cross_entropy)(params, tokens, jnp.roll(tokens, -1, 1))
    close(
        losses,
        -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.roll(tokens, -1, 1)[..., None], 2)[
            ..., 0
        ],
    )
    short = jnp.stack(
        [tokens[0, :5], jnp.pad(tokens[1, :3], (0, 2))]
    )  # prompts of 5 and 3 tokens, padded
    out = models.generate(
        model, params, short, lengths=jnp.array([5, 3]), max_tokens=8, temperature=0
    )
    text = np.concatenate([tokens[0, :5], out.tokens[0]])
    assert np.array_equal(
        jax.jit(model)(params, np.pad(text, (0, 3))[None])[0, 4:12].argmax(-1), out.tokens[0]
    )
    back = pretrained.save(model, params, {}, tmp_path, like=FOLDERS[name])
    again, restored, _ = pretrained.load(back.parent)
    assert again == model and jax.tree.all(jax.tree.map(np.array_equal, restored, params))
    config, original = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path, FOLDERS[name])
    )
    words = {field for field, value in original.items() if isinstance(value, str)} - {"dtype"}
    assert {field: config.get(field) for field in words} == {
        field: original[field] for field in words
    }


@pytest.mark.quick_cases("qwen2")
@pytest.mark.parametrize("name", ALTERNATING)
def test_alternating_blocks(name):
    """Stacked and separate blocks, their caches, gradients, quantized and low-rank parameters, one
    program for each."""
    model, params, _ = pretrained.load(FOLDERS[name], dtype=jnp.float32)
    tokens = jnp.arange(24, dtype=jnp.int32).reshape(2, 12) % model.vocab_size
    single, apart = models.unstack(model, params)
    want = jax.jit(single)(apart, tokens)
    whole = jax.jit(model)
    close(whole(params, tokens), want)
    cache = model.cache(jax.ShapeDtypeStruct((2, 16), jnp.int32))
    step = jax.jit(lambda params, tokens, cache: model(params, tokens, state=cache))
    first, cache = step(params, tokens[:, :7], cache)
    second, _ = step(params, tokens[:, 7:], cache)
    close(jnp.concatenate([first, second], 1), want)
    loss = lambda model: jax.jit(
        jax.grad(lambda params: model.cross_entropy(params, tokens, tokens).mean())
    )
    gradients = models.unstack(model, loss(model)(params))[1]
    jax.tree.map(lambda a, b: close(a, b, 1e-4), gradients, loss(single)(apart))
    quantized = compress.quantize(params, {"blocks/.*kernel": compress.Int8()})
    close(
        jax.jit(ft.use_implicit_arrays(model))(quantized, tokens),
        whole(compress.materialize(quantized), tokens),
    )
    adapted = compress.lora(jax.random.key(0), params, {"blocks/attention/query/kernel": 2})
    close(jax.jit(ft.use_implicit_arrays(model))(adapted, tokens), want)
    spec = model.spec(tokens)
    fresh = jax.eval_shape(model.init, jax.random.key(0), tokens)[0]
    assert jax.tree.map(lambda x: x.shape, fresh) == jax.tree.map(lambda x: x.shape, spec.params)


def test_config_json_without_windows():
    """Gemma 3 in transformers needs a sliding_window, even if no layer has one."""
    model = models.Decoder.preset("gemma3-1b", window=None, rotary_base=1e6)
    config = models.Decoder.CONFIGS["gemma3_text"].write(model)
    assert set(config["layer_types"]) == {"full_attention"} and "sliding_window" not in config


def test_periods():
    assert periods((0, 0, 0, 1, 1)) == [(0, 1, 3), (3, 1, 2)]
    assert periods(((0,) * 5 + (1,)) * 4 + (0, 0)) == [(0, 6, 4), (24, 1, 2)]
    assert periods((0, 1, 2)) == [(0, 1, 1), (1, 1, 1), (2, 1, 1)]
    assert (
        collapsed([3, None, 3, None, 3]) == (3, None)
        and collapsed([3, 3]) == 3
        and collapsed([1, 2]) == (1, 2)
    )
    model = models.Decoder(
        16, 8, 26, 2, 1, 8, window=(4,) * 5 + (None,), rotary_base=(1e4,) * 5 + (1e6,)
    )
    program = str(
        jax.make_jaxpr(model)(
            model.spec(jnp.zeros((1, 8), int)).params, jnp.zeros((1, 8), jnp.int32)
        )
    )
    assert (
        program.count(" scan[") == 2 and program.count("attention[") == 7
    )  # 6 blocks of a period, and 1


def test_long_texts():
    """Angles that depend on the length: a prompt beyond the original context, with and without a
    cache."""
    model = models.Decoder(
        16, 8, 2, 2, 1, 8, rope_scaling=models.LongScaling((1.0, 1.5), (3.0, 9.0), 10, 1.2)
    )
    tokens = jnp.arange(48, dtype=jnp.int32).reshape(3, 16) % 16
    params, _ = model.init(jax.random.key(0), tokens)
    lengths = np.array([14, 10, 12])
    call = jax.jit(model)
    out, _ = call(params, tokens, lengths=lengths, state=model.cache(tokens))
    without_cache = call(params, tokens, lengths=lengths)
    for row, length in zip(range(3), lengths):
        scaling = models.LongScaling(
            *((model.rope_scaling.long if length > 10 else model.rope_scaling.short,) * 2), 10, 1.2
        )
        want = jax.jit(dataclasses.replace(model, rope_scaling=scaling))(
            params, tokens[row : row + 1, :length]
        )
        close(out[row : row + 1, :length], want)
        close(without_cache[row : row + 1, :length], want)
    other = dataclasses.replace(model, rope_scaling=models.LongScaling((1.0,), (1.0,), 10))
    with pytest.raises(
        ValueError, match="expected 2 divisors, one for each pair of rotated features, got 1 and 1"
    ):
        other(params, tokens)
    attention = nn.Attention(
        2, causal=True, rotary=nn.Rotary(scaling=models.DynamicScaling(2.0, 8))
    )
    x = jnp.ones((1, 4, 8))
    with pytest.raises(
        ValueError, match="positions= with a cache needs a rotary= whose scaling does not depend"
    ):
        attention(
            attention.init(jax.random.key(0), x)[0],
            x,
            positions=jnp.arange(4),
            state=attention.cache(x),
        )


def test_scalings():
    rates = np.float32(10000.0) ** (-np.arange(0, 16, 2, dtype=np.float32) / 16)
    yarn = models.YarnScaling(4.0, 32)
    assert yarn.amplitude == pytest.approx(0.1 * np.log(4) + 1)
    got = yarn(rates)
    assert got[0] == rates[0] and got[-1] == pytest.approx(rates[-1] / 4)
    for make in (
        lambda: models.YarnScaling(0, 8),
        lambda: models.DynamicScaling(1.0, 0),
        lambda: models.LongScaling((1.0,), (0.0,), 8),
    ):
        with pytest.raises(ValueError, match="expected"):
            make()
    for scaling in (yarn, models.DynamicScaling(2.0, 8)):
        with pytest.raises(ValueError, match="at least 4 rotated features, got 2"):
            nn.Rotary(scaling=scaling)(jnp.ones((1, 3, 1, 2)), jnp.arange(3)[None])
    with pytest.raises(ValueError, match="features must be even, from 2 to head_dim=8; got 3"):
        nn.Rotary(features=3)(jnp.ones((1, 3, 1, 8)), jnp.arange(3)[None])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"activation": "mish"},
            "activation must be 'silu' or 'gelu' or 'gelu_tanh' or 'relu'; got 'mish'",
        ),
        ({"qk_norm": True}, "qk_norm must be 'head' or 'all' or None; got True"),
    ],
)
def test_invalid_options(options, text):
    with pytest.raises(ValueError, match=text):
        models.Decoder(16, 8, 2, 2, 1, 8, **options)


def test_gpt_options():
    """The scores of block i of two are those of a block whose queries are divided by i and
    sqrt(head_dim)."""
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    model = models.GPT(
        16, 8, 2, 2, context=8, hidden=12, scale_scores=False, tied=False, activation="relu"
    )
    params, _ = model.init(jax.random.key(0), tokens)
    by_depth = dataclasses.replace(model, scale_scores=True, scale_by_depth=True)
    factors = jnp.array([1, 1 / 2]) / 2
    wide = jax.tree.map(lambda x: 50 * x, params["blocks"]["attention"]["query"])
    query = jax.tree.map(lambda x: x * factors.reshape(2, *(1,) * (x.ndim - 1)), wide)
    with_query = lambda each: (
        params
        | {
            "blocks": params["blocks"]
            | {"attention": params["blocks"]["attention"] | {"query": each}}
        }
    )
    close(jax.jit(by_depth)(with_query(wide), tokens), jax.jit(model)(with_query(query), tokens))
    with pytest.raises(ValueError, match=r"GPT: activation must be 'silu' or .*; got 'mish'"):
        dataclasses.replace(model, activation="mish")
    old = models.GPT(16, 8, 2, 2, context=8)
    assert old.spec(tokens).params.keys() == params.keys() - {"head"}


# Altered fields of config.json that are errors. `make verify-pretrained ARGS=altered_decoders`
# alters every field, and compares what loads with transformers.
REFUSED = {
    "llama": [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"hidden_act": "mish"},
        {"mlp_bias": None},
        {"head_dim": 5},
        {"sliding_window": 5},
        {"num_hidden_layers": 0},
        {"rms_norm_eps": "1e-5"},
    ],
    "mistral": [
        {"sliding_window": 0},
        {"attention_bias": True},
        {"layer_types": ["full_attention"]},
    ],
    "qwen2": [
        {"layer_types": ["chunked_attention"] * 5},
        {"use_sliding_window": False},
        {"max_window_layers": -1},
        {"layer_types": ["full_attention"]},
        {"use_sliding_window": 1},
        {"attention_bias": False},
    ],
    "qwen3": [{"head_dim": None}, {"num_experts": 4}],
    "gemma": [{"use_bidirectional_attention": True}, {"hidden_activation": "silu"}],
    "gemma2": [
        {"query_pre_attn_scalar": 0},
        {"final_logit_softcapping": False},
        {"sliding_window": None},
    ],
    "gemma3_text": [
        {"attn_logit_softcapping": 30.0},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        {"sliding_window_pattern": 0, "layer_types": None},
    ],
    "phi3": [
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
        {"lm_head_bias": True},
        {"original_max_position_embeddings": 1},
        {"partial_rotary_factor": 0.3},
    ],
    "smollm3": [
        {"no_rope_layers": [1]},
        {"no_rope_layers": [0, 0, 0, 0]},
        {"no_rope_layers": [2, 1, 1, 1]},
        {"no_rope_layer_interval": 0},
    ],
    "olmo2": [{"clip_qkv": 8.0}, {"hidden_size": 24.0}],
    "mixtral": [{"num_local_experts": 0}, {"num_experts_per_tok": None}, {"attention_bias": True}],
    "qwen3_moe": [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"norm_topk_prob": None}],
    "gpt2": [
        {"activation_function": "gelu_fast"},
        {"scale_attn_weights": None},
        {"n_inner": 0},
        {"n_head": 4.0},
        {"scale_attn_by_inverse_layer_idx": 1},
        {"add_cross_attention": True},
    ],
    "gpt_neox": [
        {"rope_theta": 1e4},
        {"rotary_pct": 0.1, "rope_parameters": None},
        {"use_parallel_residual": None},
    ],
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_configurations(name, tmp_path):
    shutil.copytree(FOLDERS[name], tmp_path, dirs_exist_ok=True)
    config = json.loads((FOLDERS[name] / "config.json").read_text())
    for change in REFUSED[name]:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=next(iter(change))):
            pretrained.load(tmp_path)
