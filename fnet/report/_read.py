"""Reads the folder of a run. The run may be finished or in progress.

The files of a run are untrusted: they may be damaged, written by another program, or malicious. The
files are read as text or JSON of a limited size, and no content is executed. Content that cannot be
used is omitted, and `Run.notes` lists the omitted content.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Largest number of bytes to read from a log, and from another file.
_LOG, _FILE = (256 << 20, 32 << 20)
_METRICS, _NAME, _LINE = 300, 200, 1 << 20
_POINTS = 1500  # approximate maximal number of points of a curve
_IMAGE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/]{1,400000}={0,2}")


@dataclasses.dataclass(eq=False)
class Run:
    """The recorded data of a run.

    Attributes:
        path: the folder of the run.
        name: the name of the folder.
        metrics: {name: (steps, values)}; a value that is not finite is None.
        config: the hyperparameters, a dict; {} if none were recorded.
        facts: properties of the run, a dict, which may contain the chip, the precision policy, the
            sharding plan and the versions of libraries. `training.fit` stores it in each
            checkpoint, under "notes" in manifest.json; the newest one is read.
        checkpoints: a list of (step, metrics, size in bytes), in the order of the steps.
        damaged: the folders of damaged checkpoints, such as "400.damaged" for step 400.
        events: a list of (step, Unix time or None if it is unknown, text).
        predictions: a dict with the keys "classes", "confusion" and "mistakes", or {} if none were
            saved.
        summary: the rows of `introspect.summary`, or [] if none was saved.
        samples: the text samples, {file name: text}.
        plan: the text of `parallel.Plan.explain`, which compares sharding strategies, or "" if the
            run had no plan.
        profiles: the rows of `introspect.profile` by the range of steps, such as "100-105".
        notes: messages about files and values that could not be used.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = report.read(folder)
    >>> run.metrics
    {}
    """

    path: Path
    name: str
    metrics: dict[str, tuple[list[int], list[float | None]]] = dataclasses.field(
        default_factory=dict
    )
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    checkpoints: list[tuple[int, dict[str, float], int]] = dataclasses.field(default_factory=list)
    damaged: list[str] = dataclasses.field(default_factory=list)
    events: list[tuple[int, float | None, str]] = dataclasses.field(default_factory=list)
    predictions: dict[str, Any] = dataclasses.field(default_factory=dict)
    summary: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    samples: dict[str, str] = dataclasses.field(default_factory=dict)
    plan: str = ""
    profiles: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def step(self) -> int:
        """The last step in the logs or checkpoints of the run."""
        return max(
            [
                0,
                *(steps[-1] for steps, _ in self.metrics.values() if steps),
                *(step for step, _, _ in self.checkpoints),
            ]
        )

    @property
    def steps(self) -> int | None:
        """The number of steps that `training.fit` was asked for, or None if it is unknown."""
        fit = self.facts.get("fit")
        for found in (
            fit.get("steps") if isinstance(fit, dict) else None,
            self.config.get("steps"),
        ):
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
        return None


def read(folder: str | os.PathLike) -> Run:
    """Reads the folder of a training run. What cannot be used is listed in `Run.notes` and raises
    no error.

    Raises:
        ValueError: `folder` is not a local folder.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\\n')
    ...     report.read(folder).metrics["train/loss"]
    ([1], [0.5])
    """
    path = Path(folder)
    if "://" in str(folder) or re.match(r"(s3|gs|az|memory):/", str(folder)):
        raise ValueError(
            f"{folder}: expected a local folder; copy the run from the object store first"
        )
    if not path.is_dir():
        raise ValueError(
            f"{folder}: {'is a file, expected a' if path.exists() else 'no such'} folder"
        )
    run = Run(path, path.resolve().name or str(path))
    for part in (
        _metrics,
        _config,
        _checkpoints,
        _events,
        _predictions,
        _summary,
        _samples,
        _plan,
        _profiles,
    ):
        try:
            part(run)
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
            MemoryError,
            OverflowError,
        ) as error:
            run.notes.append(
                f"{part.__name__.strip('_')}: cannot be used ({type(error).__name__}: "
                f"{str(error)[:200]})"
            )
    if not run.metrics:
        run.notes.insert(0, "no metrics: metrics.jsonl is missing or empty")
    return run


def _raw(run: Run, path: Path, limit: int) -> bytes | None:
    """Returns the last `limit` bytes of a regular file, or None if the file is missing or cannot be
    read.

    If the file exists, but cannot be read, a note is added to the run.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        run.notes.append(f"{path.name}: {error.strerror or error}")
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        run.notes.append(f"{path.name}: not a regular file")
        return None
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > limit:
            run.notes.append(
                f"{path.name}: {status.st_size:,} bytes, of which the last {limit:,} are read"
            )
            file.seek(status.st_size - limit)
            file.readline()
        return file.read(limit)


