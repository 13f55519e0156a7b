"""A run's folder: what `fit` and `save_config` leave there, and how to start over."""

from __future__ import annotations

import shutil
from pathlib import Path

from fnet.training._checkpoint import Checkpoints
from fnet.training._config import CONFIG
from fnet.training._logs import EVENTS, METRICS

CHECKPOINTS = "checkpoints"


def clear(workdir: str | Path) -> None:
    """Removes the run in `workdir`: its checkpoints, logs and config.json, and no other file.

    Args:
      workdir: the run's folder; it need not exist.

    Raises:
      CheckpointError: a run is using it.
    """
    with Checkpoints(Path(workdir) / CHECKPOINTS) as checkpoints:
        if checkpoints.folder.is_dir():
            checkpoints.lock()
        for name in (CHECKPOINTS, EVENTS, METRICS, CONFIG):
            path = Path(workdir) / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
