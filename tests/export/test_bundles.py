"""Bundles: one file that runs without fnet, equal to the program in this process and to the model."""

import dataclasses
import datetime
import json
import os
import re
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from zoo import CONTEXT, FEW, MODELS, UNSTACKED, VOCABULARY, build, inputs

from fnet import export, models
from fnet import layers as nn
from fnet import transforms as ft
from fnet.export import _write
from fnet.export.standalone import _reader

pytestmark = pytest.mark.usefixtures("quickly")
DIGITS = models.CNN(10, (4, 6), 1)
QUICK = "CNN", "GPT"
LIMIT = 160_000  # bytes of a program


def specs_of(name):
    _, (_, where), _ = MODELS[name]
    types = inputs(name, build(name)[2])
    return {
        f"x{i}": export.spec(", ".join(map(str, x.shape)), x.dtype, where=where if i == 0 else ())
        for i, x in enumerate(types)
    }


def digits(path, **options):
    params, state = DIGITS.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
    program = export.program(DIGITS, params, state, x=export.spec("b, 8, 8, 1"))
    program.save(path, **options)
    return program, params, state


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "digits.fnet"
    digits(path, labels=map(str, range(10)), about={"dataset": "digits"})
    return path


READER = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("fnet", "flax", "optax", "safetensors", "onnx"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
before = set(sys.modules)
import json
import numpy as np
for file in sys.argv[2:]:
    sys.path.insert(0, file)
    import load, flatbuffers
    assert file in load.__file__ and ".fnet" in flatbuffers.__file__
    bundle, data = load.load(file), np.load(file + ".npz")
    for size in 0, 1:
        x = [data[name] for name in sorted(data) if name.startswith(f"in{size}")]
        import jax
        for i, y in enumerate(jax.tree.leaves(bundle(*x))):
            assert np.asarray(y).tobytes() == data[f"out{size}_{i}"].tobytes(), (file, size, i)
    print(bundle.check()[0])
    for name in ("load", "reader", "interpret", "signature", "sizes", "tensor_table"):
        del sys.modules[name]
    sys.path.pop(0)
"""


def runs_elsewhere(names, folder):
    """The bundles are read in a process without fnet: bitwise equal to the program here, 1e-5 to
    the model."""
    for name in names:
        f, params, _, shapes = build(name)
        program = export.program(f, params, **specs_of(name))
        arrays, file = {}, folder / f"{name}.fnet"
        for size in 0, 1:
            x = inputs(name, shapes[size])
            if size == 0:
                program.save(file, tests={"predict": {f"x{i}": a for i, a in enumerate(x)}})
            got = jax.tree.leaves(export.load(file)(*x))
            for a, b in zip(got, jax.tree.leaves(jax.jit(f)(params, *x)), strict=True):
                close(a, b, 1e-5)
            arrays |= {f"in{size}_{i}": a for i, a in enumerate(x)}
            arrays |= {f"out{size}_{i}": a for i, a in enumerate(got)}
        np.savez(f"{file}.npz", **arrays)
        with zipfile.ZipFile(file) as archive:
            assert archive.getinfo("programs/predict.portable.jax").file_size < LIMIT
            assert archive.getinfo("programs/predict.json").file_size < LIMIT
    run = subprocess.run(
        [sys.executable, "-c", READER, "x", *(str(folder / f"{name}.fnet") for name in names)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    lines = run.stdout.splitlines()
    assert len(lines) == len(names), run.stderr
    for line in lines:
        assert re.fullmatch(
            r"predict: JAX (equal|\d\.\de-0[6-9]|\d\.\de-1\d), NumPy (equal|\d.*)", line
        ), line


@pytest.mark.exhaustive
def test_runs_where_fnet_is_not_installed(tmp_path):
    runs_elsewhere(QUICK, tmp_path)


@pytest.mark.exhaustive
def test_other_models_run_where_fnet_is_not_installed(tmp_path):
    runs_elsewhere([name for name in FEW if name not in QUICK], tmp_path)


def test_the_description(path):
    bundle = export.load(path, check=True)
    assert bundle.signature("predict") == "predict(x: float32[b, 8, 8, 1]) -> float32[b, 10]"
    assert bundle.labels == list("0123456789")
    assert bundle.manifest["provenance"]["dataset"] == "digits"
    assert bundle.manifest["versions"]["jax"] == jax.__version__
    created, until = (
        datetime.date.fromisoformat(bundle.manifest[name]) for name in ("created", "read_until")
    )
    assert (until - created).days == 180 and bundle.read_until == until.isoformat()
    assert bundle.manifest["entries"]["predict"]["custom_calls"] == {"portable": []}
    assert not bundle.weights["params/head/kernel"].flags.owndata  # a view of the file


def test_a_zip_archive_that_python_runs(path):
    run = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert "predict(x: float32[b, 8, 8, 1]) -> float32[b, 10]\n" in run.stdout, run.stderr
    assert "predict: JAX " in run.stdout


def test_equal_contents_give_equal_bytes(path, tmp_path):
    digits(tmp_path / "again.fnet", labels=map(str, range(10)), about={"dataset": "digits"})
    assert (tmp_path / "again.fnet").read_bytes() == path.read_bytes()


def test_programs_do_not_grow_with_the_weights(tmp_path):
    """Nor with arrays that the function closes over, which are saved once."""
    table = jnp.asarray(np.random.default_rng(0).normal(size=(500, 600)), jnp.float32)
    f = jax.jit(lambda params, x: (x @ table) @ params["kernel"])
    program = export.program(f, {"kernel": jnp.ones((600, 300))}, x=export.spec("b, 500"))
    program.entry("transposed", lambda params, x: x @ table.T, x=export.spec("b, 600")).save(
        tmp_path / "f"
    )
    with zipfile.ZipFile(tmp_path / "f") as archive:
        size = {info.filename: info.file_size for info in archive.infolist()}
    assert size["programs/predict.portable.jax"] < 5000 and size["programs/predict.json"] < 2000
    assert 4 * 480_000 < size["weights.safetensors"] < 4 * 481_000
    x = np.ones((2, 500), np.float32)
    close(
        export.load(tmp_path / "f")(x),
        f(program.weights and {"kernel": jnp.ones((600, 300))}, x),
        1e-6,
    )


@pytest.mark.exhaustive
def test_several_entry_points(tmp_path):
    model = UNSTACKED
    params, _ = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))
    tokens = export.spec("b, t", "int32", where=f"t <= {CONTEXT}")
    cache = export.spec_of(lambda b: model.cache(jax.ShapeDtypeStruct((b, CONTEXT), jnp.int32)))

    def prefill(params, tokens, lengths):
        empty = model.cache(jax.ShapeDtypeStruct((tokens.shape[0], CONTEXT), jnp.int32))
        logits, cache = model(params, tokens, lengths=lengths, state=empty)
        return {"logits": logits, "cache": cache}

    def decode(params, token, cache):
        logits, cache = model(params, token, state=cache)
        return {"logits": logits, "cache": cache}

    def train_step(params, tokens, labels, key):
        loss = lambda params: model.cross_entropy(
            params, tokens, labels, key=key, train=True
        ).mean()
        loss, grads = jax.value_and_grad(loss)(params)
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), "loss": loss}

    program = export.program(model, params, tokens=tokens)
    program = program.entry("prefill", prefill, tokens=tokens, lengths=export.spec("b", "int32"))
    program = program.entry("decode", decode, token=export.spec("b, 1", "int32"), cache=cache)
    program = program.entry(
        "train_step",
        train_step,
        tokens=tokens,
        labels=tokens,
        key=jax.eval_shape(lambda: jax.random.key(0)),
    )
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (2, 5)).astype(np.int32)
    lengths = np.array([5, 3], np.int32)
    program.save(tmp_path / "gpt.fnet", tests={"prefill": {"tokens": rows, "lengths": lengths}})
    bundle = export.load(tmp_path / "gpt.fnet", check=True)
    assert bundle.entries == ("predict", "prefill", "decode", "train_step")

    first = bundle.call("prefill", rows, lengths)
    token = np.argmax(first["logits"][np.arange(2), lengths - 1], -1).astype(np.int32)
    got = bundle.call("decode", token[:, None], first["cache"])["logits"]
    for row, length in enumerate(lengths):
        text = np.append(rows[row, :length], token[row])[None].astype(np.int32)
        np.testing.assert_allclose(got[row, 0], model(params, text)[0, -1], rtol=1e-5, atol=1e-6)

    losses, weights = [], bundle.weights
    for _ in range(3):
        out = bundle.function("train_step")(weights, rows[:, :-1], rows[:, 1:], jax.random.key(0))
        weights = {"params": out["params"]}
        losses.append(float(out["loss"]))
    assert losses[0] > losses[1] > losses[2]


def test_preprocessing_and_postprocessing(tmp_path):
    params, state = DIGITS.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
    program = export.program(DIGITS, params, state, x=export.spec("b, 8, 8, 1"))
    program = program.entry(
        "preprocess",
        lambda params, image: image.astype(jnp.float32)[..., None] / 16,
        image=export.spec("b, 8, 8", "uint8"),
    )
    program = program.entry(
        "postprocess",
        lambda params, logits: {
            "class": jnp.argmax(logits, -1),
            "probabilities": jax.nn.softmax(logits),
        },
        logits=export.spec("b, 10"),
    )
    program.save(tmp_path / "digits.fnet")
    image = np.random.default_rng(0).integers(0, 17, (3, 8, 8)).astype(np.uint8)
    out = export.load(tmp_path / "digits.fnet", check=True).run(image)
    logits = DIGITS(params, image[..., None] / np.float32(16), state=state)[0]
    assert out["class"].tolist() == logits.argmax(-1).tolist()
    close(out["probabilities"], jax.nn.softmax(logits), 1e-6)


@pytest.mark.exhaustive
def test_gradients_of_a_differentiable_bundle(tmp_path):
    _, params, state = digits(tmp_path / "digits.fnet", differentiable=True)
    bundle = export.load(tmp_path / "digits.fnet")
    f, x = (
        bundle.function("predict"),
        np.random.default_rng(0).normal(size=(2, 8, 8, 1)).astype(np.float32),
    )
    got = jax.jit(jax.grad(lambda w: jnp.square(f(w, x)).sum()))(dict(bundle.weights))
    want = jax.grad(lambda params: jnp.square(DIGITS(params, x, state=state)[0]).sum())(params)
    close(got["params/head/kernel"], want["head"]["kernel"], 1e-5)


@pytest.mark.exhaustive
def test_named_tuples_are_read_as_dicts(tmp_path):
    bert = models.Bert(VOCABULARY, 8, 1, 2, 16, context=CONTEXT)
    params, _ = bert.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))
    program = export.program(
        bert,
        params,
        tokens=export.spec("b, t", "int32", where=f"t <= {CONTEXT}"),
        lengths=export.spec("b", "int32"),
    )
    tokens, lengths = np.ones((2, 3), np.int32), np.array([3, 2], np.int32)
    program.save(tmp_path / "bert.fnet", tests={"predict": {"tokens": tokens, "lengths": lengths}})
    out = export.load(tmp_path / "bert.fnet", check=True)(tokens=tokens, lengths=lengths)
    close(out["pooled"], bert(params, tokens, lengths).pooled, 1e-6)


@pytest.mark.exhaustive
def test_implicit_arrays_are_kept(tmp_path):
    """Here a leaf of fnet's: a tree of plain arrays with its own product. The bundle holds the
    8-bit numbers."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Quantized:
        numbers: jax.Array
        scale: jax.Array

    kernel = Quantized(
        jnp.arange(-6, 6, dtype=jnp.int8).reshape(4, 3), jnp.float32([0.1, 0.2, 0.3])
    )
    f = lambda params, x: (
        x @ (params["kernel"].numbers.astype(jnp.float32) * params["kernel"].scale[None])
    )
    export.program(f, {"kernel": kernel}, x=export.spec("b, 4")).save(tmp_path / "f")
    bundle = export.load(tmp_path / "f", check=True)
    assert bundle.weights["params/kernel/numbers"].dtype == np.int8
    x = np.ones((2, 4), np.float32)
    close(bundle(x), f({"kernel": kernel}, x), 1e-6)


def test_of_autocast(tmp_path):
    f, params, _, shapes = build("GPT")
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    program = export.program(ft.autocast(f, "bfloat16"), params, **specs_of("GPT"))
    x = inputs("GPT", shapes[0])
    program.save(tmp_path / "gpt.fnet", tests={"predict": {f"x{i}": a for i, a in enumerate(x)}})
    bundle = export.load(tmp_path / "gpt.fnet")
    assert {str(x.dtype) for name, x in bundle.weights.items() if name.startswith("params/")} == {
        "bfloat16"
    }
    close(bundle(*x), jax.jit(ft.autocast(f, "bfloat16"))(params, *x), 1e-6)
    close(bundle.interpret("predict", *x), bundle(*x), 2e-2)  # NumPy rounds to bfloat16 elsewhere


def test_a_function_without_a_signature():
    """It gets the state, and its inputs by position."""

    def f(params, x, state):
        return x * params + state, state

    f.__signature__ = "unknown"
    program = export.program(f, jnp.float32(2), jnp.float32(3), x=export.spec("b"))
    (y,) = program.call("predict", np.ones(2, np.float32))
    assert y.tolist() == [5, 5]


def test_kernels_of_a_platform(tmp_path):
    attend = lambda params, x: nn.dot_product_attention(x, x, x, causal=True)
    program = export.program(attend, {}, x=jax.ShapeDtypeStruct((2, 512, 2, 64), jnp.bfloat16))
    program.save(tmp_path / "f", kernels=("cuda",))
    bundle = export.load(tmp_path / "f", kernels=True)
    calls = bundle.manifest["entries"]["predict"]["custom_calls"]
    assert calls == {"portable": [], "cuda": ["__cudnn$fmhaSoftmax"]}
    assert "cuDNN 9.5" in bundle.manifest["requires"]["cuda"]
    assert _write._requirements("tpu").startswith("a tpu device, and jaxlib ")
    assert bundle.check()  # with the portable program, because this platform has no other


def test_tokenizer_files(path, tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    digits(tmp_path / "f", tokenizer=tmp_path / "vocab.txt")
    assert export.load(tmp_path / "f").files("tokenizer") == {"vocab.txt": b"[PAD]\n[UNK]\n"}
    (tmp_path / "weights.pkl").write_text("")
    with pytest.raises(ValueError, match=r"weights.pkl is no file of a tokenizer"):
        digits(tmp_path / "g", tokenizer=[tmp_path / "weights.pkl"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (np.ones((2, 9), np.int32),),
            "t = 9 (axis 1 of the input 'tokens') violates the constraint t <= 8",
        ),
        ((np.ones((2, 3), np.float32),), "the input 'tokens' has dtype float32, expected int32"),
        ((np.ones(2, np.int32),), "the input 'tokens' has shape (2,), expected int32[b, t]"),
        (
            (np.ones((0, 3), np.int32),),
            "axis 0 of the input 'tokens' has size 0; b must be at least 1",
        ),
        (
            (np.ones((2, 3), np.int32), np.ones(3, np.int32)),
            "the input 'lengths' has shape (3,), expected int32[b]: axis 0 has size 3, expected b "
            "= 2, as in axis 0 of the input 'tokens'",
        ),
        ((1, 2, 3), "(tokens, lengths) got 3 inputs"),
    ],
)
def test_calls_that_violate_the_signature(gpt, args, message):
    with pytest.raises(export.BundleError) as caught:
        gpt(*args, **({"lengths": np.ones(2, np.int32)} if len(args) == 1 else {}))
    assert message in str(caught.value)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt") / "gpt.fnet"
    params, _ = UNSTACKED.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))
    export.program(
        UNSTACKED,
        params,
        tokens=export.spec("b, t", "int32", where=f"t <= {CONTEXT}"),
        lengths=export.spec("b", "int32"),
    ).save(path)
    return export.load(path)