def _json(run: Run, path: Path, limit: int = _FILE) -> Any:
    raw = _raw(run, path, limit)
    if raw is None:
        return None
    try:
        return json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        run.notes.append(f"{path.name}: not JSON ({str(error)[:100]})")
        return None


def _lines(run: Run, name: str, use: Callable[[int, dict], None]) -> None:
    """Reads a file with one JSON object in each line, and calls `use(line number, object)` for each
    object."""
    raw, wrong = _raw(run, run.path / name, _LOG), []
    lines = (raw or b"").split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode()) if len(line) <= _LINE else None
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            use(number, row)
        elif number < len(lines):  # the last line may be incomplete
            wrong.append(number)
    if wrong:
        run.notes.append(
            f"{name}: {len(wrong)} lines are not JSON objects and are left out, the first of them "
            f"{wrong[0]}"
        )


def _metrics(run: Run) -> None:
    unnumbered, dropped = [], set()
    found: dict[str, dict[int, float | None]] = {}

    def use(number, row):
        step = row.get("step")
        if not _whole(step) or not 0 <= step < 1 << 53:
            unnumbered.append(number)
            step = number
        for name, value in row.items():
            if (
                name == "step"
                or isinstance(value, bool)
                or not isinstance(value, int | float | None)
            ):
                continue
            name = name[:_NAME]
            if name not in found and len(found) >= _METRICS:
                dropped.add(name)
                continue
            found.setdefault(name, {})[step] = _finite(value)

    _lines(run, "metrics.jsonl", use)
    if unnumbered:
        run.notes.append(
            f"metrics.jsonl: {len(unnumbered)} lines have no step; their line number is shown "
            f"instead"
        )
    if dropped:
        run.notes.append(f"metrics.jsonl: {len(dropped)} metrics more than {_METRICS} are left out")
    for name, points in found.items():
        steps = sorted(points)
        run.metrics[name] = thinned(steps, [points[step] for step in steps])
    bad = [name for name, (_, values) in run.metrics.items() if None in values]
    if bad:
        run.notes.append(
            f"not finite at some steps: {', '.join(bad[:8])}{' ...' if len(bad) > 8 else ''}"
        )


