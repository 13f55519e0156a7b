"""GGUF files that the package gguf writes, against the arrays that it decodes from them."""

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
BLOCK = {
    "attention/query": "attn_q",
    "attention/key": "attn_k",
    "attention/value": "attn_v",
    "attention/out": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
TOKENS = jnp.array([[1, 5, 9, 2], [3, 30, 0, 7]])


def tensors(model, params):
    """{name in GGUF: [out, in] or [n]}"""
    found = {
        "token_embd.weight": params["embed"]["embedding"],
        "output_norm.weight": params["norm"]["scale"],
    }
    if not model.tied:
        found["output.weight"] = params["head"]["kernel"].T
    for i in range(model.depth):
        for ours, theirs in BLOCK.items():
            node = params["blocks"]
            for part in ours.split("/"):
                node = node[part]
            found[f"blk.{i}.{theirs}.weight"] = node["kernel"][i].T
        for ours, theirs in (("norm1", "attn_norm"), ("norm2", "ffn_norm")):
            found[f"blk.{i}.{theirs}.weight"] = params["blocks"][ours]["scale"][i]
    return {name: np.asarray(array, np.float32) for name, array in found.items()}


def write(file, model, arrays, kinds, **changes):
    """A GGUF file; `kinds` names the format of matrices by a part of their names."""
    writer = gguf.GGUFWriter(file, changes.pop("architecture", "llama"))
    fields = {
        "block_count": model.depth,
        "context_length": model.context,
        "embedding_length": model.width,
        "feed_forward_length": model.hidden,
        "attention.head_count": model.heads,
        "attention.head_count_kv": model.kv_heads,
        "rope.dimension_count": model.width // model.heads,
    } | changes
    for name, value in fields.items():
        if value is not None:
            writer.add_uint32(name if name.startswith("adapter.") else f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", model.epsilon)
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


@pytest.mark.parametrize(
    ("changes", "lacking", "message"),
    [
        ({"architecture": "qwen2"}, (), "expected the architecture 'llama'; got 'qwen2'"),
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
