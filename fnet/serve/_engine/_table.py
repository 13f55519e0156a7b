"""The table: the rows on the device, which requests take and leave.

It has as many rows, and room for as many tokens, as the requests that run need, rounded up to powers
of two: each decode step reads all of it. A row that nobody has is computed along and ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.serve._engine import _cache, _programs, _sampling
from fnet.serve._engine._cache import Layout
from fnet.serve._engine._prompt import Prompt
from fnet.serve._engine._request import Request

SHORTEST = 128  # tokens for which a table has room at least
_PATIENCE = 8  # turns for which a smaller table must do before it is made smaller


def rounded(size: int, least: int, most: int) -> int:
    """The next power of two, from `least` to `most`."""
    return min(max(least, 1 << (size - 1).bit_length() if size > 0 else 0), most)


class Table:
    """The requests that run, and their rows.

    Attributes:
        requests: that of each row, or None.
        slots: how many rows it may have.
        length: how many tokens of each row fit.
        cache, rows, counts: the arrays; see `_cache` and `_sampling`.
    """

    def __init__(
        self, model: Any, params: Any, layout: Layout, *, slots: int, context: int, fixed: bool
    ):
        self._model, self._params, self._layout = model, params, layout
        self.slots, self._context = slots, context
        shortest = min(SHORTEST, context) if layout.token_bytes else context
        self._least = (slots, context) if fixed else (1, shortest)
        self.vocab_size = _vocab_size(model, params)
        self.clear()

    def clear(self) -> None:
        """Begins with an empty table."""
        size, self.length = self._least
        self.requests: list[Request | None] = [None] * size
        self.counts: _sampling.Counts | None = None
        self._smaller = 0
        self.rows = _sampling.no_rows(rows=size)
        self.cache = _cache.empty(self._params, model=self._model, rows=size, length=self.length)

    def active(self) -> Iterator[tuple[int, Request]]:
        """The rows whose requests need another token."""
        for slot, request in enumerate(self.requests):
            if request is not None and not request.ended and not request.exhausted:
                yield slot, request

    @property
    def bytes(self) -> int:
        return len(self.requests) * self._layout.row_bytes(self.length)

    def bytes_for(self, requests: Sequence[Request]) -> int:
        """The bytes of the table if these requests run, to their last tokens."""
        size, length = self._size(len(requests), max(each.most for each in requests))
        return size * self._layout.row_bytes(length)

    @property
    def most_bytes(self) -> int:
        """The bytes of the largest table."""
        return self.slots * self._layout.row_bytes(self._context)

    def sizes(self, tokens: int) -> tuple[list[int], list[int]]:
        """Returns (the numbers of rows, the lengths) of the tables in which texts of up to `tokens`
        tokens run."""
        (least, shortest), longest = self._least, self.room(tokens)
        powers = [1 << i for i in range(longest.bit_length() + 1)]
        lengths = {rounded(size, shortest, longest) for size in powers}
        rows = [1 << i for i in range(self.slots.bit_length() + 1)]
        return sorted({rounded(size, least, self.slots) for size in rows}), sorted(lengths)

    def leave(self) -> None:
        """Frees the rows of requests that have ended, or whose last token is on its way."""
        for slot, request in enumerate(self.requests):
            if request is not None and (request.ended or request.exhausted):
                self.requests[slot] = None

    def room(self, tokens: int) -> int:
        """The length of a cache of one row for so many tokens."""
        return rounded(tokens, self._least[1], self._context)

    def seat(self, prompt: Prompt, more: int = 0) -> None:
        """Gives a row to a request whose prompt is computed, and makes room for `more` of them."""
        request = prompt.request
        self.leave()
        self.fit(request, more)
        slot = self.requests.index(None)
        place = jnp.asarray(slot, jnp.int32)
        self.cache = _cache.put(self.cache, prompt.row, place, layout=self._layout)
        self.rows = _sampling.seat(
            self.rows, slot, request.prompt[-1], prompt.adapter, request.options
        )
        self.requests[slot] = request
        if request.options.penalized:
            self._count(place, request)

    def fit(self, newcomer: Request | None = None, more: int = 0) -> None:
        """Makes the table as large as the next token of every row needs; smaller only after a
        while."""
        running = [request for _, request in self.active()]
        everyone = [*running, *([] if newcomer is None else [newcomer])]
        size, length = self._size(
            len(everyone) + more, max((each.length + 1 for each in everyone), default=1)
        )
        larger = size > len(self.requests) or length > self.length
        smaller = not larger and (size < len(self.requests) or length < self.length)
        self._smaller = self._smaller + 1 if smaller and newcomer is None else 0
        if larger:
            self._resize(max(size, len(self.requests)), max(length, self.length))
        elif self._smaller >= _PATIENCE:
            self._resize(size, length)

    def _size(self, rows: int, length: int) -> tuple[int, int]:
        return (
            rounded(rows, self._least[0], self.slots),
            rounded(length, self._least[1], self._context),
        )

    def _resize(self, size: int, length: int) -> None:
        """Moves the rows of the requests that run into a table of another size."""
        kept = [slot for slot, _ in self.active()]
        slots = jnp.asarray([*kept, *[0] * (size - len(kept))], jnp.int32)
        self.cache = _cache.taken(self.cache, slots, length=length, layout=self._layout)
        self.rows = _sampling.rows_taken(self.rows, slots)
        if self.counts is not None:
            self.counts = _sampling.rows_taken(self.counts, slots)
        self.requests = [self.requests[slot] for slot in kept] + [None] * (size - len(kept))
        self.length, self._smaller = length, 0

    def _count(self, slot: jax.Array, request: Request) -> None:
        if self.counts is None:
            self.counts = _sampling.no_counts(rows=len(self.requests), vocab_size=self.vocab_size)
        seen = np.zeros(self.vocab_size, bool)
        seen[request.prompt] = True
        bias = np.zeros(self.vocab_size, np.float32)
        for token, added in request.options.logit_bias:
            bias[token] = added
        self.counts = _sampling.count_prompt(
            self.counts, slot, jnp.asarray(seen), jnp.asarray(bias)
        )

    def counted(self, requests: Iterable[Request]) -> _sampling.Counts | None:
        """The counts, if one of these requests needs them."""
        if not any(request.options.penalized for request in requests):
            self.counts = None
        return self.counts


def _vocab_size(model: Any, params: Any) -> int:
    row = jax.ShapeDtypeStruct((1,), jnp.int32)
    cache = jax.eval_shape(
        lambda params: _cache.empty(params, model=model, rows=1, length=1), params
    )
    logits, _ = jax.eval_shape(
        functools.partial(_programs.next_logits, model), params, row, row, cache
    )
    return logits.shape[-1]
