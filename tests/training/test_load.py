"""Best and last: the best state is saved when it occurs, returned when asked for, and read without
the code."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_endings import OPTIONS

from fnet import training as tr
from fnet.training.checkpoints import _structure

pytestmark = pytest.mark.usefixtures("quickly")
TX = optax.adam(0.1)


def step(state, batch):
    """The weight is the number of steps made."""
    return state.apply(TX, state.params).replace(
        params=jax.tree.map(lambda p: p + 1, state.params)
    ), {"loss": 1.0}


def start(params=None):
    params = {"w": jnp.zeros(())} if params is None else params
    return tr.TrainState.create(
        params, TX, state={"norm": {"mean": jnp.ones(2)}, "key": jax.random.key(3)}, ema=0.9
    )


def fit(workdir, values, **options):
    evaluate = {"v": lambda state: {"a": values[int(state.step)]}}
    options = (
        {"steps": max(values), "every": 1, "evaluate": evaluate, "best": "v/a", "best_mode": "max"}
        | OPTIONS
        | options
    )
    return tr.fit(step, start(), lambda i: {}, workdir=workdir, **options)


def test_the_best_state_is_saved_when_it_occurs(tmp_path):
    """Evaluations every 10 steps, checkpoints every 25: the best is at 20, which is no multiple of
    25."""
    values = {10: 1, 20: 9, 30: 2, 40: 3, 50: 4, 60: 3, 70: 2, 80: 2, 90: 2, 100: 2}
    fit(tmp_path, values, every=10, save_every=25)
    checkpoints = tr.Checkpoints(tmp_path / "checkpoints", best="v/a", mode="max")
    assert checkpoints.best() == 20 and checkpoints.latest() == 100
    assert tr.load(tmp_path, which="best").params["w"] == 20


def test_the_best_is_returned_at_the_end_and_after_a_restart(tmp_path):
    values = {1: 3.0, 2: 1.0, 3: np.nan, 4: 2.0, 5: 2.0}
    rule = tr.EarlyStop(metric="v/a", patience=3, mode="min")
    for _ in range(2):
        state = fit(tmp_path, values, best=None, early_stop=rule, restore_best=True)
        assert int(state.step) == 2 and float(state.params["w"]) == 2
    assert tr.load(tmp_path).step == 5 and tr.load(tmp_path, "best").step == 2
    assert isinstance(state, tr.TrainState) and jax.tree.structure(state) == jax.tree.structure(
        start()
    )


@pytest.mark.exhaustive
def test_another_metric_after_a_restart_is_not_compared_with_the_first(tmp_path):
    values = {1: 9.0, 2: 9.0, 3: 5.0, 4: 3.0, 5: 4.0}
    options = {
        "save_every": 100,
        "evaluate": {"v": lambda state: {"a": 0.5, "b": values[int(state.step)]}},
    }
    fit(tmp_path / "best", values, steps=2, **options)
    state = fit(
        tmp_path / "best", values, **options, best="v/b", best_mode="min", restore_best=True
    )
    assert int(state.step) == 4
    first, second = (
        tr.EarlyStop(metric=f"v/{name}", patience=n, mode="min") for name, n in (("a", 9), ("b", 2))
    )
    fit(tmp_path / "stop", values, steps=2, **options, best=None, early_stop=first)
    assert int(fit(tmp_path / "stop", values, **options, best=None, early_stop=second).step) == 5


def test_a_metric_that_is_never_finite_stops_early_and_has_no_best(tmp_path):
    rule = tr.EarlyStop(metric="v/a", mode="max", patience=3)
    with pytest.warns(
        UserWarning, match="restore_best: 'v/a' was never finite, so the last state is returned"
    ):
        state = fit(
            tmp_path,
            dict.fromkeys(range(1, 9), np.nan),
            best=None,
            early_stop=rule,
            restore_best=True,
        )
    assert int(state.step) == 3
    with pytest.raises(
        tr.CheckpointError, match="no checkpoint has a finite value of 'v/a' yet; load which='last'"
    ):
        tr.load(tmp_path, "best")


def test_a_misspelled_metric(tmp_path):
    text = (
        r"'v/b' is the monitored metric, but the evaluations return \['v/a'\]: did you mean 'v/a'?"
    )
    with pytest.raises(
        ValueError, match=text
    ):  # when it is first known; the state is saved by then
        fit(tmp_path, {1: 1.0, 2: 2.0}, best="v/b", best_mode="max")
    assert tr.Checkpoints(tmp_path / "checkpoints").steps() == [1]
    measured = tr.evaluator(
        lambda s, b: {"a": tr.mean(b["x"], b["weight"])}, {"x": np.ones(3)}, batch_size=2
    )
    with pytest.raises(ValueError, match=text):  # an evaluator's are known before the first step
        fit(tmp_path / "new", {2: 1.0}, best="v/b", best_mode="max", evaluate={"v": measured})
    assert not (tmp_path / "new").exists()


def test_restoring_the_best_wants_a_metric_and_a_folder(tmp_path):
    for options in ({"best": None}, {"workdir": None}):
        with pytest.raises(
            ValueError, match=r"restore_best=True: name the metric .* and a workdir"
        ):
            fit(**({"workdir": tmp_path, "values": {1: 1.0}, "restore_best": True} | options))


# Reading.


@pytest.mark.exhaustive
def test_a_snapshot_needs_no_code(tmp_path):
    """In a process that knows nothing of the run but its folder."""
    fit(tmp_path, {1: 1.0, 2: 5.0, 3: 4.0}, config={"rate": 0.5, "widths": [1, 2]})
    program = f"""from fnet import training as tr
