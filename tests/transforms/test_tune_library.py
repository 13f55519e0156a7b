"""tune's compiler options: which library computes what, by what a program does most, and the
numbers of oneDNN's."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import layers as nn
from fnet import transforms as ft
from fnet.hardware._onednn import ONEDNN
from fnet.jaxpr import Value
from fnet.transforms._tune import _library as library
from fnet.transforms._tune._convolutions import kernel_layout

NHWC = ("NHWC", "HWIO", "NHWC")


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1, shape), dtype)


def convolution(x, w, strides=(1, 1), padding="SAME", **params):
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=NHWC, **params)


def net(*layers):
    """(the gradient of a loss, its arguments)."""
    model = nn.Sequential(*layers, nn.Flatten(), nn.Dense(4))
    x = normal(1, 4, 8, 8, 16)
    params, _ = model.init(jax.random.key(0), x)
    return jax.value_and_grad(lambda params, x: (model(params, x)[0] ** 2).mean()), (params, x)


def options(step, args, **how):
    return ft.explain(ft.tune(step, "cpu", **how), *args).options


pytestmark = pytest.mark.usefixtures("every_size")


@pytest.fixture
def onednn():
    if not library.onednn():
        pytest.skip(
            "this XLA has no convolutions of oneDNN, or this processor no instructions for "
            "bfloat16 products"
        )


# When.


@pytest.mark.exhaustive
@pytest.mark.parametrize("there", [False, True])
def test_what_a_program_does_most_decides(monkeypatch, there):
    monkeypatch.setattr(library, "onednn", lambda: there)
    both = {**library.YNNPACK, **(ONEDNN if there else {})}
    step, args = net(nn.Conv(16, 3), nn.Conv(16, 3))
    assert options(step, args) == library.YNNPACK
    assert options(ft.autocast(step, "bfloat16"), args) == both
    assert (
        options(ft.autocast(step, "bfloat16"), args, rules={"convolution_library": False})
        == library.YNNPACK
    )
    assert options(ft.autocast(step, "bfloat16"), args, rules={"convolution_kernels": False}) == (
        ONEDNN if there else {}
    )
    by_hand = jax.grad(
        lambda w, x: convolution(x, w.astype(jnp.bfloat16)).astype(jnp.float32).sum()
    )
    assert (
        options(by_hand, (normal(1, 3, 3, 8, 8), normal(2, 2, 8, 8, 8, dtype=jnp.bfloat16))) == both
    )
    step, args = net(nn.Conv(2, 1), nn.Flatten(), nn.Dense(256), nn.Dense(256))
    assert options(step, args) == options(ft.autocast(step, "bfloat16"), args) == {}


def test_small_convolutions_are_left_alone(monkeypatch):
    monkeypatch.setattr(library, "onednn", lambda: True)
    step, args = net(nn.Conv(16, 3), nn.Conv(16, 3))  # 589,824 multiplications each
    step = ft.autocast(step, "bfloat16")
    for large, found in (500_000, {**library.YNNPACK, **ONEDNN}), (600_000, library.YNNPACK):
        monkeypatch.setattr(library, "LARGE", large)
        assert options(step, args) == found


@pytest.mark.parametrize(("example", "large"), [((4, 8, 8, 16), False), ((40, 32, 32, 16), True)])
def test_poolings_stay_in_the_kernels_of_small_convolutions(monkeypatch, example, large):
    """Unless the program also has the gradient."""
    monkeypatch.setattr(library, "SMALL", 1 << 26)
    model = nn.Sequential(nn.Conv(16, 3), nn.MaxPool(2))
    x = jax.ShapeDtypeStruct(example, jnp.float32)
    params, _ = jax.eval_shape(model.init, jax.random.key(0), x)
    f = lambda params, x: model(params, x)
    gradient = jax.grad(lambda params, x: jnp.square(f(params, x)).sum())
    fired = lambda f: {row.rule for row in ft.explain(ft.tune(f, "cpu"), params, x).rows}
    assert ("max_pool" in fired(f)) == large
    assert {"max_pool", "max_pool_gradient"} <= fired(gradient)
    assert bool(options(f, (params, x))) == large


# bfloat16 convolutions without it: the weight gradient is computed, and summed, in float32.


def test_weight_gradients_of_low_convolutions(monkeypatch):
    monkeypatch.setattr(library, "onednn", lambda: False)
    x, w, g = normal(1, 4, 8, 8, 16), normal(2, 3, 3, 16, 8), normal(3, 4, 8, 8, 8)
    gradient = jax.grad(lambda w, x: jnp.vdot(convolution(x, w), g))
    rounded = lambda a: a.astype(jnp.bfloat16).astype(jnp.float32)
    want = jax.grad(lambda w, x: jnp.vdot(convolution(x, w), rounded(g)))(w, rounded(x))
    low = ft.tune(ft.autocast(gradient, "bfloat16"), "cpu", rules={"convolution_gradient": True})
    assert [(row.primitive, row.rule) for row in ft.explain(low, w, x).rows] == [
        ("lowered", "convolution_gradient")
    ]
    got = low(w, x)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


# With it.

FORMS = {
    "3 x 3": ((2, 8, 8, 16), (3, 3, 16, 24), {}),
    "1 x 1": ((2, 8, 8, 16), (1, 1, 16, 24), {}),
    "strided": ((2, 9, 8, 16), (3, 3, 16, 24), {"strides": (2, 2)}),
    "1 x 1, strided": ((2, 8, 8, 16), (1, 1, 16, 8), {"strides": (2, 2), "padding": "VALID"}),
    "dilated": ((2, 8, 8, 16), (3, 3, 16, 24), {"rhs_dilation": (2, 2)}),
    "padded unevenly": ((2, 8, 8, 16), (2, 3, 16, 24), {"padding": ((1, 0), (0, 2))}),
    "grouped": ((2, 8, 8, 16), (3, 3, 4, 24), {"feature_group_count": 4}),
    "depthwise": ((2, 8, 8, 16), (3, 3, 1, 16), {"feature_group_count": 16}),
    "few channels": ((2, 8, 8, 3), (3, 3, 3, 5), {}),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("form", FORMS)
def test_numbers_of_onednn(onednn, form):
    shape, kernel, params = FORMS[form]
    x, w = normal(1, *shape), normal(2, *kernel)
    g = normal(3, *jax.eval_shape(lambda: convolution(x, w, **params)).shape)

    def step(w, x):
        y, back = jax.vjp(lambda w, x: convolution(x, w, **params), w, x)
        return y, *back(g)

    low = ft.tune(ft.autocast(step, "bfloat16"), "cpu")
    assert ONEDNN.items() <= options(ft.autocast(step, "bfloat16"), (w, x)).items()
    for got, want in zip(low(w, x), jax.jit(step)(w, x)):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("form", FORMS)
def test_the_layout_of_a_kernel_does_not_change_the_gradient(monkeypatch, form):
    """The rule, evaluated without oneDNN's kernels, which round differently."""
    monkeypatch.setattr(library, "onednn", lambda: True)
    shape, kernel, params = FORMS[form]
    x, w = normal(1, *shape, dtype=jnp.bfloat16), normal(2, *kernel, dtype=jnp.bfloat16)
    g = normal(3, *jax.eval_shape(lambda: convolution(x, w, **params)).shape, dtype=jnp.bfloat16)
    gradient = lambda x: jax.vjp(lambda x: convolution(x, w, **params), x)[1](g)[0]
    off = {"depthwise_convolution": False, "grouped_convolution": False}
    assert {row.rule for row in ft.explain(ft.tune(gradient, "cpu", rules=off), x).rows} == {
        "kernel_layout"
    }

    layouts = []

    def rule(primitive, scope, inputs, equation):
        if (
            primitive != "conv_general_dilated"
            or kernel_layout(equation, [Value(a) for a in inputs]) is None
        ):
            return NotImplemented
        program = jax.make_jaxpr(lambda *a: kernel_layout(equation, [Value(x) for x in a]))(*inputs)
        layouts.append(program.eqns[-1].params["dimension_numbers"].rhs_spec)
        return jax.extend.core.jaxpr_as_fun(program)(*inputs)

    got, want = jax.jit(ft.rewrite(gradient, rule))(x), jax.jit(gradient)(x)
    assert layouts == [(3, 2, 0, 1)]
    np.testing.assert_allclose(
        got.astype(np.float32), want.astype(np.float32), rtol=2**-7, atol=1e-6
    )