def thinned(steps: list[int], values: list[float | None]) -> tuple[list[int], list[float | None]]:
    """Reduces a curve to about `_POINTS` points. The curve is divided into sections, and the
    smallest and the largest value of each section are kept. Some non-finite points are also kept,
    so that gaps in the curve remain visible."""
    if len(steps) <= _POINTS:
        return steps, values
    size, kept = math.ceil(len(steps) / (_POINTS // 2)), {0, len(steps) - 1}
    for start in range(0, len(steps), size):
        stretch = range(start, min(start + size, len(steps)))
        finite = [i for i in stretch if values[i] is not None]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        kept |= {i for i in stretch if values[i] is None and i - 1 in kept}
    order = sorted(kept)
    return [steps[i] for i in order], [values[i] for i in order]


def _config(run: Run) -> None:
    found = _json(run, run.path / "config.json")
    if isinstance(found, dict):
        run.config = {str(name)[:_NAME]: value for name, value in list(found.items())[:500]}
    elif found is not None:
        run.notes.append("config.json: not an object")


def _checkpoints(run: Run) -> None:
    folder = run.path / "checkpoints"
    if not folder.is_dir():
        return
    names = sorted(os.listdir(folder))
    run.damaged = [
        name[:_NAME] for name in names if re.fullmatch(r"\d{1,18}\.damaged(-\d+)?", name)
    ]
    steps = sorted(int(name) for name in names if re.fullmatch(r"\d{1,18}", name))
    if len(steps) > 1000:
        run.notes.append(f"checkpoints: {len(steps)} steps, of which the last 1000 are shown")
    for step in steps[-1000:]:
        inside = folder / str(step)
        manifest = _json(run, inside / "manifest.json", 1 << 28) if step in steps[-20:] else {}
        manifest = manifest if isinstance(manifest, dict) else {}
        size = (
            sum(
                entry.stat(follow_symlinks=False).st_size
                for entry in os.scandir(inside)
                if entry.is_file(follow_symlinks=False)
            )
            if inside.is_dir()
            else 0
        )
        values = manifest.get("metrics")
        values = list(values.items())[:50] if isinstance(values, dict) else []
        finite = {str(name)[:_NAME]: value for name, value in values if _finite(value) is not None}
        run.checkpoints.append((step, finite, size))
        notes = manifest.get("notes")
        if isinstance(notes, dict) and notes:
            run.facts = notes
    fit = run.facts.get("fit")
    if not run.config and isinstance(fit, dict) and isinstance(fit.get("config"), dict):
        run.config = fit["config"]


def _events(run: Run) -> None:
    def use(number, row):
        text, when = row.get("text"), row.get("time")
        if isinstance(text, str) and len(run.events) < 2000:
            run.events.append(
                (row["step"] if _whole(row.get("step")) else 0, _finite(when), text[:2000])
            )

    _lines(run, "events.jsonl", use)


def _predictions(run: Run) -> None:
    found = _json(run, run.path / "predictions.json")
    if found is None:
        return
    classes, counts = found["classes"], found["confusion"]
    if not (
        isinstance(classes, list)
        and isinstance(counts, list)
        and 0 < len(classes) == len(counts) <= 2000
        and all(
            isinstance(row, list)
            and len(row) == len(classes)
            and all(_whole(n) and 0 <= n < 1 << 53 for n in row)
            for row in counts
        )
    ):
        run.notes.append(
            "predictions.json: its confusion matrix is not [classes, classes] of counts"
        )
        return
    names, mistakes, wrong = [str(name)[:_NAME] for name in classes], [], 0
    for each in found.get("mistakes", [])[:200]:
        label, guess, image = each.get("label"), each.get("guess"), each.get("image")
        if not (
            _whole(label) and _whole(guess) and 0 <= label < len(names) and 0 <= guess < len(names)
        ):
            wrong += 1
            continue
        if image is not None and not (isinstance(image, str) and _IMAGE.fullmatch(image)):
            image, wrong = None, wrong + 1
        mistakes.append(
            {
                "index": each.get("index") if _whole(each.get("index")) else None,
                "label": names[label],
                "guess": names[guess],
                "probability": _finite(each.get("probability")),
                "image": image,
            }
        )
    if wrong:
        run.notes.append(
            f"predictions.json: {wrong} mistakes have an unknown class or an image that is no PNG"
        )
    run.predictions = {"classes": names, "confusion": counts, "mistakes": mistakes}


def _summary(run: Run) -> None:
    found = _json(run, run.path / "summary.json")
    if isinstance(found, list):
        run.summary = [row for row in found if isinstance(row, dict)][:2000]
    elif found is not None:
        run.notes.append("summary.json: not a list")


def _samples(run: Run) -> None:
    for name in ("sample.txt", "samples.txt"):
        raw = _raw(run, run.path / name, 64 << 10)
        if raw:
            run.samples[name] = _text(raw)


def _plan(run: Run) -> None:
    run.plan = _text(_raw(run, run.path / "plan.txt", 64 << 10) or b"")


def _profiles(run: Run) -> None:
    folder = run.path / "profile"
    names = (
        [name for name in os.listdir(folder) if re.fullmatch(r"\d{1,18}-\d{1,18}", name)]
        if folder.is_dir()
        else []
    )
    for name in sorted(names, key=lambda name: int(name.partition("-")[0]))[-8:]:
        found = _json(run, folder / name / "profile.json")
        if isinstance(found, list):
            run.profiles[name] = [row for row in found if isinstance(row, dict)][:2000]


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace").replace("\0", "\ufffd")


def _whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value) -> float | None:
    """Returns a number that JavaScript can represent, or None."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or abs(value) > 1e300
        or not math.isfinite(value)
    ):
        return None
    return value
