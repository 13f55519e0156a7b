"""Products that a loop adds up, computed once after the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fnet import layers as nn
from fnet import transforms as ft
from fnet.layers import _recurrence
from fnet.transforms._tune import _accumulated
from tests.checks import close

RULE = "summed_products"
WITHOUT = {RULE: False}
T, B, F = 7, 2, 32


@pytest.fixture(autouse=True)
def small_sums(monkeypatch):
    monkeypatch.setattr(_accumulated, "LARGE", 1)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1, shape), dtype)


def fired(f, *args):
    return sum(row.rule == RULE for row in ft.explain(ft.tune(f, "cpu"), *args).rows)


def check(f, *args, fires=1, tolerance=1e-5):
    """The tuned program equals f, and its sums have left the loop."""
    expected, tuned = jax.jit(f)(*args), ft.tune(f, "cpu")(*args)
    assert fired(f, *args) == fires
    assert jax.tree.map(jnp.result_type, tuned) == jax.tree.map(jnp.result_type, expected)
    close(tuned, expected, tolerance)


RECURRENT = [
    nn.RNN(F),
    nn.RNN(F, activation=jax.nn.relu, use_bias=False),
    nn.RNN(F, bidirectional=True, unroll=3),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("lengths", [None, [7, 4]], ids=["whole", "ragged"])
@pytest.mark.parametrize("layer", RECURRENT, ids=lambda layer: str(layer)[:40])
def test_recurrent_layers(layer, lengths):
    x = normal(0, B, T, 5)
    params, _ = layer.init(jax.random.key(0), x)
    lengths = None if lengths is None else jnp.asarray(lengths)

    def loss(params, x):
        return jnp.sin(layer(params, x, lengths=lengths)).sum()

    check(jax.grad(loss, (0, 1)), params, x, fires=2 if layer.bidirectional else 1)


@pytest.mark.parametrize("layer", [nn.LSTM(F), nn.GRU(F)], ids=lambda each: type(each).__name__)
def test_gates(layer):
    """The loop of an LSTM or GRU, differentiated by JAX, as it is in other libraries."""
    x = normal(0, B, T, 5)
    params, _ = layer.init(jax.random.key(0), x)
    states = jax.tree.leaves(layer.zero_carry(B))

    def loss(params, x):
        operands = {"x": x, **params, **{f"state{i}": state for i, state in enumerate(states)}}
        form = _recurrence.Form(layer.cell, tuple(operands), False, 1)
        return jnp.sin(_recurrence._forward(*operands.values(), form=form, keeps=False)[0]).sum()

    check(jax.grad(loss, (0, 1)), params, x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_layers_whose_gradient_needs_no_rule(kind):
    layer, x = kind(F), normal(0, B, T, 5)
    params, _ = layer.init(jax.random.key(0), x)
    check(jax.grad(lambda p, x: jnp.square(layer(p, x)).sum()), params, x, fires=0)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("low", ["bfloat16", "float16"])
@pytest.mark.parametrize("layer", RECURRENT[:1], ids=lambda layer: type(layer).__name__)
def test_sums_of_16_bits_are_kept_in_32(layer, low):
    """The products of a 16-bit step are rounded before they are added; after the loop, they are
    not, so the sum is nearer to that of 32 bits."""
    x = normal(0, B, 40, 5)
    params, _ = layer.init(jax.random.key(0), x)
    loss = lambda params, x: jnp.square(layer(params, x.astype(low)).astype(jnp.float32)).mean()
    exact = jax.grad(lambda p, x: jnp.square(layer(p, x)).mean())(params, x)["recurrent_kernel"]
    grad = jax.grad(loss)
    assert fired(grad, params, x) == 1
    far = lambda y: float(jnp.abs(y["recurrent_kernel"] - exact).max())
    assert far(ft.tune(grad, "cpu")(params, x)) <= 1.2 * far(jax.jit(grad)(params, x))


@pytest.mark.parametrize("layer", [nn.LSTM(F), nn.GRU(F)], ids=lambda each: type(each).__name__)
def test_autocast(layer):
    """The loop stores the factors in the dtype in which they are multiplied."""
    x = normal(0, B, 40, 5)
    params, _ = layer.init(jax.random.key(0), x)
    grad = jax.grad(ft.autocast(lambda p, x: jnp.square(layer(p, x)).mean(), "bfloat16"))
    check(grad, params, x, tolerance=1e-2)
    text = ft.tune(grad, "cpu").lower(params, x).as_text()
    columns = layer.gates * F
    assert f"tensor<40x{B}x{columns}xbf16>" in text and f"tensor<40x{B}x{columns}xf32>" not in text


def summed(term, start=None, reverse=False, length=None):
    """A loop that adds term(x, y) to its carry, and whose other carry is a running maximum."""

    def f(x, y):
        shape = jax.eval_shape(term, x[0], y[0])
        begin = jnp.zeros(shape.shape, shape.dtype) if start is None else start

        def step(carry, slices):
            total, most = carry
            most = jnp.maximum(most, slices[0])
            return (total + term(*slices), most), slices[0] * slices[1].sum()

        return lax.scan(step, (begin, x[0]), (x, y), reverse=reverse, length=length)

    return f


X, Y = normal(1, T, B, F), normal(2, T, B, F)


@pytest.mark.parametrize("reverse", [False, True])
def test_values_of_other_loops(reverse):
    start = normal(3, F, F)
    check(summed(lambda x, y: x.T @ y, start, reverse), X, Y)
    check(summed(lambda x, y: (x.T @ y).T, start, reverse), X, Y)
    check(summed(lambda x, y: jnp.sin(x).T @ jnp.cos(y), start, reverse), X, Y)
    check(summed(lambda x, y: jnp.einsum("bi,bj->ij", x, x * y), start, reverse), X, Y)
    check(summed(lambda x, y: start + x.T @ y, start, reverse), X, Y, fires=0)


def test_batched_and_integer_products():
    heads = lambda x: x.reshape(B, 4, -1)
    outer = lambda x, y: jnp.einsum("bhi,bhj->hij", heads(x), heads(y))
    check(summed(outer), X[:, :, :32], Y[:, :, :32], fires=0)  # 8 x 8: not larger than its factors
    wide = normal(4, T, B, 4 * F), normal(5, T, B, 4 * F)
    check(summed(outer), *wide)
    whole = [(10 * x).astype(jnp.int32) for x in (X, Y)]
    check(summed(lambda x, y: x.T @ y), *whole, tolerance=0)


def test_factors_that_the_loop_emits_anyway():
    """Nothing is stored twice, and what the loop emits keeps its dtype."""

    def f(x, y):
        def step(carry, each):
            a, b = carry
            wave = jnp.sin(each[0])
            low = ft.autocast(jnp.matmul, "bfloat16")(wave.T, each[1])
            return (a + low, b + wave.T @ jnp.cos(wave)), wave

        return lax.scan(step, (jnp.zeros((F, F)),) * 2, (x, y))

    constants = lambda s, each: (s + each[0].T @ each[1], (1.0, each[0]))
    check(lambda x, y: lax.scan(constants, jnp.zeros((F, F)), (x, y)), X, Y)
    check(f, X, Y, tolerance=1e-2)
    assert ft.tune(f, "cpu")(X, Y)[1].dtype == jnp.float32
    exact = jax.jit(f)(X, Y)[0][1]
    close(ft.tune(f, "cpu")(X, Y)[0][1], exact, 1e-5)
    text = ft.tune(f, "cpu").lower(X, Y).as_text()
    (loop,) = (line for line in text.splitlines() if "stablehlo.while" in line)
    assert loop.count(" = ") <= 7  # counter, the two inputs, the emitted wave and its cosine


def test_what_stays_in_the_loop():
    large = X[:, 0], Y[:, 0]

    def read(x, y):  # the next iteration needs the sum
        step = lambda s, each: (s + jnp.outer(*each), (s @ each[1]).sum())
        return lax.scan(step, jnp.zeros((F, F)), (x, y))

    def emitted(x, y):
        def step(s, each):
            s = s + jnp.outer(*each)
            return s, s

        return lax.scan(step, jnp.zeros((F, F)), (x, y))

    def twice(x, y):
        step = lambda s, each: (s + s + jnp.outer(*each), None)
        return lax.scan(step, jnp.ones((F, F)), (x, y))[0]

    def printed(x, y):
        def step(s, each):
            jax.debug.callback(lambda _: None, each[0])
            return s + jnp.outer(*each), None

        return lax.scan(step, jnp.zeros((F, F)), (x, y))[0]

    def constant(x, y):
        step = lambda s, each: (s + jnp.outer(each, y[0]), None)
        return lax.scan(step, jnp.zeros((F, F)), x)[0]

    for f in (read, emitted, twice, printed, constant):
        check(f, *large, fires=0)
    check(summed(lambda x, y: x[:, :4].T @ y[:, :4]), X, Y, fires=0)  # smaller than its factors


def test_a_sum_of_which_only_one_is_read():
    def f(x, y):
        def step(carry, each):
            a, b = carry
            t = jnp.outer(*each)
            return (a + t, b + 2 * t), None

        return lax.scan(step, (jnp.zeros((F, F)),) * 2, (x, y))[0]

    check(f, X[:, 0], Y[:, 0], fires=0)  # the product is read twice


def test_lengths_0_and_1():
    f = summed(lambda x, y: x.T @ y, normal(3, F, F))
    check(f, X[:1], Y[:1])
    start = normal(3, F, F)
    empty = lambda x, y: lax.scan(lambda s, e: (s + e[0].T @ e[1], None), start, (x, y))[0]
    check(empty, X[:0], Y[:0], fires=0)
    np.testing.assert_array_equal(ft.tune(empty, "cpu")(X[:0], Y[:0]), start)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_values_stay_where_they_are(special):
    f = summed(lambda x, y: x.T @ y)
    x, y = X.at[3, 0, 5].set(special), Y.at[2, 1, 7].set(-special)
    expected, tuned = jax.jit(f)(x, y), ft.tune(f, "cpu")(x, y)
    assert fired(f, x, y) == 1
    for a, b in zip(jax.tree.leaves(tuned), jax.tree.leaves(expected)):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(np.isposinf(a), np.isposinf(b))
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))


def test_inside_of_other_transforms():
    f = summed(lambda x, y: x.T @ y)
    g = lambda x, y: f(x, y)[0][0]
    check(jax.vmap(g), jnp.stack([X, Y]), jnp.stack([Y, X]))
    check(jax.jit(g), X, Y)
    check(jax.checkpoint(g), X, Y)
    check(lambda x, y: lax.cond(x.sum() > 0, g, lambda x, y: g(y, x), x, y), X, Y, fires=2)
    inner = lambda s, _: (s + g(X, Y), None)
    check(lambda s: lax.scan(inner, s, None, 3)[0], 0 * X[0].T @ Y[0])
    check(jax.grad(lambda x, y: ft.tune(g, "cpu")(x, y).sum()), X, Y, fires=0)


def test_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def g(x, y):
        start = 0 * (x[0].T @ y[0])  # which differs between the devices
        return lax.psum(summed(lambda x, y: x.T @ y, start)(x, y)[0][0], "data")

    sharded = jax.shard_map(g, mesh=mesh, in_specs=P(None, "data"), out_specs=P())
    check(sharded, normal(6, T, 2, F), normal(7, T, 2, F))


def test_scopes_and_memory():
    """The product keeps its scope, and the loop stores at most twice as much as it did."""
    layer = nn.RNN(F, use_bias=False)
    x = normal(0, B, T, 5)
    params, _ = layer.init(jax.random.key(0), x)
    model = nn.Sequential(rnn=layer)
    grad = ft.tune(jax.grad(lambda p, x: model(p, x).sum()), "cpu")
    rows = [row for row in ft.explain(grad, {"rnn": params}, x).rows if row.rule == RULE]
    assert [row.scope for row in rows] == ["rnn"]
    text = grad.lower({"rnn": params}, x).as_text(debug_info=True)
    assert "rnn" in text

    def microbatched(w, x):  # activations that the loop did not store
        def step(total, x):
            h = jnp.tanh(x @ w)
            return total + jnp.sin(h).T @ jnp.cos(h), None

        return lax.scan(step, jnp.zeros((F, F)), x[:, :, :4])[0]

    check(lambda w, x: microbatched(w[:4], x), normal(1, F, F), X, fires=0)
