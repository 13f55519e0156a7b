"""Remembers what an equation did to its operands, because the layers of an unrolled model repeat
one another."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from fnet import _jax
from fnet.introspect._depends._reach import Reach, alike
from fnet.jaxpr import operation

_SAMPLE = 64  # elements of a large array that its key looks at


class Memory:
    """The results of the equations of one analysis.

    Two equations have the same results if they have the same primitive, options and dtypes and
    operands that are alike. So that operands are quick to compare, each `Reach` is kept once.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[Reach]] = {}
        self._ids: set[int] = set()
        self._results: dict[Hashable, list[Reach]] = {}

    def key(self, eqn: Any, operands: Sequence[Reach]) -> Hashable | None:
        """Identifies an equation and its operands, or is None if its options cannot be compared."""
        kind = operation(eqn)
        if kind is None:
            return None
        names = [None if isinstance(v, _jax.Literal) else v for v in eqn.invars]
        pattern = tuple(names.index(v) for v in names)  # x - x is 0, and x - y is not
        return kind, pattern, *(id(self.kept(each)) for each in operands)

    def get(self, key: Hashable | None) -> list[Reach] | None:
        return None if key is None else self._results.get(key)

    def put(self, key: Hashable | None, results: Sequence[Reach]) -> list[Reach]:
        kept = [self.kept(each) for each in results]
        if key is not None:
            self._results[key] = kept
        return kept

    def kept(self, reach: Reach) -> Reach:
        """The first `Reach` that is like this one."""
        if id(reach) in self._ids:
            return reach
        same = self._kept.setdefault(_digest(reach), [])
        for each in same:
            if alike(each, reach):
                return each
        same.append(reach)
        self._ids.add(id(reach))
        return reach


def _digest(reach: Reach) -> Hashable:
    arrays = reach.low, reach.high, reach.value, reach.known, reach.below
    return reach.shape, *map(_sampled, arrays)


def _sampled(array: np.ndarray | None) -> Hashable:
    if array is None:
        return None
    flat = array.reshape(-1)
    if flat.size > _SAMPLE:
        flat = flat[:: flat.size // _SAMPLE]
    return array.shape, array.dtype.str, flat.tobytes()
