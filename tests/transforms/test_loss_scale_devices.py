"""One loss scale for all devices: under pmap, shard_map and jit over a mesh."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from fnet import transforms as ft

INF = float("inf")
PARAMS = {"w": jnp.array([1.0, 2.0])}


def gradient(*numbers, dtype=jnp.float32):
    return {"w": jnp.array(numbers, dtype)}


def scalars(state):
    return float(state.scale), int(state.good_steps), int(state.skipped)


@pytest.mark.quick_cases("True")
@pytest.mark.parametrize("shard_map", [False, True])
def test_all_devices_agree(shard_map):
    tx = ft.loss_scale(optax.sgd(1.0), axis_name="devices")
    state = tx.init(PARAMS)
    grads = jnp.ones((8, 2)).at[5, 1].set(INF)  # one of eight is not finite

    def update(g):
        updates, after = tx.update({"w": g}, state, PARAMS)
        return updates["w"], after.scale, after.skipped

    if shard_map:
        assert jax.device_count() == 8
        mesh = jax.make_mesh((8,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
        run = jax.jit(
            jax.shard_map(
                lambda g: jax.tree.map(lambda y: y[None], update(g[0])),
                mesh=mesh,
                in_specs=P("devices"),
                out_specs=P("devices"),
            )
        )
        both = [run(g) for g in (grads, jnp.ones((8, 2)))]
    else:
        both = [jax.vmap(update, axis_name="devices")(g) for g in (grads, jnp.ones((8, 2)))]
    (updates, scale, skipped), (sound, kept, none) = both
    assert not updates.any() and scale.tolist() == [16384.0] * 8 and skipped.tolist() == [1] * 8
    assert (
        (sound == -1 / 32768).all() and kept.tolist() == [32768.0] * 8 and none.tolist() == [0] * 8
    )


def test_over_a_mesh_the_state_stays_the_same_everywhere():
    tx = ft.loss_scale(optax.sgd(1.0), axis_name="devices")
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.ones((8, 2)).at[5, 1].set(INF)

    def step(params, state, x):
        _, grads = ft.scaled_value_and_grad(lambda p, x: ((p["w"] * x[0]) ** 2).sum())(
            state, params, x
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("devices")), out_specs=P()))
    params, state = run(
        PARAMS, tx.init(PARAMS), x
    )  # out_specs P(): JAX has proved that all hold the same
    assert params["w"].tolist() == [1.0, 2.0] and scalars(state) == (16384.0, 0, 1)
    params, state = run(PARAMS, tx.init(PARAMS), jnp.ones((8, 2)))
    assert params["w"].tolist() == [-15.0, -30.0] and scalars(state) == (32768.0, 1, 0)


@pytest.mark.exhaustive
def test_without_an_axis_each_device_is_alone():
    tx = ft.loss_scale(optax.sgd(1.0))
    grads = jnp.ones((8, 2)).at[5, 1].set(INF)
    scale = jax.vmap(lambda g: tx.update({"w": g}, tx.init(PARAMS), PARAMS)[1].scale)(grads)
    assert scale.tolist() == [32768.0] * 5 + [16384.0] + [32768.0] * 2


@pytest.mark.exhaustive
def test_over_several_axes():
    tx = ft.loss_scale(optax.sgd(1.0), axis_name=("a", "b"))
    grads = jnp.ones((2, 3, 2)).at[1, 1, 0].set(INF)
    skip = lambda g: tx.update({"w": g}, tx.init(PARAMS), PARAMS)[1].skipped
    assert jax.vmap(jax.vmap(skip, axis_name="b"), axis_name="a")(grads).tolist() == [[1] * 3] * 2
