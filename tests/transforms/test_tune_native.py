"""Convolutions that tune gives to fnet's own kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from fnet import layers as nn
from fnet import native
from fnet import transforms as ft
from fnet.transforms._tune import _native
from tests.checks import close, same

RULE = "native_convolution"
needs_kernels = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def kernels():
    if not native.library():
        pytest.skip(native.library().reason)


@pytest.fixture(autouse=True)
def small_convolutions(monkeypatch):
    monkeypatch.setattr(_native, "WORK", 1)
    monkeypatch.setattr(_native, "PIXELS", 1)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1, shape), dtype)


def convolution(x, w, strides=1, spec=("NHWC", "HWIO", "NHWC"), **options):
    options = {"padding": "SAME", **options}
    return lax.conv_general_dilated(
        x, w, (strides,) * (x.ndim - 2), dimension_numbers=spec, **options
    )


def fired(f, *args):
    return sum(row.rule == RULE for row in ft.explain(ft.tune(f, "cpu"), *args).rows)


def calls(f, *args):
    """The calls of a kernel in a compiled program."""
    return f.lower(*args).compile().as_text().count('custom_call_target="fnet_convolution')


def loss(x, w, **options):
    return jnp.square(convolution(x, w, **options)).sum()


STEP = jax.value_and_grad(loss, argnums=(0, 1))
X, W = normal(0, 3, 9, 8, 16), normal(1, 3, 3, 16, 8)

FORMS = {
    "plain": (X, W, {}),
    "strides": (X, W, {"strides": 2}),
    "dilated": (X, W, {"rhs_dilation": (2, 1), "padding": "VALID"}),
    "groups": (X, normal(1, 3, 3, 8, 32), {"feature_group_count": 2}),
    "transposed": (X, W, {"lhs_dilation": (2, 2), "padding": ((1, 2), (2, 1))}),
    "channels first": (
        X.transpose(0, 3, 1, 2),
        W.transpose(3, 2, 0, 1),
        {"spec": ("NCHW", "OIHW", "NCHW")},
    ),
    "one axis": (normal(0, 4, 21, 16), normal(1, 5, 16, 8), {"spec": ("NWC", "WIO", "NWC")}),
    "three axes": (
        normal(0, 2, 5, 6, 4, 8),
        normal(1, 3, 2, 3, 8, 8),
        {"spec": ("NDHWC", "DHWIO", "NDHWC"), "strides": 2},
    ),
    "window larger than the input": (X[:, :2, :2], normal(1, 5, 5, 16, 8), {}),
}


@needs_kernels
@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients(name):
    x, w, options = FORMS[name]
    step = functools.partial(STEP, **options)
    close(ft.tune(step, "cpu")(x, w), jax.jit(step)(x, w))
    # With a window that is larger than the input, one is a product over few channels.
    count = 2 if name == "window larger than the input" else 3
    assert fired(step, x, w) == count
    assert calls(ft.tune(step, "cpu"), x, w) == count


@needs_kernels
def test_autocast_to_bfloat16(monkeypatch):
    monkeypatch.setattr(_native, "onednn", lambda: False)
    step = ft.autocast(STEP, "bfloat16")
    exact, tuned = STEP(X, W), ft.tune(step, "cpu")(X, W)
    assert fired(step, X, W) == 3
    assert jax.tree.map(jnp.result_type, tuned) == jax.tree.map(jnp.result_type, exact)
    close(tuned, exact, 2e-2)


@needs_kernels
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["x", "w"])
def test_nan_and_inf_stay_at_their_places(where, value):
    x, w = X, W
    if where == "x":
        x = x.at[1, 0, 3, 2].set(value)
    else:
        w = w.at[0, 2, 5, 3].set(value)
    step = jax.vjp(lambda x, w: convolution(x, w, strides=2), x, w)[1]
    g = convolution(X, W, strides=2)
    for f, args in ((lambda x, w: convolution(x, w, strides=2), (x, w)), (step, (g,))):
        got, want = ft.tune(f, "cpu")(*args), jax.jit(f)(*args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
            finite = np.isfinite(b)
            np.testing.assert_array_equal(a[~finite], b[~finite])
            np.testing.assert_allclose(a[finite], b[finite], rtol=1e-4, atol=1e-3)


def test_inside_other_transformations():
    step, tuned = jax.grad(loss, 1), ft.tune(jax.grad(loss, 1), "cpu")
    xs = jnp.stack([X, X + 1])
    close(jax.jit(tuned)(X, W), step(X, W))
    close(jax.vmap(tuned, (0, None))(xs, W), jax.vmap(step, (0, None))(xs, W))
    second = lambda f: jax.grad(lambda x, w: jnp.square(f(x, w)).sum())(X, W)
    close(second(tuned), second(step), 1e-4)
    rows = lambda f: lax.map(lambda x: f(x, W), xs)
    close(jax.jit(rows, static_argnums=0)(tuned), rows(step))
    remat = jax.checkpoint(lambda w: ft.tune(loss, "cpu")(X, w))
    close(jax.grad(remat)(W), step(X, W))


@needs_kernels
def test_an_exported_program_is_portable():
    tuned = ft.tune(jax.jit(STEP), "cpu")
    exported = jax.export.export(tuned)(X, W)
    assert "fnet_convolution" not in exported.mlir_module()
    close(exported.call(X, W), STEP(X, W))


@needs_kernels
def test_several_devices():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w = normal(0, 8, 6, 6, 16), W
    divided = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
    whole = jax.device_put(w, jax.NamedSharding(mesh, P()))
    tuned = ft.tune(jax.jit(STEP), "cpu")
    close(tuned(divided, whole), STEP(x, w))
    assert calls(tuned, divided, whole) == 0  # XLA divides JAX's own operation
    mapped = jax.jit(
        jax.shard_map(convolution, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    )
    inside = ft.tune(mapped, "cpu")
    close(inside(divided, whole), convolution(x, w))
    assert calls(inside, divided, whole) == 1


@needs_kernels
def test_results_repeat_bit_for_bit():
    tuned = ft.tune(STEP, "cpu")
    first = tuned(X, W)
    for _ in range(5):
        same(tuned(X, W), first)


def test_what_is_left_to_xla(monkeypatch):
    assert fired(convolution, normal(0, 3, 9, 8, 3), normal(1, 3, 3, 3, 8)) == 0
    first = jax.grad(loss, 1)  # of which only the gradient is worth a kernel
    assert fired(first, normal(0, 3, 9, 8, 3), normal(1, 3, 3, 3, 8)) == bool(native.library())
    monkeypatch.setattr(_native, "PIXELS", 64)
    assert fired(convolution, normal(0, 1, 7, 7, 16), W) == 0
    assert fired(convolution, normal(0, 1, 7, 7, 16), W[:1, :1]) == bool(native.library())
    assert fired(convolution, X.astype(jnp.float16), W.astype(jnp.float16)) == 0
    depthwise = functools.partial(convolution, feature_group_count=16)
    assert fired(depthwise, X, normal(1, 3, 3, 1, 16)) == 0
    with jax.enable_x64(True):
        assert fired(convolution, X.astype(jnp.float64), W.astype(jnp.float64)) == 0


def test_small_convolutions_are_left_to_xla(monkeypatch):
    monkeypatch.undo()
    assert fired(convolution, X, W) == 0


def test_without_a_compiler(monkeypatch):
    nothing = native.Library(None, "there is no C++ compiler", "")
    monkeypatch.setattr(native, "library", lambda: nothing)
    monkeypatch.setattr(
        native, "missing", lambda: ("fnet's kernels are not used: there is no C++ compiler",)
    )
    tuned = ft.tune(STEP, "cpu")
    close(tuned(X, W), STEP(X, W))
    assert fired(STEP, X, W) == 0
    assert "fnet's kernels are not used: there is no C++ compiler" in str(ft.explain(tuned, X, W))


@needs_kernels
def test_layers_of_any_kind(monkeypatch):
    net = nn.Sequential(
        nn.Conv(16, (3, 3)), jax.nn.relu, nn.ConvTranspose(8, (4, 4), strides=2), nn.GlobalAvgPool()
    )
    params, _ = net.init(jax.random.key(0), X)
    step = jax.value_and_grad(lambda params: jnp.square(net(params, X)).sum())
    close(ft.tune(step, "cpu")(params), jax.jit(step)(params), 1e-4)
    assert fired(step, params) >= 5


@needs_kernels
@pytest.mark.exhaustive
def test_calls_need_no_more_memory():
    import resource

    tuned = ft.tune(jax.jit(convolution), "cpu")
    small, kernel = normal(0, 1, 4, 4, 8), normal(1, 3, 3, 8, 8)

    def used(count):
        for _ in range(count):
            result = tuned(small, kernel)
        result.block_until_ready()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    used(1000)
    before = used(10_000)
    assert used(100_000) - before < 4096  # kilobytes
