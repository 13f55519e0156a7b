"""Products of a few rows with matrices of parameters."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import native
from fnet import transforms as ft
from fnet.native import _skinny
from tests.checks import close, same


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    monkeypatch.setattr(_skinny, "ELEMENTS", 1)


@pytest.fixture(autouse=True)
def kernels():
    if not native.library():
        pytest.skip(native.library().reason)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1, shape), dtype)


FORMS = {
    "wide": lambda x, w: x @ w,
    "long": lambda x, w: jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ()))),
    "transposed": lambda x, w: x @ w.T,
}


def matrix(form, inputs, outputs, dtype=jnp.float32):
    return normal(0, *((inputs, outputs) if form == "wide" else (outputs, inputs)), dtype=dtype)


def exact(form, x, w):
    x, w = (np.asarray(each, np.float64) for each in (x, w))
    return x @ (w if form == "wide" else w.T)


def calls(f, *args):
    return f.lower(*args).compile().as_text().count('custom_call_target="fnet_skinny')


SIZES = [(1, 1), (12, 5), (36, 48), (66, 143), (130, 300)]
ROWS = ((2,), (3, 1), (8,), (13,), (2, 16))


@pytest.mark.parametrize("form", FORMS)
def test_values(form):
    f = jax.jit(ft.tune(FORMS[form]))
    for (inputs, outputs), rows in itertools.product(SIZES, ROWS):
        x, w = normal(1, *rows, inputs), matrix(form, inputs, outputs)
        want = exact(form, x, w)
        np.testing.assert_allclose(f(x, w), want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert calls(f, x, w) == 1


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_summed_in_float32(form):
    f = jax.jit(ft.tune(FORMS[form]))
    x, w = (
        normal(1, 5, 300, dtype=jnp.bfloat16),
        matrix(form, 300, 70, jnp.bfloat16),
    )
    y, want = f(x, w), exact(form, x, w)
    assert y.dtype == jnp.bfloat16 and calls(f, x, w) == 1
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_stay_where_xla_has_them(form, value):
    x, w = normal(1, 9, 36).at[4, 7].set(value), matrix(form, 36, 53).at[2, 3].set(value)
    y, want = jax.jit(ft.tune(FORMS[form]))(x, w), FORMS[form](x, w)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(want))
    np.testing.assert_array_equal(np.isposinf(y), np.isposinf(want))
    np.testing.assert_array_equal(np.isneginf(y), np.isneginf(want))


@pytest.mark.parametrize("form", FORMS)
def test_rows_do_not_depend_on_each_other_and_repeat_bit_for_bit(form):
    f = jax.jit(ft.tune(FORMS[form]))
    x, w = normal(1, 15, 258), matrix(form, 258, 300)
    first = f(x, w)
    same(f(x, w), first)
    for some in (slice(0, 2), slice(3, 10), slice(12, 15)):
        same(f(x[some], w), first[some])


def test_gradients_maps_and_exports_are_portable():
    f, x, w = ft.tune(FORMS["wide"]), normal(1, 4, 36), normal(0, 36, 20)
    loss = lambda f: lambda x, w: jnp.square(f(x, w)).sum()
    for got, want in zip(
        jax.grad(loss(f), (0, 1))(x, w), jax.grad(loss(FORMS["wide"]), (0, 1))(x, w)
    ):
        close(got, want)
    close(jax.vmap(f, (0, None))(x.reshape(2, 2, 36), w), (x @ w).reshape(2, 2, 20))
    exported = jax.export.export(jax.jit(f))(x, w)
    assert "fnet_skinny" not in exported.mlir_module()
    close(exported.call(x, w), x @ w)


def test_layers_in_a_scan():
    def f(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    x, w = normal(1, 5, 40), normal(0, 3, 40, 40)
    close(jax.jit(ft.tune(f))(x, w), f(x, w))


def test_what_is_left_to_xla():
    x, w = normal(1, 4, 36), normal(0, 36, 20)
    f = jax.jit(ft.tune(lambda x, w: x @ w))
    assert calls(f, x, w) == 1
    assert calls(f, x[:1], w) == 0  # a single row
    assert calls(f, jnp.ones((33, 36)), w) == 0
    assert calls(f, x.astype(jnp.float16), w.astype(jnp.float16)) == 0
    assert calls(jax.jit(ft.tune(lambda x, w: x @ jnp.sin(w))), x, w) == 0  # not stored
    many = jax.jit(ft.tune(lambda x, w: jnp.einsum("bik,bkj->bij", x, w)))
    assert calls(many, normal(1, 3, 4, 36), normal(0, 3, 36, 20)) == 0
    with jax.enable_x64(True):
        assert (
            calls(f, normal(1, 4, 36, dtype=jnp.float64), normal(0, 36, 20, dtype="float64")) == 0
        )
