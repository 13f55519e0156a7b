"""Functional state of other libraries under each transform."""

import jax
import jax.numpy as jnp
import pytest
from checks import close
from stateful import TRANSFORMS, each_transform

from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly")


def batch(step, features=4):
    return jax.random.normal(jax.random.key(step), (8, features)) + 3


def sgd(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def equinox():
    eqx = pytest.importorskip("equinox")

    class Net(eqx.Module):
        dense: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        calls: eqx.nn.StateIndex

        def __init__(self, key):
            self.dense = eqx.nn.Linear(4, 3, use_bias=False, key=key)
            self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="ema")
            self.calls = eqx.nn.StateIndex(jnp.zeros((), jnp.int32))

        def __call__(self, x, state):
            y, state = self.norm(self.dense(x), state)
            return y, state.set(self.calls, state.get(self.calls) + 1)

    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, state, x):
        run = jax.vmap(
            eqx.combine(params, static), in_axes=(0, None), out_axes=(0, None), axis_name="batch"
        )
        y, state = run(x, state)
        return jnp.square(y - 1).mean(), state

    def step(carried, x):
        params, state = carried
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, x)
        return (sgd(params, grads), state), value

    return step, (params, state), lambda carried: carried[1].get(model.calls)


def haiku():
    hk = pytest.importorskip("haiku")

    def net(x):
        y = hk.BatchNorm(True, True, 0.9)(hk.Linear(3, with_bias=False)(x), is_training=True)
        return hk.dropout(hk.next_rng_key(), 0.5, y)

    net = hk.transform_with_state(net)
    params, state = net.init(jax.random.key(0), batch(0))

    def loss(params, state, key, x):
        y, state = net.apply(params, state, key, x)
        return jnp.square(y - 1).mean(), state

    def step(carried, x):
        params, state, key = carried
        key, now = jax.random.split(key)
        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, now, x)
        return (sgd(params, grads), state, key), value

    def calls(carried):
        return carried[1]["batch_norm/~/mean_ema"]["counter"]

    return step, (params, state, jax.random.key(1)), calls


def flax():
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            calls = self.variable("batch_stats", "calls", lambda: jnp.zeros((), jnp.int32))
            calls.value += 1
            x = linen.BatchNorm(use_running_average=False)(linen.Dense(3, use_bias=False)(x))
            return linen.Dropout(0.5, deterministic=False)(x)

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = Net().init(keys, batch(0))
    variables["batch_stats"]["calls"] = jnp.zeros((), jnp.int32)  # init has called it once

    def loss(params, stats, key, x):
        y, stats = Net().apply(
            {"params": params, **stats}, x, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return jnp.square(y - 1).mean(), stats

    def step(carried, x):
        params, stats, key = carried
        key, now = jax.random.split(key)
        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats, now, x)
        return (sgd(params, grads), stats, key), value

    stats = {"batch_stats": variables["batch_stats"]}
    return (
        step,
        (variables["params"], stats, keys["dropout"]),
        lambda carried: carried[1]["batch_stats"]["calls"],
    )


def trained(step, carried, steps=3):
    values = []
    for i in range(steps):
        carried, value = step(carried, batch(i))
        values.append(value)
    return carried, values


def data(tree):
    """Random keys, and what is a Python number without jit, as arrays."""
    key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if key(x) else x, jax.tree.map(jnp.asarray, tree)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("library", [equinox, haiku, flax])
@each_transform
def test_a_step_carries_its_state(library, transform):
    with jax.numpy_dtype_promotion("standard"):  # Haiku's dropout needs it
        step, carried, calls = library()
        want, got = trained(jax.jit(step), carried), trained(TRANSFORMS[transform](step), carried)
    assert calls(got[0]) == 3 and jax.tree.structure(got[0]) == jax.tree.structure(carried)
    close(data(got), data(want), 3e-2 if transform == "autocast" else 1e-5)


@pytest.mark.exhaustive
def test_microbatch_averages_statistics_and_adds_up_counts():
    step, (params, stats, key), _ = flax()

    def statistics(stats, x):
        return step((params, stats, key), x)[0][1]["batch_stats"]

    for i in range(2):
        want, got = (
            statistics(stats, batch(i)),
            ft.microbatch(statistics, 2, carry=())(stats, batch(i)),
        )
        close(got["BatchNorm_0"]["mean"], want["BatchNorm_0"]["mean"])
        assert (got["calls"], want["calls"]) == (2, 1)
