"""Stochastic weight averaging and statistics of BatchNorm, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import layers as nn
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
    want = np.mean(seen[start - 1::every], 0)
    np.testing.assert_allclose(tr.averaged_weights(state.opt_state)["w"], want, rtol=1e-6)
    plain, alone = tr.TrainState.create(params, optax.adam(0.1)), optax.adam(0.1)
    for i in range(8):
        plain = plain.apply(alone, {"w": jnp.full(3, float(i))})
    np.testing.assert_allclose(state.params["w"], plain.params["w"], rtol=1e-6)    # updates are not changed


def test_statistics_are_those_of_the_batches():
    """Two BatchNorms, of which the second sees what the first makes of each batch; PyTorch's update_bn in NumPy."""
    model = nn.Sequential(nn.Dense(4), nn.BatchNorm(momentum=0.7), jnp.tanh, nn.BatchNorm())
    batches = [np.random.default_rng(i).normal(i, 1 + i, (32, 3)).astype(np.float32) for i in range(3)]
    params, state = model.init(jax.random.key(0), batches[0])
    wrong = jax.tree.map(lambda x: x + 5, state)
    got = tr.batch_statistics(model, params, wrong, batches)
    outputs = [x @ np.asarray(params["0"]["kernel"]) for x in batches]
    np.testing.assert_allclose(got["1"]["mean"], np.mean([y.mean(0) for y in outputs], 0), rtol=1e-4)
    first = np.mean([y.var(0) for y in outputs], 0)
    assert np.allclose(got["1"]["var"], first, rtol=1e-4) or np.allclose(got["1"]["var"], first * 32 / 31, rtol=1e-4)
    inner = [np.tanh((y - y.mean(0)) / np.sqrt(y.var(0) + 1e-5)) for y in outputs]
    np.testing.assert_allclose(got["3"]["mean"], np.mean([y.mean(0) for y in inner], 0), atol=1e-4)
    assert jax.tree.structure(got) == jax.tree.structure(state)
    logits = model(params, batches[0], state=got)[0]
    assert not np.allclose(logits, model(params, batches[0], state=wrong)[0], atol=0.1)


def test_state_that_is_no_average_is_kept():
    def f(params, x, *, state, train):
        return x, {"mean": 0.9 * state["mean"] + 0.1 * x.mean(), "count": state["count"] + 1, "last": x[0, 0]}

    state = {"mean": jnp.zeros(()), "count": jnp.int32(7), "last": jnp.float32(3)}
    got = tr.batch_statistics(f, {}, state, [jnp.ones((2, 2)), (3 * jnp.ones((2, 2)),)])
    np.testing.assert_allclose(got["mean"], 2, rtol=1e-6)
    assert got["count"] == 7


def test_errors():
    with pytest.raises(ValueError, match="average_weights: expected start >= 1 and every >= 1; got 0 and 1"):
        tr.average_weights(start=0)
    tx = tr.average_weights(start=5)
    state = tx.init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"average_weights: call update\(grads, state, params\) with the parameters"):
        tx.update(jnp.ones(2), state)
    with pytest.raises(ValueError, match="nothing was averaged in 0 updates; train up to `start`"):
        tr.averaged_weights(state)
    with pytest.raises(ValueError, match="expected one average_weights in the optimizer; got 0"):
        tr.averaged_weights(optax.sgd(0.1).init(jnp.ones(2)))
    with pytest.raises(ValueError, match="batch_statistics: expected at least one batch; got none"):
        tr.batch_statistics(nn.BatchNorm(), {}, {}, [])
