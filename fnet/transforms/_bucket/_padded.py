"""Arrays with padding: the true part is in front along each axis; anything may come after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet.transforms._bucket import _sizes


@dataclasses.dataclass(frozen=True)
class Note:
    """What was added to an equation.

    Attributes:
        scope: the path of its named scope.
        primitive: its name.
        reason: what was added, and why.
        line: the line of code that it comes from.
    """

    scope: str
    primitive: str
    reason: str
    line: str


class NoRule(Exception):
    """An equation cannot be computed on padded arrays; the message says why."""


class Lengths:
    """The lengths of a call, as traced numbers, and the sizes of the padded arrays.

    Args:
        values: {letter: its length}.
        ranges: {letter: (shortest length, size of the bucket)}.
    """

    def __init__(self, values: Mapping[str, Any], ranges: Mapping[str, tuple[int, int]]):
        self._values, self._ranges = dict(values), dict(ranges)
        self._bounds: dict[str, int] = {}

    def true(self, size: Any) -> Any:
        """The true value of a size, a number or an int32."""
        if not _sizes.is_open(size):
            return int(size)
        return jnp.asarray(_sizes.value(size, self._values), jnp.int32)

    def padded(self, size: Any) -> int:
        """The size of a padded axis: the largest value of its size."""
        text = str(size)
        if text not in self._bounds:
            self._bounds[text] = max(0, _sizes.bounds(size, self._ranges)[1])
        return self._bounds[text]

    def lowest(self, size: Any) -> int:
        return _sizes.bounds(size, self._ranges)[0]

    def shape(self, sizes: Iterable[Any]) -> tuple[int, ...]:
        return tuple(map(self.padded, sizes))

    def masked(self, x: Any, shape: Sequence, axes: Iterable[int], fill: Any) -> Any:
        """Returns `x` with `fill` after its true part along some axes."""
        inside = self.inside(x.shape, shape, axes)
        return x if inside is None else jnp.where(inside, x, jnp.asarray(fill, x.dtype))

    def inside(self, padded: Sequence[int], shape: Sequence, axes: Iterable[int]) -> Any:
        """Returns which elements are in the true part along some axes, or None for all."""
        found = None
        for axis in axes:
            if _sizes.is_open(shape[axis]):
                position = lax.broadcasted_iota(jnp.int32, tuple(padded), axis)
                here = position < self.true(shape[axis])
                found = here if found is None else found & here
        return found


def open_axes(shape: Sequence) -> list[int]:
    return [axis for axis, size in enumerate(shape) if _sizes.is_open(size)]


def resized(x: Any, axis: int, size: int, fill: Any = 0) -> Any:
    """Returns `x` with another size of an axis, cut or filled at its end."""
    more = size - x.shape[axis]
    if more == 0:
        return x
    if more < 0:
        return lax.slice_in_dim(x, 0, size, axis=axis)
    padding = [(0, 0, 0)] * x.ndim
    padding[axis] = (0, more, 0)
    return lax.pad(x, jnp.asarray(fill, x.dtype), padding)


def window(x: Any, axis: int, start: Any, size: int) -> Any:
    """Returns `size` elements of an axis from `start` on, which may reach beyond its end."""
    if isinstance(start, int):
        return lax.slice_in_dim(
            resized(x, axis, max(start + size, x.shape[axis])), start, start + size, axis=axis
        )
    longer = resized(x, axis, x.shape[axis] + size)
    return lax.dynamic_slice_in_dim(longer, start, size, axis=axis)


def shifted(x: Any, axis: int, offset: Any, size: int, fill: Any) -> Any:
    """Returns y of the given size with y[offset + i] = x[i] along an axis, and `fill` elsewhere.
    The offset may be negative."""
    index = lax.iota(jnp.int32, size) - offset
    inside = (index >= 0) & (index < x.shape[axis])
    taken = jnp.take(x, jnp.clip(index, 0, max(0, x.shape[axis] - 1)), axis=axis, mode="clip")
    shape = [1] * x.ndim
    shape[axis] = size
    return jnp.where(inside.reshape(shape), taken, jnp.asarray(fill, x.dtype))


def lowest(dtype: Any) -> Any:
    """The identity of a maximum."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return False
    if jnp.issubdtype(dtype, jnp.integer):
        return np.asarray(jnp.iinfo(dtype).min, dtype)
    return np.asarray(-np.inf if _has_infinity(dtype) else jnp.finfo(dtype).min, dtype)


def highest(dtype: Any) -> Any:
    """The identity of a minimum."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        return np.asarray(jnp.iinfo(dtype).max, dtype)
    return np.asarray(np.inf if _has_infinity(dtype) else jnp.finfo(dtype).max, dtype)


def _has_infinity(dtype: Any) -> bool:
    with np.errstate(all="ignore"):
        return bool(np.isinf(np.asarray(np.inf, dtype).astype(np.float32)))
