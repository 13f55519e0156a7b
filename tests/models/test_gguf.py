"""GGUF files that the package gguf writes, against the arrays that it decodes from them.

`make verify-pretrained ARGS=gguf_files` compares such files with transformers' reader.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import compress, models
from fnet import transforms as ft
from fnet.models import pretrained

gguf = pytest.importorskip("gguf")
MODEL = models.Decoder(
    vocab_size=40,
    width=64,
    depth=2,
    heads=4,
    kv_heads=2,
    hidden=96,
    context=32,
    interleaved=True,
    epsilon=1e-5,
)
TIED = models.Decoder(
    vocab_size=40,
    width=64,
    depth=2,
    heads=4,
    kv_heads=4,
    hidden=96,
    context=32,
    interleaved=True,
    tied=True,
    epsilon=1e-6,
)
PLAIN = dataclasses.replace(MODEL, interleaved=False)
GEMMA = dataclasses.replace(
    PLAIN,
    tied=True,
    head_dim=8,
    epsilon=1e-6,
    activation="gelu_tanh",
    norm_offset=1.0,
    post_norm=True,
    scale_embeddings=True,
)
# name -> (architecture, model, fields)
FAMILIES = {
    "qwen2": ("qwen2", dataclasses.replace(PLAIN, qkv_bias=True), {}),
    "qwen3": ("qwen3", dataclasses.replace(PLAIN, qk_norm="head", head_dim=8), {}),
    "gemma2": (
        "gemma2",
        dataclasses.replace(
            GEMMA, window=(4, None), attention_softcap=40.0, logit_softcap=20.0, depth=3
        ),
        {
            "attention.sliding_window": 4,
            "attn_logit_softcapping": 40.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma2, defaults": (
        "gemma2",
        dataclasses.replace(GEMMA, window=(4096, None), attention_softcap=50.0, logit_softcap=30.0),
        {},
    ),
    "gemma2 of 46 blocks": (
        "gemma2",
        dataclasses.replace(
            GEMMA,
            window=(4, None),
            attention_softcap=50.0,
            logit_softcap=30.0,
            depth=46,
            query_scalar=16.0,
        ),
        {"attention.sliding_window": 4},
    ),
    "gemma3": (
        "gemma3",
        dataclasses.replace(
            GEMMA,
            qk_norm="head",
            depth=7,
            window=(4,) * 5 + (None,),
            rotary_base=(10000.0,) * 5 + (500000.0,),
            rope_scaling=(None,) * 5 + (models.LinearScaling(8.0),),
        ),
        {
            "attention.sliding_window": 4,
            "rope.freq_base": 500000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "gemma3 with other windows": (
        "gemma3",
        dataclasses.replace(
            GEMMA,
            qk_norm="head",
            depth=4,
            window=(4, 4, None),
            rotary_base=(100.0, 100.0, 1e6),
            logit_softcap=30.0,
        ),
        {
            "attention.sliding_window": 4,
            "attention.sliding_window_pattern": 3,
            "rope.freq_base_swa": 100.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3 without windows": (
        "gemma3",
        dataclasses.replace(GEMMA, qk_norm="head", rotary_base=1e6),
        {},
    ),
}
BLOCK = {
    "attention/query": "attn_q",
    "attention/key": "attn_k",
    "attention/value": "attn_v",
    "attention/out": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
NORMS = {
    "norm1": "attn_norm",
    "norm2": "ffn_norm",
    "post_norm1": "post_attention_norm",
    "post_norm2": "post_ffw_norm",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
}
TOKENS = jnp.array([[1, 5, 9, 2], [3, 30, 0, 7]])


def tensors(model, params):
    """{name in GGUF: [out, in] or [n]}"""
    offset = model.norm_offset
    found = {
        "token_embd.weight": params["embed"]["embedding"],
        "output_norm.weight": params["norm"]["scale"] + offset,
    }
    if not model.tied:
        found["output.weight"] = params["head"]["kernel"].T
    for i in range(model.depth):
        for ours, theirs in BLOCK.items():
            node = params["blocks"]
            for part in ours.split("/"):
                node = node[part]
            found[f"blk.{i}.{theirs}.weight"] = node["kernel"][i].T
            if "bias" in node:
                found[f"blk.{i}.{theirs}.bias"] = node["bias"][i]
        for ours, theirs in NORMS.items():
            nodes = params["blocks"] | params["blocks"]["attention"]
            if ours in nodes:
                found[f"blk.{i}.{theirs}.weight"] = nodes[ours]["scale"][i] + offset
    return {name: np.asarray(array, np.float32) for name, array in found.items()}


def write(file, model, arrays, kinds, **changes):
    """A GGUF file; `kinds` names the format of matrices by a part of their names."""
    architecture = changes.pop("architecture", "llama")
    writer = gguf.GGUFWriter(file, architecture)
    fields = {
        "block_count": model.depth,
        "context_length": model.context,
        "embedding_length": model.width,
        "feed_forward_length": model.hidden,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads,
        "rope.dimension_count": model.head_dim or model.width // model.heads,
        "attention.key_length": model.head_dim,
    } | changes
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for name, value in fields.items():
        if value is not None:
            name = name if name.startswith("adapter.") else f"{architecture}.{name}"
            add[type(value)](name, value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", model.epsilon)
    for name, array in arrays.items():
        kind = next(
            (kind for part, kind in kinds.items() if part in name and array.ndim == 2), "F32"
        )
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def decoded(model, params, kinds):
    """The parameters after the package gguf's own rounding and decoding."""
    new = {}
    for name, array in tensors(model, params).items():
        kind = next(
            (kind for part, kind in kinds.items() if part in name and array.ndim == 2), "F32"
        )
        kind = gguf.GGMLQuantizationType[kind]
        new[name] = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
    stack = lambda theirs: np.stack([new[f"blk.{i}.{theirs}.weight"] for i in range(model.depth)])
    blocks = {
        "attention": {},
        "norm1": {"scale": stack("attn_norm")},
        "norm2": {"scale": stack("ffn_norm")},
    }
    for ours, theirs in BLOCK.items():
        *above, name = ours.split("/")
        (blocks["attention"] if above else blocks)[name] = {
            "kernel": stack(theirs).swapaxes(-1, -2)
        }
    result = {
        "embed": {"embedding": new["token_embd.weight"]},
        "norm": {"scale": new["output_norm.weight"]},
        "blocks": blocks,
    }
    return result if model.tied else result | {"head": {"kernel": new["output.weight"].T}}


