"""The kernels of recurrent layers: the numbers of the layer's own program and PyTorch's, special
values, and what becomes of them in other transforms, in exports, and without a compiler."""

import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fnet import export, native
from fnet import layers as nn
from fnet import transforms as ft
from fnet.transforms._tune import _native
from tests.checks import close, same
from tests.layers import test_torch_values as torch_values

KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU}
every = pytest.mark.parametrize("kind", KINDS)
RULE = "native_recurrence"


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    if not native.library():
        pytest.skip(native.library().reason)
    monkeypatch.setattr(_native, "ROWS", 0)
    monkeypatch.setattr(_native, "UNITS", 1000)
    monkeypatch.setattr(_native, "TIME", 0)
    monkeypatch.setattr(_native, "BATCH", 0)


def made(layer, shape, seed=0, dtype=jnp.float32):
    draw = np.random.default_rng(seed)
    x = jnp.asarray(draw.normal(0, 1, shape), dtype)
    params, _ = layer.init(jax.random.key(seed), x)
    biased = lambda a: a + jnp.asarray(draw.uniform(-0.2, 0.2, a.shape), a.dtype)
    return jax.tree.map(biased, params), x


def passes(layer, lengths=None, carry=None):
    """A function of the parameters, the inputs and the carry: results, and all gradients."""

    def loss(params, x, carry):
        results = layer.scan(params, x, carry, lengths=lengths)
        total = sum(jnp.square(a.astype(jnp.float32)).sum() for a in jax.tree.leaves(results))
        return total, results

    return jax.value_and_grad(loss, (0, 1, 2) if carry else (0, 1), has_aux=True)


def fired(tuned, *args):
    return [row.primitive for row in ft.explain(tuned, *args).rows if row.rule == RULE]


def check(layer, shape, lengths=None, *, carry=False, tolerance=2e-6):
    params, x = made(layer, shape)
    draw = np.random.default_rng(1)
    start = layer.zero_carry(shape[0])
    if carry:
        start = jax.tree.map(lambda a: jnp.asarray(draw.normal(0, 1, a.shape), a.dtype), start)
    f = passes(layer, lengths, carry)
    tuned = ft.tune(f, "cpu")
    found = fired(tuned, params, x, start)
    both = ["recurrence", "recurrence_gradient"]
    assert sorted(found) == sorted(both * (1 + layer.bidirectional))
    close(tuned(params, x, start), jax.jit(f)(params, x, start), tolerance)


CASES = {
    # features, options, [batch, time, inputs], lengths
    "odd": (5, {}, (4, 6, 3), None),
    "whole vectors": (64, {}, (13, 5, 16), None),
    "several blocks": (100, {}, (5, 4, 7), [4, 0, 1, 3, 2]),
    "both directions": (33, {"bidirectional": True}, (9, 5, 6), [5, 5, 0, 1, 2, 3, 4, 5, 1]),
    "no bias": (17, {"use_bias": False, "bidirectional": True}, (3, 4, 5), None),
    "unrolled": (8, {"unroll": 2}, (1, 5, 40), [3]),
    "one step": (16, {}, (7, 1, 3), None),
}


@pytest.mark.quick_cases("GRU-several blocks")
@pytest.mark.parametrize("case", CASES)
@every
def test_values_and_gradients(kind, case):
    features, options, shape, lengths = CASES[case]
    layer = KINDS[kind](features, **options)
    lengths = None if lengths is None else jnp.asarray(lengths)
    check(layer, shape, lengths)
    check(layer, shape, lengths, carry=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
@every
def test_random_shapes(kind, seed):
    draw = np.random.default_rng([seed, len(kind)])
    batch, time, inputs, features = (int(n) for n in draw.integers(1, (40, 12, 50, 150)))
    options = {name: bool(draw.integers(2)) for name in ("bidirectional", "use_bias")}
    lengths = jnp.asarray(draw.integers(0, time + 1, batch)) if draw.integers(2) else None
    layer = KINDS[kind](features, **options)
    check(layer, (batch, time, inputs), lengths, carry=bool(draw.integers(2)), tolerance=4e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 2)], ids=str)
@every
def test_empty_axes(kind, shape):
    layer = KINDS[kind](4)
    params, x = made(layer, shape)
    f = passes(layer)
    got, want = ft.tune(f, "cpu")(params, x, None), jax.jit(f)(params, x, None)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.quick_cases("GRU")