for which in ("best", "last", 1):
    snapshot = tr.load({str(tmp_path)!r}, which=which)
    print(snapshot.step, float(snapshot.params["w"]), snapshot.state["norm"]["mean"].shape, snapshot.config["widths"],
          snapshot.metrics, float(snapshot.averaged["w"]) < snapshot.step, snapshot.state["key"].dtype)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == [
        f"{step} {float(step)} (2,) [1, 2] {{'v/a': {value}}} True key<fry>"
        for step, value in ((2, 5.0), (3, 4.0), (1, 1.0))
    ], done.stderr


def test_containers_come_back_as_they_were(tmp_path):
    params = {
        "blocks": [(jnp.ones(2), None), (jnp.zeros(3, jnp.bfloat16), None)],
        "0": {"w": jnp.ones(1)},
        "none": {},
    }
    with tr.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(4, {"state": start(params), "loop": {}})
    snapshot = tr.load(tmp_path)
    assert jax.tree.structure(snapshot.params) == jax.tree.structure(params)
    assert snapshot.params["blocks"][1][0].dtype == jnp.bfloat16 and snapshot.config is None
    assert jax.tree.structure(snapshot.ema) == jax.tree.structure(params)


def test_a_checkpoint_without_a_structure_is_nested_dicts(tmp_path):
    assert _structure.nested({"a/b": 1, "a/c/d": 2, "e": 3}) == {
        "a": {"b": 1, "c": {"d": 2}},
        "e": 3,
    }


@pytest.mark.parametrize("structure", [2, {"dict": []}, {"set": {}}, {"dict": {}, "list": []}, "x"])
def test_a_structure_that_is_none(structure):
    with pytest.raises(ValueError, match="not one of a tree"):
        _structure.build(structure, {})


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", [int, np.int64, np.uint8, jnp.int32])
def test_a_step_is_an_integer_of_any_kind(tmp_path, kind):
    fit(tmp_path, {1: 1.0, 2: 5.0})
    assert tr.load(tmp_path, kind(1)).step == 1
    assert int(tr.restore(tmp_path, like=start(), which=kind(1)).step) == 1


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("which", [True, np.bool_(True), 1.0, np.float32(1), None, "1"])
def test_other_steps_raise(tmp_path, which):
    fit(tmp_path, {1: 1.0})
    with pytest.raises(ValueError, match="use 'best', 'last' or the number of a step"):
        tr.load(tmp_path, which)


def test_a_full_state_is_restored(tmp_path):
    last = fit(tmp_path, {1: 1.0, 2: 5.0, 3: 4.0})
    state = tr.restore(tmp_path, like=start())
    assert jax.tree.structure(state) == jax.tree.structure(last)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(last)):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(
            *(
                jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
                for x in (a, b)
            )
        )
    assert int(tr.restore(tmp_path, like=jax.eval_shape(start), which="best").step) == 2
    with pytest.raises(
        tr.CheckpointError, match=r"'params/w': float32\[\] in the checkpoint, not in the target"
    ):
        tr.restore(tmp_path, like=start({"v": jnp.ones(2)}))


def test_what_cannot_be_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        tr.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        tr.load(tmp_path, "best")
    fit(tmp_path, {1: 1.0}, best=None)
    with pytest.raises(
        tr.CheckpointError,
        match="no metric says which state of this run is the best: train with fit",
    ):
        tr.load(tmp_path, "best")
    with pytest.raises(
        FileNotFoundError, match=r"no checkpoint of step 7 here, there are steps \[1\]"
    ):
        tr.load(tmp_path, 7)
    with pytest.raises(
        ValueError, match="which='first': use 'best', 'last' or the number of a step"
    ):
        tr.load(tmp_path, "first")
    file = tmp_path / "checkpoints" / "1" / "arrays-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(tr.CheckpointError, match="step 1 is damaged"):
        tr.load(tmp_path)
