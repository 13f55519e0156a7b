"""The constants of a program: what a primitive computes of known elements.

Masks are made of positions, comparisons and selections. Only operations whose result is the same on
every device and in every order of evaluation are computed here; the others give unknown elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fnet.introspect._depends._reach import Reach, container
from fnet.jaxpr import new_dtype

_EXACT = 2**20  # whole numbers up to this size are known
_VANISHES = {"exp2": -1100.0}  # the power of two of this is 0 in every dtype


def fold(eqn: Any, operands: Sequence[Reach]) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns (value, known) of an elementwise equation's result, or None if nothing is known."""
    f = _FOLDS.get(eqn.primitive.name)
    if f is None or any(each.value is None for each in operands) or not operands:
        return None
    values = [each.value for each in operands]
    dtype = container(eqn.outvars[0].aval.dtype)
    if dtype is None:
        return None
    with np.errstate(all="ignore"):
        result = f(eqn, *values)
    if result is None:
        return None
    value, exact = result
    value = np.asarray(value)
    if value.dtype != dtype:
        value = value.astype(dtype)
    known = np.asarray(exact)
    for each in operands:
        known = known & each.known
    return value, np.broadcast_to(known, np.broadcast_shapes(known.shape, value.shape))


def logic(eqn: Any, operands: Sequence[Reach]) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns (value, known) where one known operand decides: False and x, True or x, 0 times a whole
    number, and the remainder of a division by 1."""
    name, dtype = eqn.primitive.name, container(eqn.outvars[0].aval.dtype)
    if name == "rem" and dtype is not None and dtype.kind in "iu":
        by = operands[1]
        if by.value is None or by.known is None:
            return None
        return np.zeros((1,) * by.known.ndim, dtype), by.known & (by.value == 1)
    if name not in ("and", "or", "mul") or dtype is None or dtype.kind not in "biu":
        return None
    full = {"and": 0, "mul": 0, "or": True if dtype.kind == "b" else -1}[name]
    if name == "or" and dtype.kind == "u":
        return None
    decided = None
    for each in operands:
        if each.value is not None:
            here = each.known & (each.value == full)
            decided = here if decided is None else decided | here
    if decided is None or not decided.any():
        return None
    return np.full((1,) * decided.ndim, full, dtype), decided


def vanishes(bound: np.ndarray, name: str) -> np.ndarray:
    """Where the exponential of what is at most `bound` is 0 in every dtype."""
    return bound <= _VANISHES.get(name, -750.0)


def largest_exact(eqn: Any) -> int:
    """The largest whole number up to which the result of an equation has all of them."""
    kind = jnp.finfo(eqn.outvars[0].aval.dtype)
    return min(_EXACT, 2 ** (kind.nmant + 1), int(kind.max))


def _always(f: Callable) -> Callable:
    return lambda eqn, *values: (f(*values), True)


def _whole(f: Callable) -> Callable:
    """Sums, differences and products of whole numbers, or with an infinity."""

    def folded(eqn: Any, a: np.ndarray, b: np.ndarray) -> tuple:
        result = f(a, b)
        if result.dtype.kind != "f":
            return result, True
        most = largest_exact(eqn)
        whole = np.ones((), bool)
        for x in (a, b):
            whole = whole & (np.isinf(x) | ((np.trunc(x) == x) & (np.abs(x) <= most)))
        unit = np.zeros((), bool)
        if f is np.multiply:
            unit = np.isin(a, (-1, 0, 1)) & np.isfinite(b) | np.isin(b, (-1, 0, 1)) & np.isfinite(a)
        elif f in (np.add, np.subtract):
            unit = (a == 0) & np.isfinite(b) | (b == 0) & np.isfinite(a)
        return result, (whole & (np.isinf(result) | (np.abs(result) <= most))) | unit

    return folded


def _converted(eqn: Any, x: np.ndarray) -> tuple | None:
    dtype = container(new_dtype(eqn))
    if dtype is None:
        return None
    value = x.astype(new_dtype(eqn)).astype(dtype)
    back = value.astype(x.dtype)
    exact = (back == x) | ((x != x) & (value != value)) if x.dtype.kind == "f" else back == x
    if x.dtype.kind == "f" and dtype.kind in "iu":
        exact = exact & np.isfinite(x)
    if dtype.kind == "b":
        exact = np.ones((), bool)
    return value, exact


def _divided(eqn: Any, a: np.ndarray, b: np.ndarray) -> tuple | None:
    if a.dtype.kind not in "iu":
        return None
    ok = (b != 0) & (a > -_EXACT) & (a < _EXACT) & (b > -_EXACT) & (b < _EXACT)
    small, by = np.where(ok, a, 0).astype(np.int64), np.where(ok, b, 1).astype(np.int64)
    return np.trunc(small / by).astype(a.dtype), ok


def _remainder(eqn: Any, a: np.ndarray, b: np.ndarray) -> tuple | None:
    if a.dtype.kind not in "iu":
        return None
    ok = b != 0
    return np.fmod(a, np.where(ok, b, 1)), ok


def _exponential(eqn: Any, x: np.ndarray) -> tuple:
    return np.where(x == 0, 1, 0).astype(x.dtype), (x == 0) | np.isneginf(x)


def _clamped(eqn: Any, low: np.ndarray, x: np.ndarray, high: np.ndarray) -> tuple:
    return np.minimum(np.maximum(x, low), high), ~_nan(x)


def _nan(x: np.ndarray) -> np.ndarray:
    return np.isnan(x) if x.dtype.kind == "f" else np.zeros(x.shape, bool)


def _extreme(f: Callable) -> Callable:
    def folded(eqn: Any, a: np.ndarray, b: np.ndarray) -> tuple:
        zeros = (a == 0) & (b == 0) & (np.signbit(a) != np.signbit(b)) if _float(a) else False
        return f(a, b), ~(_nan(a) | _nan(b) | zeros)

    return folded


def _float(x: np.ndarray) -> bool:
    return x.dtype.kind == "f"


def _power(eqn: Any, x: np.ndarray) -> tuple:
    if x.dtype.kind != "f":
        return x * x, True
    return x * x, (np.trunc(x) == x) & (np.abs(x * x) <= largest_exact(eqn))


_FOLDS: dict[str, Callable] = {
    "lt": _always(np.less),
    "le": _always(np.less_equal),
    "gt": _always(np.greater),
    "ge": _always(np.greater_equal),
    "eq": _always(np.equal),
    "ne": _always(np.not_equal),
    "and": _always(np.bitwise_and),
    "or": _always(np.bitwise_or),
    "xor": _always(np.bitwise_xor),
    "not": _always(np.invert),
    "neg": _always(np.negative),
    "abs": _always(np.abs),
    "sign": lambda eqn, x: (np.sign(x), ~_nan(x)),
    "floor": _always(np.floor),
    "ceil": _always(np.ceil),
    "is_finite": lambda eqn, x: (np.isfinite(x), True),
    "stop_gradient": _always(lambda x: x),
    "copy": _always(lambda x: x),
    "add": _whole(np.add),
    "add_any": _whole(np.add),
    "sub": _whole(np.subtract),
    "mul": _whole(np.multiply),
    "max": _extreme(np.maximum),
    "min": _extreme(np.minimum),
    "div": _divided,
    "rem": _remainder,
    "clamp": _clamped,
    "exp": _exponential,
    "square": _power,
    "convert_element_type": _converted,
}
