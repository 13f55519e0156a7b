"""The texts of one request while they are generated: from the engine's threads to the event loop,
from tokens to text."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from fnet.serve._openai._errors import Wrong
from fnet.serve._openai._language import Asked, Language
from fnet.serve._openai._text import Text
from fnet.serve._structured._walk import Stuck

_POLL = 0.5  # seconds after which it is looked whether a request has ended without a word


class Scored(NamedTuple):
    """A token of a text, with its log-probability, the most probable tokens in its place, and the
    character of the text at which it begins."""

    id: int
    log_prob: float
    top: tuple[tuple[int, float], ...]
    start: int


class Piece(NamedTuple):
    """A part of text `index`: what was released, its tokens, and, with the last part, how the text
    ended: "stop" or "length"."""

    index: int
    text: str
    tokens: list[Scored]
    finish: str | None = None


class Usage(NamedTuple):
    """How many tokens a request took."""

    prompt: int
    generated: int
    cached: int

    def content(self) -> dict:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Generation:
    """Texts that are generated.

        generation = Generation(language, [asked])
        try:
            async for piece in generation.pieces(timeout=30):
                ...
        finally:
            generation.cancel()

    Raises:
        Wrong, Full: as `Language.submit`; nothing of the request is generated then.
    """

    def __init__(self, language: Language, asked: Sequence[Asked]):
        self._inbox = _Inbox()
        self._choices: list[_Choice] = []
        self._firsts: list[int] = []  # of each prompt
        self._prompts = sum(len(each.prompt) for each in asked)
        try:
            for each in asked:
                self._firsts.append(len(self._choices))
                for index in range(each.count):
                    text = Text(language.tokenizer, each.prompt, each.stop)
                    choice = _Choice(len(self._choices), text)
                    put = functools.partial(self._inbox.put, choice)
                    choice.request = language.submit(each, index, put)
                    self._choices.append(choice)
        except BaseException:
            self.cancel()
            raise

    async def pieces(self, timeout: float) -> AsyncIterator[Piece]:
        """Yields the parts of all texts as they come.

        Raises:
            TimeoutError: no token came within `timeout` seconds.
            Wrong: the engine failed, or ended without finishing the texts.
        """
        waited = 0.0
        running = {choice.index for choice in self._choices}
        begun = False
        while running:
            items = await self._inbox.take(_POLL)
            if not items:
                items = [(each, None) for each in self._choices if each.lost()]
                waited += _POLL
                if not begun and waited >= timeout:
                    raise TimeoutError
            begun = begun or bool(items)
            for choice, item in items:
                if choice.index not in running:
                    continue
                piece = choice.take(item)
                if piece is None:
                    continue
                if piece.finish is not None:
                    running.remove(choice.index)
                yield piece

    def stop(self, index: int) -> None:
        """Ends a text here, because what comes after it is not wanted."""
        self._choices[index].stop()
        self._inbox.put(self._choices[index], None)

    def cancel(self) -> None:
        """Ends the texts that still run."""
        for choice in self._choices:
            choice.request.cancel()
            self._inbox.put(choice, None)

    @property
    def usage(self) -> Usage:
        """The tokens of texts that have ended. Those of a prompt count once for all of its texts."""
        generated = sum(len(choice.text.starts) for choice in self._choices)
        firsts = [self._choices[first].request for first in self._firsts]
        cached = sum(request.result().cached_tokens for request in firsts)
        return Usage(self._prompts, generated, cached)


class _Choice:
    """One text: its request, and what it has that no part has said yet."""

    def __init__(self, index: int, text: Text):
        self.index, self.text = index, text
        self.request: Any = None
        self._tokens: list[Scored] = []
        self._stopped = self._silent = False

    def stop(self) -> None:
        self._stopped = True
        self.request.cancel()

    def lost(self) -> bool:
        """Whether the request has ended, and for the second time nothing said so."""
        was, self._silent = self._silent, self.request.finish_reason is not None
        return was and self._silent

    def take(self, item: Any) -> Piece | None:
        """Returns what a token, or the end (None), adds to the text."""
        if item is None:
            return self._end()
        if self._stopped:
            return self._piece("", "stop")
        released = self.text.add(item.id)
        top = tuple(item.top or ())
        self._tokens.append(Scored(item.id, item.log_prob, top, self.text.starts[-1]))
        if not self.text.stopped:
            return self._piece(released) if released else None
        self.stop()
        return self._piece(released, "stop")

    def _end(self) -> Piece:
        reason = "stop" if self._stopped else self.request.finish_reason
        if reason == "cancelled":
            raise Wrong("the server ends; the text was not finished", status=503)
        if reason not in ("stop", "length"):
            error = getattr(self.request, "error", None)
            if isinstance(error, Stuck):
                raise Wrong(f"the text cannot go on: {error}")
            raise Wrong(f"the computation failed: {type(error).__name__}", status=500)
        return self._piece(self.text.end(), reason)

    def _piece(self, released: str, finish: str | None = None) -> Piece:
        count = len(self._tokens)
        if finish is None or self._stopped:  # what is held back, or cut off, has tokens, too
            count = sum(token.start < self.text.released for token in self._tokens)
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        return Piece(self.index, released, tokens, finish)


class _Inbox:
    """What the engine's thread sends to the event loop."""

    def __init__(self):
        self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
        self._items: collections.deque[tuple[_Choice, Any]] = collections.deque()

    def put(self, choice: _Choice, item: Any) -> None:
        self._items.append((choice, item))
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(self._event.set)

    async def take(self, seconds: float) -> list[tuple[_Choice, Any]]:
        """Returns what has come, or [] if nothing comes within some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._items:
                    await self._event.wait()
                    self._event.clear()
        return [self._items.popleft() for _ in range(len(self._items))]
