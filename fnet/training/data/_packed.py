"""Texts that are packed into rows of one length: batch i is a pure function of (seed, i)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fnet.training.data._arrays import digest_of_rows
from fnet.training.data._windows import int32_tokens


class Packed:
    """Batches of texts that are packed into rows, as a function: `packed(i)` is the batch of step i.

        packed = tr.Packed(texts, length=1024, batch_size=8)
        batch = packed(0)                   # {"tokens": [8, 1024], "segments": [8, 1024], "positions": [8, 1024]}
        logits = model(params, batch["tokens"], segments=batch["segments"])

    A row holds as many whole texts as fit, so hardly any of it is padding, and no text is cut that
    fits into a row. Each epoch draws a new order of the texts, and packs them by best fit: the
    longest first, each into the row with the least room that is enough. The epochs follow one
    another, and every text occurs once in each, so a resumed run continues with the same batches
    without a saved iterator.

    A text of more than `length` tokens is divided into pieces, each of which is a text of its own
    to the model. They overlap by one token, so that each token except a text's first is predicted
    once.

    >>> packed = Packed([[5, 6, 7], [8, 9], [4, 3, 2, 1]], length=5, batch_size=2, shuffle=False)
    >>> for name, array in packed(0).items():
    ...     print(name, array.tolist())
    tokens [[5, 6, 7, 8, 9], [4, 3, 2, 1, 0]]
    segments [[1, 1, 1, 2, 2], [1, 1, 1, 1, 0]]
    positions [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    >>> packed.padding
    0.1

    Args:
      texts: the tokens of each text, a sequence of integer arrays or lists [tokens]. An array may
        be a part of a memory-mapped file (`read_tokens`), of which only the texts of a batch are
        read. Texts without tokens are left out.
      length: the number of tokens in a row, at least 2.
      batch_size: the number of rows in a batch.
      seed: the seed of the orders. Default 0.
      shuffle: False packs the texts in their own order, in every epoch into the same rows. Default
        True.
      vocab_size: the size of the vocabulary. `packed(i)` then checks that the tokens are in [0,
        vocab_size). Default None: no check.

    Attributes:
      rows: the number of rows in an epoch, the same in each.
      padding: the share of padding in the rows of an epoch, such as 0.02.

    Raises:
      ValueError: `texts` contains no tokens, a text is not one row of integers, `length` is less
        than 2, or `batch_size` less than 1. `packed(i)` raises it for a token that does not fit
        into int32 or is outside the vocabulary.

    Source: Ding et al. (2024), Fewer Truncations Improve Language Modeling, section 3.
    """

    def __init__(
        self,
        texts: Sequence[Any],
        *,
        length: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        vocab_size: int | None = None,
    ):
        if length < 2:
            raise ValueError(f"length={length}: a row that predicts a token has at least two")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch needs at least one row")
        self.texts = [_text(text, number) for number, text in enumerate(texts)]
        self.length, self.batch_size = length, batch_size
        self.seed, self.shuffle, self.vocab_size = seed, shuffle, vocab_size
        self._pieces = _pieces(self.texts, length)
        if not self._pieces:
            raise ValueError(f"Packed: the {len(self.texts)} texts have no tokens")
        # Best fit depends on the lengths alone, so every order of the texts gives as many rows.
        self._epoch: tuple[int, list[list[int]]] = (0, self._pack(0))
        self.rows = len(self._epoch[1])
        places = self.rows * length
        tokens = sum(stop - start for _, start, stop in self._pieces)
        self.padding = (places - tokens) / places

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        """Returns the batch of a step, the first of which is 0.

        Returns:
          int32 arrays [batch_size, length]: "tokens" with 0 for padding, "segments" with the number
          of the text of each token, from 1 in each row, and 0 for padding, and "positions" with the
          position of each token in its text.
        """
        shape = self.batch_size, self.length
        batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "positions")}
        for i, number in enumerate(range(step * self.batch_size, (step + 1) * self.batch_size)):
            at = 0
            for segment, piece in enumerate(self._row(number), 1):
                text, start, stop = self._pieces[piece]
                place = i, slice(at, at := at + stop - start)
                tokens = self.texts[text][start:stop]
                batch["tokens"][place] = int32_tokens(tokens, step, self.vocab_size)
                batch["segments"][place] = segment
                batch["positions"][place] = np.arange(stop - start)
        return batch

    def identity(self) -> dict[str, Any]:
        """Returns what identifies the data, as `Batches.identity` does."""
        return {
            "texts": len(self.texts),
            "tokens": sum(map(len, self.texts)),
            "length": self.length,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def digest(self) -> str:
        """Returns a digest of the tokens, as `Batches.digest` does."""
        return digest_of_rows(self.texts)

    def steps(self, epochs: float) -> int:
        """Returns the number of batches in `epochs` epochs, rounded up."""
        return -int(-epochs * self.rows // self.batch_size)

    def _row(self, number: int) -> list[int]:
        """Returns the pieces of a row. The rows of all epochs are numbered one after another."""
        epoch, row = divmod(number, self.rows)
        if self.shuffle and self._epoch[0] != epoch:  # a cache: the value depends on epoch alone
            self._epoch = epoch, self._pack(epoch)
        return self._epoch[1][row]

    def _pack(self, epoch: int) -> list[list[int]]:
        """Returns the pieces of each row of an epoch."""
        sizes = np.array([stop - start for _, start, stop in self._pieces])
        if not self.shuffle:
            rows = best_fit(sizes, self.length)
            return sorted(sorted(row) for row in rows)
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        order = generator.permutation(len(sizes))
        rows = best_fit(sizes[order], self.length)
        return [order[rows[i]].tolist() for i in generator.permutation(len(rows))]


def best_fit(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Packs items into bins by best fit decreasing: the largest items first, each into the bin with
    the least room that is enough.

    Args:
      sizes: the sizes of the items, integers in 1 .. capacity.
      capacity: the size of a bin.

    Returns:
      The indices of the items in each bin.

    Source: Johnson et al. (1974), Worst-case performance bounds for simple one-dimensional packing
    algorithms.

    >>> best_fit(np.array([3, 5, 2, 4]), 7)
    [[1, 2], [3, 0]]
    """
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit n is set if a bin has room for n more
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            chosen = by_room[room].pop()
            rooms ^= 0 if by_room[room] else 1 << room
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        by_room[room - size].append(chosen)
        rooms |= 1 << (room - size)
    return bins


def _text(text: Any, number: int) -> np.ndarray:
    array = np.asarray(text)
    if array.ndim == 1 and not len(array):
        return array.astype(np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"Packed: text {number} is {array.dtype}{list(array.shape)}; expected one row of "
            "integers, its tokens"
        )
    return array


def _pieces(texts: list[np.ndarray], length: int) -> list[tuple[int, int, int]]:
    """Returns (number of the text, start, stop) of each piece of at most `length` tokens. Successive
    pieces of a text overlap by one token."""
    pieces = []
    for number, text in enumerate(texts):
        count = math.ceil((len(text) - 1) / (length - 1)) if len(text) > 1 else len(text)
        starts = itertools.islice(itertools.count(0, length - 1), count)
        pieces += [(number, start, min(start + length, len(text))) for start in starts]
    return pieces
