"""The cache folder for the measurements and compiled programs of this machine. Reads and writes
JSON files in the cache folder."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from typing import Any

from fnet._util import _files


def cache_folder() -> pathlib.Path:
    """Returns $FNET_CACHE if it is set, otherwise $XDG_CACHE_HOME/fnet or ~/.cache/fnet.

    If the home folder cannot be determined, the result is the path of the null device
    (`os.devnull`), and nothing is cached.
    """
    base = os.environ.get("FNET_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fnet"
    )
    folder = os.path.expanduser(base)
    return pathlib.Path(os.devnull if folder.startswith("~") else folder)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or {} if the file does not exist or contains no JSON
    object."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Replaces a file atomically. Failures to write the file are ignored, because the file is only
    a cache."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _files.write_json(path, content, indent=1)
