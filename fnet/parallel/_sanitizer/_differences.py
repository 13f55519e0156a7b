"""Whether a result of several devices equals that of one device, up to rounding."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

_ROUNDING = {
    "float64": 1e-9,
    "complex128": 1e-9,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 1e-2,
}
_COARSE = 5e-2


class Difference(NamedTuple):
    """How a result differs.

    Attributes:
        error: the largest difference, relative to the largest element. Infinite if only one of the
            two is finite.
        factor: by how much the result is too large, if this is the same for each element.
        count, size: how many elements differ, of how many.
        index, many, one: an element that differs, its value on several devices, and on one.
    """

    error: float
    factor: float | None
    count: int
    size: int
    index: tuple[int, ...]
    many: str
    one: str


def difference(many: Any, one: Any, noise: float = 0.0) -> Difference | None:
    """Compares two arrays. Returns None if they are equal up to rounding.

    Args:
        noise: the largest change of the result on one device if the last bits of the arguments
            change. Sixteen times as much is rounding.
    """
    many, one = np.asarray(many), np.asarray(one)
    dtype = str(one.dtype)
    if many.shape != one.shape:
        return Difference(np.inf, None, one.size, one.size, (), str(many.shape), str(one.shape))
    if not one.size:
        return None
    if not jax.numpy.issubdtype(one.dtype, np.inexact):
        apart, scale = np.abs(many.astype(np.float64) - one.astype(np.float64)), 1.0
        wrong = many != one
    else:
        wide = np.complex128 if np.iscomplexobj(one) else np.float64
        many, one = many.astype(wide), one.astype(wide)
        finite = np.isfinite(one)
        scale = float(np.max(np.abs(one[finite]), initial=0.0)) or 1.0
        apart = _apart(many, one)
        wrong = apart > max(_ROUNDING.get(dtype, _COARSE) * scale, 16 * noise)
    if not wrong.any():
        return None
    worst = np.unravel_index(int(np.argmax(np.where(wrong, apart, -1.0))), one.shape)
    return Difference(
        float(apart[worst]) / scale,
        _factor(many, one),
        int(wrong.sum()),
        one.size,
        tuple(map(int, worst)),
        f"{many[worst]:.6g}" if many.dtype != bool else str(many[worst]),
        f"{one[worst]:.6g}" if one.dtype != bool else str(one[worst]),
    )


def _apart(many: Any, one: Any) -> Any:
    """The distance of each pair of elements: 0 if both are NaN, or the same infinity."""
    with np.errstate(all="ignore"):
        apart = np.abs(many - one)
    same = (many == one) | (np.isnan(many) & np.isnan(one))
    return np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))


def _factor(many: Any, one: Any) -> float | None:
    if one.dtype == bool or np.iscomplexobj(one):
        return None
    many, one = many.astype(np.float64), one.astype(np.float64)
    live = one != 0
    if live.sum() < 2 or many[~live].any():
        return None
    ratios = many[live] / one[live]
    middle = float(np.median(ratios))
    if not np.isfinite(ratios).all() or np.abs(ratios - middle).max() > 1e-4 * abs(middle):
        return None
    return round(middle, 3)