@pytest.mark.quick_cases("model3-kinds3-6")
@pytest.mark.parametrize(
    ("model", "kinds", "quantized"),
    [
        (MODEL, {"weight": "Q8_0"}, 9),
        (TIED, {"weight": "Q4_0"}, 8),
        (MODEL, {"weight": "F16"}, 0),
        (MODEL, {"blk.0.attn_q": "Q4_0", "blk": "Q8_0", "output": "Q5_0", "embd": "BF16"}, 6),
    ],
)
def test_arrays_and_logits_are_those_of_the_package(model, kinds, quantized, tmp_path):
    params = model.init(jax.random.key(0), TOKENS)[0]
    file = write(tmp_path / "model.gguf", model, tensors(model, params), kinds)
    read, got, state = pretrained.load_gguf(file)
    assert read == model and state == {}
    want = decoded(model, params, kinds)
    is_quantized = lambda x: isinstance(x, compress.Quantized)
    assert sum(map(is_quantized, jax.tree.leaves(got, is_leaf=is_quantized))) == quantized
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7),
        compress.materialize(got),
        want,
    )
    logits = ft.use_implicit_arrays(model)(got, TOKENS)
    np.testing.assert_allclose(
        logits, model(jax.tree.map(jnp.asarray, want), TOKENS), rtol=1e-4, atol=1e-4
    )


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, tmp_path):
    """The arrays are those of the model, and a difference in what is not in the file, such as the
    scale of embeddings, would change the model."""
    architecture, model, fields = FAMILIES[name]
    draw = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: draw.normal(size=leaf.shape).astype("f4"), model.spec(TOKENS).params
    )
    file = write(
        tmp_path / "model.gguf",
        model,
        tensors(model, params),
        {},
        architecture=architecture,
        **fields,
    )
    read, got, state = pretrained.load_gguf(file)
    assert read == model and state == {}
    assert jax.tree.structure(got) == jax.tree.structure(params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), got, params)


