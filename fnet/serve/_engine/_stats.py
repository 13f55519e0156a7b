"""Counts and times of an engine."""

from __future__ import annotations

import bisect
import collections
import threading
from collections.abc import Mapping
from typing import NamedTuple

_LIMITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram(NamedTuple):
    """How often a time was at most each limit, as in the text format of Prometheus.

    Attributes:
        limits: in seconds, increasing.
        counts: how many times were at most the limit and above the one before; the last of them,
            one more than the limits, counts those above all limits.
        sum: of all times, in seconds.

    >>> serve.Histogram((0.1, 1.0), (3, 1, 0), 0.9).total
    4
    """

    limits: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def total(self) -> int:
        return sum(self.counts)


class Stats(NamedTuple):
    """What an engine does and has done. `Engine.stats` returns it.

    Attributes:
        waiting: requests in the queue.
        active: requests that are computed, prompts included.
        slots: how many can be computed at once.
        finished: {finish_reason: how many requests}.
        refused: requests for which the queue was full.
        prompt_tokens: tokens of the prompts that were begun.
        cached_tokens: how many of them came from the prefix cache.
        generated_tokens: tokens that were generated.
        cache_bytes: bytes of the keys and values of the rows, as large as the table is now.
        cache_used: the part of the tokens that fit into the table that are there, from 0 to 1.
        prefix_bytes, prefix_blocks: of the prefix cache.
        prefix_hits: prompts whose beginning was in the prefix cache.
        first_token: times from `submit` to the first token.
        between_tokens: times between two tokens of a request.

    >>> gpt = models.GPT(vocab_size=16, width=8, depth=1, heads=1, context=8)
    >>> params, _ = gpt.init(jax.random.key(0), gpt.example())
    >>> stats = serve.Engine(gpt, params, slots=4).stats()
    >>> stats.slots, stats.waiting, stats.generated_tokens
    (4, 0, 0)
    """

    waiting: int
    active: int
    slots: int
    finished: Mapping[str, int]
    refused: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    cache_bytes: int
    cache_used: float
    prefix_bytes: int
    prefix_blocks: int
    prefix_hits: int
    first_token: Histogram
    between_tokens: Histogram


class Times:
    """A histogram that is being filled."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_LIMITS) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self._counts[bisect.bisect_left(_LIMITS, seconds)] += 1
            self._sum += seconds

    def histogram(self) -> Histogram:
        with self._lock:
            return Histogram(_LIMITS, tuple(self._counts), self._sum)


class Counters:
    """Numbers that only grow, by name."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]
