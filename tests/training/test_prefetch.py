"""Prefetch: in order, ahead of the step, its own copies, and errors where they are seen."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet.training import TrainState, fit, read_metrics
from fnet.training.loop._prefetch import Prefetch


def test_in_order_and_ahead():
    asked = []
    feed = Prefetch(lambda i: asked.append(i) or {"x": np.full(2, i)}, 3, 9, depth=2)
    try:
        for i in range(3, 9):
            np.testing.assert_array_equal(feed()["x"], [i, i])
            if i == 3:
                for _ in range(200):  # until the thread has gone as far as it may
                    if asked == [3, 4, 5, 6]:
                        break
                    time.sleep(0.01)
                assert asked == [3, 4, 5, 6]
        assert asked == list(range(3, 9))
    finally:
        feed.close()
    assert not feed._thread.is_alive()


def test_one_array_may_be_filled_again():
    buffer = np.zeros(4)

    def batches(i):
        buffer[:] = i
        return {"x": buffer, "note": i}

    feed = Prefetch(batches, 0, 3)
    got = [feed() for _ in range(3)]
    assert [float(batch["x"][0]) for batch in got] == [0, 1, 2] and [
        batch["note"] for batch in got
    ] == [0, 1, 2]
    assert all(isinstance(batch["x"], jax.Array) for batch in got)
    feed.close()


def test_an_error_is_raised_where_its_batch_is_asked_for():
    def batches(i):
        if i == 2:
            raise OSError("the disk is gone")
        return i

    feed = Prefetch(batches, 0, 5)
    assert feed() == 0 and feed() == 1
    with pytest.raises(OSError, match="the disk is gone"):
        feed()
    feed.close()


@pytest.mark.exhaustive
def test_waiting_is_counted_and_logged(tmp_path):
    def slow(i):
        time.sleep(0.05)
        return {"x": np.ones(3, np.float32)}

    def step(state, batch):
        return state.replace(step=state.step + 1), {"loss": batch["x"].sum()}

    state = TrainState.create({"w": jnp.zeros(())}, optax.sgd(0.1))
    fit(step, state, slow, steps=8, log_every=4, workdir=tmp_path, tensorboard=False)
    rows = [row for row in read_metrics(tmp_path) if "time/data" in row]
    assert 0.5 < rows[-1]["time/data"] <= 1.1, (
        rows
    )  # the first batches were ready before the step was compiled
    fit(step, state, lambda i: {"x": jnp.ones(3)}, steps=8, log_every=4)