def test_sums_of_onednn_are_of_float32(onednn):
    """Ones beside 256: a sum in bfloat16 would stay at 256."""
    x, w = (
        jnp.ones((2, 4, 4, 512), jnp.bfloat16).at[..., 0].set(256),
        jnp.ones((1, 1, 512, 16), jnp.bfloat16),
    )
    low = ft.tune(lambda x, w: convolution(x, w), "cpu")
    np.testing.assert_array_equal(low(x, w).astype(jnp.float32), 768)  # 767, rounded


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_stay_where_they_were_with_onednn(onednn, bad):
    x, w = normal(1, 2, 8, 8, 16).at[1, 2, 3, 1].set(bad), normal(2, 3, 3, 16, 16)

    def step(w, x):
        y, back = jax.vjp(lambda w, x: convolution(x, w), w, x)
        return y, *back(jnp.tanh(y))

    low = ft.autocast(step, "bfloat16")
    for got, want in zip(ft.tune(low, "cpu")(w, x), jax.jit(low)(w, x)):
        for same in np.isnan, np.isposinf, np.isneginf:
            np.testing.assert_array_equal(same(got), same(want))


@pytest.mark.exhaustive
def test_a_net_with_onednn(onednn):
    step, args = net(
        nn.Conv(16, 3), jax.nn.gelu, nn.MaxPool(2), nn.Residual(nn.Conv(16, 3), jax.nn.relu)
    )
    low = ft.tune(ft.autocast(step, "bfloat16"), "cpu")
    for got, want in zip(
        jax.tree.leaves(low(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-2 * np.abs(want).max())


@pytest.mark.exhaustive
def test_a_sharded_step_with_onednn(onednn):
    step, (params, x) = net(nn.Conv(16, 3), jax.nn.relu, nn.Conv(16, 3))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, params = (
        jax.device_put(x, NamedSharding(mesh, P("data"))),
        jax.device_put(params, NamedSharding(mesh, P())),
    )
    low = ft.tune(ft.autocast(step, "bfloat16"), "cpu")
    for got, want in zip(
        jax.tree.leaves(low(params, x)), jax.tree.leaves(jax.jit(step)(params, x)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-2 * np.abs(want).max())
