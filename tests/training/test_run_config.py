"""Configurations, logs, early stopping, progress: the small parts around the loop."""

import dataclasses
import io
import json
import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import hardware as hw
from fnet import training as tr
from fnet._util._heartbeat import Heartbeat
from fnet.training.loop import _fingerprint


@dataclasses.dataclass(frozen=True)
class Run:
    name: str
    steps: int = 10
    rate: float = 0.1
    decay: float | None = None
    flag: bool = False


def test_a_config_survives_the_file(tmp_path):
    config = Run("a", rate=0.3, decay=1e-4)
    path = tr.save_config(config, tmp_path / "new")
    assert json.loads(path.read_text())["rate"] == 0.3
    assert tr.load_config(Run, path) == config
    tr.same_config(config, tmp_path / "new")
    tr.same_config(config, tmp_path / "not there")


def test_another_config_names_what_differs(tmp_path):
    tr.save_config(Run("a"), tmp_path)
    text = r"another configuration \(steps was 10, is 5; decay was None, is 0.5\): use the old"
    with pytest.raises(tr.ConfigError, match=text):
        tr.same_config(Run("a", steps=5, decay=0.5), tmp_path)
    tr.same_config(Run("a", steps=5), tmp_path, but=("steps",))
    tr.same_config(Run("a", steps=20), tmp_path)  # longer


@pytest.mark.parametrize(
    "values, text",
    [
        ({"name": "a", "step": 1}, "Run has no field 'step': did you mean 'steps'?"),
        ({"name": "a", "zzz": 1}, "no field 'zzz': there are name, steps"),
        ({"name": "a", "steps": 1.5}, "'steps' is 1.5, it has to be int"),
        ({"name": "a", "steps": True}, "'steps' is True, it has to be int"),
        ({"name": "a", "decay": "x"}, "'decay' is 'x', it has to be float or null"),
        ({}, "Run needs a value for 'name'"),
    ],
)
def test_wrong_configs(values, text, tmp_path):
    with pytest.raises(tr.ConfigError, match=text):
        tr.from_dict(Run, values)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(values))
    with pytest.raises(tr.ConfigError, match=r"c\.json: "):
        tr.load_config(Run, path)


def test_an_int_will_do_for_a_float():
    assert tr.from_dict(Run, {"name": "a", "rate": 1}).rate == 1.0


@pytest.mark.parametrize(
    "content, text", [(None, "no such file"), ("{", "is not JSON"), ("[]", "holds a JSON list")]
)
def test_wrong_config_files(tmp_path, content, text):
    path = tmp_path / "c.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(tr.ConfigError, match=text):
        tr.load_config(Run, path)


def test_the_log(tmp_path):
    log = tr.Logger(tmp_path)
    log.write(1, {"loss": np.float32(0.5), "table": np.zeros((2, 2)), "bad": float("nan")})
    log.write(2, {"loss": 0.25})
    log.close()
    assert tr.read_metrics(tmp_path) == [
        {"step": 1, "loss": 0.5, "bad": None},
        {"step": 2, "loss": 0.25},
    ]
    assert list((tmp_path / "tensorboard").iterdir())
    log = tr.Logger(tmp_path, step=1, tensorboard=False)  # goes on from step 1
    log.close()
    assert [row["step"] for row in tr.read_metrics(tmp_path)] == [1]
    tr.Logger(tmp_path, tensorboard=False).close()  # a fresh start
    assert tr.read_metrics(tmp_path) == []


def test_a_torn_line(tmp_path):
    assert tr.read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste')
    assert tr.read_metrics(tmp_path) == [{"step": 1}]
    (tmp_path / "metrics.jsonl").write_text('{"step"\n{"step": 1}\n')
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        tr.read_metrics(tmp_path)


