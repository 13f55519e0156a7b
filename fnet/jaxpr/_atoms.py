"""The factors of axes, and a union-find structure of the factors whose sizes must stay equal."""

from __future__ import annotations

from collections.abc import Iterable

Axis = tuple[int, ...]    # atoms, from major to minor


class Atoms:
    """The factors of the axes of a program, called atoms. An axis is a tuple of its factors, from major to minor.

    Axes whose sizes must stay equal are tied: they share their atoms (factors of the axes). An atom (a factor of an
    axis) is split if a reshape splits its axis. An atom (a factor of an axis) whose size cannot change is frozen, with
    a reason.
    """

    def __init__(self):
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
        """Returns the axis as atoms (factors of the axis) that are not split further. Factors of size 1 are omitted."""
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
        """Returns the reason why the size of an atom (a factor of an axis) cannot change, or None if it can."""
        return self._frozen.get(self.root(atom))

    def tie(self, x: Axis, y: Axis) -> None:
        """Ties two axes of the same size, so that they share their atoms (factors). Atoms (factors) of the axes are
        frozen if neither size is a multiple of the other."""
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
        """Joins two factors of axes. After two atoms (factors of axes) are merged, the older atom is used for both."""
        a, b = sorted((a, b))
        if a != b:
            self._up[b] = a
            if b in self._frozen:
                self._frozen.setdefault(a, self._frozen[b])
