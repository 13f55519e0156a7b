"""Sweeps: trials of an experiment, each in a separate process. Several workers can run the trials
of one sweep.

    FOLDER/sweep.json              script, space, metric, sampler, flags
    FOLDER/trials/0000/trial.json  the hyperparameters
    FOLDER/trials/0000/run/        the run's folder
    FOLDER/trials/0000/result.json the status and the value of the metric, written last
    FOLDER/index.html              the table and plots

A worker (a process that runs trials) locks a trial with `flock` and passes the lock to the process
of the trial. The lock is released when the worker and the process of the trial have ended, so a
trial is never run twice at the same time, even if its worker is killed. If a trial has no result
and no lock, another worker continues the trial from its checkpoint. A worker ends when every trial
has a result, or when its time is used up.

Optuna's storages would not do: they take a trial for lost when its worker sends no heartbeat, so a
killed worker's process that goes on and the worker that retries its trial train in one folder at
the same time, and they would make Optuna a dependency of every
sweep.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fnet._util._files import write_json
from fnet.search._space import Space
from fnet.search.sweep import _page
from fnet.training import read_metrics
from fnet.training._direction import direction
from fnet.training.checkpoints._lock import Lock, Locked
from fnet.training.loop._fingerprint import same_json

_ATTEMPTS = 3  # attempts for a trial whose process is killed
_STARTUP = 8  # number of trials at Sobol points before Bayesian optimization
_POLL = 0.2  # seconds between two checks of trials that other processes have locked
_LOOK = 2.0  # seconds between two looks for trials that other workers have ended
_METRICS = ("validation/accuracy", "validation/loss", "test/accuracy", "test/loss", "train/loss")


class Trial:
    """A trial of a sweep, read from its folder.

    Attributes:
      index: the number of the trial, from 0.
      params: the hyperparameters of the trial.
    """

    def __init__(self, folder: Path):
        self.folder, self.index = folder, int(folder.name)
        self.params = json.loads((folder / "trial.json").read_text())["params"]

    @property
    def result(self) -> dict[str, Any] | None:
        """The result of the trial, or None if the trial has not ended. The result is a dict that
        contains "status" ("finished" or "failed"), "value" and "seconds", and for a failed trial
        also "reason"."""
        try:
            return json.loads((self.folder / "result.json").read_text())
        except FileNotFoundError:
            return None


class Sweep:
    """The folder of a sweep.

    Args:
      folder: the path of the folder, which is created if necessary.
      settings: a dict of the settings of the sweep, such as the script, the search space and the
          sampler. If the folder already contains a sweep, the settings of this sweep must be equal
          to `settings`.

    Raises:
      ValueError: the folder contains a sweep with other settings.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        self.folder, self.settings = folder, settings
        self.space = Space.read(settings["space"])
        (folder / "trials").mkdir(parents=True, exist_ok=True)
        path = folder / "sweep.json"
        with self.planning():
            if path.exists():
                before = json.loads(path.read_text())
                changed = [
                    f"{name} was {before.get(name)!r}, is {value!r}"
                    for name, value in settings.items()
                    if not same_json(before.get(name), value)
                ]
                if changed:
                    raise ValueError(
                        f"{folder} has a sweep with other settings ({'; '.join(changed)[:400]}): "
                        "use the old ones, or another --workdir"
                    )
            else:
                write_json(path, settings)

    @contextlib.contextmanager
    def planning(self):
        """A context manager that holds the lock of the sweep, so that only one worker at a time
        creates a trial."""
        while True:
            try:
                lock = Lock(self.folder)
                break
            except Locked:
                time.sleep(0.05)
        try:
            yield
        finally:
            lock.release()

    def trials(self) -> list[Trial]:
        """Returns all trials, sorted by index."""
        return [
            Trial(path)
            for path in sorted((self.folder / "trials").iterdir())
            if (path / "trial.json").exists()
        ]

    def claim(self, most: int | None) -> tuple[Trial, Lock] | None:
        """Locks an interrupted trial, or creates and locks a new trial. Returns (trial, lock), or
        None if there is no interrupted trial and no new trial may be created.

        `most` is the largest number of trials, or None for no limit.
        """
        with self.planning():
            trials = self.trials()
            for trial in trials:
                if trial.result is None and (lock := _lock(trial.folder)) is not None:
                    if trial.result is None:  # it may have ended before the lock was taken
                        return trial, lock
                    lock.release()
            if most is not None and len(trials) >= most:
                return None
            folder = self.folder / "trials" / f"{len(trials):04d}"
            folder.mkdir(exist_ok=True)
            write_json(folder / "trial.json", {"params": self.point(len(trials), trials)})
            return Trial(folder), Lock(folder)

    def metric(self) -> str | None:
        """The metric by which the finished trials are compared, or None if no trial has finished."""
        return next(
            (
                result["metric"]
                for trial in self.trials()
                if (result := trial.result) and "metric" in result
            ),
            None,
        )

    def point(self, index: int, trials: Sequence[Trial]) -> dict[str, Any]:
        """Returns the hyperparameters of a new trial."""
        from fnet.search._programs import Bayesian
        from fnet.search._space import sobol

        kind, seed = self.settings["sampler"], self.settings["seed"]
        if kind == "random":
            return self.space.random(index + 1, seed=seed)[-1]
        if kind == "bayesian" and index >= _STARTUP:
            model = Bayesian(self.space, seed=seed + index)
            finished = _page.finished(trials)
            ended = [(trial.params, trial.result["value"]) for trial in finished]
            sign = -1.0 if finished and finished[0].result["mode"] == "min" else 1.0
            model.tell([params for params, _ in ended], [sign * value for _, value in ended])
            return model.ask()[0]
        return self.space.at(sobol(1, len(self.space), seed=seed, start=index)[0])

    def command(self, params: Mapping[str, Any], workdir: str | os.PathLike) -> list[str]:
        """Returns the command that runs a trial, as a list of arguments."""
        return [
            sys.executable,
            self.settings["script"],
            *self.settings["flags"],
            *(flag for name, value in params.items() for flag in _flag(name, value)),
            f"--workdir={os.fspath(workdir)}",
        ]

    def outcome(self, trial: Trial, code: int, seconds: float) -> dict[str, Any] | None:
        """Returns the result of a trial whose process has ended, or None if the trial was
        interrupted."""
        ended = {"seconds": seconds, "value": None}
        output = (trial.folder / "output.txt").read_text(errors="replace").strip()
        if code != 0:
            lines = [line for line in output.splitlines() if line.strip()]
            return ended | {
                "status": "failed",
                "reason": f"exit code {code}: {lines[-1][:300] if lines else ''}",
            }
        if not _finished(trial.folder / "run"):
            return None
        values = {
            name: value
            for row in read_metrics(trial.folder / "run")
            for name, value in row.items()
            if value is not None
        }
        name = (
            self.settings["metric"]
            or self.metric()
            or next((each for each in _METRICS if each in values), None)
        )
        if name not in values:
            known = ", ".join(sorted(values)[:20])
            return ended | {
                "status": "failed",
                "reason": f"the run has no metric {name}; it has {known or 'none'}",
            }
        mode = direction(name, self.settings["mode"], "--mode=")
        return ended | {"status": "finished", "value": values[name], "metric": name, "mode": mode}


