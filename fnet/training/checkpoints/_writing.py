"""Writes the array files of a checkpoint, in one process or in all processes of a run."""

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

_PATIENCE = 600.0  # seconds to wait until the other processes of a run have written their part


def write(
    steps: Folder | Objects,
    head: Mapping[str, Any],
    entries: Mapping[str, Any],
    copies: Mapping[str, Any],
    hurry: threading.Event,
) -> dict[str, Any] | None:
    """Writes the shards of this process to the files of a checkpoint. Process 0 also waits for the
    shards of the other processes.

    Args:
      steps: the folder or object store of the checkpoints.
      head: the first fields of the checkpoint's manifest.json: step, metrics, notes.
      entries: a dict {path of a leaf: its entry in manifest.json}. The entries lack the location of
        the leaves (file and byte positions), which `write` adds.
      copies: the result of `snapshot`.
      hurry: an event (`threading.Event`) that is set if the run has failed. If `hurry` is set, the
        wait for other processes ends after two seconds.

    Returns:
      In process 0, `write` returns the manifest of the checkpoint, a dict that the caller must
      write to manifest.json. In the other processes, `write` returns None after process 0 has
      written the manifest.
    """
    processes, me, step = jax.process_count(), jax.process_index(), head["step"]
    partial = steps.partial(step)
    partial.mkdir(exist_ok=processes > 1)
    name, made = steps.arrays(me), pieces(copies)
    file, places = _manifest.write_arrays(
        partial / name, [(piece.name, piece.array) for piece in made]
    )
    mine: dict[str, Any] = {"files": {name: file}, "leaves": {}}
    for piece, place in zip(made, places):
        index = {} if piece.index is None else {"index": piece.index}
        mine["leaves"].setdefault(piece.path, []).append({"file": name, **place, **index})
    if me > 0:
        steps.write_part(step, me, json.dumps(mine))
        _wait(
            lambda: steps.taken(step, me),
            steps.poll,
            hurry,
            "the first process did not commit the checkpoint",
        )
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
