"""Stochastic weight averaging, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import training as tr


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("start", "every"), [(1, 1), (3, 1), (2, 3)])
def test_the_mean_of_parameters(start, every):
    tx = optax.chain(optax.adam(0.1), tr.average_weights(start=start, every=every))
    params = {"w": jnp.arange(3.0)}
    state, seen = tr.TrainState.create(params, tx), []
    for i in range(8):
        state = jax.jit(lambda state, g: state.apply(tx, {"w": g}))(state, jnp.full(3, float(i)))
        seen.append(np.asarray(state.params["w"]))
    want = np.mean(seen[start - 1 :: every], 0)
    np.testing.assert_allclose(tr.averaged_weights(state.opt_state)["w"], want, rtol=1e-6)
    plain, alone = tr.TrainState.create(params, optax.adam(0.1)), optax.adam(0.1)
    for i in range(8):
        plain = plain.apply(alone, {"w": jnp.full(3, float(i))})
    np.testing.assert_allclose(
        state.params["w"], plain.params["w"], rtol=1e-6
    )  # updates are not changed


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_mean_of_16_bit_parameters(dtype):
    """Of 3000 numbers between 1 and 4, of which each moves a mean of 16 bits by less than it can
    hold."""
    tx, numbers = tr.average_weights(start=1), jnp.asarray(1 + np.arange(3000) / 1000, dtype)
    state = jax.lax.fori_loop(
        0,
        3000,
        lambda i, s: tx.update(jnp.zeros(1, dtype), s, numbers[i][None])[1],
        tx.init(numbers[:1]),
    )
    mean = tr.averaged_weights(state)
    assert mean.dtype == jnp.float32
    np.testing.assert_allclose(mean, np.float64(numbers).mean(), rtol=1e-5)


def test_the_mean_is_of_the_parameters_after_the_update():
    """Optax adds a float32 update to a bfloat16 parameter in float32, then rounds."""
    tx, params, update = (
        tr.average_weights(start=1),
        {"w": jnp.bfloat16(256), "n": jnp.int32(2)},
        jnp.float32(1.5),
    )
    _, state = tx.update({"w": update, "n": jnp.int32(0)}, tx.init(params), params)
    assert float(tr.averaged_weights(state)["w"]) == float(jnp.bfloat16(257.5))
    assert int(tr.averaged_weights(state)["n"]) == 2


def test_the_slow_weights_of_16_bit_parameters_move():
    tx, w = tr.lookahead(optax.sgd(0.0), period=1, rate=1e-3), jnp.full(1, 2, jnp.bfloat16)
    state = tx.init(jnp.ones(1, jnp.bfloat16))

    def step(_, state):
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(jnp.zeros(1, jnp.bfloat16), state, w)[1]

    np.testing.assert_allclose(
        jax.lax.fori_loop(0, 1000, step, state).slow, 2 - 0.999**1000, rtol=1e-4
    )


def test_errors():
    with pytest.raises(
        ValueError, match="average_weights: expected start >= 1 and every >= 1; got 0 and 1"
    ):
        tr.average_weights(start=0)
    tx = tr.average_weights(start=5)
    state = tx.init(jnp.ones(2))
    with pytest.raises(
        ValueError,
        match=r"average_weights: call update\(grads, state, params\) with the parameters",
    ):
        tx.update(jnp.ones(2), state)
    with pytest.raises(ValueError, match="nothing was averaged in 0 updates; train up to `start`"):
        tr.averaged_weights(state)
    with pytest.raises(ValueError, match="expected one average_weights in the optimizer; got 0"):
        tr.averaged_weights(optax.sgd(0.1).init(jnp.ones(2)))
