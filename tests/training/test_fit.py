"""The loop: exact resume, interruption, early stopping, logs, errors."""

import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import training as tr

N = 50
RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(N, 4)).astype(np.float32),
    "y": RNG.integers(0, 3, N).astype(np.int32),
}
TX = tr.optimizer("adamw", tr.schedule("cosine", 0.05, 24, warmup=0.1), weight_decay=0.01)


def logits_of(params, x):
    return jnp.tanh(x @ params["hidden"]["kernel"]) @ params["head"]["kernel"]


def step(state, batch):
    key = jax.random.fold_in(jax.random.key(7), state.step)
    x = batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape)

    def loss(params):
        logits = logits_of(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), logits

    (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    new = {"seen": state.state["seen"] + x.mean()}
    correct = jnp.argmax(logits, -1) == batch["y"]
    return state.apply(TX, grads, state=new), {"loss": value, "accuracy": tr.mean(correct)}


def accuracy(state, batch):
    correct = jnp.argmax(logits_of(state.averaged, batch["x"]), -1) == batch["y"]
    return {"accuracy": tr.mean(correct, batch["weight"])}


@pytest.fixture(scope="module")
def evaluate():
    return {"test": tr.evaluator(accuracy, DATA, batch_size=16)}


def start():
    key = jax.random.key(0)
    params = {
        "hidden": {"kernel": jax.random.normal(key, (4, 8)) / 2},
        "head": {"kernel": jnp.zeros((8, 3))},
    }
    return tr.TrainState.create(params, TX, state={"seen": jnp.zeros(())}, ema=0.9)


def batches():
    return tr.Batches(DATA, batch_size=16, seed=3)


def same_bits(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)
    assert jax.tree.structure(a) == jax.tree.structure(b)


def rows(workdir):
    untimed = lambda row: {k: v for k, v in row.items() if not k.startswith("time/")}
    return [untimed(row) for row in tr.read_metrics(workdir)]


OPTIONS = {"every": 4, "log_every": 4, "save_every": 4, "config": {}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, evaluate):
    """A run of 24 steps that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("whole")
    state = tr.fit(
        step, start(), batches(), steps=24, workdir=workdir, evaluate=evaluate, **OPTIONS
    )
    return workdir, state


@pytest.mark.exhaustive
def test_train_stop_resume_is_train_bit_for_bit(tmp_path, evaluate, whole):
    for steps in (12, 24):
        state = tr.fit(
            step, start(), batches(), steps=steps, workdir=tmp_path, evaluate=evaluate, **OPTIONS
        )
    same_bits(state, whole[1])
    assert rows(tmp_path) == rows(whole[0])
    assert len(rows(tmp_path)) == 12


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_anywhere_it_saves_and_goes_on_bit_for_bit(tmp_path, evaluate, whole, number):
    def interrupting(i):
        if i == 13:  # while a step runs, one to three before it
            os.kill(os.getpid(), number)
        return batches()(i)

    before = signal.getsignal(number)
    arguments = {"steps": 24, "workdir": tmp_path, "evaluate": evaluate, **OPTIONS}
    with pytest.raises(
        tr.Interrupted, match=r"stopped at step 1[1-4] of 24 and saved it in .*the same"
    ):
        tr.fit(step, start(), interrupting, **arguments)
    assert signal.getsignal(number) is before
    state = tr.fit(step, start(), batches(), **arguments)
    same_bits(state, whole[1])
    assert rows(tmp_path) == rows(whole[0])


@pytest.mark.exhaustive
def test_lines_after_the_last_checkpoint_are_written_once(tmp_path, evaluate, whole):
    arguments = {"evaluate": evaluate, "workdir": tmp_path, **OPTIONS}
    tr.fit(step, start(), batches(), steps=12, **arguments)
    with (tmp_path / "metrics.jsonl").open("a") as file:  # what a killed process leaves behind
        file.write('{"step": 16, "train/loss": 9.0}\n{"step": 16, "te')
    tr.fit(step, start(), batches(), steps=24, **arguments)
    assert rows(tmp_path) == rows(whole[0])


def test_a_finished_run_is_restored_and_not_trained(tmp_path, whole):
    workdir, state = whole
    called = []
    again = tr.fit(
        step,
        start(),
        lambda i: called.append(i) or batches()(i),
        steps=24,
        workdir=workdir,
        config={},
    )
    same_bits(again, state)
    assert set(called) <= {0}  # for its shapes


def test_without_jit_the_step_sees_values_and_gives_the_same_numbers():
    tx, seen = optax.sgd(0.1), []

    def looking(state, batch):
        if not isinstance(state.step, jax.core.Tracer):
            seen.append(int(state.step))
        loss = lambda params: jnp.square(logits_of(params, batch["x"])).mean()
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(tx, grads), {"loss": value}

    states = []
    for jit in (False, True):
        state = tr.TrainState.create(start().params, tx)
        states.append(tr.fit(looking, state, batches(), steps=3, jit=jit))
        assert seen == [0, 1, 2]
    for a, b in zip(*map(jax.tree.leaves, states)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_the_step_is_traced_once_and_the_given_state_survives():
    traces = []

    def counted(state, batch):
        traces.append(1)
        return step(state, batch)

    state = start()
    tr.fit(counted, state, batches(), steps=5)
    assert len(traces) == 1  # for the metrics' shapes, and to compile
    assert np.isfinite(np.asarray(state.params["hidden"]["kernel"])).all()


@pytest.mark.exhaustive
def test_training_metrics_are_means_over_the_window(whole):
    workdir, _ = whole
    state, losses, correct = start(), [], []
    jitted = jax.jit(step)
    for i in range(4):
        state, metrics = jitted(state, batches()(i))
        losses.append(float(metrics["loss"]))
        correct.append(float(metrics["accuracy"].result()))
    row = rows(workdir)[0]
    assert row["step"] == 4
    np.testing.assert_allclose(row["train/loss"], np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(row["train/accuracy"], np.mean(correct), rtol=1e-6)


def test_evaluation_is_exact_on_the_partial_batch(evaluate, whole):
    _, state = whole
    predicted = np.argmax(np.asarray(logits_of(state.ema, DATA["x"])), -1)
    expected = np.mean(predicted == DATA["y"])
    assert evaluate["test"](state)["accuracy"] == pytest.approx(expected, rel=1e-6)


def scripted(values):
    """An evaluation that returns these values, by the state's step."""
    return {"v": lambda state: {"loss": values[int(state.step)]}}


@pytest.mark.exhaustive
def test_early_stopping_counts_across_a_restart(tmp_path):
    values = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.5, 5: 2.5, 6: 2.5}
    rule = tr.EarlyStop(metric="v/loss", patience=3, mode="min")
    arguments = {
        "workdir": tmp_path,
        "evaluate": scripted(values),
        "every": 1,
        "early_stop": rule,
        "config": {},
    }
    state = tr.fit(step, start(), batches(), steps=4, **arguments)
    assert int(state.step) == 4  # two evaluations without improvement
    for _ in range(2):  # and having stopped, it stays stopped
        state = tr.fit(step, start(), batches(), steps=20, **arguments)
        assert int(state.step) == 5
    best = tr.Checkpoints(tmp_path / "checkpoints", best="v/loss", mode="min")
    assert best.best() == 2
    best.close()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("bad", ["loss", "params"])
