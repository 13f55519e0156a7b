"""One run to a folder: a lock that ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:      # Windows: two runs in one folder are not noticed there
    fcntl = None

LOCK = ".lock"


class Locked(Exception):
    """Another process holds the lock; the message says which."""


class Lock:
    """The lock of a folder, held until `release` or until the process ends, killed or not.

    Args:
      folder: it has to exist.

    Raises:
      Locked: another process holds it, or this one does already.
      OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path):
        self._path = folder / LOCK
        for _ in range(100):
            self._file: Any = self._path.open("a+b", buffering=0)
            self._take()
            if self.holds():
                break
            self.release()                                 # removed between opening and locking: by another run's clear
            folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):                 # the process's number is of use, but not on a full disk
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()}\n".encode())

    def _take(self) -> None:
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

    def holds(self) -> bool:
        """Whether the folder is still the one that was locked: not removed, and not replaced by another of its name."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except (OSError, ValueError):                      # gone, or released
            return False

    kept = holds                                           # nobody has to be asked

    def fileno(self) -> int:
        """For `subprocess`'s pass_fds: then the lock is held until this process and that one have ended."""
        return self._file.fileno()

    def release(self) -> None:
        _HELD.discard(self)
        self._file.close()


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget() -> None:
    """A forked child shares its parent's open files, and with them the lock, which must not outlive the parent."""
    for lock in list(_HELD):
        lock._file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
