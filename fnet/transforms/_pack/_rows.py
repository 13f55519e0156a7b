"""Rows of packed texts: where each text is, for every size that depends on a text's length.

A size such as `t - 1` or `t + 2` has another value for each text. An axis of that size is an axis
of the packed rows. Where a size is never more than t, each text keeps the places of its tokens;
where it may be, the rows are longer, and the texts move apart.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._padded import NoRule


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the elements of an axis of one size are.

    Attributes:
        text: the number of the text at each place, int32 [rows, length]; any at padding.
        position: the position of each place within its text, int32 [rows, length].
        valid: whether a place holds an element, [rows, length].
        begin, count: the place at which the text at each place begins, and the number of its
            elements, int32 [rows, length].
        start, size: the same for each text, int32 [texts].
        segments: the segments [rows, length], or None if the texts are not at the places of their
            tokens. What is said here twice, by them too, lets `introspect.depends` prove that
            no text reaches another.
    """

    text: Any
    position: Any
    valid: Any
    begin: Any
    count: Any
    start: Any
    size: Any
    segments: Any = None

    @property
    def plain(self) -> bool:
        """Whether the texts are at the places of their tokens."""
        return self.segments is not None

    def first(self, reverse: bool) -> Any:
        """Where a loop over the positions begins a text, or meets padding, [rows, length]."""
        found = ~self.valid | (self.position == (self.count - 1 if reverse else 0))
        if self.segments is None:
            return found
        side = ((0, 0), (0, 1)) if reverse else ((0, 0), (1, 0))
        padded = jnp.pad(self.segments, side)
        return found | (self.segments != (padded[:, 1:] if reverse else padded[:, :-1]))

    def same(self, other: Layout) -> list:
        """Pairs of numbers that are equal for two places of a row if these belong to one text."""
        if not (self.plain and other.plain):
            return [(self.text, other.text)]
        return [(self.begin, other.begin), (self.segments, other.segments)]

    @property
    def length(self) -> int:
        return int(self.text.shape[1])


