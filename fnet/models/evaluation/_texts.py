"""Texts as tokens: prompts, the token before a text, and windows over long texts."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from fnet.models.evaluation._batches import Item
from fnet.models.tokenizers._chat import encoded


class Text(NamedTuple):
    """The tokens of a text with what stands before it, of which those from `first` on are scored."""

    tokens: np.ndarray
    first: int
    bytes: int | None


def prefix_of(tokenizer: Any) -> int | None:
    """Returns the token that stands before a text: the tokenizer's beginning-of-text token or, as in
    lm-evaluation-harness, the end-of-text token of a tokenizer without one."""
    begin = getattr(tokenizer, "bos", None)
    if begin is not None:
        return begin
    alone = np.asarray(tokenizer.encode(""))
    if len(alone) == 1:  # the tokenizer puts it before each text
        return int(alone[0])
    return next(iter(getattr(tokenizer, "stop", ())), None)


def read(text: Any, tokenizer: Any, prefix: int | None, caller: str) -> Text:
    """Returns the tokens of a text, or of a (prompt, continuation) pair."""
    prompt, rest = text if _is_pair(text) else ("" if isinstance(text, str) else (), text)
    if isinstance(prompt, str) != isinstance(rest, str):
        raise TypeError(
            f"{caller}: expected a prompt and a continuation that are both strings or both tokens; "
            f"got {_short(text)}"
        )
    size = len(rest.encode()) if isinstance(rest, str) else None
    if isinstance(rest, str):
        if tokenizer is None:
            raise TypeError(
                f"{caller}: got the string {_short(rest)}; pass tokenizer=, or tokens in its place"
            )
        prompt, rest = _encoded(prompt, rest, tokenizer)
    prompt, rest = (_tokens(part, caller) for part in (prompt, rest))
    if len(prompt):
        return Text(np.concatenate([prompt, rest]), len(prompt), size)
    if prefix is None or (len(rest) and rest[0] == prefix):
        return Text(rest, min(1, len(rest)), size)
    return Text(np.concatenate([np.array([prefix], np.int32), rest]), 1, size)


def _encoded(prompt: str, rest: str, tokenizer: Any) -> tuple:
    """Encodes prompt and continuation as lm-evaluation-harness does: the continuation are the tokens
    of the whole after as many as the prompt has, and spaces at the end of the prompt belong to it."""
    if not prompt:
        return (), encoded(tokenizer, rest)
    start = tokenizer.encode(prompt.rstrip() or prompt)
    return start, tokenizer.encode(prompt + rest)[len(start) :]


def windows(text: Text, context: int | None, stride: int | None) -> Iterator[Item]:
    """Yields the windows of a text, which score each of its tokens once.

    A window has at most `context` tokens as its input. The first scores all that follow them, and
    each further one the next `stride` tokens, with as many tokens before them as fit: the windows
    of `loglikelihood_rolling` in lm-evaluation-harness, where stride = context.
    """
    tokens, done, last = text.tokens, text.first - 1, len(text.tokens) - 1
    while done < last:
        if context is None or last <= context:
            end = last
        elif done == text.first - 1 and done < context:
            end = context
        else:
            end = min(done + stride, last)
        begin = 0 if context is None else max(0, end - context)
        yield Item(tokens[begin:end], tokens[done + 1 : end + 1])
        done = end


def is_tokens(text: Any) -> bool:
    """Whether this is one text as tokens, and not a list of texts."""
    if hasattr(text, "ndim"):
        return text.ndim == 1
    return not isinstance(text, str) and all(map(_is_number, text))


def is_string(text: Any) -> bool:
    """Whether a text, or a pair, is written as strings."""
    return isinstance(text, str) or (_is_pair(text) and all(isinstance(part, str) for part in text))


def _is_pair(text: Any) -> bool:
    return isinstance(text, tuple) and len(text) == 2 and not any(map(_is_number, text))


def _is_number(part: Any) -> bool:
    return isinstance(part, numbers.Number) or getattr(part, "ndim", None) == 0


def _tokens(part: Any, caller: str) -> np.ndarray:
    array = np.asarray(part)
    if array.ndim == 1 and not array.size:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(
            f"{caller}: expected a text as a string or as a sequence of integer tokens; got "
            f"{_short(part)}"
        )
    return array.astype(np.int32)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_tokens(texts: Iterable[np.ndarray], vocab_size: int | None, caller: str) -> None:
    """Raises ValueError if a token is outside of the vocabulary."""
    for number, tokens in enumerate(texts):
        if not len(tokens):
            continue
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            most = "" if vocab_size is None else f" to {vocab_size - 1}"
            raise ValueError(
                f"{caller}: tokens must be from 0{most}; text {number} has "
                f"{low if low < 0 else high}"
            )
