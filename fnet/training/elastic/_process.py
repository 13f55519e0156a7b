"""The process of this host: started with its place in the round, and ended with all its children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

_ABRUPT = 5.0  # seconds in which a process may end whose peers are gone
_PDEATHSIG = 1  # prctl: the signal that a process receives when its parent ends


class Process:
    """A process that runs the command in a session of its own.

    Args:
        command: the program and its arguments.
        environment: more variables of the environment.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self._child = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=_end_with_parent() if sys.platform == "linux" else None,
        )

    def ended(self) -> int | None:
        """Returns the exit status, or None while the process runs."""
        return self._child.poll()

    def stop(self, seconds: float | None = None) -> int:
        """Asks the process to end, and ends it after some seconds, with all processes that it has
        started. Returns its exit status."""
        self._signal(signal.SIGTERM)
        until = time.monotonic() + (_ABRUPT if seconds is None else seconds)
        while self._child.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        return self._child.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._child.poll() is None or number == signal.SIGKILL:
                os.killpg(self._child.pid, number)


def _end_with_parent() -> Callable[[], None]:
    """Returns a function that makes the kernel end this process when its parent is killed: nobody
    would be left to end it."""
    call = ctypes.CDLL(None).prctl  # loaded before the fork

    def ask() -> None:
        call(_PDEATHSIG, int(signal.SIGKILL))

    return ask
