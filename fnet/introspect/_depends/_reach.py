"""For each element of a value, the positions of an input's axis that it can depend on.

One axis of the inputs is followed at a time, of size n. The positions that an element depends on
are enclosed in an interval, low to high, so a value of shape [batch, time] has two integer arrays of
that shape. Both are stored with size 1 along each axis along which they do not vary, which makes
them small: an activation [8, 1024, 768] that depends on its own example alone has
low = high = [[[0]], [[1]], ..., [[7]]].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FAR = np.iinfo(np.int32).max  # the low end of an empty interval; its high end is -1
_UNBOUNDED = np.float64(np.inf)


@dataclasses.dataclass(frozen=True, eq=False)
class Reach:
    """What is known about each element of a value.

    Attributes:
        shape: the shape of the value.
        low, high: the first and the last position that an element can depend on, with size 1 along
            axes along which they do not vary. The interval is empty if low > high.
        value: the elements that are constants of the program, or None if none is known. A known
            element depends on nothing.
        known: which elements of `value` are known.
        below: an upper bound of each element, or None. It is used for masks that add a large
            negative number.
    """

    shape: tuple[int, ...]
    low: np.ndarray
    high: np.ndarray
    value: np.ndarray | None = None
    known: np.ndarray | None = None
    below: np.ndarray | None = None

    def mapped(self, shape: Sequence[int], f: Callable[[np.ndarray, Any], np.ndarray]) -> Reach:
        """Moves the elements. `f(array, fill)` moves an array; `fill` is for elements that it adds,
        which depend on nothing."""
        value = known = below = None
        if self.value is not None and self.known is not None:
            value = f(self.value, np.zeros((), self.value.dtype)[()])
            known = f(self.known, False)
        if self.below is not None:
            below = f(self.below, _UNBOUNDED)
        return made(shape, f(self.low, FAR), f(self.high, -1), value, known, below)

    def forgotten(self) -> Reach:
        """The same intervals without known values and bounds."""
        if self.value is None and self.below is None:
            return self
        return Reach(self.shape, self.low, self.high)

    def all_known(self) -> bool:
        return self.known is not None and bool(self.known.all())

    def bound(self) -> np.ndarray | None:
        """An upper bound of each element, from what is known of it."""
        bounds = [] if self.below is None else [self.below]
        if self.value is not None and self.known is not None and self.value.dtype.kind == "f":
            bounds.append(np.where(self.known, self.value.astype(np.float64), _UNBOUNDED))
        bounds = [np.where(np.isnan(each), _UNBOUNDED, each) for each in bounds]
        return np.minimum(*bounds) if len(bounds) == 2 else bounds[0] if bounds else None


def made(
    shape: Sequence[int],
    low: np.ndarray,
    high: np.ndarray,
    value: np.ndarray | None = None,
    known: np.ndarray | None = None,
    below: np.ndarray | None = None,
) -> Reach:
    """Returns a `Reach` whose arrays are as small as possible."""
    shape = tuple(shape)
    if known is not None and value is not None and value.dtype.kind == "f":
        # CPUs flush subnormal numbers in some operations and not in others
        known = known & ~((value != 0) & (np.abs(value) < np.finfo(value.dtype).tiny))
    if known is not None and not known.any():
        value = known = None
    if value is not None and known is not None:
        # a known element depends on nothing
        low, high = np.where(known, FAR, low), np.where(known, -1, high)
        value, known = small(value, shape), small(known, shape)
    if below is not None:
        # a number near 0 could be rounded to 0, and then is no bound for its multiples
        below = np.where(below <= -1, below, _UNBOUNDED)
    if below is not None and np.isposinf(below).all():
        below = None
    if below is not None:
        below = small(below, shape)
    return Reach(shape, small(low, shape), small(high, shape), value, known, below)


def small(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Cuts each axis along which an array does not vary to size 1."""
    array = np.asarray(array)
    array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    if array.size == 1:
        return array
    for axis in range(array.ndim):
        if array.shape[axis] <= 1:
            continue
        first = array.take([0], axis)
        second = array.take([1], axis)
        if _equal(first, second) and _equal(array, np.broadcast_to(first, array.shape)):
            array = first
    return array


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    if a.dtype.kind != "f":
        return np.array_equal(a, b)
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a), np.signbit(b))


def nothing(shape: Sequence[int]) -> Reach:
    """A value that depends on no position, and is unknown."""
    one = (1,) * len(shape)
    return Reach(tuple(shape), np.full(one, FAR, np.int32), np.full(one, -1, np.int32))


def source(shape: Sequence[int], axis: int) -> Reach:
    """An input: each element depends on its own position along an axis."""
    size = [1] * len(shape)
    size[axis] = shape[axis]
    positions = np.arange(shape[axis], dtype=np.int32).reshape(size)
    return made(shape, positions, positions)