def test_early_stop_counts():
    rule = tr.EarlyStop(metric="m", mode="max", patience=2, min_delta=0.1)
    best, stale = float("nan"), 0
    history = []
    for value in (0.5, 0.55, 0.7, float("nan"), 0.6):
        best, stale = rule.update(best, stale, value)
        history.append((best, stale))
    assert history == [(0.5, 0), (0.5, 1), (0.7, 0), (0.7, 1), (0.7, 2)]
    assert tr.EarlyStop(metric="m", mode="max", patience=2).update(0.5, 0, 0.5) == (
        0.5,
        1,
    )  # equal is not better


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("validation/accuracy", "max"),
        ("validation/loss", "min"),
        ("validation/mae", "min"),
        ("test/RMSE", "min"),
        ("validation/accuracy/max", "max"),
        ("validation/loss/3", "min"),
        ("validation/perplexity", "min"),
        ("validation/log_loss", None),
        ("validation/accuracy_gap", None),
        ("validation/score", None),
        ("max", None),
    ],
)
def test_the_direction_of_a_metric_is_known_or_given(tmp_path, metric, mode):
    """Only whole names are known; parts of names, such as 'loss' in 'lossless', say nothing."""
    made = [
        lambda **given: tr.EarlyStop(metric=metric, patience=1, **given).mode,
        lambda **given: tr.Checkpoints(tmp_path, best=metric, **given)._mode,
    ]
    for make in made:
        assert make(mode="max") == "max" and make(mode="min") == "min"
        if mode is not None:
            assert make() == mode
        else:
            with pytest.raises(
                ValueError,
                match=r"is its largest or its smallest value the best\? Pass mode=max or",
            ):
                make()
    assert tr.Checkpoints(tmp_path).best() is None


def test_wrong_early_stops():
    with pytest.raises(ValueError, match="mode='up': the best value is"):
        tr.EarlyStop(metric="m", patience=1, mode="up")
    with pytest.raises(ValueError, match="patience=0: wait for at least one"):
        tr.EarlyStop(metric="m", mode="max", patience=0)


def test_progress_on_a_stream_is_lines():
    stream = io.StringIO()
    progress = tr.Progress(stream)
    progress.start(0, 200)
    progress.tick(1, None, None)
    mfu = hw.MFU(0.12, peak=1e12, dtype="float32", basis="measured")
    progress.log(100, {"loss": 0.123456}, 85.25, 61.0, mfu)
    progress.log(200, {}, 85.25, 0.0, mfu)
    progress.close()
    said, first, last = stream.getvalue().splitlines()
    assert said == str(mfu)
    assert first == "step 100/200  loss 0.1235  85.2 steps/s  MFU 12.0%  ETA 1:01"
    assert last == "step 200/200  85.2 steps/s  MFU 12.0%"


@pytest.mark.parametrize("bar", [False, True])
def test_progress_says_what_it_waits_for(bar):
    stream = io.StringIO()
    progress = tr.Progress(stream, bar=bar)
    progress.start(0, 200)
    waiting = progress.waiting("compiling")
    assert waiting._every == (1.0 if bar else 30.0)
    waiting._every = 0.02
    with waiting:
        time.sleep(0.2)
    if bar:
        assert progress._bar.tasks[0].description == "compiling, 0 s so far"
    else:
        assert set(stream.getvalue().splitlines()) == {"compiling, 0 s so far"}
    progress.close()


def test_a_slow_first_step_is_announced(monkeypatch):
    monkeypatch.setattr(
        tr.Progress, "waiting", lambda self, what: Heartbeat(self.line, what, every=0.05)
    )
    stream = io.StringIO()

    def step(state, batch):
        time.sleep(0.3)  # while it is traced
        return state.apply(optax.sgd(0.1), {"w": batch}), {}

    state = tr.TrainState.create({"w": jnp.ones(2)}, optax.sgd(0.1))
    batches = lambda i: np.zeros(2, np.float32)
    tr.fit(step, state, batches, steps=2, progress=tr.Progress(stream, bar=False), tune=False)
    said = stream.getvalue()
    assert "compiling, 0 s so far\n" in said
    assert said.index("so far") < said.index("compiled in") > said.rindex("so far")


@pytest.mark.parametrize("closed", [False, True])
def test_progress_without_a_standard_output(monkeypatch, closed):
    stream = io.StringIO() if closed else None
    monkeypatch.setattr("sys.stdout", stream)
    if closed:
        stream.close()
    progress = tr.Progress()
    progress.start(0, 2)
    progress.log(2, {"loss": 1.0}, None, None)
    progress.close()


def test_progress_says_once_why_utilisation_is_unknown():
    stream = io.StringIO()
    progress = tr.Progress(stream)
    progress.start(0, 200)
    for step in (100, 200):
        progress.log(step, {}, 1.0, 1.0, hw.MFU(None, "the chip is not known"))
    assert stream.getvalue().count("MFU unknown: the chip is not known") == 1


def test_the_order_of_keys_is_no_difference():
    assert _fingerprint.same_json({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert _fingerprint.same_json({"b": 2, "a": 1}, {"a": 1, "b": 2})
    assert not _fingerprint.same_json({"a": 1}, {"a": 1.0}) and not _fingerprint.same_json(
        [1], [True]
    )
