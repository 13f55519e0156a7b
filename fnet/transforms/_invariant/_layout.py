"""Where the rows of the batch are in an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from fnet.transforms._bucket import _sizes

NAME = "b"  # the symbol of the number of rows
is_open = _sizes.is_open


class Rows(NamedTuple):
    """The axis `axis` of an array is (major, rows, minor): row r has, in each of `major` pieces, the
    `minor` entries from r * minor on."""

    axis: int
    major: int
    minor: int

    @property
    def width(self) -> int:
        """The number of entries of a row along the axis."""
        return self.major * self.minor


def size(n: Any, rows: int) -> int:
    """Returns a size for a number of rows."""
    return _sizes.value(n, {NAME: rows})


def multiple(n: Any) -> int | None:
    """Returns k if a size is k times the number of rows, and None otherwise."""
    if not is_open(n):
        return None
    first, *others = (size(n, rows) for rows in (1, 2, 3, 10))
    return first if others == [2 * first, 3 * first, 10 * first] else None


def open_axes(v: Any) -> list[int]:
    """The axes of a variable whose sizes depend on the number of rows."""
    return [i for i, n in enumerate(getattr(v.aval, "shape", ())) if is_open(n)]


def outermost(v: Any) -> Rows | None:
    """Returns the rows of a variable whose only open axis is a multiple of their number, or None if
    it is none."""
    axes = open_axes(v)
    minor = multiple(v.aval.shape[axes[0]]) if len(axes) == 1 else None
    return None if minor is None else Rows(axes[0], 1, minor)


def stacked(x: Any, at: Rows, count: int) -> Any:
    """Returns the rows of an array, one after another along a new first axis."""
    before, after = x.shape[: at.axis], x.shape[at.axis + 1 :]
    pieces = x.reshape(*before, at.major, count, at.minor, *after)
    return jnp.moveaxis(pieces, at.axis + 1, 0).reshape(count, *before, at.width, *after)


def whole(rows: Any, at: Rows) -> Any:
    """Returns the array with the rows `rows`: the inverse of `stacked`."""
    count, before, after = rows.shape[0], rows.shape[1 : at.axis + 1], rows.shape[at.axis + 2 :]
    pieces = rows.reshape(count, *before, at.major, at.minor, *after)
    return jnp.moveaxis(pieces, 0, at.axis + 1).reshape(*before, count * at.width, *after)


def at_size(shape: Sequence, rows: int) -> tuple[int, ...]:
    return tuple(size(n, rows) for n in shape)
