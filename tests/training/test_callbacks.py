"""on_step, and what TensorBoard is shown: read back from its event files."""

import contextlib
import errno
import io
import itertools
import os
import re
import signal
import struct
import threading
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import training as tr
from fnet.training.loop import _signals
from fnet.training.record import _logs

TX = optax.sgd(0.1)
X = np.linspace(0, 1, 16, dtype=np.float32)


def step(state, batch):
    value, grads = jax.value_and_grad(lambda p: jnp.mean((p["w"] * batch["x"] - 1) ** 2))(
        state.params
    )
    return state.apply(TX, grads), {"loss": value}


def start():
    return tr.TrainState.create({"w": jnp.zeros(())}, TX)


def train(steps=4, **options):
    return tr.fit(step, start(), tr.Batches({"x": X}, 4), steps=steps, **options)


def events(workdir):
    """All events of a run's TensorBoard files, their checksums verified."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found = []
    for file in sorted((Path(workdir) / "tensorboard").iterdir()):
        raw = file.read_bytes()
        while raw:
            size = int.from_bytes(raw[:8], "little")
            data = raw[12 : 12 + size]
            assert int.from_bytes(raw[12 + size : 16 + size], "little") == masked_crc32c(data)
            found.append(Event.FromString(data))
            raw = raw[16 + size :]
    return found


def shown(workdir):
    return {
        (event.step, value.tag): value for event in events(workdir) for value in event.summary.value
    }


def test_called_after_each_step_with_its_own_metrics():
    seen, plain, state = [], [], start()
    trained = train(
        on_step=[
            lambda end: seen.append((end.step, end.metrics["loss"], float(end.state.params["w"])))
        ]
    )
    for i in range(4):
        state, metrics = jax.jit(step)(state, tr.Batches({"x": X}, 4)(i))
        plain.append((i + 1, float(metrics["loss"]), float(state.params["w"])))
    np.testing.assert_allclose(seen, plain, rtol=1e-6)
    np.testing.assert_array_equal(trained.params["w"], train().params["w"])


@pytest.mark.exhaustive
def test_a_resumed_run_calls_it_once_for_each_step(tmp_path):
    seen = []
    on_step = [lambda end: seen.append(end.step), lambda end: end.log({"n": end.step})]
    options = {"workdir": tmp_path, "config": {}, "on_step": on_step}
    train(3, **options)
    train(6, **options)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert [row["n"] for row in tr.read_metrics(tmp_path) if "n" in row] == seen


@pytest.mark.exhaustive
def test_an_exception_ends_the_run_with_its_state_saved(tmp_path):
    def failing(end):
        if end.step == 3:
            raise RuntimeError("the disk of the callback is full")

    with pytest.raises(RuntimeError, match="the disk of the callback is full"):
        train(workdir=tmp_path, config={}, on_step=failing)
    assert tr.load(tmp_path).step == 3
    state = train(workdir=tmp_path, config={})
    np.testing.assert_array_equal(state.params["w"], train().params["w"])


def test_stopping_is_the_end_of_the_run(tmp_path):
    options = {
        "workdir": tmp_path,
        "config": {},
        "evaluate": {"v": lambda state: {"w": float(state.params["w"])}},
    }
    stopping = lambda end: end.stop() if end.step == 2 else None
    assert int(train(on_step=stopping, **options).step) == 2
    assert int(train(**options).step) == 2 and tr.load(tmp_path).step == 2
    assert [row["step"] for row in tr.read_metrics(tmp_path) if "v/w" in row] == [2]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("at", [2, 4])
def test_a_signal_ends_a_function_that_waits(tmp_path, at):
    def waiting(end):
        if end.step == at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
            finished.append(at)

    finished = []
    with pytest.raises(tr.Interrupted) if at == 2 else contextlib.suppress(tr.Interrupted):
        train(workdir=tmp_path, config={}, on_step=waiting)
    assert not finished and tr.load(tmp_path).step == at
    np.testing.assert_array_equal(
        train(workdir=tmp_path, config={}).params["w"], train().params["w"]
    )


@pytest.mark.quick_cases("error-2")
@pytest.mark.parametrize("at", [2, 4])
@pytest.mark.parametrize("end", ["signal", "error"])
def test_what_is_left_to_be_done_at_its_step_is_done_after_the_restart(tmp_path, at, end):
    """The log and the evaluation come after on_step, so a checkpoint written there notes them."""

    def ending(step_end):
        step_end.log({"train/own": step_end.step})
        if step_end.step == at and end == "error":
            raise ZeroDivisionError
        if step_end.step == at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    def rows(workdir):
        return [
            {name: value for name, value in row.items() if not name.startswith("time/")}
            for row in tr.read_metrics(workdir)
        ]

    options = {
        "config": {},
        "log_every": 2,
        "every": 4,
        "evaluate": {"v": lambda state: {"w": state.params["w"]}},
    }
    with pytest.raises(ZeroDivisionError if end == "error" else tr.Interrupted):
        train(6, workdir=tmp_path / "parts", on_step=ending, **options)
    assert tr.load(tmp_path / "parts").step == at
    out = io.StringIO()
    own = lambda step_end: step_end.log({"train/own": step_end.step})
    train(
        6, workdir=tmp_path / "parts", on_step=own, progress=tr.Progress(out, bar=False), **options
    )
    assert re.search(rf"step {at}/6  (v/w|loss) ", out.getvalue())
    train(6, workdir=tmp_path / "whole", on_step=own, **options)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert tr.Checkpoints(tmp_path / "parts" / "checkpoints").notes()["unlogged"] is False


def test_a_signal_before_it_leaves_it_half_a_second(tmp_path):
    """It is called once for each step that is saved, and a function that waits is ended all the
    same."""

    def source(i):
        if i == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"x": X[:4]}

    seen, began = [], []

    def waiting(end):
        seen.append(end.step)
        if _signals._runs[-1].received:
            began.append(time.monotonic())
            threading.Event().wait(30)

    with pytest.raises(tr.Interrupted):
        tr.fit(
            step,
            start(),
            source,
            steps=9,
            workdir=tmp_path,
            config={},
            on_step=waiting,
            tensorboard=False,
        )
    assert time.monotonic() - began[0] < 5 and seen == list(range(1, tr.load(tmp_path).step + 1))
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and signal.getitimer(
        signal.ITIMER_REAL
    ) == (0, 0)


@pytest.mark.quick_cases("tfevents-3", "metrics.jsonl-5")
@pytest.mark.parametrize(
    ("failing", "at"), [("metrics.jsonl", 3), ("tfevents", 3), ("metrics.jsonl", 5)]
)
def test_a_log_that_cannot_be_written_loses_no_step(tmp_path, monkeypatch, failing, at):
    """Half of the line is written, as on a full disk; the step is saved, and its line is written
    after the restart."""

    def rows(workdir):
        return [(row["step"], row["train/loss"]) for row in tr.read_metrics(workdir)]

    written, count = _logs._written, itertools.count()

    def broken(file, data):
        if failing in str(file.name) and next(count) == at:
            written(file, data[: len(data) // 2])
            raise OSError(errno.EIO, "Input/output error", file.name)
        written(file, data)

    options = {"config": {}, "log_every": 2, "save_every": 50}
    monkeypatch.setattr(_logs, "_written", broken)
    with pytest.raises(OSError, match=f"Input/output error: .*{failing}"):
        train(12, workdir=tmp_path / "parts", **options)
    monkeypatch.undo()
    assert tr.load(tmp_path / "parts").step == (4 if failing == "tfevents" else 2 * at + 2)
    train(12, workdir=tmp_path / "parts", **options)
    for steps in (12, 14):  # the metrics of the last step begin anew as well
        train(steps, workdir=tmp_path / "parts", **options)
        train(steps, workdir=tmp_path / "whole", **options)
        assert (
            rows(tmp_path / "parts") == rows(tmp_path / "whole")
            and len(rows(tmp_path / "whole")) == steps / 2
        )


def test_a_display_that_raises_loses_no_step(tmp_path):
    class Raising(tr.Progress):
        def log(self, *arguments):
            raise RuntimeError("no display")

    with pytest.raises(RuntimeError, match="no display"):
        train(workdir=tmp_path, config={}, log_every=2, progress=Raising(bar=False))
    assert tr.load(tmp_path).step == 2
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    for bar in (False, True):
        train(
            workdir=tmp_path / str(bar),
            config={},
            evaluate={"café": lambda state: {"a": 1.0}},
            progress=tr.Progress(stream, bar=bar),
        )
    stream.flush()
    assert raw.getvalue().count(b"caf\\xe9/a 1") == 2


def pixels(png):
    """The pixels of a PNG file without filters: [height, width, channels]."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data = 8, b""
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size])[0] == zlib.crc32(
            kind + body
        )
        if kind == b"IHDR":
            width, height, depth, color = struct.unpack(">IIBB", body[:10])
        data += body if kind == b"IDAT" else b""
        at += 12 + size
    assert depth == 8
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, {0: 1, 2: 3, 6: 4}[color])


