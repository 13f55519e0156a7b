"""One run to a folder: a lock that ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:      # Windows: two runs in one folder go unnoticed there
    fcntl = None

LOCK = ".lock"


class Locked(Exception):
    """Another process holds the lock; the message says which."""


class Lock:
    """The lock of a folder, held until `release` or until the process ends, killed or not.

    Args:
      folder: it has to exist.

    Raises:
      Locked: someone holds it, in this process or another.
      OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path):
        self._file: Any = (folder / LOCK).open("a+b", buffering=0)
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            who = self._file.read(100).decode(errors="replace").strip() or "another process"
            self._file.close()
            raise Locked(who) from None
        except OSError:      # a file system without locks
            return
        _HELD.add(self)
        with contextlib.suppress(OSError):      # who it is: of use, on a full disk unsaid
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()}\n".encode())

    def release(self) -> None:
        _HELD.discard(self)
        self._file.close()


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget() -> None:
    """A forked child shares its parent's open files, and with them the lock, which is not to outlive the parent."""
    for lock in list(_HELD):
        lock._file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
