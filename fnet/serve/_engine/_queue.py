"""The requests that wait, in the order of their arrival."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Sequence

from fnet.serve._batching import Full
from fnet.serve._engine._request import Request
from fnet.serve._engine._stats import Counters


class Queue:
    """Requests, between the threads that submit them and the one that takes the turns.

    Attributes:
        closed: whether it accepts no more.
    """

    def __init__(self, most: int, counters: Counters):
        self.closed = False
        self._most, self._counters = most, counters
        self._requests: collections.deque[Request] = collections.deque()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._requests)

    def requests(self) -> list[Request]:
        with self._changed:
            return list(self._requests)

    def enter(self, requests: Sequence[Request], *, bounded: bool) -> None:
        """Appends requests.

        Raises:
            Full: so many cannot wait, if the number is bounded.
            RuntimeError: the queue is closed.
        """
        with self._changed:
            if self.closed:
                raise RuntimeError("Engine: it is closed, and accepts no more requests")
            if bounded and len(self._requests) + len(requests) > self._most:
                self._counters.add("refused")
                raise Full(
                    f"Engine: {len(self._requests)} requests wait, and queue={self._most}; ask "
                    "again later"
                )
            self._requests.extend(requests)
            self._changed.notify_all()

    def leave(self, request: Request) -> None:
        """Removes a request that waits no longer."""
        with self._changed:
            with contextlib.suppress(ValueError):
                self._requests.remove(request)
            self._changed.notify_all()

    def next(self, fits: Callable[[Request], bool]) -> Request | None:
        """Takes the request that has waited longest, if it fits. Nobody overtakes it."""
        with self._changed:
            if not self._requests or not fits(self._requests[0]):
                return None
            return self._requests.popleft()

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def wait(self) -> bool:
        """Waits for a request. Returns False if there will be none, because the queue is closed."""
        with self._changed:
            while not self._requests and not self.closed:
                self._changed.wait()
            return bool(self._requests)
