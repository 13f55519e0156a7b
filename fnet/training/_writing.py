"""Writing a checkpoint's files, by one process or by all of a run's, up to the manifest."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fnet.training import _manifest
from fnet.training._snapshot import pieces

_PATIENCE = 600.0      # seconds for the other processes of a run to write their part, on the folder that all see


def write(partial: Path, head: Mapping[str, Any], entries: Mapping[str, Any], copies: Mapping[str, Any],
          hurry: threading.Event) -> bool:
    """Fills the folder `partial` with this process's arrays and, in the first process, with the manifest of them all.

    Args:
      head: of the manifest: step, metrics, notes.
      entries: of the leaves, without their places.
      copies: what `snapshot` made.
      hurry: set where the run has failed, so that nobody is waited for.

    Returns:
      Whether the folder is whole and this process is to give it its name.
    """
    processes, me = jax.process_count(), jax.process_index()
    partial.mkdir(exist_ok=processes > 1)
    name, made = f"arrays-{me}.safetensors", pieces(copies)
    file, places = _manifest.write_arrays(partial / name, [(piece.name, piece.array) for piece in made])
    mine: dict[str, Any] = {"files": {name: file}, "leaves": {}}
    for piece, place in zip(made, places):
        index = {} if piece.index is None else {"index": piece.index}
        mine["leaves"].setdefault(piece.path, []).append({"file": name, **place, **index})
    if processes > 1:
        part = partial / f".part-{me}.json"
        part.with_suffix(".new").write_text(json.dumps(mine))
        os.replace(part.with_suffix(".new"), part)
        if me > 0:
            _wait(lambda: not partial.exists(), hurry, "the first process did not give the checkpoint its name")
            return False
        mine = _gathered(partial, hurry)
    leaves = {path: {**entry, "pieces": mine["leaves"][path]} for path, entry in entries.items()}
    _manifest.write_manifest(partial, {**head, "files": mine["files"], "leaves": leaves})
    return True


def _gathered(partial, hurry):
    """What all processes wrote."""
    parts = [partial / f".part-{number}.json" for number in range(jax.process_count())]
    _wait(lambda: all(part.exists() for part in parts), hurry, "not all processes wrote their part")
    whole: dict[str, Any] = {"files": {}, "leaves": {}}
    for part in parts:
        read = json.loads(part.read_text())
        whole["files"] |= read["files"]
        for path, places in read["leaves"].items():
            whole["leaves"].setdefault(path, []).extend(places)
        part.unlink()
    return whole


def _wait(done, hurry, what):
    began = time.monotonic()
    while not done():
        if time.monotonic() - began > (2 if hurry.is_set() else _PATIENCE):
            raise TimeoutError(f"{what} in time")
        time.sleep(0.02)