def test_what_tensorboard_is_shown(tmp_path):
    values = np.array([0.0, 0.5, 1.0, 1.0, np.nan, np.inf])
    gray = np.array([[0.0, 0.5], [1.0, 2.0]], np.float32)
    color = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)

    def log(end):
        if end.step == 2:
            end.log(
                {
                    "values": tr.Histogram(values, bins=2),
                    "pictures/gray": tr.Image(gray),
                    "color": tr.Image(color),
                    "note": tr.Text("**two**"),
                    "rate": 0.5,
                    "grid": tr.Image(np.stack([color] * 3)),
                }
            )

    evaluate = {
        "test": lambda state: {
            "w": float(state.params["w"]),
            "weights": tr.Histogram(state.params["w"]),
        }
    }
    config = {"rate": 0.1, "name": "a", "wide": True, "none": None, "widths": [1, 2]}
    train(
        workdir=tmp_path,
        config=config,
        on_step=log,
        evaluate=evaluate,
        best="test/w",
        best_mode="max",
    )
    found = shown(tmp_path)
    histogram = found[2, "values"].histo
    assert (histogram.num, histogram.min, histogram.max, histogram.sum) == (4, 0, 1, 2.5)
    assert histogram.sum_squares == 2.25
    assert list(histogram.bucket) == [0, 1, 3] and list(histogram.bucket_limit) == [0, 0.5, 1]
    assert pixels(found[2, "pictures/gray"].image.encoded_image_string)[..., 0].tolist() == [
        [0, 128],
        [255, 255],
    ]
    np.testing.assert_array_equal(pixels(found[2, "color"].image.encoded_image_string), color)
    grid = pixels(found[2, "grid"].image.encoded_image_string)
    np.testing.assert_array_equal(grid, np.block([[[color], [color]], [[color], [color * 0]]]))
    assert (found[2, "grid"].image.height, found[2, "grid"].image.width) == (4, 8)
    text = found[2, "note/text_summary"]
    assert (
        text.tensor.string_val == [b"**two**"] and text.metadata.plugin_data.plugin_name == "text"
    )
    assert found[2, "rate"].simple_value == 0.5 and found[4, "test/weights"].histo.num == 1
    rows = tr.read_metrics(tmp_path)
    assert [row for row in rows if row["step"] == 2] == [{"step": 2, "rate": 0.5}]
    assert rows[-1].keys() == {"step", "test/w"}


