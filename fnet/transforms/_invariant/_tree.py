"""Adds the values of rows in an order that depends on nothing but the numbers of the rows.

Rows 0 and 1 are added, rows 2 and 3, and so on; then the sums of these pairs in the same way. So the
sum over the first 2^k rows is the same number whatever follows, a device can compute it, and rows
of zeros at the end change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

COMBINE: dict[str, Callable] = {
    "sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
}


def wide(dtype: Any) -> Any:
    """Returns the dtype in which values of a dtype are added."""
    small = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if small else dtype


class Tree:
    """Combines as many values as `count`, which are pushed one after another.

    Its memory holds, for each level, the latest result over 2^level values that has no partner yet:
    as many arrays as `count` has binary digits.
    """

    def __init__(self, ops: Sequence[str], count: int):
        self._combine = [COMBINE[op] for op in ops]
        self._levels, self._count = count.bit_length(), count

    def empty(self, like: Sequence) -> list:
        return [jnp.zeros((self._levels, *x.shape), x.dtype) for x in like]

    def push(self, memory: list, i: Any, values: list) -> list:
        """Returns the memory after value number i."""

        def merges(state: tuple) -> Any:
            return (i >> state[0]) & 1 == 1

        def merge(state: tuple) -> tuple:
            level, values = state
            return level + 1, self._joined(memory, level, values)

        level, values = lax.while_loop(merges, merge, (jnp.int32(0), list(values)))
        return [
            lax.dynamic_update_index_in_dim(store, x, level, 0) for store, x in zip(memory, values)
        ]

    def result(self, memory: list) -> list:
        """Returns the result over all values."""
        lowest, *others = [k for k in range(self._levels) if self._count >> k & 1]
        values = [store[lowest] for store in memory]
        for level in others:
            values = self._joined(memory, level, values)
        return values

    def _joined(self, memory: list, level: Any, values: list) -> list:
        stored = [lax.dynamic_index_in_dim(store, level, keepdims=False) for store in memory]
        return [f(x, y) for f, x, y in zip(self._combine, stored, values)]