def test_names_of_inputs_and_entries(gpt):
    assert repr(gpt) == f"<Bundle {gpt.signature('predict')}>"
    with pytest.raises(export.BundleError, match=r"\(tokens, lengths\) lacks the input 'lengths'"):
        gpt(np.ones((1, 2), np.int32))
    with pytest.raises(export.BundleError, match=r"got the unexpected or repeated input 'length'"):
        gpt(np.ones((1, 2), np.int32), length=1)
    with pytest.raises(export.BundleError, match=r"has no entry point 'embed'; it has predict"):
        gpt.call("embed", 1)


def test_invalid_programs():
    f = lambda params, x: x
    with pytest.raises(TypeError, match=r"export.program: expected the type of each input by name"):
        export.program(f, {})
    with pytest.raises(TypeError, match=r"export: expected an input type, export.spec"):
        export.program(f, {}, x="float32")
    with pytest.raises(
        ValueError, match=r"export.spec: 'b,, 3' is no shape, such as 'b, 28, 28, 1'"
    ):
        export.spec("b,, 3")
    normed = nn.BatchNorm()
    params, state = normed.init(jax.random.key(0), jnp.ones((2, 3)))
    by_name = export.program(normed, params, state=state, x=export.spec("b, 3"))
    assert [name for name, _ in by_name.entries["predict"].inputs] == ["x"]
    assert repr(by_name) == "<Program predict(x: float32[b, 3]) -> float32[b, 3]>"
    with pytest.raises(ValueError, match=r"expected tests as {entry point: {input: array}}"):
        by_name.save("f", tests=[{"x": np.ones((1, 3))}])
    with pytest.raises(ValueError, match=r"export.spec: 'h = 4' is no constraint; expected a comp"):
        export.spec("b, h", where="h = 4")
    with pytest.raises(Exception, match="floordiv") as raised:
        halves = lambda params, x: x[:, ::2] + x[:, 1::2]
        export.program(halves, {}, x=export.spec("b, h", where="h % 2 == 0"))
    assert "write the factor into the shape" in raised.value.__notes__[-1]
    export.program(halves, {}, x=export.spec("b, 2*h"))
    with pytest.raises(ValueError, match=r"export.spec: 'float31' is no dtype"):
        export.spec("b", "float31")
    with pytest.raises(
        TypeError, match=r"no parameter 'mask'; name all inputs as its parameters \(x\) or none"
    ):
        export.program(f, {}, x=export.spec("b"), mask=export.spec("b"))
    program = export.program(f, {}, x=export.spec("b"))
    for name, what in ("predict", "exists already"), ("a b", "must be a Python identifier"):
        with pytest.raises(ValueError, match=f"the entry point '{name}' {what}"):
            program.entry(name, f, x=export.spec("b"))
    key = jax.random.key(0)
    with pytest.raises(TypeError, match=r"closes over a random key; pass the key as an input"):
        export.program(
            lambda params, x: x + jax.random.normal(key, (1, 2)), {}, x=export.spec("b, 2")
        )
    with pytest.raises(ValueError, match=r"expected platforms among cpu, cuda, tpu"):
        program.save("f", kernels=("gpu",))


