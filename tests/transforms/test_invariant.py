"""An invariant function equals the function up to rounding, and has the same bits for every batch
size and on every number of devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bucket_cases import NAMES, case
from checks import sampled
from flax import linen, nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import layers as nn
from fnet import models
from fnet import transforms as ft

ROWS = 1, 3, 5, 8
QUICK = (
    "mean", "attention", "sort", "lstm by hand", "flattened", "indices", "embedded",
    "max pool same", "gradient of attention", "gradient of conv same stride 2",
)  # fmt: skip
# JAX cannot trace them for a batch of any size, or they fix its size, or have two batches.
NOT_TRACED = (
    "correlation", "reflected", "searched", "interpolated", "joined", "class token", "transposed",
    "dot_product_attention", "gradient of joined", "two lengths", "gradient of two lengths",
)  # fmt: skip
DRAWN = "drawn", "fnet dropout", "flax nnx"  # their draws are others
OTHER_ROUNDING = "gradient of fnet attention", "gradient of flax encoder"  # gradients that are 0


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


def mesh(devices):
    return Mesh(np.array(jax.devices()[:devices]), ("data",))


def bits(tree):
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(raw(jnp.asarray(x))).tobytes() for x in jax.tree.leaves(tree)]


def head(tree, n):
    return jax.tree.map(lambda x: x[:n], tree)


def assert_close(got, want, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if not jnp.issubdtype(y.dtype, jnp.inexact):
            np.testing.assert_array_equal(x, y)
        else:
            largest = np.nan_to_num(np.abs(y), posinf=0).max(initial=0) + 1e-12
            np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * largest)


def of_batches(name):
    """Returns (the function of a case, its arguments for 5 or 11 rows, which of them are batched)."""
    each = case(name)
    axes = each.axes if isinstance(each.axes, tuple) else (each.axes,)
    where = [i for i, text in enumerate(axes) if text is not None]
    args = each.inputs(5)
    if all(not isinstance(axes[i], str) or axes[i].startswith("b") for i in where):
        longer = lambda x: np.concatenate([x, x[::-1], x[:1]]) if np.ndim(x) else x
        args = tuple(jax.tree.map(longer, x) if i in where else x for i, x in enumerate(args))
    return each.f, args, tuple(where)


@pytest.mark.parametrize("name", sampled([n for n in NAMES if n not in NOT_TRACED + DRAWN], QUICK))
def test_equals_the_function(name):
    with jax.enable_x64(True):
        f, args, where = of_batches(name)
        got, want = ft.invariant(f, argnums=where)(*args), jax.jit(f)(*args)
        if name in OTHER_ROUNDING:
            got, want = (jax.tree.map(lambda x: x + 1, each) for each in (got, want))
        assert_close(got, want, 1e-9)


def perceptron(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jax.nn.softmax(hidden @ params["v"])


PERCEPTRON = {"w": draw(37, 53), "b": draw(53), "v": draw(53, 10)}


def weighted(f):
    """A step on rows with weights."""

    def step(params, x, y, weight):
        def loss(params):
            losses = -jnp.log(jnp.take_along_axis(f(params, x), y[:, None], 1))[:, 0]
            return (losses * weight).sum() / weight.sum()

        value, gradient = ft.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    return step


def test_a_row_has_the_same_bits_in_every_batch():
    x = draw(8, 37)
    predict = ft.invariant(perceptron)
    want = predict(PERCEPTRON, x)
    for n in ROWS:
        assert bits(predict(PERCEPTRON, x[:n])) == bits(want[:n])
        assert bits(predict(PERCEPTRON, x[8 - n :])) == bits(want[8 - n :])
    order = np.asarray([3, 1, 7, 0, 2, 6, 5, 4])
    assert bits(predict(PERCEPTRON, x[order])) == bits(want[order])
    plain = jax.jit(perceptron)  # the test would not fail without the transform
    assert any(bits(plain(PERCEPTRON, x[:n])) != bits(plain(PERCEPTRON, x)[:n]) for n in ROWS)


@pytest.mark.exhaustive
def test_rows_of_weight_zero_change_nothing_in_a_step():
    x, y = draw(8, 37), np.arange(8) % 10
    step = ft.invariant(weighted(perceptron), argnums=(1, 2, 3))
    for n in ROWS:
        few = step(PERCEPTRON, x[:n], y[:n], jnp.ones(n))
        padded = step(PERCEPTRON, x, y, jnp.arange(8) < n)
        assert bits(few) == bits(padded)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("rows", [8, 24])
def test_a_step_has_the_same_bits_on_every_number_of_devices(rows):
    args = PERCEPTRON, draw(rows, 37), np.arange(rows) % 10, draw(rows) ** 2
    f, where = weighted(perceptron), (1, 2, 3)
    want = ft.invariant(f, argnums=where)(*args)
    assert_close(want, jax.jit(f)(*args), 1e-5)
    for devices in (1, 2, 4, 8):
        assert bits(ft.invariant(f, argnums=where, mesh=mesh(devices))(*args)) == bits(want)


def test_rows_that_are_no_power_of_two_on_a_device():
    args = PERCEPTRON, draw(18, 37), np.arange(18) % 10, draw(18) ** 2
    f, where = weighted(perceptron), (1, 2, 3)
    want = ft.invariant(f, argnums=where)(*args)
    for devices in (2, 3, 6):
        assert bits(ft.invariant(f, argnums=where, mesh=mesh(devices))(*args)) == bits(want)


class ConvNet(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        for channels in (4, 6):
            x = linen.Conv(channels, (3, 3))(x)
            x = linen.relu(linen.BatchNorm(use_running_average=not train)(x))
            x = linen.max_pool(x, (2, 2), (2, 2))
        return linen.Dense(10)(x.mean((1, 2)))


def test_batch_norm_dropout_and_pooling():
    net, x, y = ConvNet(), draw(8, 8, 8, 3), np.arange(8)
    variables = net.init(jax.random.key(0), x)

    def step(variables, x, y):
        def loss(params):
            given = {**variables, "params": params}
            logits, state = net.apply(given, x, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
            return losses.mean(), state

        (value, state), gradient = ft.value_and_grad(loss, has_aux=True)(variables["params"])
        return value, gradient, state

    where = 1, 2
    want = ft.invariant(step, argnums=where)(variables, x, y)
    got, plain = (jax.tree.map(lambda x: x + 1, each) for each in (want, step(variables, x, y)))
    assert_close(got, plain, 1e-5)
    for devices in (2, 8):
        sharded = ft.invariant(step, argnums=where, mesh=mesh(devices))
        assert bits(sharded(variables, x, y)) == bits(want)
    evaluate = ft.invariant(lambda variables, x: net.apply(variables, x, train=False))
    for n in ROWS:
        assert bits(evaluate(variables, x[:n])) == bits(evaluate(variables, x)[:n])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("stacked", [True, False])
def test_gpt_in_both_forms(stacked):
    model = models.GPT(19, 8, 2, 2, context=16, stacked=stacked)
    tokens = (np.abs(draw(8, 12)) * 10).astype(np.int32) % 19
    params, _ = model.init(jax.random.key(0), tokens)

    def step(params, tokens, weight):
        def loss(params):
            logits = model(params, tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return (losses.mean(1) * weight).sum() / weight.sum()

        return ft.value_and_grad(loss)(params)

    where = 1, 2
    f = ft.invariant(step, argnums=where)
    want = f(params, tokens, jnp.ones(8))
    raised = lambda tree: jax.tree.map(lambda x: x + 1, tree)  # some gradients are 0
    assert_close(raised(want), raised(jax.jit(step)(params, tokens, jnp.ones(8))), 1e-5)
    assert bits(f(params, tokens[:3], jnp.ones(3))) == bits(f(params, tokens, jnp.arange(8) < 3))
    for devices in (2, 8):
        sharded = ft.invariant(step, argnums=where, mesh=mesh(devices))
        assert bits(sharded(params, tokens, jnp.ones(8))) == bits(want)


class Module(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(4, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(jax.nn.gelu(self.norm(self.conv(x)))).mean((1, 2)))


def test_three_steps_of_an_nnx_module_with_an_optimizer():
    x, y = draw(8, 4, 4, 3), np.arange(8)

    def step(model, optimizer, x, y):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    def trained(devices):
        model = Module(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        run = ft.invariant(step, argnums=(2, 3), mesh=devices and mesh(devices))
        losses = [float(run(model, optimizer, x, y)) for _ in range(3)]
        return losses, bits(nnx.state(model, (nnx.Param, nnx.BatchStat)))

    want = trained(None)
    assert len(set(want[0])) == 3
    assert trained(2) == want
    assert trained(8) == want


def test_draws_depend_on_the_key_and_the_number_of_the_row():
    f = ft.invariant(lambda key, x: x * jax.random.normal(key, (x.shape[1], x.shape[0])).T)
    x = np.ones((8, 5), np.float32)
    want = f(jax.random.key(0), x)
    assert bits(f(jax.random.key(0), x[:3])) == bits(want[:3])
    assert bits(f(jax.random.key(1), x)) != bits(want)
    assert len({row.tobytes() for row in np.asarray(want)}) == 8
    assert bits(ft.invariant(f.__wrapped__, mesh=mesh(4))(jax.random.key(0), x)) == bits(want)
    many = ft.invariant(lambda key, x: x * jax.random.normal(key, x.shape))
    drawn = np.asarray(many(jax.random.key(0), np.ones((8, 4096), np.float32)))
    assert abs(drawn.mean()) < 0.02 and abs(drawn.std() - 1) < 0.02
    assert abs(np.corrcoef(drawn) - np.eye(8)).max() < 0.1


def test_keys_of_rows_and_keys_split_for_rows():
    keys = jax.random.split(jax.random.key(0), 8)
    own = ft.invariant(lambda _, keys: jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys))
    assert bits(own(0.0, keys)) == bits(jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys))

    def split(key, x):
        keys = jax.random.split(key, x.shape[0])
        return x + jax.vmap(jax.random.normal)(keys)

    f, x = ft.invariant(split), draw(8)
    assert bits(f(jax.random.key(0), x[:3])) == bits(f(jax.random.key(0), x)[:3])
    assert len(set(np.asarray(f(jax.random.key(0), x) - x).tolist())) == 8


def test_a_norm_over_the_batch_in_a_loop_is_written_out():
    def f(params, x):
        def layer(x, w):
            x = jnp.tanh(x @ w)
            return (x - x.mean(0)) / (x.std(0) + 1e-3), x.mean()

        return lax.scan(layer, x, params)

    params, x = draw(4, 6, 6), draw(8, 6)
    want = ft.invariant(f)(params, x)
    assert_close(want, f(params, x), 1e-5)
    assert bits(ft.invariant(f, mesh=mesh(4))(params, x)) == bits(want)


def test_sums_over_rows_inside_a_loop():
    """The gradient of a recurrence adds to the gradient of its kernel in each turn."""

    def loss(w, x):
        turn = lambda h, each: (jnp.tanh(each + h @ w), None)
        return (lax.scan(turn, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[0] ** 2).mean()

    w, x = draw(5, 5), draw(8, 7, 5)
    f = ft.invariant(ft.grad(loss))
    assert_close(f(w, x), ft.grad(loss)(w, x), 1e-5)
    assert ft.explain(f, w, jax.ShapeDtypeStruct((8, 7, 5), jnp.float32)).phases == 1
    assert bits(ft.invariant(ft.grad(loss), mesh=mesh(8))(w, x)) == bits(f(w, x))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("layer", [nn.LSTM(4), nn.GRU(4, bidirectional=True)])
def test_recurrent_layers(layer):
    x = draw(8, 6, 3)
    params, _ = layer.init(jax.random.key(0), x)
    loss = lambda params, x: (layer(params, x) ** 2).mean()
    f = ft.invariant(ft.grad(loss))
    assert_close(f(params, x), ft.grad(loss)(params, x), 1e-4)
    assert bits(ft.invariant(ft.grad(loss), mesh=mesh(4))(params, x)) == bits(f(params, x))


TURNS = np.arange(1.0, 4.0, dtype=np.float32)


@pytest.mark.parametrize(
    "turn",
    [
        lambda t, i, x: ((i * x).sum(0), t),
        lambda t, i, x: (-t, (i * x).sum(0).astype(jnp.int32)),
        lambda t, i, x: (lax.cond(i > 2, lambda: (i * x).sum(0), lambda: x.sum(0)), t),
        lambda t, i, x: (t, lax.scan(lambda u, j: ((j * x).sum(0), u), i * t, TURNS)),
    ],
)
def test_sums_that_replace_what_a_loop_carries(turn):
    """Each row must not add the whole that the loop, or a turn of it, begins with."""

    def f(start, x):
        carry = start, 2 * start, 3 * start
        step = lambda t, i: (lambda last, y: ((t[1], t[2], last), (t[0], y)))(*turn(t[0], i, x))
        return lax.scan(step, carry, TURNS)

    start, x = draw(4), draw(8, 4)
    assert_close(ft.invariant(f)(start, x), f(start, x), 1e-5)


def test_a_converted_sum_in_a_branch():
    f = lambda w, x: lax.cond(w > 0, lambda: (3 * x).sum(0).astype(int), lambda: x.astype(int)[0])
    x = draw(8, 4)
    assert_close(ft.invariant(f)(1.0, x), f(1.0, x), 0)


def test_a_scan_without_turns():
    f = lambda w, x: lax.scan(lambda t, i: (t + x.sum(0), t), w, jnp.zeros((0, 2)))
    assert_close(ft.invariant(f)(draw(4), draw(8, 4)), f(draw(4), draw(8, 4)), 0)


def test_rows_whose_loops_end_at_different_turns():
    """A loop under `jax.vmap` runs until the last row ends; alone, a row runs for itself."""
    grow = lambda row: lax.while_loop(
        lambda c: c.sum() < 30, lambda c: 1.3 * c + jnp.exp(c / 99), row
    )
    solved = lambda row: jax.scipy.sparse.linalg.cg(jnp.diag(row**2 + 1), row)[0]
    f = ft.invariant(lambda _, x: (jax.vmap(grow)(x), jax.vmap(solved)(x)))
    x = np.abs(draw(8, 4))
    want = f(0.0, x)
    assert_close(want, (jax.vmap(grow)(x), jax.vmap(solved)(x)), 1e-4)
    assert not ft.explain(f, 0.0, jax.ShapeDtypeStruct((8, 4), jnp.float32)).by_size
    for n in ROWS:
        assert bits(f(0.0, x[:n])) == bits(head(want, n))


def test_draws_of_several_keys_for_each_row():
    def f(key, x):
        return jax.vmap(lambda key: jax.random.normal(key, x.shape))(jax.random.split(key, 3))

    drawn, x = ft.invariant(f)(jax.random.key(0), draw(8, 2)), draw(8, 2)
    assert drawn.shape == (3, 8, 2) and len(set(np.asarray(drawn).ravel().tolist())) == 48
    assert bits(ft.invariant(f)(jax.random.key(0), x[:3])) == bits(drawn[:, :3])


def test_other_sums_that_a_loop_begins_with():
    def f(start, x):
        return lax.fori_loop(0, 3, lambda i, total: total + i * x.sum(0), start)

    start, x = draw(4), draw(8, 4)
    assert_close(ft.invariant(f)(start, x), f(start, x), 1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_small_dtypes_are_added_in_float32(dtype):
    x = jnp.full((512, 2), 1.0 + 2.0**-7, dtype)
    f = ft.invariant(lambda _, x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None))
    total = f(0.0, x)
    assert total.dtype == dtype
    assert np.asarray(total, np.float32).tolist() == [516.0, 516.0]


def test_minima_counts_and_conditions():
    def f(w, x):
        most = x.max(0)
        scaled = lax.cond((x > 0).all(), lambda: x * 2, lambda: x + w)
        return most, x.min(), (x > 0).any(), (x > 0).sum(0), scaled, jnp.argmax(x, 0)

    w, x = jnp.float32(2), jnp.asarray(draw(8, 3))
    want = f(w, x)
    assert bits(ft.invariant(f)(w, x)) == bits(want)
    assert bits(ft.invariant(f, mesh=mesh(2))(w, x)) == bits(want)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize(
    "f",
    [
        lambda w, x: x.reshape(-1) + jnp.tile(w, x.shape[0]),
        lambda w, x: x.T.reshape(-1) * 2,
        lambda w, x: x.T.reshape(-1) + x.reshape(-1),  # rows in two orders
        lambda w, x: jnp.concatenate([x, x[::-1]]) @ w[:, None],
        lambda w, x: jnp.repeat(x, 3, axis=0) @ w,
        lambda w, x: x[1:] - x[:-1] + w,
        lambda w, x: jnp.cumsum(x, 0) * w,
        lambda w, x: jax.nn.softmax(x @ x.T) @ x,
        lambda w, x: x[jnp.argsort(x[:, 0])],
        lambda w, x: lax.map(lambda row: row @ w, x),
        lambda w, x: jnp.linalg.inv(jnp.einsum("bi,bj->bij", x, x) + jnp.eye(3)),
        lambda w, x: jnp.zeros((x.shape[0], 2)),
        lambda w, x: jnp.arange(x.shape[0]) * w[0],
        lambda w, x: (w, x.shape[0] * w, 3, x.shape[0]),
        lambda w, x: x[jnp.arange(x.shape[0]), 1] * w[0],
        lambda w, x: jnp.zeros(5).at[jnp.arange(x.shape[0]) % 5].add(x[:, 0]),
    ],
)
def test_programs_in_which_rows_meet_or_move(f):
    w, x = draw(3), draw(8, 3)
    want = f(w, x)
    assert_close(ft.invariant(f)(w, x), want, 2e-5)
    assert bits(ft.invariant(f, mesh=mesh(4))(w, x)) == bits(ft.invariant(f)(w, x))


def test_inside_jit_and_with_closed_over_arrays():
    scale, x = draw(3), draw(8, 3)
    f = ft.invariant(lambda w, x: jnp.tanh(x * scale) @ w)
    w = draw(3, 4)
    assert bits(jax.jit(f)(w, x)) == bits(f(w, x))

    @jax.jit
    def traced(w, x, scale):
        return ft.invariant(lambda w, x: jnp.tanh(x * scale) @ w)(w, x)

    assert bits(traced(w, x, scale)) == bits(f(w, x))


def test_a_function_that_asks_for_the_number_of_rows_and_closes_over_traced_arrays():
    f = lambda scale: ft.invariant(lambda w, x: x * scale if x.shape[0] == 4 else x)(1.0, draw(4))
    with pytest.raises(ValueError, match="does something else for 4 rows"):
        jax.jit(f)(2.0)


def test_a_sum_of_zeros_has_no_sign():
    f = ft.invariant(lambda _, x: x.sum())
    assert bits(f(0.0, -jnp.zeros(1))) == bits(f(0.0, jnp.asarray([-0.0, 0.0, 0.0])))


def test_arrays_that_are_divided_over_other_devices():
    f, w, x = ft.value_and_grad(lambda w, x: jnp.tanh(x @ w).mean()), draw(4096), draw(8, 4096)
    want = ft.invariant(f)(w, x)
    by_features = NamedSharding(mesh(4), P("data")), NamedSharding(mesh(4), P(None, "data"))
    divided = jax.device_put((w, x), by_features)
    assert bits(ft.invariant(f)(*divided)) == bits(want)
    assert bits(ft.invariant(f, mesh=mesh(8))(*divided)) == bits(want)
    on_one = jax.device_put((w, x), jax.devices()[1])
    assert bits(ft.invariant(f, mesh=mesh(4))(*on_one)) == bits(want)


def test_explain_lists_what_was_changed_and_the_price():
    def similarities(w, x, key):
        with jax.named_scope("norm"):
            x = x - x.mean(0)
        return (x @ x.T).sum() + jax.random.normal(key, x.shape).sum()

    f = ft.invariant(similarities, argnums=1)
    args = 1.0, draw(8, 3), jax.random.key(0)
    found = ft.explain(f, *args)
    assert found.rows == 8 and found.price > 0
    table = str(found)
    assert re.search(r"8 rows, one after another, \d times; \d+\.\d\d of the time", table)
    assert re.search(r"norm +reduce_sum +test_invariant.py:\d+ .*sum over the rows", table)
    assert "random_bits" in table and "with its number folded into the key" in table
    assert [change.primitive for change in found.by_size][:1] == ["dot_general"]
    assert "may depend on the number of rows" in table
    types = 1.0, jax.ShapeDtypeStruct((8, 3), jnp.float32), jax.random.key(0)
    assert ft.explain(f, *types).price is None
    rowwise = ft.explain(ft.invariant(perceptron), PERCEPTRON, draw(8, 37))
    assert not rowwise.changes and rowwise.phases == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ft.invariant(3), "invariant"),
        (lambda: ft.invariant(lambda w, x: x, mesh="data")(1.0, draw(8, 3)), "a jax.sharding.Mesh"),
        (
            lambda: ft.invariant(lambda w, x: x, mesh=mesh(8))(1.0, draw(6, 3)),
            "6 rows cannot be divided over the 8 devices",
        ),
        (lambda: ft.invariant(lambda w, x: x)(1.0, draw(0, 3)), "the batch has no rows"),
        (
            lambda: ft.invariant(lambda w, x, y: x)(1.0, draw(8, 3), draw(3, 3)),
            "same number of rows",
        ),
        (
            lambda: ft.invariant(lambda w, x: sum(x[i] for i in range(x.shape[0])))(1.0, draw(4)),
            "cannot be traced for any number of rows",
        ),
        (
            lambda: ft.invariant(lambda w, x: x if x.shape[0] == 4 else 2 * x)(1.0, draw(4)),
            "does something else for 4 rows",
        ),
        (
            lambda: jax.grad(ft.invariant(lambda w, x: (w * x).sum()))(1.0, draw(4)),
            re.escape("ft.invariant(ft.value_and_grad(loss))"),
        ),
    ],
)
def test_one_clear_error(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_an_error_of_the_function_is_its_own():
    with pytest.raises(TypeError, match="dot_general"):
        ft.invariant(lambda w, x: x @ w @ x)(draw(3, 4), draw(8, 3))


def test_the_layout_of_linear_algebra_is_that_of_one_device():
    """XLA chooses another one in a program for several devices, and with it other sums."""
    f = lambda _, x: jax.vmap(jax.scipy.linalg.expm)(x)
    for seed in (1, 5, 7):
        x = 3 * np.random.default_rng(seed).normal(size=(8, 4, 4)).astype(np.float32)
        want = bits(ft.invariant(f)(0.0, x))
        assert bits(ft.invariant(f, mesh=mesh(2))(0.0, x)) == want
        assert bits(ft.invariant(f, mesh=mesh(8))(0.0, x)) == want


def test_a_callback_on_a_sum_that_nothing_else_needs():
    said = []

    def f(_, x):
        jax.debug.callback(lambda total: said.append(float(total)), (x * 1).sum())
        return x

    ft.invariant(f)(0.0, jnp.arange(8.0))
    jax.effects_barrier()
    assert said == [28.0]
    sine = lambda _, x: jax.pure_callback(
        np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims"
    )
    np.testing.assert_array_equal(ft.invariant(sine)(0.0, draw(8)), np.sin(draw(8)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_under_a_mesh_of_the_context(kind):
    args = PERCEPTRON, draw(8, 37), np.arange(8) % 10, draw(8) ** 2
    f, where = weighted(perceptron), (1, 2, 3)
    want = bits(ft.invariant(f, argnums=where)(*args))
    place = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(kind,))
    with jax.set_mesh(place):
        assert bits(ft.invariant(f, argnums=where, mesh=place)(*args)) == want
        if kind == AxisType.Explicit:
            with pytest.raises(ValueError, match=r"explicit axes.*Pass mesh="):
                ft.invariant(f, argnums=where)(*args)
    assert bits(ft.invariant(f, argnums=where, mesh=place)(*args)) == want


def test_one_inside_another():
    x = draw(8, 37)
    f = ft.invariant(lambda params, x: jnp.sin(ft.invariant(perceptron)(params, x)))
    assert bits(f(PERCEPTRON, x[:3])) == bits(f(PERCEPTRON, x)[:3])
