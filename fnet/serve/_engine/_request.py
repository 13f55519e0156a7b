"""A text that is asked for: what was asked, the tokens up to now, and how it ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

_LOG = logging.getLogger("fnet.serve")


class Mask(Protocol):
    """Says before each token which tokens may come next. `Grammar` is one.

    >>> class Even:
    ...     def allowed(self, tokens):
    ...         return np.arange(16) % 2 == 0
    >>> gpt = models.GPT(vocab_size=16, width=8, depth=1, heads=1, context=8)
    >>> params, _ = gpt.init(jax.random.key(0), gpt.example())
    >>> engine = serve.Engine(gpt, params, slots=1)
    >>> [text] = engine.generate([[1, 2]], max_tokens=4, temperature=0, mask=Even())
    >>> any(token % 2 for token in text.tokens)
    False
    """

    def allowed(self, tokens: Sequence[int]) -> np.ndarray | None:
        """Returns booleans [vocab_size], or None if the text is complete, which then ends with
        "stop". `tokens` are those generated up to now."""


class Token(NamedTuple):
    """A generated token.

    Attributes:
        id: the token.
        log_prob: its log-probability according to the model, before penalties, temperature, top_k,
            top_p and min_p.
        top: the most probable tokens in its place, as pairs (token, log-probability), as many as
            `log_probs` asks for.

    >>> serve.Token(5, -0.25, ((5, -0.25), (7, -1.75))).id
    5
    """

    id: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()


class Finished(NamedTuple):
    """A text that has ended.

    Attributes:
        tokens: the generated tokens, without the stop token.
        log_probs: the log-probability of each.
        finish_reason: "stop" (a stop token came, or the mask ended the text), "length"
            (`max_tokens`), "cancelled" or "error".
        prompt_tokens: the number of tokens of the prompt.
        cached_tokens: how many of them were not computed, because the prefix cache had them.
        first_token_s: seconds from `submit` to the first token, or None if there was none.
        total_s: seconds from `submit` to the end.
        error: what went wrong, if finish_reason is "error".

    >>> serve.Finished([5, 7], [-0.5, -1.5], "length", 3, 0, 0.01, 0.02).finish_reason
    'length'
    """

    tokens: list[int]
    log_probs: list[float]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float | None
    total_s: float
    error: str | None = None


class Request:
    """A text that is being generated. `Engine.submit` creates it.

        for token in request:           # each `Token` as it comes
            ...
        request.cancel()
        request.result()                # waits for the end: `Finished`

    Several threads may read one request. If the engine has no thread, waiting for a token makes it
    take turns.

    Attributes:
        prompt: the tokens of the prompt.
        adapter: the name of the adapter, or None.
        finish_reason: None while the request waits or runs, then "stop", "length", "cancelled" or
            "error".
        error: the exception behind "error", or None.

    >>> gpt = models.GPT(vocab_size=16, width=8, depth=1, heads=1, context=8)
    >>> params, _ = gpt.init(jax.random.key(0), gpt.example())
    >>> request = serve.Engine(gpt, params, slots=1).submit([1, 2], max_tokens=3, temperature=0)
    >>> len([token.id for token in request]), request.finish_reason
    (3, 'length')
    """

    def __init__(
        self,
        prompt: list[int],
        options: Any,
        turn: Callable[[], bool],
        cancelled: Callable[[Request], None],
    ):
        self.prompt, self.options, self.adapter = prompt, options, options.adapter
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.cached_tokens = 0
        self.dispatched = 0  # tokens that the device was asked for; the host may not know them yet
        self._turn, self._on_cancel = turn, cancelled
        self._tokens: list[Token] = []
        self._changed = threading.Condition()
        self._times = [time.perf_counter()]  # of the submission, of each token, of the end

    def __iter__(self) -> Iterator[Token]:
        count = 0
        while True:
            self._wait(lambda count=count: len(self._tokens) > count)
            with self._changed:
                new, ended = self._tokens[count:], self.finish_reason is not None
            yield from new
            count += len(new)
            if ended and count == len(self._tokens):
                return

    def cancel(self) -> None:
        """Ends the request now; it keeps the tokens that it has. Its row is free for the next turn."""
        if self.finish("cancelled"):
            self._on_cancel(self)

    def result(self, timeout: float | None = None) -> Finished:
        """Waits for the end and returns the text.

        Args:
            timeout: the longest wait in seconds. Default None: no limit.

        Raises:
            TimeoutError: the request still runs after `timeout` seconds.
        """
        self._wait(lambda: False, timeout)
        with self._changed:
            first, *_ = *self._times[1 : len(self._tokens) + 1], None
            return Finished(
                [token.id for token in self._tokens],
                [token.log_prob for token in self._tokens],
                str(self.finish_reason),
                len(self.prompt),
                self.cached_tokens,
                None if first is None else first - self._times[0],
                self._times[-1] - self._times[0],
                None if self.error is None else f"{type(self.error).__name__}: {self.error}",
            )

    def add(self, token: Token) -> float | None:
        """Appends a token, unless the request has ended. Returns the seconds since the token before
        it, or since the submission."""
        with self._changed:
            if self.finish_reason is not None:
                return None
            now = time.perf_counter()
            waited = now - self._times[-1]
            self._times.append(now)
            self._tokens.append(token)
            self._changed.notify_all()
        return waited

    def finish(self, reason: str, error: BaseException | None = None) -> bool:
        """Ends the request, once: returns False if it has ended before."""
        with self._changed:
            if self.finish_reason is not None:
                return False
            self._times.append(time.perf_counter())
            self.error, self.finish_reason = error, reason
            self._changed.notify_all()
        if self.options.callback is not None:
            try:
                self.options.callback(None)
            except Exception:
                _LOG.exception("the callback of a request that has ended")
        return True

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None

    @property
    def generated(self) -> list[int]:
        """The tokens up to now."""
        with self._changed:
            return [token.id for token in self._tokens]

    @property
    def generated_count(self) -> int:
        return len(self._tokens)

    @property
    def most(self) -> int:
        """The most tokens that the cache will have."""
        return len(self.prompt) - 1 + self.options.max_tokens

    @property
    def exhausted(self) -> bool:
        """Whether the device was asked for all tokens."""
        return self.dispatched >= self.options.max_tokens

    @property
    def length(self) -> int:
        """The number of tokens in the cache once the tokens asked for up to now are computed."""
        return len(self.prompt) - 1 + self.dispatched

    def _wait(self, ready: Callable[[], bool], timeout: float | None = None) -> None:
        until = None if timeout is None else time.perf_counter() + timeout
        while True:
            with self._changed:
                if ready() or self.ended:
                    return
            if until is not None and time.perf_counter() >= until:
                raise TimeoutError(f"Request: no end within {timeout} s; it still runs")
            if self._turn():
                continue
            rest = 0.1 if until is None else max(0.0, min(0.1, until - time.perf_counter()))
            with self._changed:
                if not ready() and not self.ended:
                    self._changed.wait(rest)