def container(dtype: Any) -> np.dtype | None:
    """The dtype in which known values of a dtype are stored: float32 for floating-point dtypes that
    NumPy lacks, and None for keys, complex numbers, numbers of 4 bits, powers of two (e8m0) and
    others."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return None
    if str(dtype).startswith(("float4", "float6")) or "e8m0" in str(dtype):
        return None
    if jnp.issubdtype(dtype, jnp.floating) and str(dtype) not in ("float16", "float32", "float64"):
        return np.dtype(np.float32)
    return np.dtype(dtype) if np.dtype(dtype).kind in "biuf" else None


def constant(array: Any) -> Reach:
    """A known value. Large constants stay unknown."""
    shape = tuple(np.shape(array))
    dtype = container(array.dtype if hasattr(array, "dtype") else np.asarray(array).dtype)
    if dtype is None or math.prod(shape) > MOST:
        return nothing(shape)
    value = np.asarray(array).astype(dtype)
    one = (1,) * len(shape)
    known = np.ones(one, bool)
    return made(shape, nothing(shape).low, nothing(shape).high, value, known)


MOST = 2**24
"""The largest number of elements of a constant that is known."""


def union(shape: Sequence[int], reaches: Sequence[Reach]) -> Reach:
    """The elements of the result depend on the elements of all operands at the same position.
    Operands of size 1 along an axis are broadcast, and scalars too."""
    low, high = nothing(shape).low, nothing(shape).high
    for each in reaches:
        low, high = (
            np.minimum(low, _ranked(each.low, shape)),
            np.maximum(high, _ranked(each.high, shape)),
        )
    return made(shape, low, high)


def _ranked(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    return array.reshape((1,) * (len(shape) - array.ndim) + array.shape)


def over(reach: Reach, axes: Sequence[int]) -> Reach:
    """Each element depends on all elements along some axes. The shape stays."""
    axes = tuple(axes)
    if not axes:
        return reach.forgotten()
    low = reach.low.min(axes, keepdims=True, initial=FAR)
    high = reach.high.max(axes, keepdims=True, initial=-1)
    return Reach(reach.shape, low, high)


def everything(reaches: Sequence[Reach]) -> tuple[int, int]:
    """The interval that contains all positions on which any element of some values depends."""
    low = min((int(each.low.min(initial=FAR)) for each in reaches), default=FAR)
    high = max((int(each.high.max(initial=-1)) for each in reaches), default=-1)
    return low, high


def also(reach: Reach, interval: tuple[int, int]) -> Reach:
    """What depends on an interval, too."""
    first, last = interval
    if first > last:
        return reach
    low, high = np.minimum(reach.low, first), np.maximum(reach.high, last)
    return made(reach.shape, low.astype(np.int32), high.astype(np.int32), below=reach.below)


def uniform(shape: Sequence[int], low: int, high: int) -> Reach:
    one = (1,) * len(shape)
    return Reach(tuple(shape), np.full(one, low, np.int32), np.full(one, high, np.int32))


def alike(a: Reach, b: Reach) -> bool:
    """Whether two reaches are equal in all that they say."""

    def equal(x: np.ndarray | None, y: np.ndarray | None) -> bool:
        if x is None or y is None:
            return x is y
        return x.shape == y.shape and x.dtype == y.dtype and _equal(x, y)

    pairs = zip(
        (a.low, a.high, a.value, a.known, a.below), (b.low, b.high, b.value, b.known, b.below)
    )
    return a.shape == b.shape and all(equal(x, y) for x, y in pairs)


def join(a: Reach, b: Reach) -> Reach:
    """What holds for a value that is one or the other."""
    if alike(a, b):
        return a
    low, high = np.minimum(a.low, b.low), np.maximum(a.high, b.high)
    value = known = below = None
    if a.value is not None and b.value is not None and a.value.dtype == b.value.dtype:
        with np.errstate(invalid="ignore"):
            same = (a.value == b.value) | ((a.value != a.value) & (b.value != b.value))
        if a.value.dtype.kind == "f":
            same = same & (np.signbit(a.value) == np.signbit(b.value))
        value, known = a.value, a.known & b.known & same  # type: ignore[operator]
        value, known = np.broadcast_arrays(value, known)
        # an element that is known in only one of them depends on which one it is
    one, other = a.bound(), b.bound()
    if one is not None and other is not None:
        below = np.maximum(one, other)
    return made(a.shape, low, high, value, known, below)


def widened(a: Reach) -> Reach:
    """A larger value at which a loop's analysis ends sooner: every element depends on all that any
    element depends on."""
    return uniform(a.shape, *everything([a]))


def reshaped(array: np.ndarray, before: Sequence[int], after: Sequence[int]) -> np.ndarray:
    """Reshapes an array that has size 1 along axes along which it does not vary, and expands only
    the axes that must be."""
    out: list[int] = []
    expand: list[int] = []
    i = j = 0
    while i < len(before) or j < len(after):
        i0, j0 = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while math.prod(before[i0:i]) != math.prod(after[j0:j]):
            if math.prod(before[i0:i]) < math.prod(after[j0:j]):
                i += 1
            else:
                j += 1
        if i == len(before):
            j = len(after)  # sizes of 1 at the end
        if j == len(after):
            i = len(before)
        constant = all(array.shape[k] == 1 for k in range(i0, i))
        expand += [1] * (i - i0) if constant else list(before[i0:i])
        out += [1] * (j - j0) if constant else list(after[j0:j])
    return np.broadcast_to(array, expand).reshape(out)
