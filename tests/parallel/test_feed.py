"""feed on one process: every batch of the plan's shape, a ragged epoch's loss, errors. Several:
test_two_processes.py."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, counted

from fnet import introspect, parallel

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(44, 6)).astype(np.float32), RNG.normal(size=44).astype(np.float32)
SHAPES = {
    "x": np.zeros((16, 6), np.float32),
    "y": np.zeros(16, np.float32),
    "weight": np.zeros(16, np.float32),
}


def init(key):
    return {"params": {"w": jax.random.normal(key, (6,)), "b": jnp.zeros(())}}


def loss(params, batch):
    each = jnp.square(batch["x"] @ params["w"] + params["b"] - batch["y"])
    return (each * batch["weight"]).sum() / batch["weight"].sum()


def step(state, batch):
    value, grads = jax.value_and_grad(loss)(state["params"], batch)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params}, {"loss": value, "rows": batch["weight"].sum()}


def careless(state, batch):
    """Without weights."""
    return step(
        state, {"weight": jnp.ones(batch["y"].shape), **{name: batch[name] for name in ("x", "y")}}
    )


def epoch(size=16):
    for begin in range(0, len(X), size):
        yield {"x": X[begin : begin + size], "y": Y[begin : begin + size]}


@pytest.fixture(scope="module")
def plan():
    return parallel.plan(step, init, SHAPES, strategy="data")


@pytest.fixture(scope="module")
def without():
    return parallel.plan(
        careless, init, {name: SHAPES[name] for name in ("x", "y")}, strategy="data"
    )


@pytest.mark.exhaustive
def test_a_ragged_epoch_has_the_loss_of_one_device(plan):
    """44 rows in batches of 16: the last one has 12, and 8 devices."""
    traced = counted(step)
    spread, plain = plan.jit(traced), jax.jit(step)
    state = one = jax.jit(init)(jax.random.key(0))
    state, seen = plan.place(state), []
    for batch, true in zip(parallel.feed(epoch(), plan), epoch(), strict=True):
        assert jax.tree.map(lambda x: x.sharding, batch) == plan.batch
        state, metrics = spread(state, batch)
        one, want = plain(one, {**true, "weight": np.ones(len(true["y"]), np.float32)})
        close(metrics, want)
        seen.append(int(metrics["rows"]))
    close(state, one)
    assert seen == [16, 16, 12] and traced.calls == 1


def test_padding_reaches_nothing_in_a_step_that_reads_its_weights(plan):
    """Of a batch with 12 of 16 rows, as `feed` fills it: proved for the weights that it sets."""
    (batch,) = parallel.feed([{"x": X[:12], "y": Y[:12]}], plan)
    state, rows = init(jax.random.key(0)), {"x": 0, "y": 0, "weight": 0}
    report = introspect.depends(step, state, batch, axes={"b": ((None, rows), None)})
    verdict = report.padding("b", 12, known={"batch['weight']": batch["weight"]})
    assert verdict.status == "proved if" and verdict.holds(state, batch)
    careless_report = introspect.depends(careless, state, batch, axes={"b": ((None, rows), None)})
    assert careless_report.padding("b", 12).status == "refuted"


def test_padding_is_the_last_row_and_weights_are_kept(plan):
    given = {"x": X[:5], "y": Y[:5], "weight": np.array([1, 0.5, 2, 0, 1], np.float32)}
    (batch,) = parallel.feed([given], plan)
    np.testing.assert_array_equal(batch["weight"], [1, 0.5, 2, 0, 1] + [0] * 11)
    np.testing.assert_array_equal(batch["x"][:5], X[:5])
    np.testing.assert_array_equal(batch["x"][5:], np.tile(X[4], (11, 1)))


def test_short_batches_are_left_out(plan, without):
    short = [{"x": X[:5], "y": Y[:5]}, *epoch()]
    assert [batch["y"].shape for batch in parallel.feed(short, without, drop_remainder=True)] == [
        (16,),
        (16,),
    ]
    assert len(list(parallel.feed(short, plan, drop_remainder=True))) == 2
    assert len(list(parallel.feed(short, plan))) == 4


def test_without_weights_full_batches_need_none(without):
    got = list(parallel.feed([{"x": X[:16], "y": Y[:16]}], without))
    np.testing.assert_array_equal(got[0]["y"], Y[:16])


def test_leaves_without_rows():
    def noisy(state, batch):
        return state, {
            "noise": jax.random.normal(batch["key"], batch["x"].shape).mean() * batch["scale"]
        }

    shapes = {"x": np.zeros(16, np.float32), "key": jax.random.key(0), "scale": np.float32(2)}
    plan = parallel.plan(noisy, lambda key: {"params": jnp.zeros(3)}, shapes, strategy="data")
    given = {"x": Y[:16], "key": jax.random.key(7), "scale": np.float32(3)}
    (batch,) = parallel.feed([given], plan)
    assert batch["key"].sharding.is_fully_replicated and batch["scale"].sharding.is_fully_replicated
    assert (
        batch["scale"] == 3
        and (jax.random.key_data(batch["key"]) == jax.random.key_data(given["key"])).all()
    )


@pytest.mark.parametrize("offset", range(0, 64, 16))
def test_arrays_may_be_filled_again(without, offset):
    """A CPU's device shares memory with NumPy where it is aligned."""
    raw = np.zeros(16 * 7 * 4 + 128, np.uint8)
    begin = -raw.ctypes.data % 64 + offset
    x = raw[begin : begin + 16 * 6 * 4].view(np.float32).reshape(16, 6)

    def same_one():
        for i in range(3):
            x[:] = i
            yield {"x": x, "y": np.full(16, i, np.float32)}

    got = list(parallel.feed(same_one(), without))
    assert (
        [float(batch["x"].min()) for batch in got]
        == [float(batch["x"].max()) for batch in got]
        == [0, 1, 2]
    )


