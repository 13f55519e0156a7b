"""Reducing: what `fnet reduce RUN` needs from a run that failed, and from the run that it starts
again to come to the same step.

A run that ends with a `Diverged` or `OutOfMemory` error leaves `reduce.json` with the step in its
folder. The command that started it is kept in the cache folder of the user, so that a folder from
elsewhere cannot name a command. `fnet reduce` starts it with FNET_REDUCE in its environment. `fit`
then replays the run up to the step, from a checkpoint and without writing anything, reduces the
step, and ends the process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import jax

from fnet import introspect
from fnet._util import _cache, _files

VARIABLE = "FNET_REDUCE"
RECORD = "reduce.json"


def requested(workdir: Any) -> dict[str, Any] | None:
    """Returns what `fnet reduce` asks for (`step`, `failing`, `folder`, `seconds`), or None. Another
    run of the same script, in another folder, trains as always."""
    text = os.environ.get(VARIABLE)
    if not text or workdir is None:
        return None
    request = json.loads(text)
    return request if Path(request["run"]) == Path(workdir).resolve() else None


def reduce(request: dict[str, Any], recovery: Any) -> None:
    """Reduces the step before which the run has made `request["step"]` - 1 steps, and ends the
    process.

    Raises:
      SystemExit: always. Its status is 0 if a script was written.
    """
    shown = logging.getLogger("fnet.reduce")
    shown.setLevel(logging.INFO)
    shown.addHandler(logging.StreamHandler(sys.stderr))
    step = request["step"]
    inputs = recovery.replayed(step - 1)
    if isinstance(inputs, str):
        raise SystemExit(f"step {step}: {inputs[:1].lower()}{inputs[1:]}")
    state, batch, _ = inputs
    try:
        introspect.reduce(
            recovery.program.step,
            (state, batch),
            request["failing"],
            request["folder"],
            seconds=request["seconds"],
        )
    except ValueError as failed:
        raise SystemExit(f"step {step}: {failed}") from failed
    raise SystemExit(0)


def place_of_command(folder: Path) -> Path:
    """Returns the file that has the command of the run in a folder."""
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    return _cache.cache_folder() / "reduce" / f"{name}.json"


def advice(run: Any, step: int, failing: str) -> str:
    """Writes `reduce.json`, and returns the sentence that names the command; "" for a run without
    a folder on this machine, or with several processes."""
    folder = None if run.checkpoints is None else getattr(run.checkpoints, "folder", None)
    if not isinstance(folder, Path) or jax.process_count() > 1:
        return ""
    command = {"command": [sys.executable, *sys.orig_argv[1:]], "directory": os.getcwd()}
    try:
        _files.write_json(folder.parent / RECORD, {"step": step, "failing": failing})
        _cache.write_json(place_of_command(folder.parent), command)
    except OSError:  # a full disk must not hide the error of the run
        return ""
    near = os.path.relpath(folder.parent)
    shown = folder.parent if near.startswith("..") else near
    return f"`fnet reduce {shown}` reduces the step to a short script"
