"""Products of a few rows with matrices of codes of 4 and 8 bits."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import compress, native
from fnet import transforms as ft
from fnet.native import _packed, _primitive
from tests.checks import close, same

pytestmark = pytest.mark.usefixtures("small_products")


@pytest.fixture
def small_products(monkeypatch):
    monkeypatch.setattr(_packed, "CODES", 1)


@pytest.fixture(scope="module")
def kernels():
    if not native.library():
        pytest.skip(native.library().reason)


FORMATS = {
    "int4": compress.Int4(None),
    "int4 in groups": compress.Int4(6),
    "nf4 in groups": compress.NF4(2),
    "int8": compress.Int8(),
    "int8 in groups": compress.Int8(3),
}


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1, shape), dtype)


def quantized(format, wide, inputs, outputs, dtype=jnp.float32):
    values = normal(0, *((inputs, outputs) if wide else (outputs, inputs)), dtype=dtype)
    format = dataclasses.replace(format, axes=-2 if wide else -1)
    return compress.quantize({"kernel": values}, {"kernel": format})["kernel"]


def product(x, w):
    """As a layer or a table of logits writes it."""
    wide = w.shape[0] == x.shape[-1]
    return x @ w if wide else jnp.einsum("...k,nk->...n", x, w)


def exact(x, w):
    return product(
        np.asarray(x, np.float64), np.asarray(compress.materialize({"w": w})["w"], np.float64)
    )


def calls(f, *args):
    return f.lower(*args).compile().as_text().count('custom_call_target="fnet_packed')


SIZES = [(12, 5), (36, 16), (66, 143), (258, 300)]


@pytest.mark.quick_cases(4)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("wide", [True, False], ids=["wide", "long"])
@pytest.mark.parametrize("format", FORMATS)
def test_values(format, wide):
    f = jax.jit(ft.use_implicit_arrays(product))
    for (inputs, outputs), rows in itertools.product(SIZES, ((), (1,), (2, 3), (8,))):
        w, x = quantized(FORMATS[format], wide, inputs, outputs), normal(1, *rows, inputs)
        y = f(x, w)
        assert calls(f, x, w) == 1
        np.testing.assert_allclose(y, exact(x, w), rtol=0, atol=1e-5 * np.abs(exact(x, w)).max())


@pytest.mark.usefixtures("kernels")
def test_bfloat16():
    w = quantized(compress.Int4(6), True, 36, 40, jnp.bfloat16)
    x = normal(1, 2, 36, dtype=jnp.bfloat16)
    y = jax.jit(ft.use_implicit_arrays(product))(x, w)
    assert y.dtype == jnp.bfloat16
    close(y.astype(jnp.float32), jnp.asarray(exact(x, w), jnp.float32), 1e-2)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("wide", [True, False], ids=["wide", "long"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_reach_all_outputs_of_their_row(wide, value):
    w = quantized(compress.Int4(6), wide, 36, 21)
    x = normal(1, 3, 36).at[1, 7].set(value)
    y = jax.jit(ft.use_implicit_arrays(product))(x, w)
    want = jax.jit(product)(x, w.materialize())
    np.testing.assert_array_equal(np.isfinite(y), np.isfinite(want))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(want))


def test_derivatives_and_other_transformations():
    f, w = ft.use_implicit_arrays(product), quantized(compress.Int4(6), True, 36, 20)
    x, plain = normal(1, 2, 36), w.materialize()
    loss = lambda f, w: lambda x: jnp.square(f(x, w)).sum()
    close(jax.grad(loss(f, w))(x), jax.grad(loss(product, plain))(x))
    close(jax.hessian(loss(f, w))(x[0]), jax.hessian(loss(product, plain))(x[0]))
    close(jax.vmap(lambda x: f(x, w))(x), product(x, plain))
    scales = jax.grad(lambda s: jnp.sum(f(x, dataclasses.replace(w, scale=s)) ** 2))(w.scale)
    values = lambda s: dataclasses.replace(w, scale=s).materialize()
    close(scales, jax.grad(lambda s: jnp.sum(product(x, values(s)) ** 2))(w.scale))
    half = ft.autocast(f, "bfloat16")(x, w)
    close(half.astype(jnp.float32), product(x, plain), 2e-2)


def test_layers_in_a_scan():
    stacked = compress.quantize({"kernel": normal(0, 3, 12, 12)}, {"kernel": compress.Int4(6)})

    def f(x, params):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["kernel"])[0]

    x = normal(1, 2, 12)
    close(jax.jit(ft.use_implicit_arrays(f))(x, stacked), f(x, compress.materialize(stacked)))


@pytest.mark.usefixtures("kernels")
def test_an_exported_program_is_portable():
    f, w = jax.jit(ft.use_implicit_arrays(product)), quantized(compress.Int4(6), True, 36, 20)
    x = normal(1, 2, 36)
    leaves, tree = jax.tree.flatten(w)
    g = jax.jit(
        lambda x, *leaves: ft.use_implicit_arrays(product)(x, jax.tree.unflatten(tree, leaves))
    )
    exported = jax.export.export(g)(x, *leaves)
    assert "fnet_packed" not in exported.mlir_module()
    close(exported.call(x, *leaves), f(x, w))


@pytest.mark.usefixtures("kernels")
def test_results_repeat_bit_for_bit_and_rows_do_not_depend_on_each_other():
    f, w = jax.jit(ft.use_implicit_arrays(product)), quantized(compress.Int4(6), True, 258, 300)
    x = normal(1, 8, 258)
    first = f(x, w)
    same(f(x, w), first)
    for row in range(8):
        same(f(x[row : row + 1], w)[0], first[row])


def test_many_rows_and_other_formats_are_left_to_xla():
    w = quantized(compress.Int8(), True, 36, 20)
    f = lambda x, w: str(jax.make_jaxpr(ft.use_implicit_arrays(product))(x, w))
    assert "packed_product" in f(normal(1, 8, 36), w)
    assert "packed_product" not in f(normal(1, 9, 36), w)
    half = quantized(compress.Int8(), True, 36, 20, jnp.float16)
    assert "packed_product" not in f(normal(1, 2, 36, dtype=jnp.float16), half)
    for other in (compress.Int8(activations="dynamic"), compress.Float8()):
        assert "packed_product" not in f(normal(1, 2, 36), quantized(other, True, 36, 20))


def test_without_a_compiler(monkeypatch):
    nothing = native.Library(None, "there is no C++ compiler", "")
    monkeypatch.setattr(_primitive, "library", lambda: nothing)
    w, x = quantized(compress.Int4(6), True, 36, 26), normal(1, 2, 36)
    f = jax.jit(ft.use_implicit_arrays(product))
    close(f(x, w), product(x, w.materialize()))
    assert calls(f, x, w) == 0


def test_small_matrices_are_left_to_xla(monkeypatch):
    monkeypatch.undo()
    x = normal(1, 256)
    for format, outputs in ((compress.Int4(None), 256), (compress.Int8(), 256)):
        for count, wanted in ((outputs - 1, False), (outputs, True)):
            w = quantized(format, True, 256, count)
            assert native.suits(x, w.codes) == wanted, (format, count)
