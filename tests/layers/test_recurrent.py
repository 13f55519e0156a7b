"""RNN, LSTM and GRU: Flax's numbers, ragged batches as one by one, both directions, the carry,
precision, errors."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from fnet import jaxpr
from fnet import layers as nn
from fnet import transforms as ft

KINDS = {"RNN": nn.RNN, "LSTM": nn.LSTM, "GRU": nn.GRU}
BATCH, TIME, IN, FEATURES = 4, 6, 3, 5
LENGTHS = jnp.array([6, 3, 3, 0])
every = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("bidirectional", [False, True])


@functools.cache
def made(kind, **options):
    """(layer, params with biases that are not zero, x)"""
    layer = KINDS[kind](FEATURES, **options)
    x = jax.random.normal(jax.random.key(1), (BATCH, TIME, IN))
    params, state = layer.init(jax.random.key(2), x)
    assert state == {}
    draw = np.random.default_rng(0)
    return (
        layer,
        jax.tree.map(lambda a: a + jnp.asarray(draw.uniform(-0.2, 0.2, a.shape), a.dtype), params),
        x,
    )


def close(got, want, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# Flax's cells by the gates' names: the input's kernels, the recurrent kernels, and where the biases
# are.
FLAX = {
    "RNN": (linen.SimpleCell, ["i"], ["h"], "i"),
    "LSTM": (linen.OptimizedLSTMCell, ["ii", "if", "ig", "io"], ["hi", "hf", "hg", "ho"], "h"),
    "GRU": (linen.GRUCell, ["ir", "iz", "in"], ["hr", "hz", "hn"], "i"),
}


def flax_params(kind, params):
    _, inputs, recurrent, biased = FLAX[kind]
    tree = {
        name: {"kernel": kernel}
        for names, whole in ((inputs, "kernel"), (recurrent, "recurrent_kernel"))
        for name, kernel in zip(names, jnp.split(params[whole], len(names), 1))
    }
    for name, bias in zip(
        inputs if biased == "i" else recurrent, jnp.split(params["bias"], len(inputs))
    ):
        tree[name]["bias"] = bias
    if kind == "GRU":
        tree["hn"]["bias"] = params["recurrent_bias"]
    return {"params": {"cell": tree}}


@pytest.mark.quick_cases(1)
@every
def test_equals_flax(kind):
    layer, params, x = made(kind)
    flax = linen.RNN(FLAX[kind][0](FEATURES), return_carry=True)

    def theirs(params, x):
        carry, y = flax.apply(flax_params(kind, params), x, seq_lengths=jnp.array([6, 3, 1, 2]))
        if kind == "LSTM":
            carry = carry[1], carry[0]  # Flax: (cell, hidden)
        kept = jnp.arange(TIME)[None, :, None] < jnp.array([6, 3, 1, 2])[:, None, None]
        return jnp.where(kept, y, 0), carry

    def ours(params, x):
        return layer.scan(params, x, lengths=jnp.array([6, 3, 1, 2]))

    def both_passes(f):
        def loss(params, x):
            outputs = f(params, x)
            return sum(jnp.sin(a).sum() for a in jax.tree.leaves(outputs)), outputs

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    close(both_passes(ours), both_passes(theirs), 1e-5)


@pytest.mark.exhaustive
@every
@both
def test_ragged_batch_is_row_by_row(kind, bidirectional):
    layer, params, x = made(kind, bidirectional=bidirectional)
    scan = jax.jit(layer.scan)
    y, carry = scan(params, x, lengths=LENGTHS)
    assert y.shape == (BATCH, TIME, FEATURES * (1 + bidirectional))
    for row, length in enumerate(LENGTHS.tolist()):
        np.testing.assert_array_equal(y[row, length:], 0)
        if length:
            alone, last = scan(params, x[row : row + 1, :length])
            close(
                (
                    y[row : row + 1, :length],
                    jax.tree.map(lambda a, row=row: a[row : row + 1], carry),
                ),
                (alone, last),
            )
        else:
            for leaf in jax.tree.leaves(carry):
                np.testing.assert_array_equal(leaf[row], 0)
    close(layer(params, x, lengths=LENGTHS), y)
    close(scan(params, x, lengths=jnp.full(BATCH, TIME)), scan(params, x))


@pytest.mark.exhaustive
@every
def test_padding_counts_for_nothing(kind):
    layer, params, x = made(kind, bidirectional=True)
    inside = jnp.arange(TIME)[None, :, None] < LENGTHS[:, None, None]

    @jax.jit
    def run(params, x):
        def loss(params, x):
            outputs = layer.scan(params, x, lengths=LENGTHS)
            return sum(jnp.square(a).sum() for a in jax.tree.leaves(outputs)), outputs

        return jax.grad(loss, (0, 1), has_aux=True)(params, x)

    want = jax.tree.leaves(run(params, x))
    assert all(jnp.isfinite(a).all() for a in want)
    for padding in (jnp.nan, jnp.inf, 1e30):
        for a, b in zip(
            jax.tree.leaves(run(params, jnp.where(inside, x, padding))), want, strict=True
        ):
            np.testing.assert_array_equal(a, b)


@pytest.mark.quick_cases(1)
@every
def test_backward_is_forward_on_the_reversed(kind):
    layer, params, x = made(kind, bidirectional=True)
    one = KINDS[kind](FEATURES)
    y, carry = layer.scan(params, x)
    forward, first = one.scan(params["forward"], x)
    backward, last = one.scan(params["backward"], x[:, ::-1])
    close(y, jnp.concatenate([forward, backward[:, ::-1]], -1))
    close(carry, {"forward": first, "backward": last})


@pytest.mark.quick_cases(1)
@every
@both
def test_carry_goes_on(kind, bidirectional):
    layer, params, x = made(kind, bidirectional=bidirectional)
    given = jax.tree.map(lambda a: a + 0.5, layer.zero_carry(BATCH))
    close(layer.scan(params, x, layer.zero_carry(BATCH))[0], layer(params, x))
    # A row without steps hands its carry on.
    for after, before in zip(
        jax.tree.leaves(layer.scan(params, x, given, lengths=LENGTHS)[1]),
        jax.tree.leaves(given),
        strict=True,
    ):
        np.testing.assert_array_equal(after[3], before[3])
    if bidirectional:
        return
    whole, last = layer.scan(params, x, given)
    first, carry = layer.scan(params, x[:, :4], given)
    second, carry = layer.scan(params, x[:, 4:], carry)
    close((jnp.concatenate([first, second], 1), carry), (whole, last))

    def decode(carry, step):  # the carry is a scan's carry
        y, carry = layer.scan(params, step[:, None], carry)
        return carry, y[:, 0]

    carry, ys = jax.lax.scan(decode, given, x.swapaxes(0, 1))
    close((ys.swapaxes(0, 1), carry), (whole, last))


@pytest.fixture(params=KINDS, scope="module")
def two_ways(request):
    layer, params, x = made(request.param, bidirectional=True)
    return layer, params, x, jax.jit(layer)(params, x, lengths=LENGTHS)


@pytest.mark.quick_cases(1)
def test_vmap_is_the_batch(two_ways):
    layer, params, x, y = two_ways
    rows = jax.jit(jax.vmap(lambda row, length: layer(params, row[None], lengths=length[None])[0]))
    close(rows(x, LENGTHS), y)


@pytest.mark.exhaustive
def test_unrolling_changes_no_number(two_ways):
    layer, params, x, y = two_ways
    close(jax.jit(dataclasses.replace(layer, unroll=4))(params, x, lengths=LENGTHS), y)


@pytest.mark.exhaustive
def test_stack_is_one_after_the_other():
    layer, _, x = made("LSTM")
    layer = dataclasses.replace(layer, features=IN)
    deep, twin = nn.Stack(layer, 2), nn.Sequential(layer, layer)
    params = twin.init(jax.random.key(0), x)[0]
    stacked = deep.init(jax.random.key(0), x)[0]
    close(stacked, jax.tree.map(lambda a, b: jnp.stack([a, b]), params["0"], params["1"]), 0)
    close(jax.jit(deep)(stacked, x), jax.jit(twin)(params, x))


@pytest.mark.exhaustive
@every
def test_second_derivatives_both_ways(kind):
    layer, params, x = made(kind)
    x, direction = x[:2, :3], jnp.ones((2, 3, IN))
    loss = lambda x: jnp.square(layer(params, x, lengths=jnp.array([3, 2]))).sum()

    @jax.jit
    def run(x):
        reverse = jax.grad(lambda x: (jax.grad(loss)(x) * direction).sum())(x)
        return reverse, jnp.einsum("btfsuv,suv->btf", jax.hessian(loss)(x), direction)

    reverse, hessian = run(x)
    assert jnp.abs(hessian).max() > 1e-3
    close(reverse, hessian, 1e-5)


@pytest.mark.exhaustive
@every
def test_sixteen_bits_keep_a_wide_carry(kind):
    """Over 400 steps the error stays that of rounding weights and inputs once."""
    layer, params, _ = made(kind)
    x = jax.random.normal(jax.random.key(3), (2, 400, IN))
    narrow = x.astype(jnp.bfloat16)
    y, carry = jax.jit(layer.scan)(params, narrow)
    assert y.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(carry)} == {jnp.dtype("float32")}
    want = layer(params, narrow.astype(jnp.float32))
    assert jnp.abs(y.astype(jnp.float32) - want).max() < 0.02
    gradient = jax.jit(jax.grad(lambda p, x: layer(p, x).astype(jnp.float32).sum()))
    wide = gradient(params, narrow.astype(jnp.float32))
    for name, got in gradient(params, narrow).items():
        assert got.dtype == jnp.float32
        # The kernel's is one dot over all 800 rows, which JAX 0.12 on a CPU sums up in 16 bits
        # (0.07 off with AMX).
        limit = 0.12 if name == "kernel" else 0.02
        assert jnp.linalg.norm(got - wide[name]) < limit * jnp.linalg.norm(wide[name]), name


@pytest.mark.exhaustive
def test_initial_values():
    x = jnp.ones((1, 1, 64))
    params, _ = nn.LSTM(32).init(jax.random.key(0), x)
    for gate in jnp.split(params["recurrent_kernel"], 4, 1):
        np.testing.assert_allclose(gate @ gate.T, np.eye(32), atol=1e-5)
    np.testing.assert_array_equal(
        params["bias"].reshape(4, 32), np.repeat([[0], [1], [0], [0]], 32, 1)
    )
    np.testing.assert_allclose(params["kernel"].std(), 64**-0.5, rtol=0.05)
    params, _ = nn.GRU(32).init(jax.random.key(0), x)
    assert not params["bias"].any() and not params["recurrent_bias"].any()
    assert jax.tree.map(jnp.shape, nn.GRU(32, use_bias=False).spec(x).params) == {
        "kernel": (64, 96),
        "recurrent_kernel": (32, 96),
    }


def test_activation():
    layer = nn.RNN(2, activation=jax.nn.relu)
    params = {"kernel": jnp.eye(2), "recurrent_kernel": jnp.eye(2), "bias": jnp.zeros(2)}
    y = layer(params, jnp.array([[[1.0, -1.0], [2.0, 3.0]]]))
    np.testing.assert_array_equal(y, [[[1, 0], [3, 3]]])


@every
def test_one_product_for_each_step(kind):
    """The inputs are multiplied ahead of the scan, and no step slices a gate out of an array of all
    times, which XLA:CPU does one element at a time."""
    layer, params, x = made(kind)

    def equations(program):
        for eqn in program.eqns:
            called = eqn.primitive.name in jaxpr.INLINED
            yield from equations(jaxpr.bodies(eqn)[0].jaxpr) if called else [eqn]

    found = list(equations(jax.make_jaxpr(layer)(params, x).jaxpr))
    (scan,) = (eqn for eqn in found if eqn.primitive.name == "scan")
    products = [
        sum(eqn.primitive.name == "dot_general" for eqn in eqns)
        for eqns in (found, equations(scan.params["jaxpr"].jaxpr))
    ]
    assert products == [layer.gates, 1]
    assert [v.aval.shape for v in scan.invars if v.aval.ndim == 3] == layer.gates * [
        (TIME, BATCH, FEATURES)
    ]


def test_eager_calls_compile_once():
    layer, params, x = made("GRU")
    layer(params, x)
    with jax.no_tracing():
        layer(params, x)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda layer, p, x: layer(p, x[0]),
            ValueError,
            "LSTM at the root: expected input [batch, time, features]; got shape (6, 3)",
        ),
        (
            lambda layer, p, x: layer(p, x.astype(jnp.int32)),
            TypeError,
            "LSTM at the root: expected floating-point input; got int32[4, 6, 3]",
        ),
        (
            lambda layer, p, x: layer(p, x, lengths=jnp.ones(4)),
            ValueError,
            "LSTM at the root: lengths must be integers [batch] (4,); got float32[4]",
        ),
        (
            lambda layer, p, x: layer(p, x, lengths=3),
            ValueError,
            "LSTM at the root: lengths must be integers [batch] (4,); got int32[]",
        ),
        (
            lambda layer, p, x: layer.scan(p, x, jnp.zeros((4, 5))),
            ValueError,
            "LSTM at the root: expected a carry of shape ((4, 5), (4, 5)); got (4, 5)",
        ),
        (
            lambda layer, p, x: layer.scan(p, x, layer.zero_carry(3)),
            ValueError,
            "LSTM at the root: expected a carry of shape ((4, 5), (4, 5)); got ((3, 5), (3, 5))",
        ),
        (
            lambda layer, p, x: layer(p, x[..., :2]),
            ValueError,
            "'kernel': expected shape (2, 20) for this input, got (3, 20) in params",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call(*made("LSTM"))
    two_ways, params, x = made("GRU", bidirectional=True)
    with pytest.raises(
        ValueError,
        match=re.escape(
            "GRU at the root: expected a carry of shape {forward: (4, 5), backward: (4, 5)}; got "
            "(4, 5)"
        ),
    ):
        two_ways.scan(params, x, jnp.zeros((4, 5)))


PACKED = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [0, 3, 3, 0, 5, 5, 5, 5]])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layer", [nn.RNN, nn.LSTM, nn.GRU])
def test_packed_sequences_are_those_of_separate_rows(layer, bidirectional):
    with jax.enable_x64(True):
        layer = layer(4, bidirectional=bidirectional)
        x = np.random.default_rng(0).normal(size=(2, 8, 3))
        params = jax.tree.map(jnp.float64, layer.init(jax.random.key(0), jnp.asarray(x))[0])
        weight = np.random.default_rng(1).normal(size=(2, 8, 8 if bidirectional else 4))

        def packed(params, x):
            y = layer(params, x, segments=PACKED)
            return (jnp.sin(y) * weight).sum(), y

        def separate(params, x):
            y = jnp.zeros((2, 8, weight.shape[-1]))
            for row, number in ((0, 1), (0, 2), (1, 3), (1, 5)):
                where = np.flatnonzero(PACKED[row] == number)
                y = y.at[row, where].set(layer(params, x[row, where][None])[0])
            return (jnp.sin(y) * weight).sum(), y

        got, want = (
            jax.value_and_grad(f, (0, 1), has_aux=True)(params, jnp.asarray(x))
            for f in (packed, separate)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), got, want)
        hidden = jnp.asarray(np.where(PACKED[..., None] == 0, np.nan, x))
        again = jax.value_and_grad(packed, has_aux=True)(params, hidden)
        np.testing.assert_allclose(again[0][1], want[0][1], atol=1e-12)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), again[1], want[1][0]
        )


def test_packed_sequences_and_lengths_and_carries():
    layer, x = nn.LSTM(4), jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 3)), jnp.float32)
    params, _ = layer.init(jax.random.key(0), x)
    cut = layer(params, x, segments=PACKED, lengths=jnp.array([5, 8]))
    whole = layer(params, x, segments=PACKED)
    np.testing.assert_array_equal(cut[0, 5:], 0)
    np.testing.assert_allclose(cut[0, :5], whole[0, :5], atol=1e-6)
    _, (hidden, _) = layer.scan(params, x, segments=PACKED)
    np.testing.assert_allclose(hidden, jnp.stack([whole[0, 6], whole[1, 7]]), atol=1e-6)
    with pytest.raises(ValueError, match=r"LSTM at .*segments cannot be combined with a carry"):
        layer.scan(params, x, layer.zero_carry(2), segments=PACKED)
    with pytest.raises(ValueError, match=r"segments must be integers \[batch, time\]"):
        layer(params, x, segments=PACKED[:, :4])


def test_a_training_step_on_packed_sequences_is_tuned_to_the_same_result():
    layer, x = nn.GRU(4), jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 3)), jnp.float32)
    params, _ = layer.init(jax.random.key(0), x)
    step = jax.value_and_grad(lambda params: (layer(params, x, segments=PACKED) ** 2).sum())
    got, want = ft.tune(jax.jit(step))(params), step(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
