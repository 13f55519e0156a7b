"""The axes of an equation, described by letters as in einops."""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Letter = Any  # of any hashable type
Letters = tuple[Letter, ...]  # the factors of an axis, from major to minor
Array = Sequence[Letters]  # the axes of an array


class AxisMap(NamedTuple):
    """Which axes of the operands and the results of an equation are the same axis.

    Each axis is written as letters. An axis of several letters is their product: a reshape of
    [4, 6] to [24] is "a b -> (a b)". Equal letters mean equal indices, or at least equal sizes: the
    axis of a cumulative sum has the same letter before and after it, and is in `fixed`.

    Attributes:
        sizes: {letter: size}.
        operands: for each operand, the letters of each of its axes.
        results: the same for each result.
        fixed: {letter: why its size cannot change}, such as "sorted". A letter that is in no result
            and not in `fixed` is summed over, or its size is 1.
    """

    sizes: Mapping[Letter, int]
    operands: Sequence[Array]
    results: Sequence[Array]
    fixed: Mapping[Letter, str]

    def size(self, axis: Letters) -> int:
        size = 1
        for letter in axis:
            size = size * self.sizes[letter]
        return size

    def shape(self, array: Array) -> tuple[int, ...]:
        return tuple(map(self.size, array))

    def follow(self, operand: int, axis: int, pieces: int = 1) -> list[int | None]:
        """Returns where an axis of an operand is in each result, or None where it is not.

        If a reshape splits the axis, its major part continues the axis. If a reshape joins it with
        others, the joined axis continues the axis only if it is the major part. If the axis lies in
        `pieces` on as many devices, the major part that both have must consist of whole pieces.
        """
        given = self._longer(self.operands[operand][axis])
        return [self._place(given, array, pieces) for array in self.results]

    def _place(self, given: Letters, array: Array, pieces: int) -> int | None:
        for i, axis in enumerate(array):
            pairs = zip(given, self._longer(axis))
            shared = tuple(
                a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
            )
            if shared and self.size(shared) % pieces == 0:
                return i
        return None

    def _longer(self, axis: Letters) -> Letters:
        """Returns the letters of an axis that are longer than 1, or all if none is."""
        return tuple(letter for letter in axis if self.sizes[letter] != 1) or axis

    def __str__(self) -> str:
        """Writes the map as einops does, with letters of fixed sizes in upper case, 1 for an axis
        without letters and () for a scalar."""
        names = iter((*string.ascii_lowercase, *(f"a{i}" for i in range(1000))))
        known: dict[Letter, str] = {}

        def written(axis: Letters) -> str:
            for letter in axis:
                if letter not in known:
                    name = next(names)
                    known[letter] = name.upper() if letter in self.fixed else name
            text = " ".join(known[letter] for letter in axis) or "1"
            return f"({text})" if len(axis) > 1 else text

        arrays = lambda side: ", ".join(" ".join(map(written, array)) or "()" for array in side)
        return f"{arrays(self.operands)} -> {arrays(self.results)}"


class Drawing:
    """Collects the letters of an `AxisMap` while a rule describes the axes of an equation."""

    def __init__(self) -> None:
        self.sizes: dict[Letter, int] = {}
        self.fixed: dict[Letter, str] = {}

    def letter(self, size: int, why: str | None = None) -> int:
        """Returns a new letter. `why` states why its size cannot change."""
        letter = len(self.sizes)
        self.sizes[letter] = size
        if why:
            self.fixed[letter] = why
        return letter

    def axis(self, size: int, why: str | None = None) -> Letters:
        return (self.letter(size, why),)

    def array(self, v: Any, why: str | None = None) -> Array:
        """Returns new axes for a variable of a jaxpr, of one letter each."""
        return tuple(self.axis(size, why) for size in getattr(v.aval, "shape", ()))

    def arrays(self, variables: Sequence[Any], why: str | None = None) -> list[Array]:
        return [self.array(v, why) for v in variables]

    def fix(self, why: str, *axes: Letters) -> None:
        """Records that the sizes of axes cannot change."""
        for axis in axes:
            for letter in axis:
                self.fixed.setdefault(letter, why)
