"""A run's folder: damaged logs, other configurations, other data, restarts, folders that were
replaced, two runs."""

import dataclasses
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from test_endings import OPTIONS, batches, start, step, steps_of

from fnet import training as tr

pytestmark = pytest.mark.usefixtures("quickly")


def fit(workdir, steps=2, source=batches, **options):
    return tr.fit(
        step,
        start(),
        source,
        steps=steps,
        workdir=workdir,
        **(OPTIONS | {"log_every": 1} | options),
    )


# metrics.jsonl


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 1, "train/loss": \xff\xfe}',
        b'{"train/loss": 1.0}',
        b"3.5",
        b"[]",
        b"{",
        b'{"step": "1"}',
        b"[" * 100_000,
    ],
    ids=lambda line: line[:12].decode("latin1"),
)
def test_a_damaged_log_blocks_no_run(tmp_path, line):
    fit(tmp_path, 1)
    file = tmp_path / "metrics.jsonl"
    damaged = line + b"\n" + file.read_bytes()
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match="line 1 is not JSON with an integer 'step', remove it: "):
        tr.read_metrics(tmp_path)
    with pytest.warns(
        tr.LogWarning,
        match="1 damaged lines were left out, the first of them line 1; the file is kept",
    ):
        assert int(fit(tmp_path).step) == 2
    assert [row["step"] for row in tr.read_metrics(tmp_path)] == [1, 2]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged


# Configurations and data.


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = 0.1
    steps: int = 2
    widths: tuple = (3, 4)
    data_dir: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class Later(Config):
    decay: float = 0.0


def test_a_run_is_resumed_with_its_configuration_only(tmp_path):
    fit(tmp_path, config=Config())
    assert json.loads((tmp_path / "config.json").read_text())["rate"] == 0.1
    fit(
        tmp_path, 3, config=Config(steps=3, data_dir="x")
    )  # longer is allowed, and what does not decide
    fit(tmp_path, 3, config=Later(steps=3))  # and a new field with its default
    for config, text in [
        (Config(rate=0.2), "rate was 0.1, is 0.2"),
        (Later(decay=0.1), "decay was not there, is 0.1"),
        ({"steps": 3}, r"rate was 0.1, is not there; widths was .*, is not there; data_dir .*"),
    ]:
        with pytest.raises(tr.ConfigError, match=rf"another configuration \({text}\): use the old"):
            fit(tmp_path, 3, config=config)
    with pytest.raises(
        tr.ConfigError, match=r"\(steps was 3, is 2, and a run is only ever made longer\)"
    ):
        fit(tmp_path, 2, config=Config())
    with pytest.warns(
        tr.ResumeWarning, match="this call has no config=, so the model, the optimizer and"
    ):
        fit(tmp_path, 3, config=None)
    assert tr.load(tmp_path).config == {"rate": 0.1, "steps": 3, "widths": [3, 4], "data_dir": "x"}


def test_without_a_config_it_warns_of_what_it_sees_and_of_what_it_cannot(tmp_path):
    data = {"x": np.ones(40, np.float32)}
    fit(tmp_path, 4, tr.Batches(data, batch_size=8), config=None)
    text = (
        r"the data's examples was 40, is 32; the data's digest of batch 0 was '\w+', is '\w+'; the "
        r"data's digest of all examples was '\w+', is '\w+'; steps was 4, is 2, "
        r"and .* longer. this call has no config="
    )
    with pytest.warns(tr.ResumeWarning, match=text):
        fit(tmp_path, 2, tr.Batches({"x": 2 * data["x"][:32]}, batch_size=8), config=None)
    with pytest.warns(tr.ResumeWarning, match="the checkpoint has no config="):
        fit(tmp_path, 4, tr.Batches(data, batch_size=8), config={"rate": 1})


@pytest.mark.exhaustive
def test_other_data_is_another_run(tmp_path):
    rows = np.arange(40, dtype=np.float32) / 40
    source = lambda rows, **options: tr.Batches({"x": rows}, batch_size=8, **options)
    fit(tmp_path, 2, source(rows))
    fit(tmp_path, 3, source(rows))
    for other, text in [
        (source(rows, seed=1), "the data's seed was 0, is 1; the data's digest"),
        (source(rows + 1), "the data's digest of batch 0 was"),
        (
            source(np.where(rows == rows[tr.Batches(rows, 8).index(4)[7]], 9, rows)),
            "the data's digest of all examples was",
        ),  # one example of the last batch
        (source(np.tile(rows, 2)), "the data's examples was 40, is 80"),
        (lambda i: {"x": rows[:8] + 1}, "the data's digest of batch 0 was"),
    ]:
        with pytest.raises(tr.ConfigError, match=text):
            fit(tmp_path, 3, other)


@pytest.mark.parametrize(
    "config, text",
    [
        ("rate=0.1", "config is a dataclass or a dict of JSON types; got a str"),
        ({"f": len}, "config: 'f' is <built-in function len>, which JSON does not hold"),
        ({"rate": float("nan")}, "config: 'rate' is nan, which JSON does not hold"),
    ],
)
def test_configurations_that_cannot_be_kept(config, text):
    with pytest.raises((TypeError, ValueError), match=text):
        tr.fit(step, start(), batches, steps=2, config=config)


# Restarting.


