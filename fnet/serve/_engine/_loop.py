"""The turns: pieces of prompts, one token of every row, and their way to the requests."""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fnet.serve._engine import _cache, _sampling
from fnet.serve._engine._prefix import Prefixes
from fnet.serve._engine._prompt import Plan, Prompt
from fnet.serve._engine._queue import Queue
from fnet.serve._engine._request import Mask, Request, Token
from fnet.serve._engine._stats import Counters, Times
from fnet.serve._engine._table import Table

_LOG = logging.getLogger("fnet.serve")
# Steps of small models are as short as the work of the host between them, so several are one program
# if they take no longer than this many seconds together.
_SEVERAL, _HURRY = 8, 0.04


class _Turn(NamedTuple):
    """Decode steps on their way: their tokens on the device, [rows] or [steps, rows], and whose row
    is which."""

    picked: _sampling.Picked
    requests: list[tuple[int, Request]]


class Loop:
    """Takes the turns of an engine. Only one thread at a time may.

    Attributes:
        plan: how prompts are computed.
        table: the rows.
        prefixes: the prefix cache, or None.
        counters, first, between: what `Engine.stats` reports.
        cancels: whether the next turn cancels everything.
    """

    def __init__(
        self,
        plan: Plan,
        table: Table,
        queue: Queue,
        decode: Callable,
        advance: Callable | None,
        *,
        prefixes: Prefixes | None,
        adapters: Mapping[str, int],
        stop: frozenset[int],
        memory: int | None,
        counters: Counters,
    ):
        self.plan, self.table, self.prefixes = plan, table, prefixes
        self.counters, self.first, self.between = counters, Times(), Times()
        self._queue, self._adapters = queue, adapters
        self._decode, self._advance = decode, advance
        self._pace = math.inf  # seconds of a decode step, smoothed
        self._stop, self._memory = stop, memory
        self.cancels = False
        self._prompt: Prompt | None = None
        self._pending: collections.deque[_Turn] = collections.deque()

    @property
    def reads(self) -> bool:
        """Whether a prompt is being computed."""
        return self._prompt is not None

    def requests(self) -> list[Request]:
        """Those whose prompts or texts are being computed, or whose last tokens are on their way."""
        prompt = [] if self._prompt is None else [self._prompt.request]
        running = [request for request in self.table.requests if request is not None]
        late = [request for turn in list(self._pending) for _, request in turn.requests]
        return list(dict.fromkeys([*prompt, *running, *late]))

    def turn(self, ahead: int) -> bool:
        """Takes a turn, and reads the tokens of all but the last `ahead`. Returns whether there was
        anything to do. If some may be ahead, several tokens of every row may be one turn."""
        if self.cancels:
            for request in (*self._queue.requests(), *self.requests()):
                request.cancel()
        began = time.perf_counter()
        try:
            self.table.leave()
            reads = self._read_prompts()
            steps = self._decode_all(_SEVERAL if ahead and not reads else 1)
            busy = reads or steps > 0
            while len(self._pending) > (ahead if busy else 0):
                self._deliver()
                busy = True
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
            return True
        if steps and not reads:
            seconds = (time.perf_counter() - began) / steps
            self._pace = min(seconds, self._pace * 0.8 + seconds * 0.2)
        return busy

    def warm(self, tokens: int) -> None:
        """Compiles what texts of up to `tokens` tokens need, by running it on empty rows."""
        rows, lengths = self.table.sizes(tokens)
        for length in lengths:
            row = self.plan.empty(1, length)
            for size in self.plan.sizes():
                row = self.plan.read(jnp.zeros(1, jnp.int32), np.zeros((1, size), np.int32), 1, row)
            for count in rows:
                cache, free = self.plan.empty(count, length), _sampling.no_rows(rows=count)
                cache = _cache.put(cache, row, jnp.asarray(0, jnp.int32), layout=self.plan.layout)
                self._warm_step(free, cache)
        jax.block_until_ready(row)

    def _warm_step(self, rows: _sampling.Rows, cache: Any) -> None:
        nobody = jnp.zeros(len(rows.last), bool)
        if self._advance is None:
            logits, cache = self._decode(rows.adapters, rows.last, cache)
            _sampling.picked(logits, rows, nobody, None, None)
            return
        for turns in (1, _SEVERAL):
            rows, _, cache, _ = self._advance(rows, nobody, None, cache, turns=turns)

    def _read_prompts(self) -> bool:
        """Computes at most `chunk` tokens of prompts."""
        left, busy = self.plan.chunk, False
        while True:
            if self._prompt is None or self._prompt.request.ended:
                self._prompt = self._next_prompt()
            prompt = self._prompt
            if prompt is None or (not prompt.done and busy and prompt.cost > left):
                return busy
            if not prompt.done:
                left -= prompt.cost
                prompt.advance()
                busy = True
            if prompt.done:
                # A table that grows once is copied and compiled once.
                more = len(self._queue) if self._memory is None else 0
                self.table.seat(prompt, more)
                self._prompt = None

    def _next_prompt(self) -> Prompt | None:
        """The prompt that has waited longest, if there is room for it."""
        request = self._queue.next(self._fits)
        if request is None:
            return None
        adapter = 0 if request.adapter is None else self._adapters[request.adapter]
        length = self.table.room(len(request.prompt) - 1)
        try:
            prompt = Prompt(self.plan, request, adapter, length, self.prefixes)
        except BaseException as error:
            self._end(request, "error", error)  # it waits no longer, and runs not yet
            raise
        self.counters.add("prompt_tokens", len(request.prompt))
        self.counters.add("cached_tokens", request.cached_tokens)
        self.counters.add("prefix_hits", int(request.cached_tokens > 0))
        return prompt

    def _fits(self, request: Request) -> bool:
        running = [each for _, each in self.table.active()]
        if len(running) >= self.table.slots:
            return False
        return self._memory is None or self.table.bytes_for([*running, request]) <= self._memory

    def _decode_all(self, most: int) -> int:
        """Computes a token of every row, or several. Returns how many."""
        table = self.table
        table.fit()
        requests = list(table.active())
        if not requests:
            return 0
        running = [request for _, request in requests]
        steps = most if self._may_hurry(running, most) else 1
        for request in running:
            request.dispatched += steps
        active = np.zeros(len(table.requests), bool)
        active[[slot for slot, _ in requests]] = True
        rows, counts = table.rows, table.counted(running)
        if self._advance is None or any(each.options.mask is not None for each in running):
            logits, table.cache = self._decode(rows.adapters, rows.last, table.cache)
            table.rows, table.counts, picked = _sampling.picked(
                logits, rows, jnp.asarray(active), counts, self._allowed(requests)
            )
        else:
            table.rows, table.counts, table.cache, picked = self._advance(
                rows, jnp.asarray(active), counts, table.cache, turns=steps
            )
        self._pending.append(_Turn(picked, requests))
        return steps

    def _may_hurry(self, running: list[Request], steps: int) -> bool:
        """Whether several tokens of every row may be computed at once: nobody waits long for them or
        for a row, everyone needs all of them, and there is room."""
        if self._advance is None or len(self._queue) or self._pace * steps > _HURRY:
            return False
        if any(each.options.mask is not None for each in running):
            return False
        needed = min(each.options.max_tokens - each.dispatched for each in running)
        return steps <= needed and max(each.length for each in running) + steps <= self.table.length

    def _allowed(self, requests: list[tuple[int, Request]]) -> jax.Array | None:
        """Asks the masks, for which all tokens up to now are needed."""
        masked = [(slot, each) for slot, each in requests if each.options.mask is not None]
        if not masked:
            return None
        while self._pending:
            self._deliver()
        shape = len(self.table.requests), self.table.vocab_size
        allowed = np.ones(shape, bool)
        for slot, request in masked:
            if not request.ended:
                with self._blamed(request):
                    row = _row_of(request.options.mask, request.generated, shape[1])
                    if row is None:
                        self._end(request, "stop")
                    else:
                        allowed[slot] = row
        return jnp.asarray(allowed)

    def _deliver(self) -> None:
        """Reads the tokens of the oldest turn, and gives them to their requests."""
        turn = self._pending.popleft()
        picked = jax.device_get(turn.picked)
        rows, many = picked.top.shape[-2:]
        tokens, log_probs = (x.reshape(-1, rows) for x in (picked.tokens, picked.log_probs))
        top, top_log_probs = (x.reshape(-1, rows, many) for x in (picked.top, picked.top_log_probs))
        for step in range(len(tokens)):
            for slot, request in turn.requests:
                count = request.options.log_probs
                pairs = zip(top[step, slot, :count], top_log_probs[step, slot, :count])
                best = tuple((int(token), float(log_prob)) for token, log_prob in pairs)
                token = Token(int(tokens[step, slot]), float(log_probs[step, slot]), best)
                self._receive(request, token)

    def _receive(self, request: Request, token: Token) -> None:
        if request.ended:
            return
        if math.isnan(token.log_prob):
            self._end(request, "error", FloatingPointError("the model's logits are not finite"))
        elif token.id in self._stop or token.id in request.options.stop:
            self._end(request, "stop")
        else:
            self._give(request, token)

    def _give(self, request: Request, token: Token) -> None:
        first = not request.generated_count
        waited = request.add(token)
        if waited is None:
            return
        (self.first if first else self.between).add(waited)
        self.counters.add("generated_tokens")
        if request.options.callback is not None:
            with self._blamed(request):
                request.options.callback(token)
        if request.generated_count == request.options.max_tokens:
            self._end(request, "length")

    def _end(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        if request.finish(reason, error):
            self.counters.add(reason)

    @contextlib.contextmanager
    def _blamed(self, request: Request) -> Any:
        """An exception of a user's function ends the request that brought it, and no other."""
        try:
            yield
        except Exception as error:
            self._end(request, "error", error)

    def _fail(self, error: BaseException) -> None:
        """Ends what runs with an error, and begins with an empty table: arrays that were given to a
        step that failed are lost."""
        _LOG.error("a turn has failed: %s: %s", type(error).__name__, error)
        requests = self.requests()
        self._prompt = None
        self._pending.clear()
        if self.prefixes is not None:
            self.prefixes.clear()
        for request in requests:
            self._end(request, "error", error)
        self.table.clear()


def _row_of(mask: Mask, tokens: list[int], vocab_size: int) -> np.ndarray | None:
    row = mask.allowed(tokens)
    if row is None:
        return None
    allowed = np.asarray(row)
    if allowed.shape != (vocab_size,) or allowed.dtype != bool:
        raise ValueError(
            f"mask.allowed: expected booleans [{vocab_size}], got {allowed.dtype}"
            f"{list(allowed.shape)}"
        )
    if not allowed.any():
        raise ValueError(f"mask.allowed: no token may follow {tokens[-8:]}")
    return allowed