@every
def test_only_one_result_has_a_cotangent(kind):
    layer = KINDS[kind](20)
    params, x = made(layer, (3, 4, 5))
    for pick in (lambda y, carry: y, lambda y, carry: jax.tree.leaves(carry)[-1]):
        f = jax.grad(lambda p, x, pick=pick: jnp.sin(pick(*layer.scan(p, x))).sum())
        tuned = ft.tune(f, "cpu")
        assert len(fired(tuned, params, x)) == 2
        close(tuned(params, x), jax.jit(f)(params, x), 2e-6)


@pytest.mark.quick_cases("GRU")
@every
def test_sixteen_bits(kind):
    """The kernel rounds where the layer does, and sums in float32: it is as near to float32."""
    layer = KINDS[kind](24, bidirectional=True)
    params, x = made(layer, (4, 30, 10), dtype=jnp.bfloat16)
    lengths = jnp.array([30, 12, 0, 29])
    f = passes(layer, lengths)
    tuned = ft.tune(f, "cpu")
    assert len(fired(tuned, params, x, None)) == 4
    got, plain = tuned(params, x, None), jax.jit(f)(params, x, None)
    assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, plain)
    exact = jax.jit(f)(params, x.astype(jnp.float32), None)
    norm = lambda a: np.linalg.norm(np.asarray(a, np.float64))
    for a, b, c in zip(*map(jax.tree.leaves, (got, plain, exact)), strict=True):
        off = norm(np.asarray(a, np.float64) - c)
        assert off <= 1.2 * norm(np.asarray(b, np.float64) - c) + 2e-3 * norm(c)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["x", "kernel", "recurrent_kernel", "bias"])
@pytest.mark.quick_cases(1)
@every
def test_special_values_stay_where_they_are(kind, place, special):
    layer = KINDS[kind](18)
    params, x = made(layer, (7, 5, 6))
    if place == "x":
        x = x.at[2, 3, 1].set(special)
    else:
        params[place] = params[place].at[(1, 20)[-params[place].ndim :]].set(special)
    for lengths in (None, jnp.array([5, 4, 3, 5, 0, 1, 5])):
        f = passes(layer, lengths)
        got, want = ft.tune(f, "cpu")(params, x, None), jax.jit(f)(params, x, None)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            for test in (np.isnan, np.isposinf, np.isneginf):
                np.testing.assert_array_equal(test(a), test(b))


def test_large_arguments():
    """Gates that are 0 or 1 exactly, where the logistic function and tanh no longer change."""
    layer = nn.LSTM(16)
    params, x = made(layer, (3, 4, 5))
    for scale in (1e3, 1e30):
        f = lambda p, x: layer.scan(p, x)
        got, want = ft.tune(f, "cpu")(params, scale * x), jax.jit(f)(params, scale * x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7)


def torch_cases():
    cases = torch_values.fixture("recurrent")
    return [name for name, case in cases.items() if case["config"]["layer"] in KINDS]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", torch_cases())
def test_equals_torch(name):
    torch_values.equals_torch("recurrent", name, lambda f: ft.tune(f, "cpu"))


@pytest.mark.quick_cases("GRU")
@every
def test_runs_are_bit_equal(kind):
    layer = KINDS[kind](40, bidirectional=True)
    params, x = made(layer, (9, 7, 5))
    step = ft.tune(passes(layer), "cpu")
    first = step(params, x, None)
    for _ in range(3):
        same(step(params, x, None), first)


@pytest.mark.exhaustive
@every
def test_inside_of_other_transforms(kind):
    layer = KINDS[kind](12)
    params, x = made(layer, (3, 4, 5))
    tuned = ft.tune(layer, "cpu")
    loss = lambda f: lambda p, x: jnp.square(f(p, x)).sum()
    close(jax.jit(tuned)(params, x), layer(params, x), 2e-6)
    close(jax.grad(loss(tuned))(params, x), jax.grad(loss(layer))(params, x), 2e-6)
    xs = jnp.stack([x, 2 * x])
    mapped = lambda f: jax.vmap(f, (None, 0))(params, xs)
    close(mapped(tuned), mapped(layer), 2e-6)
    both = ft.tune(lambda p, xs: jax.vmap(layer, (None, 0))(p, xs), "cpu")
    assert not fired(both, params, xs)
    close(both(params, xs), mapped(layer), 2e-6)
    twice = lambda f: jax.jvp(jax.grad(loss(f)), (params, x), (params, x))
    close(twice(tuned), twice(layer), 1e-5)
    again = jax.checkpoint(layer)
    step = ft.tune(jax.grad(loss(again)), "cpu")
    assert fired(step, params, x)
    close(step(params, x), jax.grad(loss(layer))(params, x), 2e-6)
    microbatched = ft.microbatch(jax.value_and_grad(loss(layer)), 3)
    assert len(fired(ft.tune(microbatched, "cpu"), params, x)) == 2
    close(ft.tune(microbatched, "cpu")(params, x), microbatched(params, x), 2e-6)


