"""Where a run's numbers go: metrics.jsonl always, and TensorBoard, which is imported when written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

METRICS, EVENTS = "metrics.jsonl", "tensorboard"


def read_metrics(workdir: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, one dict each; [] where there is none.

    A last line that a killed process left half written is left out.

    Raises:
      ValueError: a line in the middle is not JSON.
    """
    path = Path(workdir) / METRICS
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}, line {number} is not JSON: {line[:80]!r}") from error
    return rows


class Logger:
    """Writes scalars, by step, to `workdir/metrics.jsonl` and to TensorBoard's event files.

    Each line of metrics.jsonl is one object with "step" and what was measured there; NaN and
    infinity are written as null. Arrays (a confusion matrix) go into neither.

    Args:
      workdir: the run's folder.
      step: the step the run goes on from. Lines of later steps, which a killed process wrote after
        its last checkpoint, are taken out, as they will be written again.
      tensorboard: False for metrics.jsonl alone.
    """

    def __init__(self, workdir: str | Path, *, step: int = 0, tensorboard: bool = True):
        self.workdir = Path(workdir)
        self.workdir.mkdir(parents=True, exist_ok=True)
        self._tensorboard = tensorboard
        self._events: Any = None
        self._step = step
        path = self.workdir / METRICS
        if path.exists():
            kept = [row for row in read_metrics(workdir) if row["step"] <= step] if step else []
            new = path.with_suffix(".jsonl.new")
            new.write_text("".join(json.dumps(row) + "\n" for row in kept))
            os.replace(new, path)
        self._file = path.open("a")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One line, on the disk when this returns."""
        scalars = {k: float(v) for k, v in values.items() if np.ndim(v) == 0}
        row = {k: v if np.isfinite(v) else None for k, v in scalars.items()}
        self._file.write(json.dumps({"step": step} | row) + "\n")
        self._file.flush()
        if self._tensorboard:
            if self._events is None:
                from tensorboardX import SummaryWriter

                self._events = SummaryWriter(
                    str(self.workdir / EVENTS), purge_step=self._step + 1
                )
            for name, value in scalars.items():
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()