def run(
    script: str,
    space: str,
    workdir: str,
    *,
    seconds: float,
    trials: int | None,
    metric: str | None,
    mode: str | None,
    sampler: str,
    seed: int,
    flags: Sequence[str],
    workers: int = 1,
) -> int:
    """Runs the trials of a sweep until the time is over or all trials have a result. Returns the
    exit code."""
    if not Path(script).is_file():
        raise ValueError(f"{script}: no such file; expected an experiment")
    if metric is not None:
        direction(metric, mode, "--mode=")  # raises an error before the first trial
    settings = {
        "script": os.path.abspath(script),
        "space": Space.read(space).json(),
        "metric": metric,
        "mode": mode,
        "sampler": sampler,
        "seed": seed,
        "flags": list(flags),
    }
    if sampler == "bayesian":
        from fnet.search._programs import Bayesian

        Bayesian(Space.read(space))  # raises an error if Optuna is missing
    sweep = Sweep(Path(workdir), settings)
    others = []
    if workers > 1:
        again = [
            sys.executable,
            "-m",
            "fnet.cli",
            "sweep",
            script,
            "--space",
            space,
            "--workdir",
            workdir,
            "--budget",
            f"{seconds}s",
            "--sampler",
            sampler,
            "--seed",
            str(seed),
        ]
        again += [
            part
            for name, value in (("trials", trials), ("metric", metric), ("mode", mode))
            if value is not None
            for part in (f"--{name}", str(value))
        ]
        others = [
            subprocess.Popen([*again, "--", *flags], stdout=subprocess.DEVNULL)
            for _ in range(workers - 1)
        ]
    signals = {}

    def stop(number, frame):
        raise KeyboardInterrupt

    if hasattr(signal, "SIGTERM"):
        signals[signal.SIGTERM] = signal.signal(signal.SIGTERM, stop)
    try:
        _work(sweep, time.monotonic() + seconds, trials)
        for other in others:
            other.wait()
    except KeyboardInterrupt:
        for other in others:
            other.terminate()
        print(f"interrupted; the same command continues {workdir}", file=sys.stderr)
        return 130
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
        best = _report(sweep)
    return 0 if best is not None else 1


