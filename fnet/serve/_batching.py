"""Combines requests that arrive at about the same time into batches."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np


class Alone(Exception):
    """Raised by a computation of requests that must not be combined, split or padded.

    Attributes:
        cause: "rows" (they are not proved to be independent), "padding" (it is not proved to reach
            no output) or "condition" (of a proof; the inputs do not fulfill it).
    """

    def __init__(self, cause: str, message: str = ""):
        super().__init__(message)
        self.cause = cause


class Full(RuntimeError):
    """Raised if too many requests wait, or if what would compute them is closed. Ask again later.

    >>> gpt = models.GPT(vocab_size=16, width=8, depth=1, heads=1, context=8)
    >>> params, _ = gpt.init(jax.random.key(0), gpt.example())
    >>> engine = serve.Engine(gpt, params, queue=1)
    >>> request = engine.submit([1, 2], max_tokens=3)
    >>> engine.submit([1, 2], max_tokens=3)
    Traceback (most recent call last):
    fnet.serve._batching.Full: Engine: 1 requests wait, and queue=1; ask again later
    """


class _Request(NamedTuple):
    key: tuple
    rows: int
    arrays: list[np.ndarray]
    future: Future


class Batcher:
    """A thread that computes the outputs of the requests for one model.

    The thread computes a batch as soon as the requests in the queue have `max_batch` rows, or after
    it has waited `max_delay` seconds for more requests. While a batch is computed, new requests
    wait for the next batch. Two requests can be in the same batch only if their inputs have equal
    dtypes, and equal shapes except for the first axis.

    If a batch must not be computed together, its halves are tried, and so on, so that a few requests
    which break the condition of a proof do not keep the others apart.

    Attributes:
        max_batch: the argument. It may be changed while no request waits.
        cause: why every request is computed by itself, or None. It may be changed, too.

    Args:
        compute: a function of a list of arrays that returns a list of arrays, or raises `Alone`. If
            `max_batch` is not 1, the first axis of all arrays is the batch axis.
        alone: a function that computes the arrays of one request for which `compute` raises `Alone`.
            Default: none does.
        max_batch: the maximum number of rows of a batch. A request with more than `max_batch` rows
            is not combined with other requests.
        max_delay: the maximum time in seconds to wait for more requests.
        max_queue: the maximum number of requests in the queue.
        observe: a function that is called with the number of rows and the time in seconds of each
            batch. Default: does nothing.
        apart: a function that is called with the cause for each request that is computed by itself
            because of `Alone` or `cause`. Default: does nothing.
    """

    def __init__(
        self,
        compute: Callable[[list], list],
        alone: Callable[[list], list] | None = None,
        *,
        max_batch: int,
        max_delay: float,
        max_queue: int,
        observe: Callable[[int, float], None] = lambda rows, seconds: None,
        apart: Callable[[str], None] = lambda cause: None,
    ):
        self._compute, self._alone = compute, alone
        self._observe, self._apart = observe, apart
        self.cause: str | None = None
        self.max_batch, self._max_delay, self._max_queue = max_batch, max_delay, max_queue
        self._queue: collections.deque[_Request] = collections.deque()
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, arrays: list[np.ndarray]) -> Future:
        """Adds a request to the queue, and returns a Future of its outputs.

        Raises:
            Full: the queue of waiting requests is full, or the batcher is closed.
        """
        batched = self.max_batch > 1
        key = tuple((x.shape[1:], x.dtype) for x in arrays) if batched else (object(),)
        request = _Request(key, len(arrays[0]) if batched else 1, arrays, Future())
        with self._changed:
            if self._closed or len(self._queue) >= self._max_queue:
                raise Full(f"{len(self._queue)} requests wait; try again later")
            self._queue.append(request)
            self._changed.notify()
        return request.future

    def close(self) -> None:
        """Waits until the outputs of all requests in the queue are computed, and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next():
            batch = [request for request in batch if request.future.set_running_or_notify_cancel()]
            if batch:
                self._run(batch, self.cause)

    def _next(self) -> list[_Request]:
        """Returns the requests of the next batch, or an empty list if the batcher is closed and no
        request waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            end = time.monotonic() + self._max_delay
            while (
                not self._closed
                and sum(request.rows for request in self._queue) < self.max_batch
                and (left := end - time.monotonic()) > 0
            ):
                self._changed.wait(left)
            batch: list[_Request] = []
            rows, others = 0, []
            while self._queue and rows < self.max_batch:
                request = self._queue.popleft()
                if batch and (request.key != batch[0].key or rows + request.rows > self.max_batch):
                    others.append(request)
                else:
                    batch.append(request)
                    rows += request.rows
            self._queue.extendleft(reversed(others))
            return batch

    def _run(self, batch, cause: str | None) -> None:
        """Computes requests; `cause` is that for which they are not computed with others."""
        start = time.perf_counter()
        parts = [request.arrays for request in batch]
        single = len(parts) == 1
        try:
            try:
                outputs = self._compute(
                    parts[0] if single else [np.concatenate(xs) for xs in zip(*parts)]
                )
            except Alone as error:
                cause = error.cause
                if not single:
                    half = len(batch) // 2
                    self._run(batch[:half], cause)
                    self._run(batch[half:], cause)
                    return
                assert self._alone is not None
                outputs = self._alone(parts[0])
        except BaseException as error:  # of any type, because the clients wait for an answer
            for request in batch:
                request.future.set_exception(error)
            return
        if single and cause is not None:
            self._apart(cause)
        self._observe(sum(request.rows for request in batch), time.perf_counter() - start)
        first = 0
        for request in batch:
            part = outputs if single else [y[first : first + request.rows] for y in outputs]
            first += request.rows
            request.future.set_result(part)
