"""Places texts of different lengths into batches of a few shapes."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fnet.models.evaluation._program import Batch, chunk_of

_ROW = 512  # tokens in a row with several texts; from here on, attention skips other texts
_SMALLEST = 16  # tokens in a row


class Item(NamedTuple):
    """The input of the model [n], and the tokens [m] that follow its last m tokens, m <= n."""

    inputs: np.ndarray
    labels: np.ndarray


class Group(NamedTuple):
    """Items with the same input, which is computed once."""

    inputs: np.ndarray
    numbers: list[int]


def batches(
    items: Sequence[Item], *, packs: bool, context: int | None, batch_tokens: int
) -> Iterator[tuple[Batch, list[int]]]:
    """Yields each batch, and the numbers of its items, in the order of its labels.

    There is one shape for all rows of up to 512 tokens if several texts may share a row, and one
    for each power of two above it; otherwise one for each power of two.

    Args:
        items: the inputs and labels.
        packs: whether the model takes several texts in a row, with segments.
        context: the maximum number of tokens in a row, or None.
        batch_tokens: the maximum number of tokens in a batch, unless a single row has more.
    """
    groups = _groups(items)
    for size, rows in sorted(_rows(groups, packs, context).items(), reverse=True):
        height = max(1, min(batch_tokens // size, _power(len(rows))))
        for start in range(0, len(rows), height):
            yield _batch(items, rows[start : start + height], height, size, packs)


def _groups(items: Sequence[Item]) -> list[Group]:
    """Joins items with equal inputs, such as the answers of one token to a question, while they
    have no more labels than tokens."""
    groups: list[Group] = []
    last: dict[bytes, tuple[Group, int]] = {}  # the last group of an input, and its free labels
    for number, (inputs, labels) in enumerate(items):
        key = inputs.tobytes()
        group, free = last.get(key, (None, 0))
        if group is None or free < len(labels):
            group, free = Group(inputs, []), len(inputs)
            groups.append(group)
        group.numbers.append(number)
        last[key] = group, free - len(labels)
    return groups


def _rows(groups: list[Group], packs: bool, context: int | None) -> dict[int, list[list[Group]]]:
    """Returns {number of tokens: rows}. If `packs`, the longest text comes first, each goes into
    the row with the least room that is enough."""
    total = sum(len(group.inputs) for group in groups)
    least = min(_ROW, _power(total)) if packs else _SMALLEST
    rows: dict[int, list[list[Group]]] = {}
    room: list[tuple[int, int]] = []  # (free tokens, number of the row), sorted
    contents: list[list[Group]] = []
    for group in sorted(groups, key=lambda group: -len(group.inputs)):
        length = len(group.inputs)
        place = bisect.bisect_left(room, (length, -1)) if packs else len(room)
        if place < len(room):
            free, number = room.pop(place)
        else:
            size = max(least, _power(length))
            free = size if context is None else min(size, context)
            number = len(contents)
            contents.append([])
            rows.setdefault(free, []).append(contents[number])
        contents[number].append(group)
        if packs:
            bisect.insort(room, (free - length, number))
    return rows


def _batch(items, rows, height, size, packs) -> tuple[Batch, list[int]]:
    tokens = np.zeros((height, size), np.int32)
    segments = np.zeros((height, size), np.int32) if packs else None
    positions, labels, numbers = [], [], []
    for row, groups in enumerate(rows):
        start = 0
        for segment, group in enumerate(groups, 1):
            stop = start + len(group.inputs)
            tokens[row, start:stop] = group.inputs
            if packs:
                segments[row, start:stop] = segment
            for number in group.numbers:
                end = row * size + stop
                positions.append(np.arange(end - len(items[number].labels), end, dtype=np.int32))
                labels.append(items[number].labels)
            numbers += group.numbers
            start = stop
    count = sum(map(len, labels))
    padding = np.zeros(-(-height * size // (chunk := chunk_of(height, size))) * chunk - count)
    whole = lambda parts: np.concatenate([*parts, padding]).astype(np.int32)
    return Batch(tokens, segments, whole(positions), whole(labels), np.int32(count)), numbers


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()
