"""Appends lines to a log. A log is a local file, or a sequence of objects in an object store."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fnet.training.checkpoints._storage import StorageError, StorePath, write_whole

_FULL = 256 << 10  # bytes of an object, after which the next object is started


def parts(path: Path | StorePath) -> list[Path | StorePath]:
    """Returns the parts of a log, in order: one file, or objects in an object store, such as
    metrics.jsonl and metrics.jsonl.0001."""
    if isinstance(path, Path):
        return [path] if path.exists() else []
    pattern = re.compile(rf"{re.escape(path.name)}(\.\d+)?")
    return [path.parent / name for name in sorted(path.parent.keys()) if pattern.fullmatch(name)]


def rewrite(path: Path | StorePath, keep: Callable[[bytes], bytes]) -> None:
    """Replaces the content of each part of a log by `keep(content)`, from the last part to the
    first part.

    A log in an object store can have several parts. If the process is killed during `rewrite`, some
    of the last parts may already have the new content, while all earlier parts still have the old
    content.
    """
    for part in reversed(parts(path)):
        raw = part.read_bytes()
        if (new := keep(raw)) == raw:
            continue
        if isinstance(part, StorePath) and not new:
            part.unlink(missing_ok=True)
        else:
            write_whole(part, new)


class Objects:
    """A log in an object store, with the methods of an unbuffered file. When `write` returns, the
    line is in the object store.

    An object store cannot append to an object, so each call of `write` writes the last object of
    the log again. When the last object is full, a new object is started.

    Args:
      path: the path of the first object of the log.
    """

    def __init__(self, path: StorePath):
        self.name = str(path)
        self._path, existing = path, parts(path)
        suffix = existing[-1].name.removeprefix(path.name) if existing else ""
        self._number = int(suffix.removeprefix(".") or 0)
        self._data = bytearray(existing[-1].read_bytes()) if existing else bytearray()

    def write(self, data: bytes) -> int:
        if self._data and len(self._data) + len(data) > _FULL:
            self._number, self._data = self._number + 1, bytearray()
        self._data += data
        name = self._path.name + (f".{self._number:04}" if self._number else "")
        try:
            (self._path.parent / name).write_bytes(bytes(self._data))
        except StorageError:
            del self._data[-len(data) :]
            raise
        return len(data)

    def close(self) -> None:
        pass


def appending(path: Path | StorePath):
    """Opens a log for appending, without a buffer."""
    return Objects(path) if isinstance(path, StorePath) else path.open("ab", buffering=0)
