"""fit(plan=): a run on eight devices has the numbers of one, resumes with the same bits, and goes
on under other plans."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import close
from test_resume import DATA, Died, batches, everything, measure, same_run, start, step

from fnet import parallel
from fnet import training as tr
from fnet.training.loop._spread import Spread

SHAPES = {name: np.zeros((8, *array.shape[1:]), array.dtype) for name, array in DATA.items()}
OPTIONS = {"every": 6, "log_every": 4, "save_every": 3, "tensorboard": False, "config": {}}


pytestmark = pytest.mark.usefixtures("quickly")  # programs run a few times


@pytest.fixture(scope="module")
def plan():
    return parallel.plan(step, lambda key: start(), SHAPES, strategy="fsdp")


@pytest.fixture(scope="module")
def options():
    return OPTIONS | {"evaluate": {"test": tr.evaluator(measure, DATA, batch_size=16)}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, options, plan):
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, tr.fit(
        step, start(), batches(), steps=12, workdir=workdir, plan=plan, **options
    )


@pytest.mark.exhaustive
def test_the_numbers_of_one_device(tmp_path, options, plan, whole):
    """Loss scale, noise, moving average, statistics and a random key are in the state."""
    one = tr.fit(step, start(), batches(), steps=12, workdir=tmp_path, **options)
    close(whole[1].params, one.params)
    close(whole[1].ema, one.ema)
    assert jax.tree.map(lambda x: x.sharding, whole[1]) == plan.state
    rows, wanted = everything(whole[0])[1], everything(tmp_path)[1]
    assert [row.keys() for row in rows] == [row.keys() for row in wanted] and len(rows) == 5
    for row, want in zip(rows, wanted):
        np.testing.assert_allclose(list(row.values()), list(want.values()), rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("death", [1, 8])
def test_the_same_bits_after_a_death(tmp_path, options, plan, whole, death):
    def feed(i):
        if i == death:
            raise Died
        return batches()(i)

    with pytest.raises(Died):
        tr.fit(
            step,
            plan.init(jax.random.key(0)),
            feed,
            steps=12,
            workdir=tmp_path,
            plan=plan,
            **options,
        )
    tr.fit(step, start(), batches(), steps=12, workdir=tmp_path, plan=plan, **options)
    same_run(tmp_path, whole[0])


@pytest.mark.exhaustive
def test_it_goes_on_under_another_plan_and_says_so(tmp_path, options, plan, whole):
    other = parallel.plan(
        step, lambda key: start(), SHAPES, strategy="data", devices=jax.devices()[:4]
    )
    tr.fit(step, start(), batches(), steps=6, workdir=tmp_path, plan=plan, **options)
    said = r"the number of devices was 8, is 4; the plan was fsdp over data=8, is data over data=4; from this step on"
    with pytest.warns(tr.ResumeWarning, match=said):
        tr.fit(step, start(), batches(), steps=9, workdir=tmp_path, plan=other, **options)
    with pytest.warns(
        tr.ResumeWarning, match="the plan was data over data=4, is none; from this step on"
    ):
        state = tr.fit(step, start(), batches(), steps=12, workdir=tmp_path, **options)
    close(state.params, whole[1].params)
    assert len(state.params["hidden"].devices()) == 1


def test_batches_go_to_their_chips_alone(plan):
    spread = Spread(plan)
    batch = spread.batch(batches()(0), 0)
    assert jax.tree.map(lambda x: x.sharding, batch) == plan.batch
    assert batch["x"].addressable_shards[0].data.shape == (1, 4)


def test_each_chip_measures_its_share(plan):
    """40 examples, 12 at a time: 16 on eight chips, of which the last batch fills half."""
    seen = []

    def watched(state, batch):
        jax.debug.inspect_array_sharding(batch["x"], callback=seen.append)
        return measure(state, batch)

    evaluate = tr.evaluator(watched, DATA, batch_size=12)
    state = start()
    want, got = evaluate(state), evaluate(plan.place(state))
    np.testing.assert_allclose(got["accuracy"], want["accuracy"], rtol=1e-6)
    assert [where.shard_shape((16, 4)) for where in seen[-1:]] == [(2, 4)]


@pytest.mark.exhaustive
def test_it_is_compiled_once(plan):
    """Metrics that begin anew lie where the step leaves them."""
    from jax import monitoring

    compiled = []
    listen = lambda event, seconds, **_: (
        compiled.append(event) if "backend_compile" in event else None
    )

    def count(steps):
        compiled.clear()
        tr.fit(step, start(), batches(), steps=steps, plan=plan, log_every=1, tune=False)
        return len(compiled)

    count(2)  # what is compiled once for all
    monitoring.register_event_duration_secs_listener(listen)
    try:
        assert count(2) == count(7) >= 1
    finally:
        monitoring.unregister_event_duration_listener(listen)


@pytest.mark.exhaustive
@pytest.mark.parametrize("nonfinite", ["skip", "rollback"])
def test_steps_that_are_not_finite(tmp_path, plan, nonfinite):
    def broken(i):
        batch = batches()(i)
        return batch | {"x": batch["x"] * np.float32(np.nan)} if i == 5 else batch

    ends = [
        tr.fit(
            step,
            start(),
            broken,
            steps=9,
            workdir=tmp_path / name,
            nonfinite=nonfinite,
            plan=where,
            **OPTIONS,
        )
        for name, where in (("one", None), ("eight", plan))
    ]
    close(ends[1].params, ends[0].params)
    assert int(ends[1].step) == 9


@pytest.mark.exhaustive
def test_short_batches_are_filled_up():
    def weighted(state, batch):
        def loss(params):
            each = jnp.square(batch["x"] @ params["w"] - 1)
            return (each * batch["weight"]).sum() / batch["weight"].sum()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(tx, grads), {"loss": value}

    tx = optax.sgd(0.1)
    begin = lambda key=None: tr.TrainState.create({"w": jnp.ones(4)}, tx)
    shapes = {"x": SHAPES["x"], "weight": np.zeros(8, np.float32)}
    ragged = lambda i: {"x": DATA["x"][: 8 if i % 2 else 5]}
    full = lambda i: ragged(i) | {"weight": np.ones(len(ragged(i)["x"]), np.float32)}
    plan = parallel.plan(weighted, begin, shapes, strategy="data")
    close(
        tr.fit(weighted, begin(), ragged, steps=4, plan=plan).params,
        tr.fit(weighted, begin(), full, steps=4).params,
    )


@pytest.mark.exhaustive
def test_debug_names_the_layer(tmp_path, plan):
    def broken(i):
        batch = batches()(i)
        return batch | {"x": batch["x"] * np.float32(1e30)} if i == 2 else batch

    def squares(state, batch):
        with jax.named_scope("squares"):
            return step(state, batch | {"x": jnp.square(batch["x"])})

    place = parallel.plan(
        squares, lambda key: start(), SHAPES, strategy="fsdp", devices=jax.devices()[:2]
    )
    with pytest.raises(tr.Diverged, match=r"not finite at step 3 of 5 .*'square' .* in 'squares'"):
        tr.fit(squares, start(), broken, steps=5, plan=place, debug=True)


class Elsewhere:
    """A plan for chips that are not attached."""

    attached = False

    def __init__(self, plan):
        self.mesh, self.chip = plan.mesh, plan.chip


def test_errors(plan):
    with pytest.raises(
        ValueError, match=r"fit: this plan is for 8 x .* that are not here; plan for devices='loca"
    ):
        Spread(Elsewhere(plan))
    other = tr.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
    with pytest.raises(
        ValueError,
        match="fit: the plan is for a state of another structure: plan with the init that",
    ):
        tr.fit(step, other, batches(), steps=2, plan=plan)
    with pytest.raises(
        ValueError, match=re.escape("feed: batch['x'] of shape (16, 4) has 16 rows")
    ):
        tr.fit(step, start(), tr.Batches(DATA, batch_size=16), steps=2, plan=plan)
