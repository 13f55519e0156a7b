"""TrainState: one update, and the moving average."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import training as tr


def test_apply_is_optax():
    params = {"w": jnp.array([1.0, -2.0])}
    grads = {"w": jnp.array([0.5, 0.25])}
    tx = optax.adam(0.1)
    state = tr.TrainState.create(params, tx, state={"mean": jnp.zeros(2)})
    state = state.apply(tx, grads).apply(tx, grads, state={"mean": jnp.ones(2)})
    with jax.numpy_dtype_promotion("standard"):
        opt_state, expected = tx.init(params), params
        for _ in range(2):
            updates, opt_state = tx.update(grads, opt_state, expected)
            expected = optax.apply_updates(expected, updates)
    np.testing.assert_array_equal(state.params["w"], expected["w"])
    assert int(state.step) == 2
    assert state.state["mean"].tolist() == [1, 1]
    assert state.ema is None and state.averaged is state.params


def test_the_average_follows_its_formula():
    tx = optax.sgd(1.0)
    state = tr.TrainState.create({"w": jnp.zeros(())}, tx, ema=0.5)
    ema = w = 0.0
    for t in range(20):
        state = state.apply(tx, {"w": jnp.float32(-1)})
        w, d = w + 1, min(0.5, (1 + t) / (10 + t))
        ema = d * ema + (1 - d) * w
        assert float(state.ema["w"]) == pytest.approx(ema, rel=1e-5)
    assert state.averaged is state.ema


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_average_of_16_bit_weights_moves(dtype):
    """In 16 bits, 0.001 of a difference of 1 would be rounded away."""
    tx = optax.sgd(0.0)
    state = tr.TrainState.create({"w": jnp.ones(2, dtype), "none": None}, tx, ema=0.999)
    state = state.replace(step=jnp.int32(10_000), params={"w": jnp.full(2, 2, dtype), "none": None})
    step = jax.jit(lambda _, s: s.apply(tx, {"w": jnp.zeros(2, dtype), "none": None}))
    state = jax.lax.fori_loop(0, 3000, step, state)
    assert state.ema["w"].dtype == jnp.float32 and state.averaged["w"].dtype == dtype
    np.testing.assert_allclose(state.ema["w"], 2 - 0.999**3000, rtol=1e-4)
    np.testing.assert_allclose(np.float64(state.averaged["w"]), 2 - 0.999**3000, rtol=4e-3)


def test_leaves_without_an_average():
    """A counter among the parameters: the average has the newest."""
    tx, params = optax.sgd(0.0), {"w": jnp.zeros(2), "count": jnp.int32(3)}
    state = tr.TrainState.create(params, tx, ema=0.5)
    for count in (8, 9):
        state = state.replace(params=params | {"count": jnp.int32(count)})
        state = state.apply(optax.set_to_zero(), params)
    assert int(state.averaged["count"]) == 9


def test_params_and_average_can_both_be_donated():
    tx = optax.sgd(1.0)
    state = tr.TrainState.create({"w": jnp.zeros(3)}, tx, ema=0.9)
    update = jax.jit(lambda s: s.apply(tx, s.params), donate_argnums=0)
    assert int(update(update(state)).step) == 2


@pytest.mark.parametrize("ema", [1.0, -0.1])
def test_a_decay_out_of_range(ema):
    with pytest.raises(ValueError, match="the decay of the average must be in"):
        tr.TrainState.create({"w": jnp.zeros(3)}, optax.sgd(1.0), ema=ema)
