"""Batches prepared and moved to the device by a thread, while the step before them runs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fnet.training.loop._signals import POLL, Signals, Stopping

_GRACE = 0.5           # seconds that `close` waits for the thread, which may be inside a source that never returns


class Prefetch:
    """Prepares `batches(i)` for i = start, start + 1, ... in a thread, ahead of the steps that use them.

    Args:
      batches: `batches(i)` is the batch of step i. Its NumPy arrays are copied, so a source may reuse its buffers.
      start, stop: the first step, and the one after the last.
      depth: how many batches are kept ready.
      seen: the run's signals. A signal ends the wait for a batch. None: signals are not checked.
      move: whether NumPy arrays are moved to the device, or handed on as they are.

    Attributes:
      waited: seconds that `__call__` has waited so far.
    """

    def __init__(self, batches: Callable[[int], Any], start: int, stop: int, *, depth: int = 2,
                 seen: Signals | None = None, move: bool = True):
        self.waited = 0.0
        self._seen = seen
        self._ready: queue.Queue = queue.Queue(depth)
        self._closed = threading.Event()
        # A daemon: a source that never returns must not keep the process alive.
        arguments = batches, start, stop, move
        self._thread = threading.Thread(target=self._fill, args=arguments, daemon=True, name="batches")
        self._thread.start()

    def __call__(self) -> Any:
        """The next batch.

        Raises:
          Stopping: a signal came before the batch.
          BaseException: whatever preparing it raised.
        """
        began = time.perf_counter()
        batch, error = self._next()
        self.waited += time.perf_counter() - began
        if error is not None:
            raise error
        return batch

    def close(self, *, wait: bool = False) -> None:
        """Ends the thread; one that is inside `batches` for longer is left behind, unless `wait` (for batches that
        will be asked for again) and no signal comes."""
        self._closed.set()
        end = time.monotonic() + _GRACE
        while self._thread.is_alive() and (time.monotonic() < end or (wait and not self._stopping())):
            try:
                self._ready.get(timeout=0.02)              # it may be waiting for room
            except queue.Empty:
                pass

    def _next(self):
        while True:
            try:
                return self._ready.get(timeout=POLL)
            except queue.Empty:
                pass
            if self._stopping():
                raise Stopping
            if not self._thread.is_alive() and self._ready.empty():
                raise RuntimeError("the thread that prepares batches ended without a batch or an error")

    def _stopping(self):
        return self._seen is not None and self._seen.received is not None

    def _fill(self, batches, start, stop, move):
        item, i = None, start
        while item is None or (item[1] is None and i < stop):
            try:
                item = jax.tree.map(_moved, batches(i)) if move else batches(i), None
            except BaseException as error:                 # for the loop, which raises it
                item = None, error
            i += 1
            if self._closed.is_set():
                return
            self._ready.put(item)


def _moved(x):
    return jax.device_put(np.array(x)) if isinstance(x, np.ndarray) else x
