"""microbatch: state goes from slice to slice. The reference takes n separate steps."""

import gc
import weakref

import equinox as eqx
import flax.linen as linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import checking_leaks, sampled
from flax import nnx

from fnet import layers as nn
from fnet import transforms as ft

N = 4
X = jax.random.normal(jax.random.key(0), (8, 3)) + 2


def slices(x):
    return [x[i::N] for i in range(N)]


def same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        assert a.dtype == b.dtype and a.shape == b.shape
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=3e-5)


def separate(f, params, state, x):
    """The mean of the values and gradients of n steps, and the state after the last."""
    values = []
    for rows in slices(x):
        (value, state), slope = f(params, state, rows)
        values.append((value, slope))
    return jax.tree.map(lambda *leaves: sum(leaves) / N, *values), state


def check(loss, params, state, **options):
    with jax.numpy_dtype_promotion("standard"):  # Haiku multiplies integers and floats
        return checked(loss, params, state, **options)


def checked(loss, params, state, **options):
    f = jax.value_and_grad(loss, has_aux=True)
    expected, after = separate(f, params, state, X)
    for g in (
        ft.microbatch(f, N, argnums=2, **options),
        jax.jit(ft.microbatch(jax.jit(f), N, argnums=2, **options)),
    ):
        (value, found), slope = g(params, state, X)
        same(((value, slope), found), (expected, after))
    return after


def fnet():
    model = nn.Sequential(nn.Dense(3), nn.BatchNorm())
    params, state = model.init(jax.random.key(1), X, train=True)

    def loss(params, state, x):
        y, state = model(params, x, state=state, train=True)
        return jnp.square(y).mean() + jnp.square(params["0"]["kernel"]).sum(), state

    return loss, params, state


def haiku():
    f = hk.without_apply_rng(
        hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(hk.Linear(3)(x), True))
    )
    with jax.numpy_dtype_promotion("standard"):
        params, state = f.init(jax.random.key(1), X)

    def loss(params, state, x):
        y, state = f.apply(params, state, x)
        return jnp.square(y + 1).mean(), state

    return loss, params, state


def equinox():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    arrays, rest = eqx.partition(norm, eqx.is_inexact_array)

    def loss(arrays, state, x):
        norm = eqx.combine(arrays, rest)
        y, state = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            x, state
        )
        return jnp.square(y + 1).mean(), state

    return loss, arrays, state


def flax():
    model = linen.BatchNorm(use_running_average=False, momentum=0.9)
    variables = model.init(jax.random.key(1), X)

    def loss(params, stats, x):
        y, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return jnp.square(y + 1).mean(), new["batch_stats"]

    return loss, variables["params"], variables["batch_stats"]


def counter():
    def loss(w, state, x):
        step, key = state["step"], jax.random.fold_in(state["key"], state["step"])
        noise = jax.random.normal(key, x.shape)
        mean = 0.9 * state["mean"] + 0.1 * x.mean(0)
        new = {"step": step + 1, "key": jax.random.split(state["key"])[0], "mean": mean}
        return jnp.square(w * x + noise).mean(), new

    return (
        loss,
        jnp.float32(2),
        {"step": jnp.int32(5), "key": jax.random.key(3), "mean": jnp.zeros(3)},
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [haiku, equinox, counter])
def test_state_with_integers_is_carried(make):
    check(*make())


@pytest.mark.quick_cases("fnet")
@pytest.mark.parametrize("make", [fnet, flax, haiku, counter])
def test_declared_state_is_carried(make):
    loss, params, state = make()
    after = check(loss, params, state, carry=1)
    with jax.numpy_dtype_promotion("standard"):
        full = loss(params, state, X)[1]  # one step on the full batch gives other statistics
    assert not all(
        np.array_equal(*map(np.asarray, pair))
        for pair in zip(*map(jax.tree.leaves, (after, full)))
        if jnp.issubdtype(pair[0].dtype, jnp.inexact)
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [fnet, flax])
def test_statistics_without_integers_must_be_declared(make):
    loss, params, state = make()
    step = ft.microbatch(jax.value_and_grad(loss, has_aux=True), N, argnums=2)
    with pytest.raises(
        ValueError,
        match=r"the result\[0\]\[1\] has the structure of argument 1 and is computed from it"
        r".*pass carry=1: each slice .* pass carry=\(\)",
    ):
        step(params, state, X)
    averaged = ft.microbatch(loss, N, argnums=2, carry=())(params, state, X)[1]
    expected = jax.tree.map(
        lambda *x: sum(x) / N, *(loss(params, state, rows)[1] for rows in slices(X))
    )
    same(averaged, expected)
    same(
        ft.microbatch(loss, N, carry=1)(params, state, X)[1],
        separate(lambda *args: (loss(*args), 0.0), params, state, X)[1],
    )  # carried arguments are not batched


