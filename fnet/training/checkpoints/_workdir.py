"""Removes the files that `fit` and `save_config` have written to a run's folder."""

from __future__ import annotations

import os

from fnet.training._config import CONFIG
from fnet.training.checkpoints import _append
from fnet.training.checkpoints._checkpoint import Checkpoints
from fnet.training.checkpoints._storage import StorePath, location
from fnet.training.record._logs import EVENTS, METRICS, NOTES

CHECKPOINTS, PLAN = "checkpoints", "plan.txt"


def clear(workdir: str | os.PathLike) -> None:
    """Removes the run in `workdir`: checkpoints, logs, config.json and plan.txt. Other files stay.

    To train again from the first step, use `fit(..., restart=True)` instead, which removes the old
    run only after it has checked the arguments of the new one.

    Args:
      workdir: the folder of the run, as a path or a URL. It need not exist.

    Raises:
      CheckpointError: a run uses the folder, or its checkpoints/ contains files that do not belong
        to checkpoints. Nothing was removed.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (pathlib.Path(folder) / "config.json").write_text("{}")
    ...     tr.clear(folder)
    ...     list(pathlib.Path(folder).iterdir())
    []
    """
    folder = location(workdir) / CHECKPOINTS
    local = not isinstance(folder, StorePath)
    if local and not folder.is_dir():
        remove_logs(workdir)
        return
    with Checkpoints(folder) as checkpoints:
        checkpoints.clear()
        remove_logs(workdir)
        if local:
            for entry in folder.iterdir():  # the lock, last
                entry.unlink()
            folder.rmdir()


def remove_logs(workdir: str | os.PathLike) -> None:
    """Removes metrics.jsonl, events.jsonl, config.json, plan.txt and TensorBoard's files."""
    folder = location(workdir)
    for path in (*_append.parts(folder / METRICS), folder / NOTES, folder / CONFIG, folder / PLAN):
        path.unlink(missing_ok=True)
    events = folder / EVENTS
    if isinstance(events, StorePath):
        for name in events.keys():
            if name.startswith("events.out.tfevents."):
                (events / name).unlink(missing_ok=True)
    elif events.is_dir() and not events.is_symlink():
        for file in events.glob("events.out.tfevents.*"):
            file.unlink()
        if not any(events.iterdir()):
            events.rmdir()
