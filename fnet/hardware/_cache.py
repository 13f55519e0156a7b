"""The folder of what was measured or compiled on this machine, and JSON files in it."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile
from typing import Any


def cache_folder() -> pathlib.Path:
    """The environment's FNET_CACHE, otherwise fnet in XDG_CACHE_HOME or ~/.cache.

    If HOME is not set and the user is unknown, nothing can be written to it (in particular no folder named "~").
    """
    base = os.environ.get("FNET_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fnet")
    folder = os.path.expanduser(base)
    return pathlib.Path(os.devnull if folder.startswith("~") else folder)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a file; {} if there is no such file, or it contains something else."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Replaces a file atomically. It is only a cache, so failures are ignored."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.stem}-") as beside:
            new = pathlib.Path(beside, path.name)
            new.write_text(json.dumps(content, indent=1))
            os.replace(new, path)
    except OSError:
        pass
