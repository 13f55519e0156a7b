"""The memory of a step for other numbers of rows than it was traced with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_cases import cnn, gpt

from fnet import parallel
from fnet.parallel._estimate import Followed, Split, estimate
from fnet.parallel._strategies import Strategy
from fnet.parallel._trace import Traced


def shapes(make):
    step, init, batch = make()
    state = jax.eval_shape(init, jax.random.key(0))
    return step, state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def times(batch, factor):
    larger = lambda x: jax.ShapeDtypeStruct((factor * x.shape[0], *x.shape[1:]), x.dtype)
    return jax.tree.map(larger, batch)


@pytest.mark.parametrize("make", [cnn, gpt])
@pytest.mark.parametrize("option", [Strategy("data"), Strategy("data", remat=True)], ids=str)
def test_rows_scale_what_is_split_by_rows(make, option):
    step, state, batch = shapes(make)
    splits = [Split()] * len(jax.tree.leaves(state)) + [Split(0)] * len(jax.tree.leaves(batch))
    traced = Traced(step, state, batch)
    followed = Followed(traced.program(option), splits, {"data": 2})
    for factor in (2, 8):
        larger = traced.resized(option, times(batch, factor))
        want = estimate(larger, splits, {"data": 2})
        found = followed.estimate(factor)
        assert abs(found.peak / want.peak - 1) < 0.01
        assert [held.bytes for held in found.largest] == [held.bytes for held in want.largest]
    assert traced.proportional(option, 8, times(batch, 8))


def in_pieces(state, batch):
    """A step that divides a large batch into pieces of 16 rows, of which one is live at a time."""
    loss = lambda w, x: jnp.square(jnp.tanh(x @ w)).sum()
    grad = lambda total, x: (total + jax.grad(loss)(state["params"], x), None)
    count = batch.shape[0] // 16
    pieces = batch[: 16 * count].reshape(count, 16, *batch.shape[1:])
    total, _ = jax.lax.scan(grad, jnp.zeros_like(state["params"]), pieces)
    return {"params": state["params"] - total}, {}


def test_a_step_that_divides_large_batches_is_traced_again(monkeypatch):
    batch = jax.ShapeDtypeStruct((16, 256), jnp.float32)
    init = lambda key: {"params": jnp.zeros((256, 64))}
    traced = Traced(in_pieces, jax.eval_shape(init, jax.random.key(0)), batch)
    assert not traced.proportional(Strategy("data"), 8, times(batch, 8))
    rows = lambda: parallel.compare(in_pieces, init, batch, ["T4"]).columns[0].rows
    found = rows()
    monkeypatch.setattr(Traced, "proportional", lambda *args: False)
    assert rows() == found
    monkeypatch.setattr(Traced, "proportional", lambda *args: True)
    assert rows() != found


def test_a_step_is_traced_twice_for_any_number_of_chips():
    """Once as written, and once with more rows, to see whether its memory grows with them."""
    calls = []

    def step(w, x):
        calls.append(x.shape[0])
        return w - jax.grad(lambda w: jnp.square(x @ w).mean())(w), {}

    init = lambda key: jnp.zeros((256, 64))
    batch = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    parallel.compare(step, init, batch, ["T4", "TPU v5e", "A100 SXM4 80GB", "i7-7700K"])
    assert calls[0] == 64 and len(calls) <= 3 and len(set(calls)) == len(calls)


def test_constants_of_jitted_functions_are_replicated():
    table = np.ones((256, 64), np.float32)

    @jax.jit
    def step(w, x):
        return w - jax.grad(lambda w: jnp.square(x @ (w * table)).mean())(w), {}

    batch = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    plan = parallel.plan(
        step, lambda key: jnp.zeros((256, 64)), batch, devices="v5e:2x2", compile=False
    )
    assert plan.chosen.estimate.peak > 256 * 64 * 4
