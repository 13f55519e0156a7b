"""Writing a checkpoint's files, by one process or by all of a run's, up to the manifest."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax

from fnet.training.checkpoints import _manifest
from fnet.training.checkpoints._folder import Folder
from fnet.training.checkpoints._objects import Objects
from fnet.training.checkpoints._snapshot import pieces

_PATIENCE = 600.0      # seconds for the other processes of a run to write their part


def write(steps: Folder | Objects, head: Mapping[str, Any], entries: Mapping[str, Any], copies: Mapping[str, Any],
          hurry: threading.Event) -> dict[str, Any] | None:
    """Writes this process's shards of a step and, in the first process, waits for those of the others.

    Args:
      steps: where.
      head: of the manifest: step, metrics, notes.
      entries: of the leaves, without their pieces.
      copies: what `snapshot` made.
      hurry: set where the run has failed, so that it does not wait long.

    Returns:
      The manifest to commit, in the first process; None in the others, after it is committed.
    """
    processes, me, step = jax.process_count(), jax.process_index(), head["step"]
    partial = steps.partial(step)
    partial.mkdir(exist_ok=processes > 1)
    name, made = steps.arrays(me), pieces(copies)
    file, places = _manifest.write_arrays(partial / name, [(piece.name, piece.array) for piece in made])
    mine: dict[str, Any] = {"files": {name: file}, "leaves": {}}
    for piece, place in zip(made, places):
        index = {} if piece.index is None else {"index": piece.index}
        mine["leaves"].setdefault(piece.path, []).append({"file": name, **place, **index})
    if me > 0:
        steps.write_part(step, me, json.dumps(mine))
        _wait(lambda: steps.taken(step, me), steps.poll, hurry, "the first process did not commit the checkpoint")
        return None
    for process in range(1, processes):
        parts = []

        def written(process=process, parts=parts):
            parts[:] = [steps.take_part(step, process)]
            return parts[0] is not None

        _wait(written, steps.poll, hurry, "not all processes wrote their part")
        part = json.loads(parts[0])
        mine["files"] |= part["files"]
        for path, more in part["leaves"].items():
            mine["leaves"].setdefault(path, []).extend(more)
    leaves = {path: {**entry, "pieces": mine["leaves"][path]} for path, entry in entries.items()}
    return {**head, "files": mine["files"], "leaves": leaves}


def _wait(done, pause, hurry, what):
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > (2 if hurry.is_set() else _PATIENCE):
            raise TimeoutError(f"{what} in time")
        time.sleep(pause)
