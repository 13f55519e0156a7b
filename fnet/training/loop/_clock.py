"""Measures the speed of a run, and estimates the remaining time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Measures the steps per second, excluding compilation and pauses such as evaluations. Also
    estimates the remaining time of the run, including compilation and pauses."""

    def __init__(self):
        self.compiled: float | None = None
        self.rate: float | None = None
        self._began = self._lap_began = time.perf_counter()
        self._first = self._lap_at = 0

    def start(self, at: int) -> None:
        now = time.perf_counter()
        self.compiled = now - self._began
        self._began = self._lap_began = now
        self._first = self._lap_at = at

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._lap_began += time.perf_counter() - began

    def lap(self, at: int) -> float | None:
        """Returns the number of steps per second since the last call of `lap`. The caller must wait
        for the device before it calls `lap`."""
        now = time.perf_counter()
        if at > self._lap_at and now > self._lap_began:  # a coarse clock may not have moved
            self.rate = (at - self._lap_at) / (now - self._lap_began)
        self._lap_at, self._lap_began = at, now
        return self.rate

    def left(self, at: int, steps: int) -> float | None:
        """Returns the estimated remaining seconds of the run, from the average speed so far."""
        if at == self._first or self.rate is None:
            return None
        return (time.perf_counter() - self._began) / (at - self._first) * (steps - at)
