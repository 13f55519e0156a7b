"""llama2.c's model.bin: read, written, converted, and damaged."""

import dataclasses
import pathlib
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from numpy_llama import Decoder

from fnet import compress, models
from fnet.models import pretrained

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))
import llama2c  # noqa: E402

MODEL = models.Decoder(50, 16, 2, 4, 2, 24, context=32, interleaved=True, tied=True)


def filled(model):
    """Parameters of a model, none of them 0 or 1, in less time than `init` takes to compile."""
    rng = np.random.default_rng(0)
    draw = lambda spec: (rng.uniform(-2, 2, spec.shape) / np.sqrt(spec.shape[-1])).astype(
        np.float32
    )
    return jax.tree.map(draw, model.spec(model.example()).params)


@pytest.mark.parametrize("tied", [True, False])
def test_the_order_of_the_arrays(tmp_path, tied):
    head = llama2c.Header(8, 12, 2, 4, 2, 5, 6, tied)
    numbers = np.random.default_rng(0)
    arrays = {
        name: numbers.standard_normal(shape, np.float32) for name, shape in head.shapes().items()
    }
    file = tmp_path / "model.bin"
    # run.c: Config, then token_embedding_table, rms_att_weight, wq, wk, wv, wo, rms_ffn_weight, w1,
    # w2, w3, ...
    raw = struct.pack("<7i", 8, 12, 2, 4, 2, 5 if tied else -5, 6)
    file.write_bytes(raw + b"".join(array.tobytes() for array in arrays.values()))
    assert arrays["wk"].shape == (2, 4, 8) and ("wcls" in arrays) == (not tied)
    assert llama2c.header(file) == head
    read = llama2c.read(file)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array, name)
    whole = file.read_bytes()
    llama2c.write(file, head, read)
    assert file.read_bytes() == whole
    with pytest.raises(
        ValueError, match=r"'wq': expected shape \(2, 8, 8\) for a model.bin .*, got \(2, 8\)"
    ):
        llama2c.write(file, head, arrays | {"wq": np.ones((2, 8))})
    assert file.read_bytes() == whole and len(list(tmp_path.iterdir())) == 1
    file.write_bytes(whole[:-4])
    with pytest.raises(
        ValueError,
        match=r"is not a model.bin of llama2.c, version 0 \(seven integers, then as many floats as "
        rf"they imply; this file has {len(whole) - 4} bytes\)",
    ):
        llama2c.load(file)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("tied", [True, False])
def test_out_and_in_again(tied, tmp_path):
    """A model.bin, and an independent reader's logits and greedy text."""
    model = dataclasses.replace(MODEL, tied=tied)
    params = filled(model)
    path = llama2c.save(model, params, tmp_path)
    for each in (path, tmp_path):
        assert llama2c.is_file(each) and llama2c.model_of(each) == model
        again, read = llama2c.load(each)
        assert again == model
        close(read, params, 0)

    raw, prompt = path.read_bytes(), [3, 1, 4, 1, 5]
    out = models.generate(model, params, [prompt], max_tokens=12, temperature=0)
    assert out.tokens[0].tolist() == Decoder(raw).greedy(prompt, 12)
    logits, decoder = jax.jit(model)(params, jnp.array([prompt]))[0], Decoder(raw)
    np.testing.assert_allclose(
        logits, np.stack([decoder(token) for token in prompt]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("tied", [True, False])
def test_converted_for_load(tied, tmp_path):
    """The folder that the script writes has the names and the rotary embedding of transformers, and
    the same logits. A preset finds it where the model.bin was."""
    model = dataclasses.replace(MODEL, tied=tied)
    params = filled(model)
    llama2c.save(model, params, tmp_path)
    llama2c.main([str(tmp_path)])
    assert not llama2c.is_file(tmp_path)  # there are other weights now
    other, converted, state = pretrained.load(tmp_path)
    assert other == dataclasses.replace(model, interleaved=False) and state == {}
    tokens = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    close(jax.jit(other)(converted, tokens), jax.jit(model)(params, tokens), 1e-5)
    changes = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    del changes["interleaved"]
    assert pretrained.model("stories260k", tmp_path, **changes) == other


def test_implicit_arrays_are_written_as_what_they_represent(tmp_path):
    params = filled(MODEL)
    quantized = compress.quantize(params, {"blocks": compress.Int8(8)})
    adapted = compress.lora(jax.random.key(0), quantized, {"blocks/attention/.*": 2})
    _, read = llama2c.load(llama2c.save(MODEL, adapted, tmp_path))
    close(read, compress.materialize(adapted), 0)


def test_models_that_run_c_does_not_know(tmp_path):
    for change, text in (
        (dict(interleaved=False), "interleaved=True"),
        (dict(rotary_base=5e5, qkv_bias=True), "rotary_base=10000.0, qkv_bias=False"),
    ):
        with pytest.raises(ValueError, match=f"llama2.c runs a Decoder with {text} alone"):
            llama2c.save(dataclasses.replace(MODEL, **change), {}, tmp_path)
    with pytest.raises(ValueError, match="head"):
        llama2c.save(dataclasses.replace(MODEL, tied=False), filled(MODEL), tmp_path)
    assert not list(tmp_path.iterdir())


HEADERS = {  # run.c's seven integers, of which the rest of the file is said to be full
    "no layers": (16, 24, 0, 4, 2, 50, 32),
    "negative": (-16, 24, 2, 4, 2, 50, 32),
    "long": (16, 24, 3, 4, 2, 50, 32),
    "heads do not divide": (16, 24, 2, 3, 2, 50, 32),
    "groups do not divide": (16, 24, 2, 4, 3, 50, 32),
    "huge": (2**31 - 1, 2**31 - 1, 2**31 - 1, 1, 1, 2**31 - 1, 2**31 - 1),
    "no words": (16, 24, 2, 4, 2, 0, 32),
    "least": (16, 24, 2, 4, 2, -(2**31), 32),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_hostile_headers(header, tmp_path):
    path = llama2c.save(MODEL, filled(MODEL), tmp_path / "model.bin")
    path.write_bytes(np.array(header, "<i4").tobytes() + path.read_bytes()[28:])
    with pytest.raises(ValueError, match=r"model\.bin"):
        llama2c.load(path)


@pytest.mark.exhaustive
def test_the_script(tmp_path):
    llama2c.save(MODEL, filled(MODEL), tmp_path / "model.bin")
    run = lambda *arguments: subprocess.run(
        [sys.executable, ROOT / "experiments" / "llama2c.py", *arguments],
        capture_output=True,
        text=True,
    )
    done = run(tmp_path / "model.bin", tmp_path / "folder")
    assert done.stdout == f"{tmp_path}/folder/model.safetensors: 4,720 parameters\n", done.stderr
    assert pretrained.load(tmp_path / "folder")[0].depth == 2
    (tmp_path / "model.bin").write_bytes(b"x" * 100)
    refused = run(tmp_path)
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert "is not a model.bin of llama2.c" in refused.stderr
    assert "usage:" in run().stderr
