"""Logs of a run: metrics.jsonl, and TensorBoard event files, for which tensorboardX is imported on
first use."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fnet.training.checkpoints import _append
from fnet.training.checkpoints._storage import StorageError, StorePath, location
from fnet.training.record._media import MEDIA, hyperparameters

METRICS, EVENTS, NOTES = "metrics.jsonl", "tensorboard", "events.jsonl"


class LogWarning(UserWarning):
    """Damaged lines of metrics.jsonl were removed, and the original file was kept as a copy.

    >>> import pathlib, tempfile, warnings
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "metrics.jsonl").write_text('damaged\\n{"step": 1, "loss": 0.5}\\n')
    ...     with warnings.catch_warnings(record=True, action="always") as issued:
    ...         tr.Logger(folder, step=1, tensorboard=False).close()
    ...     issued[0].category.__name__, tr.read_metrics(folder)
    ('LogWarning', [{'step': 1, 'loss': 0.5}])
    """


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads metrics.jsonl of a run: a list with one dict for each line, [] if there is no such
    file.

    A last line that a killed process left incomplete is omitted.

    Args:
      workdir: the folder or URL that was passed to `fit(workdir=)`.

    Raises:
      ValueError: another line is not a JSON object with an integer "step".

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = tr.Logger(folder, tensorboard=False)
    ...     logger.write(10, {"loss": 0.5})
    ...     logger.close()
    ...     tr.read_metrics(folder)
    [{'step': 10, 'loss': 0.5}]
    """
    rows = []
    for path in _append.parts(location(workdir) / METRICS):
        more, wrong, last = _parsed(path.read_bytes())
        for number, line in wrong.items():
            if number < last:
                raise ValueError(
                    f"{path}, line {number} is not JSON with an integer 'step', remove it: "
                    f"{line[:80]!r}"
                )
        rows += more
    return rows


def _parsed(raw: bytes) -> tuple[list[dict[str, Any]], dict[int, str], int]:
    """Parses the lines of a log. Returns a list of the rows, a dict {line number: line} of the
    lines that cannot be parsed, and the number of the last line."""
    rows, wrong, number = [], {}, 0
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            row = json.loads(line.decode())
            if not isinstance(row, dict) or type(row["step"]) is not int:
                raise ValueError
            rows.append(row)
        except (
            ValueError,
            KeyError,
            RecursionError,
        ):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
            wrong[number] = line[:1000].decode(errors="replace")
    return rows, wrong, number


