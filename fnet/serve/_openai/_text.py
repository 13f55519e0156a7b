"""The text of tokens that arrive one by one, up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 6  # tokens before the text, on which the space before its first word may depend
# An incomplete character has become U+FFFD, one or one for each byte, and so has each byte that is
# no text. A model that writes more of them in a row writes garbage, for which nobody waits.
_LONGEST = 64


class Text:
    """The text of a generated sequence, of which each part is released once.

        text = Text(tokenizer, prompt, stop=("\\n",))
        for token in tokens:
            print(text.add(token), end="")
            if text.stopped:
                break
        print(text.end(), end="")

    What may be the start of a stop string, or of a character whose bytes are not complete, is held
    back until the tokens after it tell. The text ends before the stop string that is completed
    first, wherever tokens divide it.

    Attributes:
        starts: where in the text each token begins, a list of numbers of characters. A token in the
            middle of a character begins where the character does.
        released: the length of the text that was released.
        stopped: whether a stop string has ended the text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = ()):
        self._decode, self._stop = tokenizer.decode, tuple(stop)
        self.starts: list[int] = []
        self.released, self.stopped = 0, False
        # Decoding begins at `_window`, so that a token costs the same however long the text is.
        # The tokens before `_read` have become text.
        self._tokens = [int(token) for token in prompt[-_CONTEXT:]]
        self._window, self._read = 0, len(self._tokens)
        self._before = self._decode(self._tokens)  # the text of _tokens[_window:_read]
        self._held = ""  # complete characters that are not released

    def add(self, token: int) -> str:
        """Adds a token, and returns the text that it releases."""
        self.starts.append(self.released + len(self._held))
        self._tokens.append(int(token))
        self._held += self._complete()
        return self._release(self._safe())

    def end(self) -> str:
        """Returns the rest of the text, with U+FFFD for an incomplete character."""
        if self.stopped:
            return ""
        self._held += self._pending()
        self._tokens, self._window, self._read, self._before = [], 0, 0, ""
        return self._release(len(self._held))

    def _pending(self) -> str:
        """Returns the text of the tokens from `_read` on."""
        return self._decode(self._tokens[self._window :])[len(self._before) :]

    def _complete(self) -> str:
        pending = self._pending()
        tail = len(pending) - len(pending.rstrip("\ufffd"))
        if not pending or 0 < tail <= _LONGEST:
            return ""
        self._window, self._read = self._read, len(self._tokens)
        self._before = self._decode(self._tokens[self._window :])
        return pending

    def _safe(self) -> int:
        """Returns how many of the held characters are no start of a stop string."""
        ends = [(at + len(each), at) for each in self._stop if (at := self._held.find(each)) >= 0]
        if ends:
            self.stopped = True
            return min(ends)[1]
        longest = max((overlap(self._held, each) for each in self._stop), default=0)
        return len(self._held) - longest

    def _release(self, count: int) -> str:
        released, self._held = self._held[:count], self._held[count:]
        self.released += len(released)
        return released


def overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of a text are the start of a stop string."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
