"""Gradient accumulation equals the full batch, traces its body once, and moves no rows between
devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, counted, same
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import layers as nn
from fnet import transforms as ft

DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(24, 4)), DRAW.normal(size=(24, 3))
WEIGHT = DRAW.uniform(0.5, 2, size=24)
MODEL = nn.Sequential(nn.Dense(5), jnp.tanh, nn.Dense(3))
PARAMS, _ = MODEL.init(jax.random.key(0), jnp.ones((1, 4)))


def loss(params, batch):
    return jnp.square(MODEL(params, batch["x"]) - batch["y"]).mean()


def weighted_loss(params, batch):
    rows = jnp.square(MODEL(params, batch["x"]) - batch["y"]).mean(-1)
    return (rows * batch["weight"]).sum() / batch["weight"].sum()


def total_weight(params, batch):
    return batch["weight"].sum()


def cast(dtype, *trees):
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), trees)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.float64, 1e-6)])
@pytest.mark.parametrize("n", [1, 2, 8, 24])
def test_equals_full_batch(n, dtype, tolerance):
    with jax.enable_x64(dtype == jnp.float64):
        params, batch = cast(dtype, PARAMS, {"x": X, "y": Y})
        step = jax.value_and_grad(loss)
        close(jax.jit(ft.microbatch(step, n))(params, batch), step(params, batch), tolerance)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.float64, 1e-6)])
def test_weighted_loss_sums_numerator_and_weight(dtype, tolerance):
    with jax.enable_x64(dtype == jnp.float64):
        params, batch = cast(dtype, PARAMS, {"x": X, "y": Y, "weight": WEIGHT})
        step = jax.value_and_grad(weighted_loss)
        close(
            jax.jit(ft.microbatch(step, 4, weight=total_weight))(params, batch),
            step(params, batch),
            tolerance,
        )


@pytest.mark.independent(in_axes=(None, 0))
@pytest.mark.parametrize("n", [1, 4])
def test_rows_of_the_result_depend_on_their_own_rows_alone(n):
    """Row i of an averaged function of rows is the mean over row i of each slice."""
    rows = lambda params, x: MODEL(params, x)
    averaged = lambda params, x: ft.microbatch(rows, n)(params, x.reshape(-1, 4))
    return averaged, PARAMS, jnp.ones((24 // n, n, 4))


@pytest.mark.exhaustive
def test_slice_of_weight_zero_contributes_nothing():
    # Rows i, i + 4, ... make slice i: slice 1 is padding, and its loss is 0 / 0.
    weight = np.where(np.arange(24) % 4 == 1, 0, WEIGHT)
    params, batch = cast(jnp.float32, PARAMS, {"x": X, "y": Y, "weight": weight})
    step = jax.value_and_grad(weighted_loss)
    got = jax.jit(ft.microbatch(step, 4, weight=total_weight))(params, batch)
    assert np.isnan(step(params, jax.tree.map(lambda a: a[1::4], batch))[0])
    close(got, step(params, batch))


@pytest.mark.exhaustive
def test_gradient_of_microbatch_is_microbatch_of_gradient():
    params, batch = cast(jnp.float32, PARAMS, {"x": X, "y": Y})
    close(jax.grad(ft.microbatch(loss, 4))(params, batch), jax.grad(loss)(params, batch))
    close(
        jax.jit(ft.hvp(ft.microbatch(loss, 4)))(params, params, batch),
        ft.hvp(loss)(params, params, batch),
    )


def test_integers_are_summed_and_floats_keep_their_dtype():
    def metrics(offset, x):
        return {
            "count": jnp.int32(len(x)),
            "positive": (x > offset).sum(),
            "mean": x.astype(jnp.bfloat16).mean(),
        }

    x = jnp.asarray(X, jnp.float32)
    got = ft.microbatch(metrics, 4)(0.0, x)
    assert got["count"] == 24
    assert got["positive"] == (x > 0).sum()
    assert got["mean"].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(got["mean"]), x.mean(), atol=2e-3)


def test_half_precision_is_accumulated_in_float32():
    # 1 + 255 * 2**-8 in bfloat16 would stop at 1 if it were summed there.
    x = jnp.asarray([1.0] + [2.0**-9] * 255)
    got = ft.microbatch(lambda _, x: x.astype(jnp.bfloat16).mean(), 256)(None, x)
    np.testing.assert_allclose(np.float32(got), (1 + 255 * 2.0**-9) / 256, rtol=2**-8)


def test_keys_are_folded_with_the_slice():
    def draws(_, x, key):
        return jnp.zeros(4).at[x[0]].set(4 * jax.random.uniform(key))

    key = jax.random.key(3)
    got = ft.microbatch(draws, 4)(None, jnp.arange(4), key)
    want = jnp.array([jax.random.uniform(jax.random.fold_in(key, i)) for i in range(4)])
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert len(set(got.tolist())) == 4


def test_slices_take_rows_in_turn():
    place = lambda _, x: jnp.zeros((2, 3), jnp.int32).at[x[0]].set(x)
    got = ft.microbatch(place, 2)(None, jnp.array([0, 1, 10, 11, 20, 21]))
    assert got.tolist() == [[0, 10, 20], [1, 11, 21]]


def test_argnums():
    f = lambda a, b, c: (a * b).mean() + c.sum()
    a, b, c = jnp.arange(6.0), jnp.arange(6.0) + 1, jnp.ones(2)
    for argnums in ((0, 1), (-3, -2), (1, 0)):
        close(ft.microbatch(f, 3, argnums=argnums)(a, b, c), f(a, b, c))


def test_body_is_traced_once():
    step = counted(jax.value_and_grad(loss))
    params, batch = cast(jnp.float32, PARAMS, {"x": X, "y": Y})
    accumulate = jax.jit(ft.microbatch(step, 8))
    accumulate(params, batch)
    accumulate(params, batch)
    assert step.calls == 1


@pytest.mark.exhaustive
def test_donated_batch():
    params, batch = cast(jnp.float32, PARAMS, {"x": X, "y": Y})
    want = jax.grad(loss)(params, batch)
    step = jax.jit(
        ft.microbatch(lambda p, b: jax.tree.map(lambda p, g: p - g, p, jax.grad(loss)(p, b)), 4),
        donate_argnums=0,
    )
    start = jax.tree.map(jnp.copy, params)
    close(step(start, batch), jax.tree.map(lambda p, g: p - g, params, want))
    assert all(a.is_deleted() for a in jax.tree.leaves(start))


def communication(compiled):
    return sorted(
        set(re.findall(r"all-gather|all-to-all|collective-permute|all-reduce", compiled.as_text()))
    )


@pytest.mark.exhaustive
def test_sharded_batch_moves_no_rows():
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    params, batch = cast(
        jnp.float32, PARAMS, {"x": np.tile(X, (4, 1))[:64], "y": np.tile(Y, (4, 1))[:64]}
    )
    want = jax.value_and_grad(loss)(params, batch)
    batch = jax.device_put(batch, NamedSharding(mesh, P("batch")))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    step = jax.jit(ft.microbatch(jax.value_and_grad(loss), 4))
    assert communication(step.lower(params, batch).compile()) == ["all-reduce"]
    close(jax.tree.map(np.asarray, step(params, batch)), jax.tree.map(np.asarray, want))


@pytest.mark.exhaustive
def test_composes_with_vmap():
    params, batch = cast(jnp.float32, PARAMS, {"x": X, "y": Y})
    stacked = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), params)
    got = jax.vmap(ft.microbatch(loss, 4), in_axes=(0, None))(stacked, batch)
    close(got, jnp.stack([loss(params, batch), loss(jax.tree.map(lambda a: 2 * a, params), batch)]))


def test_one_slice_is_the_function_itself():
    params, batch = cast(jnp.float32, PARAMS, {"x": X, "y": Y})
    same(ft.microbatch(loss, 1)(params, batch), loss(params, batch))


# Slices of weight 0, and of negative weight. The reference is plain JAX on the full batch.


def ratio(p, batch):
    return (p * batch["x"] * batch["w"]).sum() / batch["w"].sum()


def nonlinear(p, batch):
    return (jnp.exp(p * batch["x"]) * batch["w"]).sum() / batch["w"].sum()


def row_weight(p, batch):
    return batch["w"].sum()


def rows_of(*weights):
    return {"x": jnp.arange(1.0, 5.0), "w": jnp.array(weights)}


PADDED, SIGNED = (
    rows_of(0.0, 2.0, 0.0, 2.0),
    rows_of(-1.0, 2.0, -1.0, 2.0),
)  # rows 0 and 2 are slice 0 of 2
WAYS = {
    "value": lambda f: f,
    "reverse": lambda f: jax.grad(f),
    "forward": lambda f: jax.jacfwd(f),
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f)),
    "reverse over reverse": lambda f: jax.grad(jax.grad(f)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [PADDED, SIGNED], ids=["weight 0", "negative weight"])
def test_weights_of_any_sign_in_every_derivative(way, batch):
    sliced, derive = ft.microbatch(nonlinear, 2, weight=row_weight), WAYS[way]
    close(jax.jit(derive(sliced))(0.5, batch), jax.jit(derive(nonlinear))(0.5, batch))
    points = jnp.array([0.5, -0.25])
    close(*(jax.jit(jax.vmap(derive(f), (0, None)))(points, batch) for f in (sliced, nonlinear)))


@pytest.mark.exhaustive
def test_some_slices_of_weight_zero_under_vmap():
    """The condition is batched as well: slice 0 has weight 0 in one example and slice 1 in the
    other."""
    batch = jax.tree.map(lambda *a: jnp.stack(a), PADDED, rows_of(1.0, 0.0, 3.0, 0.0))
    sliced = ft.microbatch(nonlinear, 2, weight=row_weight)
    every = lambda f: jax.jit(
        jax.vmap(lambda p, batch: [derive(f)(p, batch) for derive in WAYS.values()], (None, 0))
    )
    close(every(sliced)(0.5, batch), every(nonlinear)(0.5, batch))


@pytest.mark.exhaustive
def test_published_numbers():
    assert ft.microbatch(ratio, 2, weight=row_weight)(2.0, PADDED) == ratio(2.0, PADDED) == 6
    assert (
        jax.grad(ft.microbatch(ratio, 2, weight=row_weight))(2.0, PADDED)
        == jax.grad(ratio)(2.0, PADDED)
        == 3
    )
    assert ft.microbatch(jax.grad(ratio), 2, weight=row_weight)(2.0, PADDED) == 3
    assert ft.microbatch(ratio, 2, weight=row_weight)(2.0, SIGNED) == ratio(2.0, SIGNED) == 8
    counted_too = lambda p, batch: (ratio(p, batch), (batch["x"] > 0).sum())
    assert ft.microbatch(counted_too, 2, weight=row_weight)(2.0, PADDED)[1] == 2


@pytest.mark.exhaustive
def test_gradients_of_the_batch_and_of_closures():
    sliced = ft.microbatch(nonlinear, 2, weight=row_weight)
    close(jax.grad(sliced, 1)(0.5, PADDED)["x"], jax.grad(nonlinear, 1)(0.5, PADDED)["x"])
    close(jax.jacfwd(sliced, 1)(0.5, PADDED)["x"], jax.jacfwd(nonlinear, 1)(0.5, PADDED)["x"])

    def closed(p):
        return ft.microbatch(lambda _, batch: nonlinear(p, batch), 2, weight=row_weight)(
            None, PADDED
        )

    def by_name(p):
        return ft.microbatch(
            lambda _, batch, *, p: nonlinear(p, batch),
            2,
            weight=lambda _, batch, *, p: batch["w"].sum(),
        )(None, PADDED, p=p)

    for f in closed, by_name, jax.jit(closed):
        close(jax.grad(f)(0.5), jax.grad(nonlinear)(0.5, PADDED))
        close(jax.jacfwd(jax.grad(f))(0.5), jax.grad(jax.grad(nonlinear))(0.5, PADDED))


@pytest.mark.exhaustive
def test_weight_that_depends_on_the_parameters():
    importance = lambda p, batch: jnp.exp(p * batch["x"]) * batch["w"]

    def f(p, batch):
        return (importance(p, batch) * batch["x"]).sum() / importance(p, batch).sum()

    total = lambda p, batch: importance(p, batch).sum()
    every = lambda f: jax.jit(lambda p, batch: [derive(f)(p, batch) for derive in WAYS.values()])
    for batch in PADDED, SIGNED:
        # Second derivatives are differences of larger numbers.
        close(every(ft.microbatch(f, 2, weight=total))(0.1, batch), every(f)(0.1, batch), 1e-4)
    root = lambda p, batch: jnp.sqrt((p * batch["w"]).sum())  # its own derivative at 0 is infinite
    sliced = ft.microbatch(lambda p, batch: p * batch["x"].mean(), 2, weight=root)
    for derive in jax.grad, jax.jacfwd:
        np.testing.assert_allclose(
            derive(sliced)(2.0, PADDED), 3, rtol=1e-6
        )  # slice 1 alone: x is 2 and 4


def test_weights_that_add_up_to_zero():
    for batch, want in (
        (rows_of(0.0, 0.0, 0.0, 0.0), np.nan),
        (rows_of(1.0, -1.0, 1.0, -1.0), -np.inf),
    ):
        with jax.debug_nans(False):
            assert np.array_equal(
                ft.microbatch(ratio, 2, weight=row_weight)(1.0, batch), want, equal_nan=True
            )
            assert np.array_equal(ratio(1.0, batch), want, equal_nan=True)
    assert np.isnan(ft.microbatch(ratio, 2, weight=row_weight)(1.0, rows_of(np.nan, 1.0, 1.0, 1.0)))


@pytest.mark.parametrize(
    "convert", [lambda w: w.astype(jnp.int32), lambda w: w.astype(jnp.float16), lambda w: w > 0]
)
def test_dtypes_of_weights(convert):
    f = lambda p, batch: ratio(p, {**batch, "w": convert(batch["w"]).astype(jnp.float32)})
    sliced = ft.microbatch(f, 2, weight=lambda p, batch: convert(batch["w"])[0])
    assert sliced(2.0, rows_of(0.0, 1.0, 0.0, 1.0)) == 6


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("weight", [None, lambda *_: 2.0], ids=["unweighted", "weighted"])
def test_outputs_of_every_kind(weight):
    def f(p, x):
        return {
            "python": 1.0,
            "count": 1,
            "none": None,
            "half": x.mean().astype(jnp.float16),
            "complex": lax.complex(x, -x).mean(),
            "pair": (x.mean(), ()),
        }

    x = jnp.arange(8.0)
    plain = ft.microbatch(f, 1, weight=weight)(None, x)
    sliced = ft.microbatch(f, 4, weight=weight)(None, x)
    assert plain["count"] == 1 and sliced["count"] == 4
    for leaf, other in zip(jax.tree.leaves(plain), jax.tree.leaves(sliced)):
        assert isinstance(leaf, jax.Array) and not leaf.weak_type and not other.weak_type
        assert leaf.dtype == other.dtype
        np.testing.assert_allclose(other, 4 if leaf.dtype == jnp.int32 else leaf, rtol=1e-6)


@pytest.mark.exhaustive
def test_batched_keys_and_none():
    keys = jax.random.split(jax.random.key(0), 4)
    f = lambda p, batch: jax.vmap(jax.random.uniform)(batch["key"]).mean()
    close(ft.microbatch(f, 2)(None, {"key": keys, "nothing": None}), f(None, {"key": keys}))


def test_leaves_of_a_batch_that_are_not_arrays():
    f = lambda p, batch: getattr(jnp, batch["name"])(p * batch["f"](batch["x"])).mean()
    batch = {"x": jnp.arange(4.0), "name": "sin", "f": jnp.cos}
    close(ft.microbatch(f, 2)(2.0, batch), f(2.0, batch))
    close(
        ft.microbatch(f, 2, weight=lambda p, batch: batch["x"].sum())(
            2.0, {**batch, "x": jnp.ones(4)}
        ),
        f(2.0, {**batch, "x": jnp.ones(4)}),
    )
    batch["x"] = batch["x"][:, None]
    close(ft.per_example(f, argnums=1)(2.0, batch), jnp.sin(2 * jnp.cos(jnp.arange(4.0))))


def test_weight_is_traced_into_one_loop():
    f, weigh = counted(nonlinear), counted(row_weight)
    jax.jit(jax.grad(ft.microbatch(f, 2, weight=weigh)))(0.5, PADDED)
    assert (f.calls, weigh.calls) == (1, 1)


ROWS = "the batched arguments must be arrays with the same number of rows (argnums= says which arguments are batched)"
ERRORS = {
    "slices": (
        lambda: ft.microbatch(loss, 0),
        "microbatch: the number of slices must be a positive integer; got 0",
    ),
    "indivisible": (
        lambda: ft.microbatch(loss, 5)(PARAMS, jnp.ones((24, 4))),
        "microbatch: a batch of 24 rows cannot be divided into 5 equal slices; use 4",
    ),
    "no arrays": (
        lambda: ft.microbatch(loss, 2)(PARAMS, 1.0),
        f"microbatch: {ROWS}; got no arrays",
    ),
    "rows": (
        lambda: ft.microbatch(loss, 2)(PARAMS, {"x": jnp.ones((8, 4)), "y": jnp.ones(4)}),
        f"microbatch: {ROWS}; got argument 1['x'] (8, 4); argument 1['y'] (4,)",
    ),
    "argnums": (
        lambda: ft.microbatch(loss, 2, argnums=5)(PARAMS, jnp.ones((8, 2))),
        "microbatch: argnums names argument 5; the function was called with 2",
    ),
    "weights of rows": (
        lambda: ft.microbatch(ratio, 2, weight=lambda p, batch: batch["w"])(1.0, PADDED),
        "microbatch: weight= must return a real scalar, the weight of a slice; got float32[2]",
    ),
    "complex weight": (
        lambda: ft.microbatch(ratio, 2, weight=lambda p, batch: 1j)(1.0, PADDED),
        "microbatch: weight= must return a real scalar, the weight of a slice; got complex64[]",
    ),
    "booleans of one slice": (
        lambda: ft.microbatch(lambda _, x: (x > 0).any(), 1)(None, jnp.ones((8, 2))),
        "microbatch: expected outputs with floating-point dtype (averaged over slices) or integer "
        "dtype (summed); got bool[]. If it is the new value of an argument, such as a random key, "
        "pass carry= with the position of this argument",
    ),
    "booleans": (
        lambda: ft.microbatch(lambda _, x: (x > 0).any(), 2)(None, jnp.ones((8, 2))),
        "microbatch: expected outputs with floating-point dtype (averaged over slices) or integer "
        "dtype (summed); got bool[]. If it is the new value of an argument, such as a random key, "
        "pass carry= with the position of this argument",
    ),
}


def test_arguments_of_the_wrong_type():
    with pytest.raises(
        TypeError, match=r"microbatch: weight= must be a function .* slice; got 3.0"
    ):
        ft.microbatch(loss, 2, weight=3.0)
    with pytest.raises(
        TypeError, match="microbatch: argnums must be an integer or a tuple of integers; got 'x'"
    ):
        ft.microbatch(loss, 2, argnums="x")(PARAMS, jnp.ones((8, 2)))
    assert ft.microbatch(lambda x: x.mean(), 2, argnums=np.int64(0))(jnp.arange(4.0)) == 1.5
    assert ft.microbatch(lambda _, x: x.mean(), np.int64(2))(None, jnp.arange(4.0)) == 1.5


@pytest.mark.parametrize("name", ERRORS)
def test_error(name):
    attempt, text = ERRORS[name]
    with pytest.raises(ValueError) as caught:
        attempt()
    assert str(caught.value) == text


def test_inside_shard_map():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    params, batch = cast("float32", PARAMS, {"x": X, "y": Y, "weight": WEIGHT})

    def spread(f):
        return jax.jit(
            jax.shard_map(
                lambda p, b: jax.tree.map(lambda y: lax.pmean(y, "data"), f(p, b)),
                mesh=mesh,
                in_specs=(P(), P("data")),
                out_specs=P(),
            )
        )

    step = spread(ft.microbatch(loss, 3))
    close(step(params, batch), loss(params, batch))
    close(jax.grad(step)(params, batch), jax.grad(loss)(params, batch))
    sums = spread(ft.microbatch(jax.grad(loss), 3))(params, batch)  # each a sum over the devices
    close(sums, jax.tree.map(lambda g: 2 * g, jax.grad(loss)(params, batch)))

    weighted = ft.microbatch(weighted_loss, 3, weight=total_weight)
    with pytest.raises(
        ValueError,
        match=r"vary over the mesh axes \['data'\] and some arguments do not.*to='varying'",
    ):
        spread(weighted)(params, batch)
    vary = spread(
        lambda p, b: weighted(jax.tree.map(lambda a: lax.pcast(a, ("data",), to="varying"), p), b)
    )
    halves = jax.tree.map(lambda a: a[:12], batch), jax.tree.map(lambda a: a[12:], batch)
    close(vary(params, batch), np.mean([weighted_loss(params, half) for half in halves]))
    close(
        jax.grad(vary)(params, batch),
        jax.tree.map(
            lambda *g: sum(g) / 2, *(jax.grad(weighted_loss)(params, half) for half in halves)
        ),
    )
