"""Sweeps: workers that are killed, trials that are killed, the page and the command line."""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from fnet import search
from fnet.cli import _sweep as command_line
from fnet.cli import main
from fnet.search.sweep import _importance, _page, _sweep
from fnet.search.sweep._importance import Importance, importance

# An experiment without fnet, which is quick: it logs each step, resumes after the last one, and
# says when it begins.
SCRIPT = """
import json, os, signal, sys, time
given = dict(arg[2:].split("=", 1) for arg in sys.argv[1:])
folder = given["workdir"]
os.makedirs(folder, exist_ok=True)
path = os.path.join(folder, "metrics.jsonl")
note = lambda text: open(os.path.join(folder, "events.jsonl"), "a").write(json.dumps({"step": 0, "text": text}) + "\\n")
done = len(open(path).readlines()) if os.path.exists(path) else 0
def stop(*_):
    note("ended by Interrupted: SIGTERM")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
if float(given["x"]) > 0.9 and "strict" in given:
    sys.exit("error: --x is too large")
for step in range(done, int(given.get("steps", 5))):
    time.sleep(float(given.get("pause", 0.01)))
    with open(path, "a") as file:
        file.write(json.dumps({"step": step + 1, "validation/accuracy": 1 - (float(given["x"]) - 0.3) ** 2}) + "\\n")
note("finished at step 5")
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    space = {"x": {"uniform": [0, 1]}, "kind": {"choice": ["a", "<b>"]}}
    (tmp_path / "space.json").write_text(json.dumps(space))
    return tmp_path


def command(files, *flags, trials=6, script=()):
    return [
        "sweep",
        str(files / "script.py"),
        "--space",
        str(files / "space.json"),
        "--workdir",
        str(files / "sweep"),
        "--budget",
        "60s",
        "--trials",
        str(trials),
        *flags,
        "--",
        *script,
    ]


def results(files):
    return [trial.result for trial in _trials(files)]


def _trials(files):
    return [_sweep.Trial(path) for path in sorted((files / "sweep" / "trials").iterdir())]


def steps(files):
    return [
        [
            json.loads(line)["step"]
            for line in (trial.folder / "run" / "metrics.jsonl").read_text().splitlines()
        ]
        for trial in _trials(files)
    ]


def test_a_sweep_finds_the_best_and_prints_its_command(files, capsys):
    assert main(command(files, trials=8)) == 0
    shown = capsys.readouterr().out
    assert (
        all(result["status"] == "finished" for result in results(files))
        and len(results(files)) == 8
    )
    best = min(_trials(files), key=lambda trial: abs(trial.params["x"] - 0.3))
    assert f"best: trial {best.index}, validation/accuracy" in shown
    line = next(line for line in shown.splitlines() if line.startswith("python "))
    assert f"--x={best.params['x']}" in shlex.split(line) and "--workdir=runs/best" in line
    page = (files / "sweep" / "index.html").read_text()
    assert (
        page.count("<polyline") == 8
        and "Importance" in page
        and "&lt;b&gt;" in page
        and "<b>" not in page
    )
    assert not re.search(r"https?:|<script|src=|url\(", page)
    assert re.findall("<link[^>]*>", page) == ['<link rel="icon" href="data:,">']  # asks for none
    assert main(command(files, trials=8)) == 0  # again: nothing is run
    assert steps(files) == [[1, 2, 3, 4, 5]] * 8


@pytest.mark.exhaustive
def test_two_workers_of_which_one_is_killed(files):
    """Nothing is lost, and nothing is run twice: each step of each trial is logged once."""
    run = [sys.executable, "-m", "fnet.cli", *command(files, trials=6, script=["--pause=0.15"])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    first, second = (
        subprocess.Popen(
            run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    )
    logs = lambda: list((files / "sweep").glob("trials/*/run/metrics.jsonl"))
    deadline = time.monotonic() + 120
    while len(logs()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    first.kill()  # the process of its trial goes on, and holds the lock
    shown = second.communicate(timeout=120)[0]
    first.communicate()
    assert second.returncode == 0, shown
    assert [result["status"] for result in results(files)] == ["finished"] * 6
    assert steps(files) == [[1, 2, 3, 4, 5]] * 6


def test_the_process_of_a_killed_worker_holds_the_last_trial(files):
    """The other worker waits for that process, and writes the result."""
    run = [sys.executable, "-m", "fnet.cli", *command(files, trials=1, script=["--pause=0.4"])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    worker = subprocess.Popen(
        run, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    path, deadline = (
        files / "sweep" / "trials" / "0000" / "run" / "metrics.jsonl",
        time.monotonic() + 120,
    )
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    worker.kill()
    worker.wait()
    assert results(files) == [None] and _sweep._lock(path.parents[1]) is None
    assert main(command(files, trials=1, script=["--pause=0.4"])) == 0
    assert results(files)[0]["status"] == "finished" and steps(files) == [[1, 2, 3, 4, 5]]


@pytest.mark.exhaustive
def test_a_killed_trial_continues(files):
    run = [sys.executable, "-m", "fnet.cli", *command(files, trials=1, script=["--pause=0.3"])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    worker = subprocess.Popen(
        run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    path, deadline = (
        files / "sweep" / "trials" / "0000" / "run" / "metrics.jsonl",
        time.monotonic() + 120,
    )
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    children = pathlib.Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    shown = worker.communicate(timeout=120)[0]
    assert children and worker.returncode == 0, shown
    assert steps(files) == [[1, 2, 3, 4, 5]] and results(files)[0]["status"] == "finished"


def test_the_budget_interrupts_a_trial_and_the_next_call_continues_it(files, capsys):
    slow = command(files, trials=1, script=["--pause=1"])
    slow[slow.index("60s")] = "3s"
    assert main(slow) == 1  # no trial has finished
    assert results(files) == [None] and 1 <= len(steps(files)[0]) < 5
    slow[slow.index("3s")] = "60s"
    assert main(slow) == 0
    assert steps(files) == [[1, 2, 3, 4, 5]]


def test_failures_are_recorded_and_do_not_stop_a_sweep(files, capsys):
    assert main(command(files, trials=8, script=["--strict=1"])) == 0
    failed = [
        (t.params["x"], t.result["reason"])
        for t in _trials(files)
        if t.result["status"] == "failed"
    ]
    assert failed and all(
        x > 0.9 and "exit code 1: error: --x is too large" in reason for x, reason in failed
    )


def test_a_sweep_whose_trials_all_fail_stops(files, capsys):
    (files / "space.json").write_text(json.dumps({"x": {"uniform": [0.95, 1]}}))
    assert main(command(files, script=["--strict=1"])) == 2
    assert "the first 3 trials failed; the last one: exit code 1" in capsys.readouterr().err
    assert len(results(files)) == 3


def test_other_settings_and_wrong_flags(files, capsys):
    assert main(command(files, trials=1)) == 0
    assert main(command(files, "--seed", "1", trials=1)) == 2
    assert "seed was 0, is 1" in capsys.readouterr().err
    wrong = command(files)
    wrong[wrong.index("60s")] = "soon"
    assert main(wrong) == 2 and "--budget=soon: expected a time" in capsys.readouterr().err
    assert main(["sweep", "missing.py", "--space", str(files / "space.json")]) == 2
    assert "missing.py: no such file" in capsys.readouterr().err
    assert command_line.budget("1.5h") == 5400 and command_line.budget("90") == 90


def test_a_metric_that_the_run_does_not_log(files, capsys):
    assert main(command(files, "--metric", "test/f1", trials=1)) == 1
    assert (
        "the run has no metric test/f1; it has step, validation/accuracy"
        in results(files)[0]["reason"]
    )


class Result:
    """A trial that has ended, as the page reads it."""

    def __init__(self, index, value, metric="validation/loss", mode="min"):
        self.index, self.params = index, {}
        self.result = {"status": "finished", "value": value, "metric": metric, "mode": mode}


def logs(files, name):
    """The script, with another metric: the square of the distance from 0.3."""
    text = SCRIPT.replace('"validation/accuracy": 1 - (', f'"{name}": (')
    (files / "script.py").write_text(text)


@pytest.mark.parametrize("name", ["mae", "perplexity"])
def test_errors_are_minimized(files, capsys, name):
    logs(files, f"validation/{name}")
    assert (
        main(
            command(
                files, "--metric", f"validation/{name}", trials=3, script=["--steps=1", "--pause=0"]
            )
        )
        == 0
    )
    best = min(_trials(files), key=lambda trial: abs(trial.params["x"] - 0.3))
    assert (
        f"best: trial {best.index}, validation/{name} {best.result['value']:.6g}"
        in capsys.readouterr().out
    )


def test_a_metric_of_unknown_direction_needs_one(files, capsys):
    logs(files, "validation/gap")
    flags = "--metric", "validation/gap"
    assert main(command(files, *flags, trials=3)) != 0
    assert (
        "is its largest or its smallest value the best? Pass --mode=max or --mode=min"
        in capsys.readouterr().err
    )
    assert not (files / "sweep").exists()
    assert (
        main(command(files, *flags, "--mode", "min", trials=3, script=["--steps=1", "--pause=0"]))
        == 0
    )
    best = min(_trials(files), key=lambda trial: abs(trial.params["x"] - 0.3))
    assert f"best: trial {best.index}, " in capsys.readouterr().out


def test_a_sweep_without_validation_data_says_so(files, capsys):
    logs(files, "test/loss")
    assert main(command(files, trials=1, script=["--steps=1", "--pause=0"])) == 0
    assert (
        "warning: the runs have no validation metric, so the trials are compared by test/loss"
        in (capsys.readouterr().err)
    )


def test_values_of_different_metrics_are_not_compared():
    trials = [Result(0, 0.5), Result(1, 0.9, "validation/accuracy", "max"), Result(2, 0.4)]
    assert _page.best(trials).index == 2 and len(_page.finished(trials)) == 2


def test_choices_of_other_types_are_another_sweep(files):
    settings = lambda choice: {"space": {"a": {"choice": choice}}}
    _sweep.Sweep(files / "sweep", settings([1, 0]))
    _sweep.Sweep(files / "sweep", settings([1, 0]))
    for other in ([True, False], [1.0, 0.0], [1, 2]):
        with pytest.raises(ValueError, match="has a sweep with other settings"):
            _sweep.Sweep(files / "sweep", settings(other))


@pytest.mark.parametrize("sampler", ["random", "bayesian"])
def test_samplers(files, sampler):
    if sampler == "bayesian":
        pytest.importorskip("optuna")
    assert (
        main(command(files, "--sampler", sampler, trials=10, script=["--steps=1", "--pause=0"]))
        == 0
    )
    assert len({trial.params["x"] for trial in _trials(files)}) == 10


SPACE = search.Space(
    a=search.LogUniform(1e-4, 1), b=search.Integer(4, 64), c=search.Choice(("relu", "tanh"))
)


def test_importance():
    points = SPACE.sobol(64, seed=0)
    values = [SPACE["a"].where(p["a"]) ** 2 for p in points]
    told = importance(points, values, SPACE)
    assert told.trials == 64 and told.explained > 0.95 and told.p == 0.005
    assert told.shares["a"] == (pytest.approx(told.explained), 0.015)
    assert max(told.shares["b"][0], told.shares["c"][0]) < 0.02
    assert told.shares["b"][1] > 0.05 < told.shares["c"][1]
    only = importance(points, [float(p["c"] == "tanh") for p in points], SPACE)
    assert only.shares["c"][0] > 0.95 and only.shares["a"][0] < 0.02
    both = importance(points, [v * (p["c"] == "tanh") for v, p in zip(values, points)], SPACE)
    assert min(both.shares["a"][0], both.shares["c"][0]) > 0.3 and both.shares["b"][0] < 0.05
    none = dict.fromkeys("abc", (0.0, 1.0))
    assert importance(points[:2], [1.0, 2.0], SPACE) == Importance(2, 0.0, 1.0, none)
    assert importance(points, [2.0] * 64, SPACE) == Importance(64, 0.0, 1.0, none)


def test_held_out_errors_are_those_of_a_model_without_the_trial():
    rng = np.random.default_rng(0)
    places, values = rng.random(9), rng.normal(size=9)
    kernel = np.exp(-((places[:, None] - places) ** 2))
    errors = _importance._errors(kernel, 0.3, values[None])[0]
    for i in range(9):
        rest = np.delete(np.arange(9), i)
        prior = kernel + _importance._CONSTANT
        weights = np.linalg.solve(prior[np.ix_(rest, rest)] + 0.3 * np.eye(8), values[rest])
        assert errors[i] == pytest.approx(values[i] - prior[i, rest] @ weights, abs=1e-6)


@pytest.mark.parametrize("trials", [6, 24])
def test_noise_has_no_importance(trials):
    """Of sweeps of noise, one in twenty or so finds an importance, and the explained variance is as
    often below zero as above."""
    rng, told = np.random.default_rng(0), []
    for seed in range(60):
        points = SPACE.random(trials, seed=seed)
        told.append(importance(points, rng.random(trials), SPACE))
    assert sum("<rect" in _page._importance(each) for each in told) <= 6
    assert np.median([each.explained for each in told]) < 0.1


def test_a_second_hyperparameter_is_told_beside_a_strong_one():
    points, rng = SPACE.sobol(64, seed=1), np.random.default_rng(0)
    values = [
        np.sin(6 * SPACE["a"].where(p["a"])) + 0.5 * (p["c"] == "relu") + 0.3 * rng.normal()
        for p in points
    ]
    shares = importance(points, values, SPACE).shares
    assert [name for name, (_, p) in shares.items() if p <= 0.05] == ["a", "c"]
    assert shares["a"][0] > 0.6 and 0.05 < shares["c"][0] < 0.25


def test_the_page_says_what_can_be_told():
    told = Importance(24, 0.8, 0.005, {"noise": (0.07, 0.4), "signal": (0.3, 0.01)})
    page = _page._importance(told)
    assert "explains 80% of the metric's variance for trials that it has not seen" in page
    assert page.index("signal") < page.index("noise") and "7% not significant, p = 0.4" in page
    assert "fewer than 20" not in page
    few = _page._importance(dataclasses.replace(told, trials=19))
    assert "With 19 trials, fewer than 20, the percentages are rough" in few
    for unclear, said in (
        ({"explained": -0.12}, "(it explains -12% of their variance)"),
        ({"p": 0.3}, "(it explains 80% of their variance, which chance alone reaches with a "),
    ):
        page = _page._importance(dataclasses.replace(told, **unclear))
        assert "No importance can be told from 24 trials" in page and said in page
        assert "<svg" not in page


def test_no_label_of_the_page_is_cut():
    name = "a_hyperparameter_with_a_long_name"
    space = search.Space({name: search.Choice(("a value which is long, too", 1)), "b": SPACE["b"]})
    trial = lambda i, params: types.SimpleNamespace(
        index=i, params=params, result={"value": float(i), "mode": "max"}
    )
    trials = [trial(i, params) for i, params in enumerate(space.sobol(4, seed=0))]
    page = _page._coordinates(trials, space, "validation/a_metric_with_a_long_name")
    width = float(re.search(r'viewBox="0 0 (\d+) ', page)[1])
    before = {}
    for x, y, size, text in re.findall(
        r'<text x="([\d.]+)" y="(\d+)" text-anchor="middle" font-size="(\d+)">([^<]*)<', page
    ):
        half = 0.6 * int(size) * len(text) / 2
        assert before.get(y, 0) <= float(x) - half and float(x) + half <= width
        before[y] = float(x) + half


@pytest.mark.exhaustive
def test_every_worker_prints_all_trials(files, capfd):
    flags = command(files, "--workers", "2", trials=6, script=["--pause=0.1"])
    assert main(flags) == 0
    shown = capfd.readouterr().out
    assert sorted(re.findall(r"^trial (\d):", shown, re.MULTILINE)) == list("012345")
    assert 1 <= shown.count(", by another worker\n") <= 5
    assert "index.html: 6 trials, 6 finished\n" in shown