def test_a_single_key_or_number_as_state():
    f = lambda w, key, total, x: (
        w * x.mean() + jax.random.normal(key),
        jax.random.split(key)[0],
        total + x.sum(),
    )
    key, total = jax.random.key(1), jnp.float32(0)
    got = ft.microbatch(f, N, carry=(1, 2))(2.0, key, total, X)
    mean = 0.0
    for rows in slices(X):
        value, key, total = f(2.0, key, total, rows)
        mean += value / N
    same(got, (mean, key, total))
    with pytest.raises(
        ValueError, match=r"got key<fry>.*pass carry= with the position of this argument"
    ):
        ft.microbatch(f, N, argnums=3)(2.0, key, total, X)


def test_a_counter_that_is_replaced_is_not_carried():
    step = lambda w, state, x: (
        w * x.mean(),
        {"mean": state["mean"] * 0.9 + x.mean(), "n": jnp.int32(7)},
    )
    with pytest.raises(ValueError, match=r"the result\[1\] has the structure of argument 1"):
        ft.microbatch(step, N, argnums=2)(2.0, {"mean": jnp.float32(0), "n": jnp.int32(3)}, X)


def test_counters_are_not_summed():
    step = lambda w, count, x: (w * x.mean(), count + 1)
    with pytest.raises(
        ValueError, match=r"the result\[1\] is an integer that is computed from another integer and"
    ):
        ft.microbatch(step, N, argnums=2)(2.0, jnp.int32(3), X)
    assert ft.microbatch(step, N, carry=1)(2.0, jnp.int32(3), X)[1] == 3 + N
    assert ft.microbatch(step, N, argnums=2, carry=())(2.0, jnp.int32(3), X)[1] == N * 4
    closed = jnp.arange(3)
    with pytest.raises(ValueError, match="Its sum over the slices would be wrong"):
        ft.microbatch(lambda w, x: (w * x.mean(), closed + 1), N)(2.0, X)
    # Counts of a metric are sums, also if they depend on integers that are not state.
    limit = jnp.int32(1)
    metrics = lambda w, limit, x: {
        "n": (x > limit.astype(x.dtype)).sum(),
        "rows": jnp.int32(len(x)),
    }
    got = ft.microbatch(metrics, N, argnums=2)(2.0, limit, X)
    assert got["n"] == (X > 1).sum() and got["rows"] == 8


def test_a_metric_with_the_shape_of_a_counter_is_a_sum():
    f = lambda w, state, x: ({"hits": (x > 2).sum()}, {"step": state["step"] + 1})
    got = ft.microbatch(f, N, argnums=2)(2.0, {"step": jnp.int32(7)}, X)
    assert got[0]["hits"] == (X > 2).sum() and got[1]["step"] == 7 + N


@pytest.mark.exhaustive
def test_gradients_with_the_structure_of_the_state():
    """A moving average has the structure of the parameters and of their gradients."""

    def loss(params, average, x):
        moved = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p * x.mean(), average, params)
        return jnp.square(x @ params["w"]).mean(), moved

    params, average = {"w": jnp.arange(3.0)}, {"w": jnp.ones(3)}
    check(loss, params, average, carry=1)


def test_slices_without_weight_leave_the_state():
    f = lambda w, state, x, weights: (
        (w * x.mean(1) * weights).sum() / weights.sum(),
        {"step": state["step"] + 1},
    )
    weights = jnp.array([1.0, 0, 1, 0, 1, 0, 1, 0])  # slices 1 and 3 have no weight
    got = ft.microbatch(f, N, argnums=(2, 3), weight=lambda w, state, x, weights: weights.sum())(
        2.0, {"step": jnp.int32(0)}, X, weights
    )
    assert got[1]["step"] == 2
    np.testing.assert_allclose(got[0], 2 * X[::2].mean(), rtol=1e-5)


class Block(nnx.Module):
    def __init__(self):
        self.linear, self.norm = (
            nnx.Linear(3, 3, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(3, rngs=nnx.Rngs(0)),
        )
        self.dropout, self.steps = nnx.Dropout(0.5, rngs=nnx.Rngs(1)), nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.steps[...] += 1
        return self.dropout(self.norm(self.linear(x)))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit, ft.tune])
def test_modules_of_nnx(wrap):
    f = nnx.value_and_grad(lambda model, x: jnp.square(model(x)).mean())
    linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    same(wrap(ft.microbatch(f, N))(linear, X), f(linear, X))
    reference, model, results = Block(), Block(), []
    for rows in slices(X):
        results.append(f(reference, rows))
    got = wrap(ft.microbatch(f, N))(model, X)
    same(got, jax.tree.map(lambda *leaves: sum(leaves) / N, *results))
    same(nnx.state(model), nnx.state(reference))
    assert model.steps[...] == N