def test_hyperparameters(tmp_path):
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    config = {"rate": 0.1, "name": "a", "wide": True, "none": None, "widths": [1, 2]}
    train(
        workdir=tmp_path,
        config=config,
        evaluate={"test": lambda state: {"w": 1.0}},
        best="test/w",
        best_mode="max",
    )
    found = {
        tag: value.metadata.plugin_data
        for (_, tag), value in shown(tmp_path).items()
        if "_hparams_" in tag
    }
    data = {tag: HParamsPluginData.FromString(plugin.content) for tag, plugin in found.items()}
    started = data["_hparams_/session_start_info"].session_start_info.hparams
    assert {
        name: value.number_value or value.string_value or value.bool_value
        for name, value in started.items()
    } == {"rate": 0.1, "name": "a", "wide": True, "widths": "[1, 2]"}
    experiment = data["_hparams_/experiment"].experiment
    assert [info.name.tag for info in experiment.metric_infos] == ["test/w"]
    assert {plugin.plugin_name for plugin in found.values()} == {"hparams"}


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: tr.Image(np.zeros((2, 2, 2))),
            ValueError,
            "with 1, 3 or 4 channels, .* got float64[2, 2, 2]",
        ),
        (lambda: tr.Image(np.zeros((2, 2), np.int32)), ValueError, "got int32[2, 2]"),
        (lambda: tr.Image(np.zeros((0, 2))), ValueError, "got float64[0, 2]"),
        (
            lambda: train(on_step=3),
            TypeError,
            "on_step=): expected a function of a StepEnd, or several; got (3,)",
        ),
        (
            lambda: train(on_step=[3]),
            TypeError,
            "on_step=): expected a function of a StepEnd, or several; got (3,)",
        ),
        (
            lambda: train(on_step=lambda end: end.log({"x": np.zeros(3)})),
            TypeError,
            "log: 'x' is a ndarray: expected a number, tr.Histogram(values), tr.Image(pixels) or "
            "tr.Text(text)",
        ),
        (
            lambda: train(on_step=lambda end: end.log({"x": "text"})),
            TypeError,
            "log: 'x' is a str: expected a number",
        ),
    ],
    ids=range(7),
)
def test_wrong_values(make, error, text):
    with pytest.raises(error, match=re.escape(text).replace(r"\.\*", ".*")):
        make()