@pytest.mark.parametrize("usual", [True, False])
def test_divisors_of_the_rotation_rates(usual, tmp_path):
    """Llama 3.1 and later: the parameters of the usual formula are found, other divisors are kept."""
    model = dataclasses.replace(MODEL, head_dim=128, rotary_base=500000.0)
    rates = (500000.0 ** (-np.arange(0, 128, 2) / 128)).astype(np.float32)
    llama3 = models.Llama3Scaling(32.0, 1.0, 4.0, 8192)
    divisors = (rates / llama3(rates) if usual else np.linspace(1, 7, 64)).astype(np.float32)
    arrays = tensors(model, model.init(jax.random.key(0), TOKENS)[0])
    file = write(
        tmp_path / "model.gguf",
        model,
        arrays | {"rope_freqs.weight": divisors},
        {},
        **{"rope.freq_base": 500000.0},
    )
    scaling = pretrained.load_gguf(file)[0].rope_scaling
    if usual:
        assert scaling == llama3
    else:
        assert isinstance(scaling, models.LongScaling)
        for length in (1, 32, 1000):
            (got,) = scaling(rates, jnp.array([length]))
            np.testing.assert_allclose(got, rates / divisors, rtol=1e-6)


@pytest.mark.parametrize(
    ("architecture", "divisors", "changes", "message"),
    [
        ("llama", np.ones(5), {}, "rope_freqs.weight: expected 8 numbers above 0; got .5,."),
        ("llama", np.zeros(8), {}, "rope_freqs.weight: expected 8 numbers above 0"),
        ("qwen2", np.ones(8), {}, "expected in files of the architecture 'llama'"),
        (
            "llama",
            np.ones(8),
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            "without another scaling; got 'llama' with rope.scaling.type='linear'",
        ),
        (
            "qwen2",
            None,
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "qwen2.rope.scaling.type='yarn' with factor 4.0 is not supported",
        ),
        ("qwen3", None, {"attention.scale": 0.5}, "qwen3.attention.scale=0.5 is not supported"),
        (
            "gemma3",
            None,
            {"attention.sliding_window_pattern": 0},
            "sliding_window_pattern=0: expected an integer above 0",
        ),
        ("gemma3", None, {"attention.causal": 0}, "gemma3.attention.causal=0 is not supported"),
    ],
)
def test_what_changes_the_result_is_an_error(architecture, divisors, changes, message, tmp_path):
    arrays = tensors(MODEL, MODEL.init(jax.random.key(0), TOKENS)[0])
    if divisors is not None:
        arrays["rope_freqs.weight"] = divisors.astype(np.float32)
    file = write(tmp_path / "model.gguf", MODEL, arrays, {}, architecture=architecture, **changes)
    with pytest.raises(ValueError, match=message):
        pretrained.load_gguf(file)


@pytest.mark.parametrize(
    ("changes", "lacking", "message"),
    [
        (
            {"architecture": "phi3"},
            (),
            "expected the architecture 'llama', 'qwen2', 'qwen3', 'gemma2', 'gemma3'; got 'phi3'",
        ),
        ({"architecture": "qwen2"}, (), "lacks the arrays blk.0.attn_k.bias, blk.0.attn_q.bias"),
        ({"adapter.lora.alpha": 8}, (), "has fields that fnet does not know: adapter.lora.alpha"),
        ({"expert_count": 8}, (), "llama.expert_count=8 is not supported; expected 0"),
        (
            {"rope.dimension_count": 8},
            (),
            "llama.rope.dimension_count=8 is not supported; expected 16",
        ),
        ({"attention.causal": 0}, (), "llama.attention.causal=0 is not supported"),
        ({"feed_forward_length": 128}, (), r"expected shape \(128, 64\); got \(96, 64\)"),
        ({}, ("blk.1.ffn_up.weight",), "lacks the arrays blk.1.ffn_up.weight"),
        ({"feed_forward_length": None}, (), "lacks the fields llama.feed_forward_length"),
        ({"attention.head_count_kv": None}, (), r"blk.*expected shape"),
        ({"block_count": 1}, (), "also contains the arrays blk.1.attn_k.weight"),
    ],
)
def test_what_the_model_does_not_have_is_an_error(changes, lacking, message, tmp_path):
    arrays = tensors(MODEL, MODEL.init(jax.random.key(0), TOKENS)[0])
    file = write(
        tmp_path / "model.gguf",
        MODEL,
        {name: a for name, a in arrays.items() if name not in lacking},
        {},
        **changes,
    )
    with pytest.raises(ValueError, match=message):
        pretrained.load_gguf(file)