class Rows:
    """The packed rows of a call.

    Args:
        segments: integers [rows, length], 0 for padding.
        texts: the most texts that the rows may hold.
        time, row: the letters of the length of a text and of the number of texts.

    Attributes:
        count: the number of texts.
        exists: which texts there are, [texts].
        lengths: the number of tokens of each text, int32 [texts].
        row: the row of each text, int32 [texts].
        numbers: the number of each text, int32 [texts].
    """

    def __init__(self, segments: Any, texts: int, time: str, row: str):
        self.time, self.letter, self.texts = time, row, texts
        segments = jnp.asarray(segments).astype(jnp.int32)
        self.shape = rows, length = tuple(map(int, segments.shape))
        valid = segments != 0
        begins = valid & (segments != jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1])
        ordered = begins.astype(jnp.int32).reshape(-1).cumsum(dtype=jnp.int32)
        number = ordered.reshape(rows, length) - 1
        place = lax.broadcasted_iota(jnp.int32, (rows, length), 1)
        # Without gathers by the number of a text, `introspect.depends` follows what is done.
        begin = lax.cummax(jnp.where(begins, place, 0), axis=1)
        after = jnp.pad(segments, ((0, 0), (0, 1)))[:, 1:]
        stop = lax.cummin(jnp.where(segments != after, place, length - 1), axis=1, reverse=True)
        text = jnp.clip(number, 0, texts - 1)
        self.count = ordered[-1]
        self.numbers = lax.iota(jnp.int32, texts)
        self.exists = self.numbers < self.count
        where = jnp.where(begins, number, texts).reshape(-1)
        empty = jnp.zeros((texts,), jnp.int32)
        row_of = lax.broadcasted_iota(jnp.int32, (rows, length), 0)
        self.row = empty.at[where].set(row_of.reshape(-1), mode="drop")
        start = empty.at[where].set(place.reshape(-1), mode="drop")
        self.lengths = empty.at[jnp.where(valid, number, texts).reshape(-1)].add(1, mode="drop")
        count = stop - begin + 1
        base = Layout(text, place - begin, valid, begin, count, start, self.lengths, segments)
        self._layouts: dict[str, Layout] = {time: base}
        self.segments = segments

    def layout(self, size: str) -> Layout:
        """Returns the places of an axis of a size, such as "t - 1"."""
        if size not in self._layouts:
            self._layouts[size] = self._made(size)
        return self._layouts[size]

    def _made(self, size: str) -> Layout:
        base = self._layouts[self.time]
        lengths = np.arange(1, self.shape[1] + 1)
        sizes = np.maximum(np.asarray(_sizes.value(size, {self.time: lengths})), 0)
        sizes = np.broadcast_to(sizes, lengths.shape)
        true = jnp.maximum(jnp.asarray(self.value(size), jnp.int32), 0)
        true = jnp.where(self.exists, jnp.broadcast_to(true, (self.texts,)), 0)
        if (sizes <= lengths).all():
            count = jnp.asarray(_sizes.value(size, {self.time: base.count}), jnp.int32)
            count = jnp.maximum(jnp.broadcast_to(count, base.count.shape), 0)
            valid = base.valid & (base.position < count)
            return dataclasses.replace(base, valid=valid, count=count, size=true)
        longest = _longest(sizes, self.shape[1], self.texts)
        before = jnp.cumsum(true, dtype=jnp.int32) - true
        rows = jnp.where(self.exists, self.row, self.shape[0])
        first = jax.ops.segment_min(before, rows, self.shape[0] + 1)
        start = jnp.where(self.exists, before - first[rows], 0)
        where = jnp.where(true > 0, self.row, self.shape[0]), start
        begun = jnp.zeros((self.shape[0], longest), jnp.int32)
        begun = begun.at[where].set(self.numbers + 1, mode="drop")
        text = jnp.maximum(lax.cummax(begun, axis=1) - 1, 0)
        place = lax.broadcasted_iota(jnp.int32, text.shape, 1)
        position = place - start[text]
        started = lax.cummax(begun, axis=1) > 0
        valid = started & (position >= 0) & (position < true[text])
        return Layout(text, position, valid, start[text], true[text], start, true)

    def value(self, size: Any) -> Any:
        """Returns the value of a size that depends on the length of a text alone, for each text."""
        if self.letter in _sizes.letters(str(size)):
            raise NoRule("it selects some of the texts")
        return _sizes.value(str(size), {self.time: self.lengths})

    def total(self, size: Any) -> Any:
        """Returns the value of a size that depends on the number of texts: of `n*t + 3`, the number
        of all tokens plus 3."""
        at = [_sizes.value(str(size), {self.letter: k, self.time: self.lengths}) for k in range(3)]
        zero, one = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), (self.texts,)) for x in at[:2])
        lengths = np.arange(1, 9)
        numbers = [
            np.asarray(_sizes.value(str(size), {self.letter: k, self.time: lengths}))
            for k in range(3)
        ]
        if self.time not in _sizes.letters(str(size)):
            return jnp.asarray(_sizes.value(str(size), {self.letter: self.count}), jnp.int32)
        if np.ptp(numbers[0]) or (numbers[2] - 2 * numbers[1] + numbers[0]).any():
            raise NoRule(f"the size {size} is no sum over the texts")
        return jnp.where(self.exists, one - zero, 0).sum(dtype=jnp.int32) + zero[0]

    def overflow(self) -> Any:
        """Whether there are more texts than room for them."""
        return self.count > self.texts


class Column:
    """One place of each row, as the body of a scan over the places sees it: a text for each row.

    Attributes: as those of `Rows`, for the text at that place; `exists` is False at padding.
    """

    def __init__(self, outer: Any, exists: Any, lengths: Any, numbers: Any):
        self.time, self.letter = outer.time, outer.letter
        self.exists, self.lengths, self.numbers = exists, lengths, numbers
        self.texts = int(exists.shape[0])

    def layout(self, size: str) -> Layout:
        raise NoRule(f"it needs all positions, [{size}], within a loop over them")

    value = Rows.value

    def total(self, size: Any) -> Any:
        raise NoRule(f"it needs the number of texts, {size}, within a loop over the positions")


def _longest(sizes: np.ndarray, length: int, texts: int) -> int:
    """Returns the largest sum of the sizes of texts that fit into a row."""
    most = length + min(length, texts) * int((sizes - np.arange(1, length + 1)).max())
    if most > 4 * length:
        best = np.zeros(length + 1, int)
        for n in range(1, length + 1):
            best[n] = max(best[n - 1], int((sizes[:n] + best[n - 1 :: -1][:n]).max()))
        most = min(most, int(best[length]))
    return max(1, most)
