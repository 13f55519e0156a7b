"""Batches prepared and moved to the device by a thread, while the step before them runs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np


class Prefetch:
    """`batches(i)` for i = start, start + 1, ... in that order, each ready before it is asked for if the device gives
    the time.

    Args:
      batches: `batches(i)` is the batch of step i. It runs in a thread of its own; its NumPy arrays are copied, so that
        it may fill the same ones again.
      start, stop: the first step, and the one after the last.
      depth: how many batches are kept ready.

    Attributes:
      waited: seconds that `__call__` has waited so far.
    """

    def __init__(self, batches: Callable[[int], Any], start: int, stop: int, *, depth: int = 2):
        self.waited = 0.0
        self._ready: queue.Queue = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(batches, start, stop), daemon=True)
        self._thread.start()

    def __call__(self) -> Any:
        """The next batch; what preparing it raised is raised here."""
        began = time.perf_counter()
        batch, error = self._ready.get()
        self.waited += time.perf_counter() - began
        if error is not None:
            raise error
        return batch

    def close(self) -> None:
        self._closed.set()
        while self._thread.is_alive():    # it may stand before a full queue
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                pass

    def _fill(self, batches, start, stop):
        for i in range(start, stop):
            try:
                item = jax.tree.map(_moved, batches(i)), None
            except BaseException as error:    # handed to the loop, which raises it
                item = None, error
            if self._closed.is_set():
                return
            self._ready.put(item)
            if item[1] is not None:
                return


def _moved(x):
    return jax.device_put(np.array(x)) if isinstance(x, np.ndarray) else x