def opened(path):
    """The archive, its manifest, and its files other than tensors, to write them again."""
    archive = _reader.Archive(path)
    manifest = {name: x for name, x in archive.manifest.items() if name != "files"}
    names = [
        name for name in archive.names() if not name.endswith((".safetensors", "manifest.json"))
    ]
    return archive, manifest, {name: archive.read(name) for name in names}


def test_a_check_that_fails(path, tmp_path):
    """Another model's weights under the same digests: the outputs in the file do not match."""
    archive, manifest, files = opened(path)
    weights = {
        name: x + np.float32(0.01) for name, x in archive.tensors("weights.safetensors").items()
    }
    _write.write(
        tmp_path / "f",
        manifest,
        files,
        {"weights.safetensors": weights, "tests.safetensors": archive.tensors("tests.safetensors")},
    )
    with pytest.raises(
        export.BundleError, match="'predict' computed with JAX, the output '0' differs"
    ):
        export.load(tmp_path / "f", check=True)


def test_a_program_that_jax_no_longer_reads(path, tmp_path):
    """It is refused with the reason, and NumPy computes the output."""
    archive, manifest, files = opened(path)
    files["programs/predict.portable.jax"] = files["programs/predict.portable.jax"][::-1]
    tensors = {name: archive.tensors(name) for name in ("weights.safetensors", "tests.safetensors")}
    _write.write(tmp_path / "f", {**manifest, "read_until": "2020-01-01"}, files, tensors)
    bundle, x = export.load(tmp_path / "f"), np.ones((2, 8, 8, 1), np.float32)
    with pytest.raises(
        export.BundleError,
        match=r"cannot read programs/predict.portable.jax .* until 2020-01-01. "
        r"fnet bundle renew .* for the installed version, and Bundle.interpret runs it with NumPy",
    ):
        bundle(x)
    close(bundle.interpret("predict", x), export.load(path)(x), 1e-5)


def test_the_manifest_is_plain_json(path):
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read("manifest.json"))
        assert archive.testzip() is None
    assert set(manifest["files"]) == set(archive.namelist()) - {"manifest.json"}
