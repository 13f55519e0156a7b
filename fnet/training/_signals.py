"""SIGINT and SIGTERM as a note that the loop reads between steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class Signals:
    """The name of the first signal that came, or None."""

    received: str | None = None


@contextlib.contextmanager
def signals() -> Iterator[Signals]:
    """Notes the first SIGINT or SIGTERM, lets the second one through, restores the old handlers."""
    seen = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def note(number, frame):
        if seen.received is not None:
            raise KeyboardInterrupt
        seen.received = signal.Signals(number).name

    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
