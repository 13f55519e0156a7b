"""A thread that prepares batches and moves them to the device while earlier steps run."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fnet.training.loop._signals import POLL, Signals, Stopping

_GRACE = 0.5  # seconds that `close` waits for the thread, because a source may never return


class Prefetch:
    """Prepares `batches(i)` for i = start, start + 1, ... in a thread, ahead of the steps that use
    them.

    Args:
      batches: a function; `batches(i)` is the batch of step i. The NumPy arrays of a batch are
          copied, so a source may reuse its buffers.
      start, stop: the range of the steps, as in `range(start, stop)`.
      depth: the number of batches that are kept ready. Default 2.
      seen: the `Signals` of the run, which record received signals such as SIGINT. After a signal,
        `__call__` raises `Stopping` if no batch is ready. Default None: signals are not checked.
      move: whether to move NumPy arrays to the device. If `move` is False, batches are returned
        unchanged. Default True.

    Attributes:
      waited: the total time that `__call__` has waited, in seconds.
    """

    def __init__(
        self,
        batches: Callable[[int], Any],
        start: int,
        stop: int,
        *,
        depth: int = 2,
        seen: Signals | None = None,
        move: bool = True,
    ):
        self.waited = 0.0
        self._seen = seen
        self._ready: queue.Queue = queue.Queue(depth)
        self._closed = threading.Event()
        # A daemon thread, because a source that never returns must not keep the process alive.
        arguments = batches, start, stop, move
        self._thread = threading.Thread(
            target=self._fill, args=arguments, daemon=True, name="batches"
        )
        self._thread.start()

    def __call__(self) -> Any:
        """Returns the next batch.

        Raises:
          Stopping: a signal arrived before the batch was ready.
          BaseException: the error that `batches` raised.
        """
        began = time.perf_counter()
        batch, error = self._next()
        self.waited += time.perf_counter() - began
        if error is not None:
            raise error
        return batch

    def close(self, *, wait: bool = False) -> None:
        """Ends the thread. `close` waits at most 0.5 seconds for a thread that is inside `batches`.

        With `wait=True`, `close` waits for the thread without a time limit, unless a signal
        arrives. Pass `wait=True` if `batches` will be called again."""
        self._closed.set()
        end = time.monotonic() + _GRACE
        while self._thread.is_alive() and (
            time.monotonic() < end or (wait and not self._stopping())
        ):
            try:
                self._ready.get(timeout=0.02)  # the thread may be waiting for a free slot
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
                raise RuntimeError(
                    "the thread that prepares batches ended without a batch or an error"
                )

    def _stopping(self):
        return self._seen is not None and self._seen.received is not None

    def _fill(self, batches, start, stop, move):
        item, i = None, start
        while item is None or (item[1] is None and i < stop):
            try:
                item = jax.tree.map(_moved, batches(i)) if move else batches(i), None
            except BaseException as error:  # `__call__` raises the error
                item = None, error
            i += 1
            if self._closed.is_set():
                return
            self._ready.put(item)


def _moved(x):
    return jax.device_put(np.array(x)) if isinstance(x, np.ndarray) else x
