"""Says that something long is still under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

EVERY = 8.0


class Heartbeat:
    """A context that says every few seconds what it is waiting for, such as "compiling, 16 s so far".

    A block that is quicker says nothing. An error of `say` is raised at the end of the block.

    Args:
      say: a function of a line, which is called from another thread.
      stage: what is under way.
      every: seconds between two lines. Default None: 8.
    """

    def __init__(self, say: Callable[[str], object], stage: str, *, every: float | None = None):
        self._say, self._every = say, every or EVERY
        self._done = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._beat, name="fnet-heartbeat", daemon=True)
        self.begin(stage)

    def begin(self, stage: str) -> None:
        """Begins another stage, whose seconds are counted from now on."""
        self._stage = stage, time.monotonic()

    def _beat(self) -> None:
        while not self._done.wait(self._every):
            stage, began = self._stage
            try:
                self._say(f"{stage}, {time.monotonic() - began:.0f} s so far")
            except Exception as error:
                self._error = error
                return

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._done.set()
        self._thread.join()
        if self._error is not None and raised[0] is None:
            raise self._error