def _work(sweep, deadline, most):
    news = _News(sweep)
    while time.monotonic() < deadline:
        claimed = sweep.claim(most)
        if claimed is None:
            news.print()
            if all(trial.result for trial in sweep.trials()):
                return
            # Other workers run the last trials. If they are killed, this worker continues.
            time.sleep(_POLL)
            continue
        trial, lock = claimed
        try:
            result = _execute(sweep, trial, lock, deadline, news)
        finally:
            lock.release()
        if result is None:
            continue
        news.print(own=trial.index)
        _page.write(sweep)
        ended = [each.result for each in sweep.trials() if each.result]
        if len(ended) >= 3 and all(each["status"] == "failed" for each in ended):
            raise ValueError(
                f"the first {len(ended)} trials failed; the last one: {ended[-1]['reason']}"
            )


class _News:
    """Prints the trials that have ended since the last look, also those of other workers."""

    def __init__(self, sweep):
        self.sweep = sweep
        self.known = {trial.index for trial in sweep.trials() if trial.result}

    def print(self, own: int | None = None) -> None:
        """Prints the new results. `own` is the index of a trial of this worker."""
        for trial in self.sweep.trials():
            if trial.index in self.known or (result := trial.result) is None:
                continue
            self.known.add(trial.index)
            shown = result.get("reason") or f"{result['metric']} {result['value']:.4g}"
            worker = "" if trial.index == own else ", by another worker"
            print(f"trial {trial.index}: {shown}  ({_said(trial.params)}){worker}", flush=True)


def _execute(sweep, trial, lock, deadline, news):
    """Runs a trial to its end and returns its result, or None if the trial was interrupted and can
    be continued."""
    began, attempts = time.monotonic(), 0
    while True:
        with open(trial.folder / "output.txt", "ab") as output:
            process = subprocess.Popen(
                sweep.command(trial.params, trial.folder / "run"),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                pass_fds=(lock.fileno(),),
            )
        try:
            code = _code(process, deadline, news)
        except KeyboardInterrupt:
            _stop(process)
            raise
        if code is None:
            _stop(process)
            return None
        attempts += 1
        if code < 0 and attempts < _ATTEMPTS:  # killed: it resumes from its checkpoint
            continue
        result = sweep.outcome(trial, code, time.monotonic() - began)
        if result is not None or attempts >= _ATTEMPTS:
            result = result or {
                "status": "failed",
                "value": None,
                "reason": "it was interrupted several times",
                "seconds": time.monotonic() - began,
            }
            write_json(trial.folder / "result.json", result)
            return result


def _code(process, deadline, news) -> int | None:
    """Waits for a process, and prints the news meanwhile. Returns its exit code, or None at the
    deadline."""
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=min(left, _LOOK))
        news.print()
    return process.poll()


def _stop(process):
    """Sends SIGTERM to a process, so that `fit` saves the last step. A process that does not end
    within 60 seconds receives SIGKILL."""
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _finished(workdir) -> bool:
    """Whether the last `fit` of a run finished. A run without the file events.jsonl counts as
    finished."""
    try:
        lines = (workdir / "events.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return True
    ends = [line for line in lines if '"finished at step' in line or '"ended by' in line]
    return bool(ends) and '"finished at step' in ends[-1]


def _report(sweep) -> Trial | None:
    """Writes the HTML page of a sweep, and prints the best configuration as a command."""
    path, trials = _page.write(sweep), sweep.trials()
    best = _page.best(trials)
    print(f"{path}: {_counts(trials)}")
    if best is not None:
        metric = best.result["metric"]
        if sweep.settings["metric"] is None and not metric.startswith("validation/"):
            print(
                "warning: the runs have no validation metric, so the trials are compared by "
                f"{metric}. The best value is then too optimistic for new data: log a metric of "
                "validation data, or pass --metric to say that you mean this one",
                file=sys.stderr,
            )
        command = sweep.command(best.params, "runs/best")
        print(f"best: trial {best.index}, {best.result['metric']} {best.result['value']:.6g}")
        print(shlex.join(["python", *command[1:]]))
    return best


def _counts(trials: Sequence[Trial]) -> str:
    """Says how many trials of all workers there are, and how they ended."""
    kinds = [(trial.result or {"status": "open"})["status"] for trial in trials]
    parts = [
        f"{kinds.count(kind)} {kind}" for kind in ("finished", "failed", "open") if kind in kinds
    ]
    return f"{len(trials)} trials" + (f", {', '.join(parts)}" if parts else "")


def _lock(folder) -> Lock | None:
    try:
        return Lock(folder)
    except Locked:
        return None


def _flag(name, value) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no{name}"]
    return [f"--{name}={value}"]


def _said(params) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in params.items()
    )