def test_divergence_is_an_error_and_never_a_checkpoint(tmp_path, bad):
    def breaking(state, batch):
        broken = jnp.where(state.step >= 5, jnp.nan, 1.0)
        state, metrics = step(state, batch)
        if bad == "params":
            return state.replace(params=jax.tree.map(lambda p: p * broken, state.params)), {}
        return state, {"loss": metrics["loss"] * broken}

    with pytest.raises(
        tr.Diverged,
        match=r"not finite at step 6 of 9 \(batch 5\); the checkpoint of step 4 is sound",
    ):
        tr.fit(breaking, start(), batches(), steps=9, workdir=tmp_path, save_every=2, log_every=2)
    kept = tr.Checkpoints(tmp_path / "checkpoints")
    assert kept.latest() == 4
    kept.close()


@pytest.mark.exhaustive
def test_a_damaged_checkpoint_is_no_fresh_start(tmp_path):
    tr.fit(step, start(), batches(), steps=4, workdir=tmp_path, save_every=2)
    for file in (tmp_path / "checkpoints" / "4").rglob("*"):
        if file.is_file():
            file.unlink()
    for folder in (tmp_path / "checkpoints").iterdir():
        if folder.name == "2":
            (folder / "manifest.json").write_text("{}")
    with pytest.raises(
        tr.CheckpointError, match=r"no checkpoint here can be read: step 4 is damaged .*; step 2 is"
    ):
        tr.fit(step, start(), batches(), steps=8, workdir=tmp_path)
    with pytest.raises(tr.CheckpointError, match=r"set aside: 2\.damaged, 4\.damaged. To start"):
        tr.fit(step, start(), batches(), steps=8, workdir=tmp_path)