def test_a_weight_leaves_the_updates_of_modules_alone():
    f = nnx.value_and_grad(lambda model, x: jnp.square(model(x)).mean())
    expected, model = Block(), Block()
    ft.microbatch(f, N)(expected, X)
    ft.microbatch(f, N, weight=lambda model, x: 1.0)(model, X)
    assert model.steps[...] == N
    same(nnx.state(model), nnx.state(expected))


def _merged(params, rest, x):
    """A module that exists inside the function alone, with its statistics as second result."""
    # Copies, because the arguments may belong to an outer trace.
    model = nnx.merge(nnx.graphdef(Block()), params, rest, copy=True)
    return jnp.square(model(x)).mean(), nnx.state(model, nnx.BatchStat)


def _sliced(f):
    return ft.microbatch(f, N, argnums=2, carry=())


_FORMS = {
    "value": _sliced(_merged),
    "grad of it": jax.grad(lambda *args: _sliced(_merged)(*args)[0]),
    "of a gradient": _sliced(jax.value_and_grad(_merged, has_aux=True)),
    "vmap": jax.vmap(_sliced(_merged), in_axes=(None, None, 0)),
    "vmap of a gradient": jax.vmap(
        jax.grad(_sliced(_merged), has_aux=True), in_axes=(None, None, 0)
    ),
}


@pytest.mark.parametrize("form", sampled(_FORMS, ["grad of it", "vmap"]))
def test_no_tracer_of_a_slice_survives(form):
    _, params, rest = nnx.split(Block(), nnx.Param, ...)
    x = jnp.stack([X, X]) if form.startswith("vmap") else X
    with checking_leaks():
        jax.jit(_FORMS[form]).trace(params, rest, x)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("weight", [None, lambda model, x: x.sum()], ids=["equal", "weighted"])
def test_no_tracer_in_a_module_survives(weight):
    f = nnx.value_and_grad(lambda model, x: jnp.square(model(x)).mean())
    with checking_leaks():
        jax.jit(lambda x: ft.microbatch(f, N, weight=weight)(Block(), x)).trace(X)


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [fnet, haiku, equinox, flax, counter])
def test_no_tracer_in_the_state_of_a_library_survives(make):
    loss, params, state = make()
    sliced = ft.microbatch(loss, N, carry=1)
    of_gradient = ft.microbatch(jax.value_and_grad(loss, has_aux=True), N, carry=1)
    forms = (jax.grad(sliced, has_aux=True), of_gradient)
    with jax.numpy_dtype_promotion("standard"), checking_leaks():
        for form in forms:
            jax.jit(form).trace(params, state, X)


def test_arguments_are_released():
    """An eager call of each step must not keep the batches of the calls before it."""
    x = jnp.ones((8, 3))
    ft.microbatch(lambda w, x: w * x.mean(), N, weight=lambda w, x: x.sum())(2.0, x)
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None


def test_errors():
    f = lambda w, state, x: (w * x.mean(), state)
    with pytest.raises(ValueError, match=r"argument 1 is both in argnums= and in carry="):
        ft.microbatch(f, N, argnums=(1, 2), carry=1)(2.0, X, X)
    with pytest.raises(
        ValueError,
        match=r"carry= names argument 1, whose new value .* no result has those of the "
        r"argument: \['a'\] float32\[2\]",
    ):
        ft.microbatch(lambda w, state, x: w * x.mean(), N, carry=1)(2.0, {"a": jnp.zeros(2)}, X)
    with pytest.raises(ValueError, match=r"the results at \[0\], \[1\] all have"):
        ft.microbatch(lambda w, s, x: (s, s), N, carry=1)(2.0, {"a": jnp.zeros(2)}, X)
    with pytest.raises(
        TypeError, match=r"carry= names argument 1, which must contain only .* \['a'\] is a str"
    ):
        ft.microbatch(f, N, carry=1)(2.0, {"a": "b"}, X)
    assert ft.microbatch(lambda w, n, x: (w * x.mean(), n + 1), N, carry=1)(2.0, 3, X)[1] == 3 + N
    with pytest.raises(
        TypeError, match="carry must be an integer or a tuple of integers; got 'state'"
    ):
        ft.microbatch(f, N, carry="state")(2.0, {}, X)
    with pytest.raises(ValueError, match="carry names argument 5; the function was called with 3"):
        ft.microbatch(f, N, carry=5)(2.0, {}, X)
