"""Times of functions, measured in rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

_SECONDS = 0.4  # after this time, no further round begins
_ROUNDS = 9, 50  # at least and at most


def timings(
    calls: Mapping[Any, Callable[[], Any]], clock: Callable[[], float]
) -> dict[Any, list[float]]:
    """Measures the time of each function in several rounds. In each round, every function is called
    once, so that a slow period of the machine affects all functions. Returns {name: the time in
    seconds for each round}."""
    times: dict[Any, list[float]] = {name: [] for name in calls}
    end, (least, most) = time.perf_counter() + _SECONDS, _ROUNDS
    for number in range(most):
        if number >= least and time.perf_counter() > end:
            break
        for name, call in calls.items():
            start = clock()
            jax.block_until_ready(call())
            times[name].append(clock() - start)
    return times
