"""The tokens of a tokenizer as llguidance knows them, and the grammars compiled for them."""

from __future__ import annotations

import collections
import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from fnet._util import _missing
from fnet.models.tokenizers._pieces import Pieces, pieces

_KEPT = 64  # compiled grammars
_ALL: weakref.WeakKeyDictionary[Any, Vocabulary] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def library() -> Any:
    """Imports llguidance.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        import llguidance
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            _missing.message("structured output needs", "llguidance")
        ) from None
    return llguidance


class Vocabulary:
    """The tokens of a tokenizer.

    Attributes:
        size: how many there are.
        tokens: the tokenizer of llguidance. Its last token is none of them: an end of the text.
        special: those that are no text.
        names: the names of these.
        firsts, copies: tokens that have the bytes of an earlier one, and that one. llguidance sees
            the first only.
    """

    def __init__(self, tokenizer: Any):
        kept = pieces(tokenizer)
        _check(tokenizer, kept)
        self.size, self.special = len(kept.bytes), kept.special
        self.names = {kept.bytes[token].decode(errors="replace"): token for token in kept.special}
        llguidance = library()
        self.tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Wrapped(kept)))
        first: dict[bytes, int] = {}
        pairs = [
            (first.setdefault(piece, token), token)
            for token, piece in enumerate(kept.bytes)
            if piece and token not in kept.special
        ]
        self.firsts, self.copies = (
            np.array([pair for pair in pairs if pair[0] != pair[1]], np.int64).reshape(-1, 2).T
        )
        self._compiled: collections.OrderedDict[str, Future] = collections.OrderedDict()
        self._lock = threading.Lock()

    def compiled(self, text: str, compile: Callable[[str], Any]) -> Any:
        """Returns `compile(text)`, or what it returned or raised before."""
        with self._lock:
            future = self._compiled.get(text)
            mine = future is None
            if mine:
                future = self._compiled[text] = Future()
            self._compiled.move_to_end(text)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        if mine:
            try:
                future.set_result(compile(text))
            except ValueError as error:
                future.set_exception(error)
            except BaseException as error:  # of the machine, and not of the grammar
                with self._lock:
                    self._compiled.pop(text, None)
                future.set_exception(error)
        return future.result()


def vocabulary(tokenizer: Any) -> Vocabulary:
    """Returns the vocabulary of a tokenizer, which is made once.

    Raises:
        ModuleNotFoundError: llguidance is not installed.
        ValueError: texts are not the bytes of their tokens, as with WordPiece.
    """
    with _LOCK:
        if tokenizer not in _ALL:
            _ALL[tokenizer] = Vocabulary(tokenizer)
        return _ALL[tokenizer]


class _Wrapped:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, kept: Pieces):
        # No text has the byte 255, with which llguidance marks special tokens.
        self.tokens = [b"" if b"\xff" in piece else piece for piece in kept.bytes] + [b"<end>"]
        self.eos_token_id = len(kept.bytes)
        self.special_token_ids = [*sorted(kept.special), self.eos_token_id]

    def __call__(self, text: Any) -> list[int]:
        return []  # asked only for tokens that are forced, which are chosen like the others


def _check(tokenizer: Any, kept: Pieces) -> None:
    """Raises ValueError unless the text of random tokens is that of their bytes."""
    usable = [i for i, piece in enumerate(kept.bytes) if i not in kept.special and _is_text(piece)]
    draw = random.Random(0)
    for _ in range(32):
        tokens = draw.choices(usable, k=8) if usable else []
        expected = b"".join(kept.bytes[token] for token in tokens).decode()
        # SentencePiece removes the space before the first word.
        if tokenizer.decode(tokens) not in (expected, expected.removeprefix(" ")) or not usable:
            raise ValueError(
                f"structured output: {type(tokenizer).__name__} joins tokens in a way of its own: "
                f"{tokens} become {tokenizer.decode(tokens)!r}, and their bytes are {expected!r}; "
                "use a byte-level, SentencePiece, byte or character tokenizer"
            )


def _is_text(piece: bytes) -> bool:
    try:
        return bool(piece.decode())
    except UnicodeDecodeError:
        return False
