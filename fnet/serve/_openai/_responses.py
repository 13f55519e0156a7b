"""The JSON of answers: whole, or as the events of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fnet
from fnet.serve._openai._generation import Piece, Scored, Usage
from fnet.serve._openai._tools import Call, Plain, Reader

_LEAST = -9999.0  # in place of -infinity, which JSON does not have
DONE = "data: [DONE]\n\n"


def event(data: Any) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


class Answer:
    """An answer, whole or in events. Its subclasses are those of the two kinds of requests.

    Args:
        model: the id that the request names.
        count: the number of texts.
        token_bytes: the bytes of a token.
        alternatives: how many alternatives of each token are listed, or None for no
            log-probabilities.
    """

    prefix = kind = chunk = ""

    def __init__(
        self,
        model: str,
        count: int,
        token_bytes: Callable[[int], bytes],
        alternatives: int | None = None,
    ):
        self._bytes, self._alternatives, self._count = token_bytes, alternatives, count
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fnet-{fnet.__version__}",
        }

    def begin(self) -> Iterator[dict]:
        """Yields the events before the first token."""
        return iter(())

    def events(self, piece: Piece) -> Iterator[dict]:
        """Yields the events of a part of a text."""
        raise NotImplementedError

    def add(self, piece: Piece) -> None:
        """Adds a part of a text to the whole answer."""
        raise NotImplementedError

    def complete(self, index: int) -> bool:
        """Whether a text has all that it needs, although the model would go on."""
        return False

    def whole(self, usage: Usage) -> dict:
        return {
            **self._head,
            "object": self.kind,
            "choices": [self._choice(index) for index in range(self._count)],
            "usage": usage.content(),
        }

    def usage(self, usage: Usage) -> dict:
        """Returns the event with the number of tokens."""
        return {**self._chunk([]), "usage": usage.content()}

    def _choice(self, index: int) -> dict:
        raise NotImplementedError

    def _chunk(self, choices: list[dict]) -> dict:
        return {**self._head, "object": self.chunk, "choices": choices}

    def _text(self, token: int) -> str:
        return self._bytes(token).decode(errors="replace")


class Chat(Answer):
    """An answer of a conversation.

    Args:
        reader: divides text into content and calls of tools. Default: all is content.
        single: whether a text ends after its first call. Default False.
    """

    prefix, kind, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        *arguments: Any,
        reader: Callable[[], Reader] = Plain,
        single: bool = False,
        **options: Any,
    ):
        super().__init__(*arguments, **options)
        self._single = single
        self._readers = [reader() for _ in range(self._count)]
        self._contents: list[str] = [""] * self._count
        self._calls: list[list[Call]] = [[] for _ in range(self._count)]
        self._scores: list[list[Scored]] = [[] for _ in range(self._count)]
        self._finish: list[str | None] = [None] * self._count

    def begin(self) -> Iterator[dict]:
        for index in range(self._count):
            yield self._event(index, {"role": "assistant", "content": "", "refusal": None})

    def events(self, piece: Piece) -> Iterator[dict]:
        index, before = piece.index, len(self._calls[piece.index])
        self._scores[index] += piece.tokens
        content = self._read(piece)
        calls = self._calls[index][before:]
        if content:
            yield self._event(index, {"content": content})
        for number, call in enumerate(calls, before):
            yield self._event(index, {"tool_calls": [call.content(number)]})
        if piece.finish is not None:
            yield self._event(index, {}, self._reason(index, piece.finish))

    def add(self, piece: Piece) -> None:
        self._scores[piece.index] += piece.tokens
        self._contents[piece.index] += self._read(piece)
        self._finish[piece.index] = piece.finish

    def _read(self, piece: Piece) -> str:
        """Returns the content of a part, and keeps its calls."""
        reader, calls = self._readers[piece.index], self._calls[piece.index]
        if self._single and calls:
            return ""
        content, found = reader.add(piece.text)
        if piece.finish is not None:
            rest, more = reader.end()
            content, found = content + rest, found + more
        calls += found[:1] if self._single else found
        return content

    def complete(self, index: int) -> bool:
        return self._single and bool(self._calls[index])

    def _reason(self, index: int, finish: str) -> str:
        return "tool_calls" if self._calls[index] and finish == "stop" else finish

    def _event(self, index: int, delta: dict, finish: str | None = None) -> dict:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if self._scores[index] and self._alternatives is not None:
            choice["logprobs"] = self._log_probs(self._scores[index])
        self._scores[index] = []
        return self._chunk([choice])

    def _choice(self, index: int) -> dict:
        calls = [call.content() for call in self._calls[index]]
        message = {"role": "assistant", "content": self._contents[index], "refusal": None}
        if calls:
            message |= {"content": self._contents[index] or None, "tool_calls": calls}
        scored = self._alternatives is not None
        return {
            "index": index,
            "message": message,
            "logprobs": self._log_probs(self._scores[index]) if scored else None,
            "finish_reason": self._reason(index, str(self._finish[index])),
        }

    def _log_probs(self, tokens: Sequence[Scored]) -> dict:
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: Scored) -> dict:
        top = token.top[: self._alternatives]
        return {
            **self._alternative(token.id, token.log_prob),
            "top_logprobs": [self._alternative(*each) for each in top],
        }

    def _alternative(self, token: int, log_prob: float) -> dict:
        return {
            "token": self._text(token),
            "logprob": _finite(log_prob),
            "bytes": list(self._bytes(token)),
        }


class Completion(Answer):
    """Continuations of texts.

    Args:
        echoes: what each text begins with, the prompt if it was asked for. Default: nothing.
    """

    prefix, kind, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, *arguments: Any, echoes: Sequence[str] = (), **options: Any):
        super().__init__(*arguments, **options)
        self._echoes = list(echoes) or [""] * self._count
        self._pieces: list[list[Piece]] = [[] for _ in range(self._count)]

    def begin(self) -> Iterator[dict]:
        for index, echo in enumerate(self._echoes):
            if echo:
                yield self._chunk([self._part(index, echo, [], None)])

    def events(self, piece: Piece) -> Iterator[dict]:
        yield self._chunk([self._part(*piece)])

    def add(self, piece: Piece) -> None:
        self._pieces[piece.index].append(piece)

    def _choice(self, index: int) -> dict:
        pieces = self._pieces[index]
        text = self._echoes[index] + "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        return self._part(index, text, tokens, pieces[-1].finish)

    def _part(self, index: int, text: str, tokens: Sequence[Scored], finish: str | None) -> dict:
        scored = self._alternatives is not None
        return {
            "index": index,
            "text": text,
            "logprobs": self._log_probs(tokens, len(self._echoes[index])) if scored else None,
            "finish_reason": finish,
        }

    def _log_probs(self, tokens: Sequence[Scored], start: int) -> dict:
        # As OpenAI says, the token itself comes beside its alternatives.
        tops = [(*token.top[: self._alternatives], token[:2]) for token in tokens]
        return {
            "tokens": [self._text(token.id) for token in tokens],
            "token_logprobs": [_finite(token.log_prob) for token in tokens],
            "top_logprobs": [{self._text(i): _finite(p) for i, p in top} for top in tops],
            "text_offset": [start + token.start for token in tokens],
        }


def _finite(log_prob: float) -> float:
    return float(log_prob) if log_prob >= _LEAST else _LEAST  # NaN, too
