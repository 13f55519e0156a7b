"""A grammar that is followed token by token: the mask of one text."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from fnet.serve._structured._vocabulary import Vocabulary

SLOWEST = 1.0  # seconds for the next tokens of a text, while other texts may wait


class Stuck(ValueError):
    """A text cannot go on as its grammar demands."""


class Walk:
    """The mask of one text.

    Args:
        matcher: llguidance's state of the grammar, which belongs to this text alone.
        vocabulary: that of the grammar.
        vocab_size: the number of tokens of the model, which may have more or fewer.
        stop: tokens that end a text. They are allowed where the text may end.
    """

    def __init__(
        self, matcher: Any, vocabulary: Vocabulary, vocab_size: int, stop: Collection[int]
    ):
        self._matcher, self._vocab_size, self._read = matcher, vocab_size, 0
        self._known = min(vocabulary.size, vocab_size)
        inside = vocabulary.copies < vocab_size
        self._firsts, self._copies = vocabulary.firsts[inside], vocabulary.copies[inside]
        self._stop = np.array([token for token in stop if token < vocab_size], np.int64)

    def allowed(self, tokens: Sequence[int]) -> np.ndarray | None:
        """Returns the tokens that may follow, booleans [vocab_size], or None if the text is complete
        and nothing may follow.

        Raises:
            Stuck: the vocabulary lacks the tokens to go on, or they take too long to find.
        """
        began = time.perf_counter()
        for token in tokens[self._read :]:
            if not self._matcher.consume_token(token):
                raise Stuck(f"the token {token} after {self._read} others breaks the grammar")
            self._read += 1
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        found = np.zeros(self._vocab_size, bool)
        found[: self._known] = np.unpackbits(bits, count=self._known, bitorder="little")
        found[self._copies] = found[self._firsts]
        found[self._stop] = False
        may_end, goes_on = self._matcher.is_accepting(), bool(found.any())
        if not goes_on and not may_end:
            raise Stuck(self._why())
        if time.perf_counter() - began > SLOWEST:
            raise Stuck(
                f"the next tokens took more than {SLOWEST:g} s to find; simplify the grammar"
            )
        if not goes_on:
            return None
        found[self._stop] = may_end
        return found

    def _why(self) -> str:
        if "Complex" in self._matcher.stop_reason():
            return "the grammar is too complex to be followed further; simplify it"
        return f"after {self._read} tokens, no token of the vocabulary continues the grammar"