class Logger:
    """Writes scalars to `workdir/metrics.jsonl` and to TensorBoard's event files.

    Each line of metrics.jsonl is a JSON object with "step" and the values of this step; NaN and
    infinity become null. `Histogram`, `Image` and `Text` go to TensorBoard only, and arrays, such
    as a confusion matrix, are not logged.

    Args:
      workdir: the folder of the run, as a path or a URL. In an object store, each `write` writes
        the whole log object again, and at 256 KiB a new one begins, such as metrics.jsonl.0001.
      step: the step from which the run is resumed. Lines of later steps, which a process left that
        was killed some steps after its last checkpoint, are removed, because the run writes them
        again. So are damaged lines, with a `LogWarning`; the original is kept as
        metrics.jsonl.damaged. Default 0: all lines are removed.
      tensorboard: write TensorBoard's event files, too. Default True.
      again: the names that the resumed run computes again at `step`, such as "validation/loss", or
        "validation" for all values of this evaluation. A line of `step` with one of them is
        removed. Default ().

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = tr.Logger(folder, tensorboard=False)
    ...     logger.write(1, {"train/loss": 0.5})
    ...     logger.close()
    ...     tr.read_metrics(folder)
    [{'step': 1, 'train/loss': 0.5}]
    """

    hyperparameters: Mapping[str, Any] | None = (
        None  # shown by TensorBoard; set them before the first line
    )
    compared: Sequence[str] = ()  # shown with them: the metrics by which runs are compared

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        step: int = 0,
        tensorboard: bool = True,
        again: Collection[str] = (),
    ):
        self.workdir = location(workdir)
        self.workdir.mkdir(parents=True, exist_ok=True)
        self._tensorboard = tensorboard
        self._events: Any = None
        self._step = step
        path = self.workdir / METRICS
        _append.rewrite(path, lambda raw: self._kept(path, raw, step, frozenset(again)))
        self._file = _append.appending(path)

    def _kept(self, path: Path | StorePath, raw: bytes, step: int, again: frozenset[str]) -> bytes:
        """Returns the lines of metrics.jsonl that are kept if a run is resumed from step `step`."""
        rows, wrong, last = _parsed(raw)
        if torn := wrong.keys() - {last}:
            kept = path.parent / f"{path.name}.damaged"
            kept.write_bytes(raw)
            warnings.warn(
                f"{path}: {len(torn)} damaged lines were left out, the first of them line "
                f"{min(torn)}; the file is kept as {kept.name}",
                LogWarning,
                stacklevel=6,
            )
        repeated = lambda row: (
            row["step"] == step
            and not again.isdisjoint(
                part for name in row for part in (name, name.partition("/")[0])
            )
        )
        rows = [row for row in rows if row["step"] <= step and not repeated(row)] if step else []
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the values of a step as one line of metrics.jsonl.

        When it returns, the operating system has the line, or it is in the object store.

        Args:
          step: the number of the step.
          values: the values by name.

        Raises:
          OSError: the line cannot be written. The error names the file.
        """
        media = {name: value for name, value in values.items() if isinstance(value, MEDIA)}
        scalars = {k: float(v) for k, v in values.items() if k not in media and np.ndim(v) == 0}
        row = {k: _exact(values[k], v) if np.isfinite(v) else None for k, v in scalars.items()}
        if row or not media:
            _written(self._file, (json.dumps({"step": step} | row) + "\n").encode())
        if self._tensorboard:
            if self._events is None:
                self._events = _Events(self.workdir / EVENTS, self._step + 1)
                if self.hyperparameters:
                    self._events.summarize(
                        self._step, hyperparameters(self.hyperparameters, self.compared)
                    )
            self._events.write(step, scalars | media)

    def note(self, step: int, text: str) -> None:
        """Adds an event, such as a recompilation, to events.jsonl, for `fnet report`.

        Nothing is recorded if the run is in an object store or the file cannot be written.
        """
        if isinstance(self.workdir, StorePath):
            return
        with contextlib.suppress(OSError), open(self.workdir / NOTES, "ab") as file:
            file.write(
                (
                    json.dumps({"step": step, "time": round(time.time(), 3), "text": text}) + "\n"
                ).encode()
            )

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def _exact(value: Any, rounded: float) -> float | int:
    """Returns an integer that float64 rounds as an integer, and any other value as a float."""
    whole = isinstance(value, int) or (
        hasattr(value, "dtype") and np.dtype(value.dtype).kind in "iu"
    )
    return int(value) if whole and int(value) != rounded else rounded


class _Events:
    """Writes a TensorBoard event file, with tensorboardX's protocol buffers.

    tensorboardX's SummaryWriter is not used, because it writes in a thread. If the disk is full,
    the thread of SummaryWriter prints tracebacks, and no error is raised in the run."""

    def __init__(self, folder: Path | StorePath, first: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = _append.appending(
            folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
        )
        self._event(file_version="brain.Event:2")
        from tensorboardX.proto.event_pb2 import SessionLog

        # TensorBoard then hides what an earlier process wrote for the steps that are repeated.
        self._event(step=first, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        shown = []
        for name, value in values.items():
            tag = re.sub(r"[^-/\w.]", "_", name)
            shown += (
                value.summaries(tag)
                if isinstance(value, MEDIA)
                else [Summary.Value(tag=tag, simple_value=value)]
            )
        self.summarize(step, shown)

    def summarize(self, step: int, shown: Sequence[Any]) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        self._event(step=step, summary=Summary(value=shown))

    def close(self) -> None:
        self._file.close()

    def _event(self, **fields) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import masked_crc32c

        data = Event(wall_time=time.time(), **fields).SerializeToString()
        head = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", masked_crc32c(part)) for part in (head, data)]
        _written(self._file, head + sums[0] + data + sums[1])


def _written(file: Any, data: bytes) -> None:
    """Writes all of `data` to an unbuffered file. On a disk that is nearly full, one call of
    `file.write` may write only a part of `data`."""
    try:
        while data:
            data = data[file.write(data) :]
    except StorageError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.name)) from None
