"""Pooling, NaN and Inf: rules of tune leave every value where XLA puts it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tune_cases import EVERY, NAMES, STEPS, fired, normal, only

from fnet import transforms as ft
from fnet.transforms._tune import _library

pytestmark = [
    pytest.mark.usefixtures("every_size"),
    pytest.mark.filterwarnings("ignore:tune. the compiler options"),
]  # tested in test_tune_calls
ELSEWHERE = (
    "bfloat16_products",  # test_tune_bfloat16
    "convolution_library",  # test_tune_library
    "native_convolution",  # test_tune_native
    "native_product",  # native/test_skinny_product
    "native_recurrence",  # native/test_recurrent_kernels
    "summed_products",  # test_tune_accumulated
)


def pooled(x, window, g):
    def pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, *window, 1), (1, *window, 1), "VALID")

    y, back = jax.vjp(pool, x)
    return y, back(g)[0]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("window", [(2, 2), (3, 2), (1, 4)])
@pytest.mark.parametrize("kind", ["ties", "nan", "inf"])
def test_pooling_is_that_of_xla_bit_for_bit(window, kind):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 3, (4, 6, 12, 5)).astype(np.float32)
    if kind == "nan":
        x[rng.random(x.shape) < 0.3] = np.nan
    if kind == "inf":
        x = np.where(
            rng.random(x.shape) < 0.3, -np.inf, np.where(rng.random(x.shape) < 0.3, np.inf, x)
        )
    g = rng.normal(size=(4, 6 // window[0], 12 // window[1], 5)).astype(np.float32)
    args = jnp.asarray(x, jnp.float32), jnp.asarray(g)
    f = lambda x, g: pooled(x, window, g)
    assert fired(f, *args) == {"max_pool", "max_pool_gradient"}
    for got, want in zip(ft.tune(f, "cpu")(*args), jax.jit(f)(*args)):
        np.testing.assert_array_equal(got, want)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("window", "shape"),
    [
        ((1, 1, 2, 2), (2, 3, 6, 8)),
        ((1, 1, 2, 3, 1), (2, 1, 6, 6, 3)),
        ((1, 2, 2), (2, 6, 6)),
        ((2, 2, 2, 1), (2, 6, 6, 3)),
        ((4, 4), (8, 12)),
    ],
)
def test_pooling_along_other_axes(window, shape):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 3, shape), jnp.float32)
    g = normal(1, *(size // k for size, k in zip(shape, window)))

    def f(x, g):
        y, back = jax.vjp(
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID"), x
        )
        return y, back(g)[0]

    assert fired(f, x, g) == {"max_pool", "max_pool_gradient"}
    for got, want in zip(ft.tune(f, "cpu")(x, g), jax.jit(f)(x, g)):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("window", "strides", "padding", "shape"),
    [
        ((1, 3, 3, 1), (1, 2, 2, 1), "SAME", (2, 6, 6, 3)),  # windows overlap
        ((1, 2, 2, 1), (1, 2, 2, 1), "VALID", (2, 7, 6, 3)),  # a row is left over
        ((1, 6, 3, 1), (1, 6, 3, 1), "VALID", (2, 12, 12, 1)),  # too many places
        ((1, 1, 1, 1), (1, 1, 1, 1), "VALID", (2, 6, 6, 3)),  # nothing is pooled
    ],
)
def test_other_poolings_are_left_alone(window, strides, padding, shape):
    f = jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding).sum())
    assert not fired(f, normal(1, *shape)) & {"max_pool", "max_pool_gradient"}


# NaN and Inf.


@pytest.mark.quick_cases("nan-cnn")
@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_stay_where_they_were(name, bad):
    """One bad example among the gradients of each: no other's is touched."""
    step, (params, x) = STEPS[name]()
    x = x.at[1].set(bad)
    each = lambda params, x: jax.vmap(lambda row: step(params, row[None]))(x)
    for got, want in zip(
        jax.tree.leaves(ft.tune(each, "cpu")(params, x)), jax.tree.leaves(jax.jit(each)(params, x))
    ):
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.quick_cases("kernel_layout")
@pytest.mark.parametrize("rule", [name for name in NAMES if name not in ELSEWHERE])
def test_one_bad_number_spreads_no_further(rule, monkeypatch):
    monkeypatch.setattr(_library, "onednn", lambda: rule == "kernel_layout")
    x, w, g = normal(1, 2, 8, 8, 4), normal(2, 3, 3, 4, 6), normal(3, 2, 8, 8, 6)
    conv = lambda x, w, layout="HWIO": lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", layout, "NHWC")
    )
    back = lambda x: jax.grad(lambda w: jnp.vdot(conv(x, w), g))(w)
    groups = lambda n: (
        lambda x: lax.conv_general_dilated(
            x,
            w[:, :, : 4 // n, :4],
            (1, 1),
            "SAME",
            feature_group_count=n,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    )
    f = {
        "products": lambda x: x.reshape(-1, 4).T @ g.reshape(-1, 6),
        "max_pool": lambda x: pooled(x, (2, 2), g[:, ::2, ::2, :4])[0],
        "max_pool_gradient": lambda x: pooled(x, (2, 2), g[:, ::2, ::2, :4])[1],
        "depthwise_convolution": groups(4),
        "grouped_convolution": groups(2),
        "convolution_gradient": back,
        "small_input": lambda x: conv(x[:, 2:4, 3:5], w),
        "dilated_input": lambda x: lax.conv_transpose(x[:, None], w[None], (1, 2, 2), "SAME"),
        "convolution_kernels": back,
        "kernel_layout": lambda x: conv(*(a.astype(jnp.bfloat16) for a in (x, w.mT)), "HWOI"),
    }[rule]
    assert rule in fired(f, x, rules=EVERY)
    for bad in (np.nan, np.inf, -np.inf):
        broken = x.at[1, 2, 3, 1].set(bad)
        got, want = ft.tune(f, "cpu", rules=only(rule))(broken), jax.jit(f)(broken)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_array_equal(np.isposinf(got), np.isposinf(want))


# Derivatives of a pooling that was tuned first.


def max_pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


DERIVATIVES = {
    "grad": lambda f: jax.grad(lambda x: (f(x) * SLOPES).sum()),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda x: (f(x) * SLOPES).sum())),
    "grad of jit": lambda f: jax.grad(lambda x: (jax.jit(f)(x) * SLOPES).sum()),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (DIRECTION,))[1],
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: (f(x[None]) * SLOPES[:1]).sum())),
    "second": lambda f: (
        lambda x: jax.jvp(jax.grad(lambda x: (f(x) ** 3 * SLOPES).sum()), (x,), (DIRECTION,))[1]
    ),
    "tuned twice": lambda f: jax.grad(lambda x: (ft.tune(f, "cpu")(x) * SLOPES).sum()),
}
SLOPES = jnp.arange(1.0, 9.0).reshape(2, 2, 2, 1)
DIRECTION = jnp.arange(1.0, 33.0).reshape(2, 4, 4, 1)