@pytest.mark.exhaustive
def test_what_is_logged(tmp_path, evaluate, capsys):
    progress = tr.Progress(bar=False)
    tr.fit(
        step,
        start(),
        batches(),
        steps=4,
        workdir=tmp_path,
        evaluate=evaluate,
        log_every=2,
        progress=progress,
    )
    out = capsys.readouterr().out
    assert "compiled in" in out and "steps/s" in out and "ETA" in out and "MFU" in out
    assert "test/accuracy" in out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 4]
    assert {"train/loss", "train/accuracy", "time/steps_per_second"} <= lines[1].keys()
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 1


def events(file):
    """What a TensorBoard file holds: each record's length, its checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    raw, found = file.read_bytes(), []
    while raw:
        size = int.from_bytes(raw[:8], "little")
        data, sums = raw[12 : 12 + size], (raw[8:12], raw[12 + size : 16 + size])
        assert [int.from_bytes(one, "little") for one in sums] == [
            masked_crc32c(raw[:8]),
            masked_crc32c(data),
        ]
        found.append(Event.FromString(data))
        raw = raw[16 + size :]
    return found


def test_what_tensorboard_is_shown(tmp_path):
    logger = tr.Logger(tmp_path, step=4)
    logger.write(6, {"train/loss": 0.5, "test/top 5": 0.25, "test/confusion": np.zeros((2, 2))})
    logger.close()
    first, restart, row = events(next((tmp_path / "tensorboard").iterdir()))
    assert first.file_version == "brain.Event:2" and (restart.step, restart.session_log.status) == (
        5,
        1,
    )
    assert row.step == 6 and [(v.tag, v.simple_value) for v in row.summary.value] == [
        ("train/loss", 0.5),
        ("test/top_5", 0.25),
    ]


def test_a_bar_on_a_terminal(capsys):
    tr.fit(
        step, start(), batches(), steps=4, log_every=2, progress=tr.Progress(bar=True, refresh=1e9)
    )
    out = capsys.readouterr().out
    assert "step 2/4" in out and "accuracy" in out


@pytest.mark.parametrize(
    "options, text",
    [
        ({"steps": 0}, "steps=0: expected a number of steps, an integer from 1 to 2147483647"),
        ({"steps": 15.5}, "steps=15.5: expected a number of steps, an integer"),
        ({"steps": float("nan")}, "steps=nan: expected a number of steps, an integer"),
        ({"steps": 1e14}, "steps=100000000000000.0: expected a number of steps, an integer"),
        ({"steps": True}, "steps=True: expected a number of steps, an integer"),
        ({"log_every": 0}, "log_every=0: expected a number of steps"),
        (
            {"best": "dev/accuracy"},
            r"'dev/accuracy' is the monitored metric, but evaluate= has \[\]",
        ),
    ],
)
def test_wrong_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        tr.fit(step, start(), batches(), **({"steps": 2} | options))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            (start, lambda: step, batches),
            r"^fit\(step, state, batches\): step is a function; got a TrainState$",
        ),
        (
            (lambda: step, start, lambda: [1, 2]),
            r"^fit\(step, state, batches\): batches is a function; got a list$",
        ),
    ],
)
def test_arguments_of_other_kinds(arguments, text):
    with pytest.raises(TypeError, match=text):
        tr.fit(*(make() for make in arguments), steps=2)


def test_a_watched_metric_that_is_not_measured(evaluate):
    rule = tr.EarlyStop(metric="test/loss", patience=1)
    with pytest.raises(
        ValueError, match=r"'test/loss' is the monitored metric, but .* return \['test/accuracy'\]"
    ):
        tr.fit(step, start(), batches(), steps=2, evaluate=evaluate, early_stop=rule)


def test_metrics_must_be_scalars():
    with pytest.raises(ValueError, match=r"metric 'losses' has shape \(16,\): return a scalar, or"):
        tr.fit(lambda s, b: (s, {"losses": b["x"][:, 0]}), start(), batches(), steps=2)


def test_interrupted_without_a_workdir():
    def interrupting(i):
        if i == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return batches()(i)

    with pytest.raises(tr.Interrupted, match="without a workdir, the state is not saved"):
        tr.fit(step, start(), interrupting, steps=5)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_metrics_that_cannot_be_written_name_their_file(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    logger = tr.Logger.__new__(tr.Logger)  # opening it would read what is there, which never ends
    logger.workdir, logger._tensorboard, logger._file = (
        tmp_path,
        False,
        (tmp_path / "metrics.jsonl").open("ab", 0),
    )
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.jsonl'"):
        logger.write(1, {"loss": 1.0})
    logger._file.close()