def test_one_process_has_no_thread_and_asks_for_one_batch_at_a_time(plan, monkeypatch):
    monkeypatch.setattr(
        "threading.Thread.start", lambda thread: pytest.fail(f"a thread: {thread.name}")
    )
    asked = []
    feed = parallel.feed((asked.append(i) or batch for i, batch in enumerate(epoch())), plan)
    assert asked == [] and next(feed) and asked == [0] and next(feed) and asked == [0, 1]


CHOICES = (
    "so it cannot be padded; weight the loss by batch['weight'], float32 [rows], in step and plan; "
    "or omit short batches with drop_remainder=True; or use a number of rows and devices that "
    "every batch fills"
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b: {**b, "x": X[:17], "y": Y[:17]},
            "feed: batch['x'] of shape (17, 6) has 17 rows, but this process's "
            "share of the plan's 16 is 16; pass 16 rows, or plan for more",
        ),
        (
            lambda b: {**b, "y": Y[:15]},
            "feed: batch['y'] has 15 rows and batch['x'] has 16; all leaves of a batch must "
            "have the same number of rows",
        ),
        (
            lambda b: {**b, "x": X[:16, :5]},
            "feed: expected batch['x'] to be float32[16, 6] from this process, as "
            "in the plan; got float32[16, 5]",
        ),
        (lambda b: {**b, "x": X[:16].astype(np.int32)}, "as in the plan; got int32[16, 6]"),
        (
            lambda b: {"x": b["x"]},
            "expected batch['weight'], batch['x'], batch['y'] as in the plan; got batch['x']",
        ),
        (lambda b: None, "as in the plan; got nothing"),
    ],
)
def test_errors_of_batches(plan, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        list(parallel.feed([change({"x": X[:16], "y": Y[:16]})], plan))


@pytest.mark.parametrize("value", [2**31, -(2**40)])
def test_integers_that_do_not_fit_into_32_bits(value):
    step = lambda state, batch: (state, {"n": batch["time"].max()})
    plan = parallel.plan(
        step, lambda key: {"w": jnp.ones(3)}, {"time": np.zeros(16, np.int64)}, strategy="data"
    )
    fine, wrong = np.arange(16), np.where(np.arange(16) == 7, value, 0)
    assert [int(batch["time"].max()) for batch in parallel.feed([{"time": fine}], plan)] == [15]
    with pytest.raises(
        ValueError, match=rf"batch\['time'\] holds {value}, which does not fit into 32 bits"
    ):
        list(parallel.feed([{"time": fine}, {"time": wrong}], plan))


def test_short_without_weights(without):
    with pytest.raises(
        ValueError,
        match=re.escape(
            "feed: batch 2 has 12 rows here, fewer than this process's share of 16, and the plan's "
            "batch has no 'weight', " + CHOICES
        ),
    ):
        list(parallel.feed(epoch(), without))
    unread = parallel.plan(careless, init, SHAPES, strategy="data")
    with pytest.raises(
        ValueError, match=re.escape("and the step does not read batch['weight'], " + CHOICES)
    ):
        list(parallel.feed(epoch(), unread))
    assert len(list(parallel.feed(epoch(), unread, drop_remainder=True))) == 2


def test_errors_of_arguments(plan):
    with pytest.raises(
        TypeError,
        match=r"feed: batches must be iterable, e.g. a list or a generator such as "
        r"\(batches\(i\) for i in range\(steps\)\); got function",
    ):
        parallel.feed(lambda i: i, plan)
    with pytest.raises(ValueError, match="feed: timeout must be > 0 seconds; got 0"):
        parallel.feed([], plan, timeout=0)
    heavy = parallel.plan(
        lambda s, b: (s, b["weight"].sum()),
        init,
        {"weight": np.zeros((16, 2), np.float32)},
        strategy="data",
    )
    with pytest.raises(
        ValueError, match=re.escape("float32 [rows]; in the plan it is float32[16, 2]")
    ):
        parallel.feed([], heavy)


class Elsewhere:
    """A plan for chips that are not attached."""

    attached = False

    def __init__(self, plan):
        self.mesh, self.chip = plan.mesh, plan.chip


def test_a_plan_for_chips_elsewhere(plan):
    with pytest.raises(
        ValueError,
        match="feed: this plan is for 8 x .*, which are not attached; use devices='local' "
        r"or jax\.devices\(\) to run it",
    ):
        parallel.feed([], Elsewhere(plan))
