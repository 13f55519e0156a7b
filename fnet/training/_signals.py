"""SIGINT and SIGTERM as a note that the loop reads between steps."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_runs: list[Signals] = []      # of which the last listens: signals are the process's


class Stopping(Exception):
    """Ends an evaluation that was interrupted; `fit` catches it."""


class Signals:
    """The name of the first signal that came, or None; and whether an evaluation is under way that may be ended."""

    received: str | None = None
    evaluating: bool = False


def poll() -> None:
    """Ends the evaluation under way if a signal has come. For whoever evaluates for long, between two batches.

    Raises:
      Stopping: `fit` evaluates again when the run goes on.
    """
    if _runs and _runs[-1].evaluating and _runs[-1].received:
        raise Stopping


@contextlib.contextmanager
def signals() -> Iterator[Signals]:
    """Notes the first SIGINT or SIGTERM, ends the process at the second, restores the old handlers.

    At a prompt or in a notebook the second is a KeyboardInterrupt. Outside of the main thread no signal is seen.
    """
    seen = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules

    def note(number, frame):
        if seen.received is not None and interactive:
            raise KeyboardInterrupt
        seen.received = seen.received or signal.Signals(number).name

    with contextlib.ExitStack() as stack:
        if not interactive:
            stack.enter_context(_second_ends())
        for number in _NUMBERS:
            old = signal.signal(number, note)
            # A handler that C installed is None here, and cannot be put back.
            stack.callback(signal.signal, number, signal.SIG_DFL if old is None else old)
        _runs.append(seen)
        stack.callback(_runs.remove, seen)
        yield seen


@contextlib.contextmanager
def _second_ends() -> Iterator[None]:
    """Ends the process at the second signal even while the main thread compiles, where no handler runs: Python writes
    each signal's number into a pipe at once, and a thread reads it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch():
        count = 0
        while byte := os.read(reading, 1):
            count += byte[0] in _NUMBERS
            if count == 2:
                os.write(2, b"ended at once; the run goes on from its last checkpoint\n")
                os._exit(128 + byte[0])
        os.close(reading)

    thread = threading.Thread(target=watch, daemon=True, name="second signal")
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        thread.join()
