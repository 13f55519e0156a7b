"""Engine: what it serves, what is asked of it, and the thread that takes the turns."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from fnet import layers as nn
from fnet.models.generation import _generate
from fnet.serve._engine import _adapters, _cache, _checks, _independent, _programs
from fnet.serve._engine._loop import Loop
from fnet.serve._engine._prefix import Prefixes
from fnet.serve._engine._prompt import Plan
from fnet.serve._engine._queue import Queue
from fnet.serve._engine._request import Finished, Mask, Request, Token
from fnet.serve._engine._stats import Counters, Stats
from fnet.serve._engine._table import Table
from fnet.serve._structured._grammar import Grammar

_LOG = logging.getLogger("fnet.serve")
_AHEAD = 1  # turns whose tokens the host has not read when the next is begun


class Engine:
    """Generates the texts of many requests together, with continuous batching.

        engine = serve.Engine(model, params, slots=8, context=1024, adapters={"french": french})
        texts = engine.generate(prompts, max_tokens=64, temperature=0)    # in this thread

        with engine:                                                      # or with a thread
            request = engine.submit([1, 2, 3], max_tokens=64, temperature=0.7, seed=1)
            for token in request:
                print(token.id, token.log_prob)

    A turn computes at most `chunk` tokens of prompts and one token of each text that runs. A request
    joins the others at the turn after its prompt is computed, and leaves with its last token; a long
    prompt stops nobody. Prompts are computed in the order of their arrival.

    What one request gets depends on no other. Greedy text is that of `models.generate` for the
    prompt alone, and sampled text that of `models.generate` with `jax.random.key(seed)`; because
    sums are rounded in another order in another batch, a token may differ where the logits of the
    first two lie within about 1e-4 of each other. The rows of a decode step are proved to be
    independent (`introspect.depends`). A model for which that fails, such as a mixture of experts
    with a capacity over the batch, is computed one row after another.

    Each request has a row of a table, a slot; the table has as many rows, and room for as many
    tokens, as the running requests need, rounded up to powers of two. Pages of keys and values, which
    have to be gathered for each token, take 2.0 to 2.7 times as long in an attention layer on a CPU
    (`python -m benchmarks.engine --pages`); the beginnings that prompts share are blocks of 32
    tokens, which are copied into the row. Each size is compiled when it is first needed, or by `warm`.

    Args:
        model: a model with a cache: GPT, Decoder, LSTMLanguageModel or one of your own, as for
            `models.generate`.
        params: its parameters, which may be quantized or have an adapter. Their blocks are copied
            once, to unstack them and to cast them to `dtype`.
        slots: how many texts are computed together at most.
        context: the most tokens of a prompt and its text together. Default: the model's context, at
            most 1024.
        chunk: the most tokens of prompts in a turn.
        prefix_cache: whether beginnings of prompts are kept and reused, or the most bytes of them.
            True: as many bytes as the full table has.
        adapters: {name: parameters with LoRA adapters}, from `compress.lora` or
            `pretrained.load_adapter`, of the same base parameters. One batch may have all of them.
        stop: tokens that end every text.
        queue: how many requests may wait.
        memory: the most bytes of the table. Requests wait until they fit. Default: no limit but
            `slots` and `context`.
        dtype: the dtype to which floating-point parameters are cast, and of keys and values.
        exact: whether every bit of a text is the same alone and in company, with a cold and with a
            warm prefix cache. The decode step then is `ft.invariant`, which computes one row after
            another, and the table always has its full size.

    Attributes:
        slots, context, vocab_size, adapters: sizes, and the names of the adapters.
        one_by_one: why texts are computed one by one, or None if they are computed together.

    Raises:
        ValueError: an argument is outside of its range, or an adapter does not belong to params.
        TypeError: the model has no cache.

    >>> gpt = models.GPT(vocab_size=16, width=8, depth=1, heads=1, context=8)
    >>> params, _ = gpt.init(jax.random.key(0), gpt.example())
    >>> engine = serve.Engine(gpt, params, slots=2)
    >>> [len(text.tokens) for text in engine.generate([[1, 2], [3]], max_tokens=3, temperature=0)]
    [3, 3]
    """

    def __init__(
        self,
        model: nn.Layer,
        params: Any,
        *,
        slots: int = 8,
        context: int | None = None,
        chunk: int = 128,
        prefix_cache: bool | int = True,
        adapters: Mapping[str, Any] | None = None,
        stop: Sequence[int] = (),
        queue: int = 1024,
        memory: int | None = None,
        dtype: Any = None,
        exact: bool = False,
    ):
        self.slots = _checks.integer("Engine: slots", slots, 1)
        self.context = _context(model, context)
        self.adapters = tuple(adapters or ())
        chunk = min(_checks.integer("Engine: chunk", chunk, 1), self.context)
        self._stop = _checks.stops("Engine", stop)
        if adapters:
            params = _adapters.together(params, adapters)
        dtype = None if dtype is None else jnp.dtype(dtype)
        model, params = _generate.prepared(model, params, dtype)
        layout = _cache.layout(model, params)
        self.one_by_one = _independent.why_not(model, params, layout)
        by_length = _by_length(model)
        plan = Plan(
            model,
            params,
            layout,
            self.context if by_length else chunk,
            padded=self.one_by_one is None,
            same_pieces=exact,
        )
        table = Table(model, params, layout, slots=self.slots, context=self.context, fixed=exact)
        self.vocab_size = table.vocab_size
        self._memory = None if memory is None else _checks.integer("Engine: memory", memory, 1)
        self._counters = Counters()
        self._queue = Queue(_checks.integer("Engine: queue", queue, 1), self._counters)
        self._loop = Loop(
            plan,
            table,
            self._queue,
            *_steps(plan, self.one_by_one, exact),
            prefixes=None if by_length else _prefixes(prefix_cache, table),
            adapters={name: i + 1 for i, name in enumerate(self.adapters)},
            stop=self._stop,
            memory=self._memory,
            counters=self._counters,
        )
        self._turns = threading.Lock()  # held during a turn
        self._thread: threading.Thread | None = None

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        seed: int = 0,
        stop: Sequence[int] = (),
        log_probs: int = 0,
        logit_bias: Mapping[int, float] | None = None,
        adapter: str | None = None,
        mask: Mask | None = None,
        callback: Callable[[Token | None], None] | None = None,
    ) -> Request:
        """Asks for the continuation of a prompt, and returns at once.

        Args:
            prompt: integers, at least one.
            max_tokens: the most tokens that are generated.
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
                frequency_penalty: as for `models.generate`.
            seed: an integer from 0 to 2^63 - 1. The same seed gives the same text.
            stop: tokens that end this text, in addition to those of the engine.
            log_probs: how many of the most probable tokens are reported beside each token, up to 20.
            logit_bias: {token: number from -100 to 100}, which is added to its logit. Reported
                log-probabilities are those without it.
            adapter: the name of an adapter. Default None: the parameters without a change.
            mask: what the text must be (`json_schema`, `regex`, `choice`, `lark`), or any object
                with `allowed(tokens) -> booleans [vocab_size]`, which is asked before each token,
                with the tokens generated up to now, while the device computes. It costs the other
                requests what the call takes longer than that.
            callback: called with each `Token`, and with None at the end, in the thread that takes
                the turns. An exception ends this request with "error", and no other.

        Raises:
            ValueError: an argument is not valid, or the text would exceed the context or the memory.
            Full: too many requests wait.
            RuntimeError: the engine is closed.
        """
        request = self._request(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            stop=stop,
            log_probs=log_probs,
            logit_bias=logit_bias,
            adapter=adapter,
            mask=mask,
            callback=callback,
        )
        self._queue.enter([request], bounded=True)
        return request

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        seed: int = 0,
        **options: Any,
    ) -> list[Finished]:
        """Continues prompts, and returns the texts in their order.

        Without a thread, the turns are taken here.

        Args:
            prompts: lists of tokens, as many as you like.
            max_tokens, temperature: as for `submit`.
            seed: prompt i gets the seed `seed + i`, so that equal prompts get different texts.
            options: further options of `submit`, for all prompts.

        Raises:
            ValueError: as for `submit`; nothing is generated then.
            RuntimeError: a request has failed.
        """
        requests = [
            self._request(
                prompt, max_tokens=max_tokens, temperature=temperature, seed=seed + i, **options
            )
            for i, prompt in enumerate(prompts)
        ]
        self._queue.enter(requests, bounded=False)
        try:
            results = [request.result() for request in requests]
        finally:
            for request in requests:
                request.cancel()
        for i, request in enumerate(requests):
            if request.error is not None:
                raise RuntimeError(f"generate: prompt {i} has failed") from request.error
        return results

    def warm(self, tokens: int | None = None) -> None:
        """Compiles the programs for texts of up to `tokens` tokens, prompts included, so that no
        request waits for the compiler. With a `compilation cache
        <https://docs.jax.dev/en/latest/persistent_compilation_cache.html>`_, later processes read
        them.

        Args:
            tokens: as for `context`. Default: that of the engine.

        Raises:
            ValueError: tokens exceeds the engine's context.
        """
        tokens = _checks.integer("warm: tokens", self.context if tokens is None else tokens, 1)
        if tokens > self.context:
            raise ValueError(
                f"warm: tokens={tokens} exceeds the context of {self.context}; create the engine "
                "with a larger context="
            )
        with self._turns:
            self._loop.warm(tokens)

    def step(self) -> bool:
        """Takes one turn: at most `chunk` tokens of prompts, and one token of each text that runs.

        Returns:
            Whether there was anything to do.

        Raises:
            RuntimeError: the engine has a thread, which takes the turns.
        """
        if self._thread is not None:
            raise RuntimeError("Engine: step() is for an engine without a thread")
        with self._turns:
            return self._loop.turn(0)

    def stats(self) -> Stats:
        """Returns counts and times since the engine was created."""
        count, loop = self._counters, self._loop
        table, prefixes = loop.table, loop.prefixes
        running = [each for each in list(table.requests) if each is not None and not each.ended]
        used = sum(min(request.length, table.length) for request in running)
        return Stats(
            len(self._queue),
            len(running) + loop.reads,
            self.slots,
            {name: count[name] for name in ("stop", "length", "cancelled", "error")},
            count["refused"],
            count["prompt_tokens"],
            count["cached_tokens"],
            count["generated_tokens"],
            table.bytes,
            used / (len(table.requests) * table.length),
            0 if prefixes is None else prefixes.bytes,
            0 if prefixes is None else len(prefixes),
            count["prefix_hits"],
            loop.first.histogram(),
            loop.between.histogram(),
        )

    def start(self) -> None:
        """Starts the thread that takes the turns; `with engine:` does it.

        Raises:
            RuntimeError: the engine is closed, or has a thread.
        """
        if self._queue.closed or self._thread is not None:
            which = "close()" if self._queue.closed else "start()"
            raise RuntimeError(f"Engine: start() after {which}; create another engine")
        with self._turns:
            self._thread = threading.Thread(target=self._serve, name="fnet-engine", daemon=True)
            self._thread.start()

    def close(self, *, cancel: bool = False) -> None:
        """Accepts no more requests, and waits for the end of those that wait and run.

        Args:
            cancel: whether they are cancelled instead.
        """
        self._loop.cancels = self._loop.cancels or cancel
        self._queue.close()
        if self._thread is None:
            while self._take_turn():
                pass
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close(cancel=kind is not None)

    def _request(self, prompt: Sequence[int], **options: Any) -> Request:
        defaults = {**dict.fromkeys(_checks.OPTIONAL), "stop": (), "log_probs": 0}
        checked = _checks.options_of(
            **{**defaults, **options}, adapters=self.adapters, vocab_size=self.vocab_size
        )
        if isinstance(checked.mask, Grammar):
            walk = checked.mask.walk(self.vocab_size, self._stop | checked.stop)
            checked = checked._replace(mask=walk)
        tokens = _checks.prompt_of(prompt, self.vocab_size)
        total = len(tokens) + checked.max_tokens
        if total > self.context + 1:  # the last token is not read by the model
            raise ValueError(
                f"submit: a prompt of {len(tokens)} tokens and max_tokens={checked.max_tokens} "
                f"exceed the context of {self.context}; shorten one of them, or create the engine "
                "with a larger context="
            )
        request = Request(tokens, checked, self._take_turn, self._cancelled)
        needed = self._loop.table.bytes_for([request])
        if self._memory is not None and needed > self._memory:
            raise ValueError(
                f"submit: a text of up to {total - 1} tokens needs {needed} bytes, and "
                f"memory={self._memory}; lower max_tokens, or create the engine with more"
            )
        return request

    def _cancelled(self, request: Request) -> None:
        self._counters.add("cancelled")
        self._queue.leave(request)

    def _serve(self) -> None:
        try:
            while True:
                with self._turns:
                    busy = self._loop.turn(_AHEAD)
                if not busy and not self._queue.wait():
                    return
        finally:  # nobody waits for a thread that something like SystemExit has ended
            self._queue.close()
            for request in self._queue.requests():
                request.finish("error", RuntimeError("the engine's thread has ended"))

    def _take_turn(self) -> bool:
        """Takes a turn for someone who waits, unless the thread does."""
        if self._thread is not None:
            return False
        with self._turns:
            return self._loop.turn(_AHEAD)


def _context(model: Any, context: int | None) -> int:
    most = getattr(model, "context", None)
    if context is None:
        return min(1024, most or 1024)
    context = _checks.integer("Engine: context", context, 2)
    if most is not None and context > most:
        raise ValueError(
            f"Engine: context={context} exceeds that of the model, {most}; pass at most that"
        )
    return context


def _by_length(model: Any) -> bool:
    """Whether rotary angles depend on the length of the text, so that a prompt computed in pieces
    would get other keys."""
    scaling = getattr(model, "rope_scaling", None)
    several = scaling if isinstance(scaling, tuple) else (scaling,)
    return any(getattr(each, "by_length", False) for each in several)


def _steps(plan: Plan, one_by_one: str | None, exact: bool) -> tuple[Callable, Callable | None]:
    """Returns (a function (adapters, last, cache) -> (logits, cache), `_programs.advance` or None if
    tokens must be chosen by a program of their own)."""
    if one_by_one is not None:
        _LOG.warning("texts are computed one by one, because %s", one_by_one)
    elif exact:
        return functools.partial(_programs.decode_exactly(plan.model), plan.params), None
    layout = None if one_by_one is None else plan.layout
    decode, advance = (
        functools.partial(program, plan.model, plan.params)
        for program in (_programs.decode, _programs.advance)
    )
    return functools.partial(decode, layout=layout), functools.partial(advance, layout=layout)


def _prefixes(most: bool | int, table: Table) -> Prefixes | None:
    if most is False:
        return None
    if most is True:
        return Prefixes(table.most_bytes)
    return Prefixes(_checks.integer("Engine: prefix_cache", most, 0))