def test_restarting_removes_the_run_when_all_else_is_known_to_be_right(tmp_path):
    fit(tmp_path, 3, config={"rate": 1})
    with pytest.raises(TypeError, match=r"must return .state, metrics."):
        tr.fit(
            lambda state, batch: state,
            start(),
            batches,
            steps=2,
            workdir=tmp_path,
            restart=True,
            **OPTIONS,
        )
    with pytest.raises(OSError, match="no data"):
        fit(tmp_path, source=lambda i: (_ for _ in ()).throw(OSError("no data")), restart=True)
    assert steps_of(tmp_path) == [3]
    fit(tmp_path, 2, config={"rate": 2}, restart=True)
    assert steps_of(tmp_path) == [2] and tr.load(tmp_path).config == {"rate": 2}
    assert [row["step"] for row in tr.read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("name", ["model.pt", "best/model.pt", "7/model.pt"])
def test_files_of_somebody_else_are_never_removed(tmp_path, name):
    fit(tmp_path, 2)
    path = tmp_path / "checkpoints" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("weights")
    for remove in (lambda: tr.clear(tmp_path), lambda: fit(tmp_path, restart=True)):
        with pytest.raises(
            tr.CheckpointError,
            match=f"that are not of checkpoints .{name.split('/')[0]}., so "
            "no file was removed: remove the folder manually",
        ):
            remove()
    assert (
        path.read_text() == "weights"
        and 2 in steps_of(tmp_path)
        and (tmp_path / "metrics.jsonl").exists()
    )


def test_a_folder_that_another_run_uses_is_not_restarted(tmp_path):
    fit(tmp_path, 2)
    with tr.Checkpoints(tmp_path / "checkpoints") as other:
        other.lock()
        with pytest.raises(tr.CheckpointError, match="another run is using this folder"):
            fit(tmp_path, restart=True)
    assert steps_of(tmp_path) == [2]


# Two runs.


def test_a_run_whose_folder_was_replaced_writes_nothing_into_the_new_one(tmp_path):
    def replacing(i):
        if i == 3:  # by another run, which goes to step 2 there
            shutil.rmtree(tmp_path / "run")
            fit(tmp_path / "run", 2, config={"rate": 2})
        return batches(i)

    with pytest.raises(
        tr.CheckpointError, match="this folder was removed or replaced, or another run"
    ):
        fit(tmp_path / "run", 6, replacing, save_every=2, config={"rate": 1})
    assert steps_of(tmp_path / "run") == [2] and tr.load(tmp_path / "run").config == {"rate": 2}


def test_a_step_of_the_run_that_took_the_folder_stays_in_its_place(tmp_path):
    """The folder is replaced between the last look at the lock and the rename."""
    from fnet.training.checkpoints._folder import Folder

    folder = Folder(tmp_path)
    folder.partial(2).mkdir()

    def replaced():
        shutil.rmtree(folder.partial(2))
        (tmp_path / "2").mkdir()
        (tmp_path / "2" / "theirs").touch()

    with pytest.raises(FileNotFoundError):
        folder.commit(2, {}, replaced)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    assert (tmp_path / "2" / "theirs").exists()


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_taken_again(tmp_path, monkeypatch):
    from fnet.training.checkpoints import _lock

    real, calls = _lock.Lock._take, []

    def take(self):
        real(self)
        if not calls:
            calls.append(1)
            (tmp_path / ".lock").unlink()

    monkeypatch.setattr(_lock.Lock, "_take", take)
    lock = _lock.Lock(tmp_path)
    assert lock.holds() and calls
    with pytest.raises(_lock.Locked):
        _lock.Lock(tmp_path)
    lock.release()


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="forks with JAX loaded")
def test_two_configurations_started_together_do_not_swap(tmp_path):
    """One has the new folder, and its config.json and checkpoints are its own; the other is
    refused."""
    program = textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_endings import OPTIONS, batches, start, step
        from fnet import training as tr
        def source(i):
            time.sleep(0.02)
            return batches(i)
        try:
            tr.fit(step, start(), source, steps=100, workdir={str(tmp_path)!r}, save_every=20,
                   **(OPTIONS | {{"config": {{"rate": float(sys.argv[1])}}}}))
            print("trained", sys.argv[1])
        except (tr.CheckpointError, tr.ConfigError) as error:
            print("refused", error)
        """)
    both = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, rate], stdout=subprocess.PIPE, text=True
        )
        for rate in ("0.1", "0.2")
    ]
    said = sorted(process.communicate(timeout=200)[0] for process in both)
    assert said[0].startswith("refused ") and said[1].startswith("trained "), said
    rate = float(said[1].split()[1])
    assert tr.load(tmp_path).config == {"rate": rate}
    assert f'"rate": {rate}' in (tmp_path / "config.json").read_text()


def test_integers_in_the_log_keep_their_digits(tmp_path):
    """Above 2^53, float64 rounds them; the step is an integer of any size."""
    values = {
        "large": 2**53 + 1,
        "unsigned": np.uint64(2**64 - 1),
        "whole": 3,
        "part": np.float32(0.5),
        "flag": True,
    }
    logger = tr.Logger(tmp_path, tensorboard=False)
    logger.write(2**53 + 1, values)
    logger.close()
    assert tr.read_metrics(tmp_path) == [
        {
            "step": 2**53 + 1,
            **{
                name: value.item() if hasattr(value, "item") else value
                for name, value in values.items()
            },
        }
    ]
