"""Uses a union-find structure to record which axes of the arrays of a program must have equal
sizes."""

from __future__ import annotations

from collections.abc import Iterable

Axis = tuple[int, ...]  # atoms, from major to minor


class Atoms:
    """Records which axes of the arrays of a program must have equal sizes.

    Each axis is represented as a tuple of integer ids (called atoms). If a reshape merges axes of
    sizes 3 and 4 into an axis of size 12, the merged axis is represented by the ids of the two
    axes, from major to minor. If a reshape splits an axis, the method `expand` returns the ids of
    the smaller axes. The method `tie` records that two axes must always have equal sizes. The
    method `freeze` records that the size of an axis cannot change, and why.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._up: list[int] = []
        self._parts: dict[int, Axis] = {}
        self._frozen: dict[int, str] = {}

    def new(self, size: int) -> int:
        self._sizes.append(size)
        self._up.append(len(self._up))
        return len(self._up) - 1

    def axes(self, shape: Iterable[int]) -> tuple[Axis, ...]:
        """Returns new axes with the sizes in `shape`."""
        return tuple((self.new(size),) for size in shape)

    def size(self, atom: int) -> int:
        return self._sizes[atom]

    def root(self, atom: int) -> int:
        while self._up[atom] != atom:
            self._up[atom] = atom = self._up[self._up[atom]]
        return atom

    def expand(self, axis: Axis) -> Axis:
        """Returns the tuple of integer ids that currently represent an axis of an array.

        If a reshape splits the axis, for example from size 12 into sizes 3 and 4, the method
        returns the ids of the smaller axes. Axes of size 1 are omitted from the result.
        """
        found: list[int] = []
        for atom in map(self.root, axis):
            if atom in self._parts:
                found += self.expand(self._parts[atom])
            elif self._sizes[atom] != 1:
                found.append(atom)
        return tuple(found)

    def freeze(self, why: str, *axes: Axis) -> None:
        for axis in axes:
            for atom in self.expand(axis):
                self._frozen.setdefault(atom, why)

    def reason(self, atom: int) -> str | None:
        """Returns the reason why the size of the axis with the id `atom` cannot change, or None if
        it can change."""
        return self._frozen.get(self.root(atom))

    def tie(self, x: Axis, y: Axis) -> None:
        """Records that the axes x and y must always have equal sizes.

        If the axis y has been split by a reshape, for example from size 12 into sizes 3 and 4, the
        axis x is split in the same way, and vice versa. If reshapes split x and y in incompatible
        ways, for example into sizes (2, 3) and (3, 2), the method records that the sizes of the
        resulting axes cannot change.
        """
        left, right = list(self.expand(x)), list(self.expand(y))
        while left and right:
            a, b = left[-1], right[-1]
            m, n = self._sizes[a], self._sizes[b]
            if m == n:
                self._join(left.pop(), right.pop())
            elif n and m % n == 0:
                left[-1:] = self._split(a, n)
            elif m and n % m == 0:
                right[-1:] = self._split(b, m)
            else:
                break
            left, right = list(self.expand(tuple(left))), list(self.expand(tuple(right)))
        self.freeze("reshaped to sizes that are not factors of it", (*left, *right))

    def tie_all(self, x: Iterable[Axis], y: Iterable[Axis]) -> None:
        for a, b in zip(x, y):
            self.tie(a, b)

    def _split(self, atom: int, minor: int) -> Axis:
        parts = self.new(self._sizes[atom] // minor), self.new(minor)
        self._parts[atom] = parts
        if atom in self._frozen:
            self.freeze(self._frozen[atom], parts)
        return parts

    def _join(self, a: int, b: int) -> None:
        """Records that the axes with the ids a and b must always have equal sizes, by representing
        both axes with the smaller of the two ids."""
        a, b = sorted((a, b))
        if a != b:
            self._up[b] = a
            if b in self._frozen:
                self._frozen.setdefault(a, self._frozen[b])