@pytest.mark.quick_cases("grad", "jvp", "second", "tuned twice")
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_ties_go_to_the_element_that_jax_selects(derivative):
    x = jnp.asarray(np.random.default_rng(1).integers(0, 2, (2, 4, 4, 1)), jnp.float32)
    assert fired(max_pool, x) == {"max_pool"}
    take = DERIVATIVES[derivative]
    got = take(ft.tune(max_pool, "cpu"))(x)
    np.testing.assert_array_equal(got, take(max_pool)(x))
    if derivative == "grad":  # to the first of equal elements, in row-major order
        windows = np.asarray(x).reshape(2, 2, 2, 2, 2).transpose(0, 1, 3, 2, 4).reshape(2, 2, 2, 4)
        expected = np.eye(4)[windows.argmax(-1)] * np.asarray(SLOPES)
        np.testing.assert_array_equal(
            got, expected.reshape(2, 2, 2, 2, 2).transpose(0, 1, 3, 2, 4).reshape(x.shape)
        )


def test_a_pooling_of_integers_in_a_differentiated_function():
    x = jnp.arange(16, dtype=jnp.int32).reshape(1, 4, 4, 1)
    pool = lambda x: lax.reduce_window(
        x, jnp.iinfo(jnp.int32).min, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    )
    f = ft.tune(lambda w, x: (w * pool(x).astype(jnp.float32)).sum(), "cpu")
    assert fired(lambda x: pool(x), x) == {"max_pool"}
    assert jax.grad(f)(2.0, x) == 5 + 7 + 13 + 15