def test_without_a_number_of_key_heads_the_attention_is_not_grouped(tmp_path):
    model = dataclasses.replace(MODEL, kv_heads=MODEL.heads)
    params = model.init(jax.random.key(0), TOKENS)[0]
    file = write(
        tmp_path / "model.gguf",
        model,
        tensors(model, params),
        {},
        **{"attention.head_count_kv": None},
    )
    assert pretrained.load_gguf(file)[0] == model


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", ["llama", *FAMILIES])
def test_saved_parameters_are_those_of_the_file(name, tmp_path):
    """The new file has all fields of the old one, and its arrays bit for bit if nothing changed."""
    architecture, model, fields = FAMILIES.get(name, ("llama", MODEL, {}))
    draw = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: draw.normal(size=leaf.shape).astype("f4"), model.spec(TOKENS).params
    )
    arrays = tensors(model, params)
    if name == "llama":
        arrays["rope_freqs.weight"] = np.linspace(1, 7, 8, dtype=np.float32)
    kinds = {"attn_q": "Q8_0", "ffn": "Q4_0", "token_embd": "F16"}
    if model.head_dim == 8:  # rows of 32 numbers are no multiples of a block
        kinds = {"ffn_up": "Q8_0", "token_embd": "F16"}
    old = write(tmp_path / "old.gguf", model, arrays, kinds, architecture=architecture, **fields)
    (model, got, _), new = pretrained.load_gguf(old), tmp_path / "new.gguf"
    assert pretrained.save_gguf(model, got, new, like=old) == new
    before, after = gguf.GGUFReader(old), gguf.GGUFReader(new)
    contents = lambda reader: {
        key: field.contents() for key, field in reader.fields.items() if key[:5] != "GGUF."
    }
    assert contents(before) == contents(after)
    for one, other in zip(before.tensors, after.tensors, strict=True):
        assert (one.name, one.tensor_type) == (other.name, other.tensor_type)
        if model.norm_offset and "norm" in one.name:  # w + 1 - 1 + 1
            np.testing.assert_allclose(one.data, other.data, atol=1e-6)
        else:
            np.testing.assert_array_equal(one.data, other.data)


def test_changed_parameters_in_another_format(tmp_path):
    params = MODEL.init(jax.random.key(0), TOKENS)[0]
    old = write(tmp_path / "old.gguf", MODEL, tensors(MODEL, params), {"weight": "Q8_0"})
    changed = jax.tree.map(lambda leaf: leaf * 2 + 0.1, params)
    file = pretrained.save_gguf(MODEL, changed, tmp_path / "new.gguf", like=old, format="F32")
    _, got, _ = pretrained.load_gguf(file)
    jax.tree.map(np.testing.assert_array_equal, got, changed)
    pretrained.save_gguf(MODEL, changed, old, like=old, format="F16")  # in place
    _, got, _ = pretrained.load_gguf(old)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-6), got, changed)


def test_what_cannot_be_saved_leaves_the_file(tmp_path):
    params = MODEL.init(jax.random.key(0), TOKENS)[0]
    old = write(tmp_path / "old.gguf", MODEL, tensors(MODEL, params), {"weight": "Q8_0"})
    content, new = old.read_bytes(), tmp_path / "new.gguf"
    for options, message in (
        ({"format": "Q6_K"}, "cannot write token_embd.weight, .40, 64., as Q6_K .*'Q8_0' or 'F16'"),
        ({"format": "int8"}, "format='int8': expected a format of GGUF, such as 'F16'"),
        ({"model": TIED}, "expected the model of .*old.gguf, Decoder"),
        ({"params": {**params, "norm": {}}}, "'norm/scale' .64,. is missing"),
    ):
        arguments = {"model": MODEL, "params": params, "path": old, "like": old} | options
        with pytest.raises(ValueError, match=message):
            pretrained.save_gguf(
                arguments.pop("model"), arguments.pop("params"), arguments.pop("path"), **arguments
            )
        assert old.read_bytes() == content and not new.exists()


def test_damaged_files_are_named(tmp_path):
    file = write(
        tmp_path / "model.gguf", MODEL, tensors(MODEL, MODEL.init(jax.random.key(0), TOKENS)[0]), {}
    )
    raw = file.read_bytes()
    rng = np.random.default_rng(0)
    damaged = [raw[:n] for n in (0, 3, 20, 200, len(raw) // 2)]
    for _ in range(20):  # in the header
        changed = bytearray(raw)
        changed[int(rng.integers(4, 700))] ^= 1 << int(rng.integers(8))
        damaged.append(bytes(changed))
    huge = bytearray(raw)
    huge[16:24] = (2**60).to_bytes(8, "little")
    damaged.append(bytes(huge))
    refused = 0
    for i, content in enumerate(damaged):
        bad = tmp_path / f"bad{i}.gguf"
        bad.write_bytes(content)
        try:
            pretrained.load_gguf(bad)
        except ValueError as error:
            refused += 1
            assert bad.name in str(error)
    assert refused >= 6
