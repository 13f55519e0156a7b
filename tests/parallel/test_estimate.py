"""The memory that a plan needs on each chip, estimated from the jaxpr of the step."""

import jax
import jax.numpy as jnp

from fnet.parallel._estimate import Split, estimate


def test_replicated_parameters_of_a_split_optimizer_are_gathered():
    """ZeRO-1: the old and the new parameters are whole at the same time."""

    def step(p, m, x):
        m = 0.9 * m + jax.grad(lambda p: ((x @ p) ** 2).sum())(p)
        return p - m, m

    closed = jax.make_jaxpr(step)(jnp.zeros((64, 64)), jnp.zeros((64, 64)), jnp.zeros((8, 64)))
    splits = [Split(), Split(data=0), Split(rows=0)]
    parameters, others = 64 * 64 * 4, 64 * 64 * 4 // 8 + 64 * 4
    found = estimate(closed, splits, {"data": 8}, whole=True)
    assert found.peak == parameters + others + 2 * parameters
    assert [(t.collective, t.bytes) for t in found.ledger.transfers][-1] == (
        "all-gather",
        parameters,
    )
    assert estimate(closed, splits, {"data": 8}).peak < parameters + others + parameters
