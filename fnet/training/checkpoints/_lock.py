"""The lock of a local folder, which allows one run at a time. The lock is released when the process
that holds it ends."""

from __future__ import annotations

import contextlib
import os
import weakref
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows, where two runs in one folder are not detected
    fcntl = None

LOCK = ".lock"


class Locked(Exception):
    """Another process holds the lock. The message names the process."""


class Lock:
    """The lock of a folder. The lock is held until `release` is called or the process ends, for
    example because it is killed.

    Args:
      folder: the folder, which must exist.

    Raises:
      Locked: another process, or another `Lock` of this process, holds the lock.
      OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path):
        self._path = folder / LOCK
        for _ in range(100):
            self._file: Any = self._path.open("a+b", buffering=0)
            self._take()
            if self.holds():
                break
            self.release()  # another run's `clear` removed the file before it was locked
            folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(
            OSError
        ):  # the process id is useful, but not essential on a full disk
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
        except OSError:  # a file system without locks
            return
        _HELD.add(self)

    def holds(self) -> bool:
        """Whether the locked folder still exists, and has not been replaced by another folder."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
        except (OSError, ValueError):  # gone, or released
            return False

    kept = holds  # no request is necessary

    def fileno(self) -> int:
        """Returns the file descriptor of the lock. If the descriptor is passed to a child process
        (`pass_fds` of `subprocess.Popen`), the lock is held until both processes have ended."""
        return self._file.fileno()

    def release(self) -> None:
        _HELD.discard(self)
        self._file.close()


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget() -> None:
    """Closes the lock files in a forked child, so that the child does not keep the lock after its
    parent has ended."""
    for lock in list(_HELD):
        lock._file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
