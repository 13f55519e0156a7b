"""The turns: pieces of prompts, one token of every row, and their way to the requests."""

from __future__ import annotations

import collections
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fnet.serve._engine import _sampling
from fnet.serve._engine._prefix import Prefixes
from fnet.serve._engine._prompt import Plan, Prompt
from fnet.serve._engine._queue import Queue
from fnet.serve._engine._request import Mask, Request, Token
from fnet.serve._engine._stats import Counters, Times
from fnet.serve._engine._table import Table

_LOG = logging.getLogger("fnet.serve")


class _Turn(NamedTuple):
    """A decode step on its way: its tokens on the device, and whose row is which."""

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
        *,
        prefixes: Prefixes | None,
        adapters: Mapping[str, int],
        stop: frozenset[int],
        memory: int | None,
        counters: Counters,
    ):
        self.plan, self.table, self.prefixes = plan, table, prefixes
        self.counters, self.first, self.between = counters, Times(), Times()
        self._queue, self._decode, self._adapters = queue, decode, adapters
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
        anything to do."""
        if self.cancels:
            for request in (*self._queue.requests(), *self.requests()):
                request.cancel()
        try:
            self.table.leave()
            busy = self._read_prompts()
            busy = self._decode_all() or busy
            while len(self._pending) > (ahead if busy else 0):
                self._deliver()
                busy = True
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
            return True
        return busy

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
                self.table.seat(prompt)
                self._prompt = None

    def _next_prompt(self) -> Prompt | None:
        """The prompt that has waited longest, if there is room for it."""
        request = self._queue.next(self._fits)
        if request is None:
            return None
        adapter = 0 if request.adapter is None else self._adapters[request.adapter]
        length = self.table.room(len(request.prompt) - 1)
        prompt = Prompt(self.plan, request, adapter, length, self.prefixes)
        self.counters.add("prompt_tokens", len(request.prompt))
        self.counters.add("cached_tokens", request.cached_tokens)
        self.counters.add("prefix_hits", int(request.cached_tokens > 0))
        return prompt

    def _fits(self, request: Request) -> bool:
        running = [each for _, each in self.table.active()]
        if len(running) >= self.table.slots:
            return False
        return self._memory is None or self.table.bytes_for([*running, request]) <= self._memory

    def _decode_all(self) -> bool:
        """Computes one token of every row."""
        table = self.table
        table.fit()
        requests = list(table.active())
        if not requests:
            return False
        for _, request in requests:
            request.dispatched += 1
        rows, counts = table.rows, table.counted(request for _, request in requests)
        logits, table.cache = self._decode(rows.adapters, rows.last, table.cache)
        active = np.zeros(len(table.requests), bool)
        active[[slot for slot, _ in requests]] = True
        table.rows, table.counts, picked = _sampling.pick(
            logits, rows, jnp.asarray(active), counts, self._allowed(requests)
        )
        self._pending.append(_Turn(picked, requests))
        return True

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
                    allowed[slot] = _row_of(request.options.mask, request.generated, shape[1])
        return jnp.asarray(allowed)

    def _deliver(self) -> None:
        """Reads the tokens of the oldest turn, and gives them to their requests."""
        turn = self._pending.popleft()
        tokens, log_probs, top, top_log_probs = jax.device_get(turn.picked)
        for slot, request in turn.requests:
            if request.ended:
                continue
            if np.isnan(log_probs[slot]):
                self._end(request, "error", FloatingPointError("the model's logits are not finite"))
                continue
            token, many = int(tokens[slot]), request.options.log_probs
            if token in self._stop or token in request.options.stop:
                self._end(request, "stop")
                continue
            pairs = zip(top[slot, :many].tolist(), top_log_probs[slot, :many].tolist())
            self._give(request, Token(token, float(log_probs[slot]), tuple(pairs)))

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


def _row_of(mask: Mask, tokens: list[int], vocab_size: int) -> np.ndarray:
    allowed = np.asarray(mask.allowed(tokens))
    if allowed.shape != (vocab_size,) or allowed.dtype != bool:
        raise ValueError(
            f"mask.allowed: expected booleans [{vocab_size}], got {allowed.dtype}"
            f"{list(allowed.shape)}"
        )
    if not allowed.any():
        raise ValueError(f"mask.allowed: no token may follow {tokens[-8:]}")
    return allowed
