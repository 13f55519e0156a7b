"""Bundles with dtypes of 64 bits, with and without jax_enable_x64; bundles of a later JAX; values
that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_bundles import digits, opened

from fnet import cli, export
from fnet.export import _evaluate, _write
from fnet.serve._model import Model

pytestmark = pytest.mark.usefixtures("quickly")
NAMES = r"has the dtype {}, which JAX narrows without jax_enable_x64.*jax.config.update\('jax_enable_x64', True\)"
THIRD = np.float64(1) / 3

# name -> (function of the weight and of x, weight, dtype and values of x, the dtype that the error
# names)
WIDE = {
    "float64": (lambda p, x: jnp.cumsum(x * p), THIRD, "float64", np.arange(4.0) * 1e-9, "float64"),
    "int64": (lambda p, x: x + p, np.int64(2**40 + 1), "int64", np.array([2**41, -5, 7]), "int64"),
    "uint64": (
        lambda p, x: x + p,
        np.uint64(2**63 + 1),
        "uint64",
        np.array([2**62, 3], np.uint64),
        "uint64",
    ),
    "weights": (
        lambda p, x: x * p.astype(jnp.float32),
        THIRD,
        "float32",
        np.ones(4, np.float32),
        "float64",
    ),
    "output": (
        lambda p, x: x.astype(jnp.float64) / 3,
        THIRD,
        "float32",
        np.ones(4, np.float32),
        "float64",
    ),
    "mixed": (
        lambda p, x: (x.astype(jnp.float64) * p, x),
        THIRD,
        "int32",
        np.arange(4, dtype=np.int32),
        "float64",
    ),
}
# Programs of narrow signatures that compute in 64 bits: they run without jax_enable_x64.
INSIDE = {
    "constants": (
        lambda p, x: ((x.astype(jnp.float64) + 1) * (1 / 3) - 1 / 3).astype(jnp.float32),
        "float32",
        np.array([1e-9, 3.0], np.float32),
    ),
    "integers": (
        lambda p, x: ((x.astype(jnp.int64) * 2**33) // 2**32).astype(jnp.int32),
        "int32",
        np.array([7, -9], np.int32),
    ),
}


def write(path, f, params, dtype):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        program = export.program(
            lambda p, x: f(p["a"], x), {"a": jnp.asarray(params)}, x=export.spec("n", dtype)
        )
        program.save(path)


def wanted(f, params, x):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        return [np.asarray(y) for y in jax.tree.leaves(f(jnp.asarray(params), jnp.asarray(x)))]


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        assert np.asarray(a).dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-15, atol=0)


@pytest.mark.quick_cases("float64", "int64", "mixed")
@pytest.mark.parametrize("name", WIDE)
def test_wide_bundles_need_x64(name, tmp_path):
    f, params, dtype, x, named = WIDE[name]
    write(tmp_path / "f", f, params, dtype)
    export.renew(tmp_path / "f", tmp_path / "g")
    if name == "float64":
        assert (
            cli.main(["bundle", "renew", str(tmp_path / "f"), "--output", str(tmp_path / "g")]) == 0
        )
    for path in tmp_path / "f", tmp_path / "g":
        needs_x64(path, x, NAMES.format(named), wanted(f, params, x))
        assert export.load(path).weights["params/a"].dtype == np.asarray(params).dtype


def needs_x64(path, x, error, want):
    bundle = export.load(path)
    for call in (
        lambda: bundle(x),
        lambda: bundle.function("predict")(bundle.weights, x),
        lambda: export.load(path, check=True),
        lambda: Model("m", "1", bundle, "predict", 8, {}).compute([x]),
    ):
        with pytest.raises(export.BundleError, match=error):
            call()
    same(bundle.interpret("predict", x), want)
    with jax.enable_x64(True):
        same(export.load(path, check=True)(x), want)
        same(Model("m", "1", export.load(path), "predict", 8, {}).compute([x]), want)


@pytest.mark.parametrize("name", INSIDE)
def test_64_bits_inside_of_a_program(name, tmp_path):
    f, dtype, x = INSIDE[name]
    write(tmp_path / "f", f, np.float32(0), dtype)
    export.renew(tmp_path / "f", tmp_path / "g")
    want = wanted(f, np.float32(0), x)
    for path in tmp_path / "f", tmp_path / "g":
        bundle = export.load(path, check=True)
        for got in (
            bundle(x),
            bundle.interpret("predict", x),
            Model("m", "1", bundle, "predict", 8, {}).compute([x])[0],
            _evaluate.function(bundle, "predict", {"n": 2})(bundle.weights, [x])[0],
        ):
            same(got, want)


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_wide_inputs_without_x64(dtype):
    with pytest.raises(
        ValueError,
        match=rf"export.program: the input 'x' has dtype {dtype}, which JAX narrows to \w+ "
        "without jax_enable_x64",
    ):
        export.program(lambda p, x: x + x, {}, x=export.spec("b", dtype))


def test_complex_numbers_of_128_bits_are_refused(tmp_path):
    with (
        jax.enable_x64(True),
        pytest.raises(
            ValueError, match="has dtype complex128, which safetensors files cannot hold"
        ),
    ):
        export.program(
            lambda p, x: x * p, jnp.complex128(1j), x=export.spec("n", "complex128")
        ).save(tmp_path / "f")


def test_wide_weights_without_x64(tmp_path):
    """JAX computes with them in 32 bits, so the bundle has 32 bits; integers that do not fit are
    refused."""
    program = export.program(
        lambda p, x: x * p["a"], {"a": np.array([[THIRD]])}, x=export.spec("b, 1")
    )
    program.save(tmp_path / "f")
    bundle = export.load(tmp_path / "f", check=True)
    assert bundle.weights["params/a"].dtype == np.float32
    assert float(bundle(np.ones((1, 1), np.float32))[0, 0]) == np.float32(1 / 3)
    with pytest.raises(
        ValueError,
        match="the weight 'params/a' has dtype int64 and the value 1099511627776, which int32 cannot hold",
    ):
        export.program(
            lambda p, x: x * p["a"][0], {"a": np.array([2**40])}, x=export.spec("b", "int32")
        )


# (dtype of the signature, dtype of the input, values that it accepts, a value that it cannot hold)
VALUES = [
    ("int32", "int64", [2**31 - 1, -(2**31), 0], 2**31),
    ("int32", "int64", [], 2**40 + 1),
    ("int32", "uint32", [5], 2**32 - 1),
    ("int32", "uint64", [5], 2**63),
    ("int8", "int32", [-128, 127], 128),
    ("uint32", "uint64", [2**32 - 1], 2**32),
    ("float32", "float64", [0.1, np.inf], 1e39),
    ("float32", "int64", [2**40, 3], 2**40 + 1),
    ("float16", "float32", [65504.0, np.nan], 7e4),
    ("float16", "int32", [2048, 4096], 4097),
    ("float32", "uint64", [2**63], 2**63 + 1),
]


@pytest.mark.parametrize(
    "dtype, given, fit, too_large",
    VALUES,
    ids=[f"{a} from {b} {i}" for i, (a, b, _, _) in enumerate(VALUES)],
)
def test_values_that_an_input_cannot_hold(dtype, given, fit, too_large, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / f"identity_{dtype}"
    if not path.exists():
        export.program(
            lambda p, x: x * jnp.asarray(1, x.dtype), {}, x=export.spec("b", dtype)
        ).save(path)
    bundle = export.load(path)
    if fit:
        x = np.array(fit, given)
        for got in bundle(x), bundle.interpret("predict", x):
            assert got.dtype == dtype
            np.testing.assert_array_equal(
                np.asarray(got, np.float64), x.astype(dtype).astype(np.float64)
            )
    for call in bundle, lambda x: bundle.interpret("predict", x):
        with pytest.raises(
            export.BundleError,
            match=rf"the input 'x' has dtype {given} and the value .*, which {dtype} "
            "cannot hold",
        ):
            call(np.array([1, too_large], given))


def test_traced_integers_are_not_narrowed(tmp_path):
    export.program(lambda p, x: x + 1, {}, x=export.spec("b", "int8")).save(tmp_path / "f")
    f = export.load(tmp_path / "f").function("predict")
    with pytest.raises(
        export.BundleError,
        match=r"dtype int32, expected int8; inside of a transformation of JAX, convert",
    ):
        jax.jit(lambda x: f({}, x))(jnp.arange(3))
    assert jax.jit(lambda x: f({}, x.astype("int8")))(jnp.arange(3)).tolist() == [1, 2, 3]


def test_a_bundle_of_a_later_jax(tmp_path, capsys):
    """JAX 0.10 does not read what JAX 0.12 writes. Every way to run it names both versions and the
    remedy."""
    digits(tmp_path / "f")
    archive, manifest, files = opened(tmp_path / "f")
    files["programs/predict.portable.jax"] = b"a later format"
    manifest["versions"]["jax"] = "99.1.2"
    tensors = {name: archive.tensors(name) for name in ("weights.safetensors", "tests.safetensors")}
    _write.write(tmp_path / "f", manifest, files, tensors)
    x, path = np.ones((1, 8, 8, 1), np.float32), tmp_path / "f"
    bundle = export.load(path)
    message = (
        rf"was written by JAX 99.1.2, and the installed JAX {jax.__version__} cannot read "
        rf".*fnet bundle renew {path}"
    )
    for call in (
        lambda: bundle(x),
        lambda: bundle.function("predict"),
        lambda: export.load(path, check=True),
    ):
        with pytest.raises(export.BundleError, match=message):
            call()
    want = bundle.interpret("predict", x)
    np.testing.assert_allclose(
        Model("m", "1", bundle, "predict", 8, {}).compute([x])[0], want, rtol=1e-4, atol=1e-6
    )
    assert cli.main(["bundle", "check", str(path)]) == 1
    assert "JAX 99.1.2" in capsys.readouterr().out
    export.renew(path)
    np.testing.assert_allclose(export.load(path, check=True)(x), want, rtol=1e-4, atol=1e-6)


def test_a_later_jax_with_an_unknown_operation(tmp_path, monkeypatch):
    """Some programs can be read, but not compiled."""
    digits(tmp_path / "f")
    bundle = export.load(tmp_path / "f")
    bundle.manifest["versions"]["jax"] = "99.1.2"

    def fails(*args):
        raise RuntimeError("unregistered operation")

    monkeypatch.setattr(bundle, "_program", lambda entry: fails)
    with pytest.raises(
        export.BundleError,
        match=r"written by JAX 99.1.2.*unregistered operation.*fnet bundle renew",
    ):
        bundle(np.ones((1, 8, 8, 1), np.float32))
    bundle.manifest["versions"]["jax"] = jax.__version__
    with pytest.raises(RuntimeError, match="unregistered operation"):
        bundle(np.ones((1, 8, 8, 1), np.float32))