@pytest.mark.exhaustive
def test_several_devices():
    """XLA divides the portable loop; inside shard_map, each device calls the kernel."""
    layer = nn.GRU(8)
    params, x = made(layer, (8, 4, 5))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
    whole = jax.device_put(params, jax.NamedSharding(mesh, P()))
    grad = jax.grad(lambda p, x: jnp.square(layer(p, x)).sum())
    tuned = ft.tune(jax.jit(grad), "cpu")
    close(tuned(whole, x), grad(params, x), 2e-6)
    assert "fnet_gru" not in tuned.lower(whole, x).as_text()
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    inside = ft.tune(jax.jit(mapped), "cpu")
    close(inside(whole, x), layer(params, x), 2e-6)
    assert "fnet_gru" in inside.lower(whole, x).as_text()


def test_layers_in_a_loop():
    stack = nn.Stack(nn.LSTM(6), 3)
    params, x = made(stack, (4, 5, 6))
    grad = jax.grad(lambda p, x: jnp.sin(stack(p, x)).sum())
    assert fired(ft.tune(grad, "cpu"), params, x) == ["recurrence", "recurrence_gradient"]
    close(ft.tune(grad, "cpu")(params, x), jax.jit(grad)(params, x), 2e-6)


@pytest.mark.quick_cases("GRU")
@every
def test_exports_are_portable(kind, tmp_path):
    """An exported program names no kernel, and runs where there is none."""
    layer = KINDS[kind](12, bidirectional=True)
    params, x = made(layer, (3, 4, 5))
    tuned = ft.tune(layer, "cpu")
    exported = jax.export.export(jax.jit(tuned))(params, x)
    assert "custom_call" not in exported.mlir_module() or "fnet_" not in exported.mlir_module()
    close(exported.call(params, x), layer(params, x), 2e-6)
    program = export.program(layer, params, {}, x=export.spec("b, 4, 5", "float32"))
    program.save(tmp_path / "layer.fnet")
    close(export.load(tmp_path / "layer.fnet")(x), layer(params, x), 2e-6)


def test_without_a_compiler(monkeypatch):
    layer = nn.LSTM(12)
    params, x = made(layer, (3, 4, 5))
    none = native.Library(None, "there is no C++ compiler", "")
    for module in (native, native._primitive):
        monkeypatch.setattr(module, "library", lambda: none)
    f = passes(layer)
    tuned = ft.tune(f, "cpu")
    assert not fired(tuned, params, x, None)
    same(tuned(params, x, None), ft.tune(f, "cpu", rules={RULE: False})(params, x, None))


@pytest.mark.exhaustive
def test_dtypes_without_a_kernel():
    layer = nn.GRU(12)
    params, x = made(layer, (3, 4, 5), dtype=jnp.float16)
    assert not fired(ft.tune(layer, "cpu"), params, x)
    with jax.enable_x64(True):
        params, x = made(layer, (3, 4, 5), dtype=jnp.float64)
        assert not fired(ft.tune(layer, "cpu"), params, x)
        params, x = made(layer, (3, 4, 5))
        assert fired(ft.tune(layer, "cpu"), params, x)
        close(ft.tune(layer, "cpu")(params, x), layer(params, x), 2e-6)


@pytest.mark.exhaustive
def test_memory_does_not_grow():
    layer = nn.LSTM(8)
    params, x = made(layer, (2, 3, 4))
    step = ft.tune(jax.grad(lambda p, x: layer(p, x).sum()), "cpu")

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB on Linux

    for _ in range(20_000):
        result = step(params, x)
    jax.block_until_ready(result)
    before = peak()
    for _ in range(100_000):
        result = step(params, x)
    jax.block_until_ready(result)
    assert peak() - before < 4096
