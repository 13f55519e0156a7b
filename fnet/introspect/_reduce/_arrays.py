"""Writes arrays as code: literals where they are short, and else an entry of repro.npz."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fnet.introspect._reduce._program import is_spread
from fnet.introspect._reduce._spell import dtype, text

_LONGEST = 90  # characters of a literal


def literal(x: Any) -> str | None:
    """Returns an array as code, or None if that would be long."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        data = literal(np.asarray(jax.random.key_data(x)))
        return data and f"jax.random.wrap_key_data({data}, impl={str(jax.random.key_impl(x))!r})"
    x = np.asarray(x)
    kind = dtype(x.dtype)
    if x.ndim == 0:
        return f"{kind}({number(x)})"
    shape = text(x.shape) if x.ndim > 1 else str(x.size)
    first = x.ravel()[:1]
    same = (x.size and (x == first).all()) or (x.size and np.isnan(x.astype(complex)).all())
    if x.size == 0 or same:
        value = x.ravel()[0] if x.size else 0
        if x.size and not _whole(value):
            return f"np.full({shape}, {number(value)}, {kind})"
        for plain, function in ((0, "zeros"), (1, "ones")):
            if value == plain and not np.signbit(np.float64(np.real(value))):
                return f"np.{function}({shape}, {kind})"
        return f"np.full({shape}, {number(value)}, {kind})"
    if _counts(x):
        reshaped = "" if x.ndim == 1 else f".reshape{text(x.shape)}"
        return f"np.arange({x.size}, dtype={kind}){reshaped}"
    if x.size > _LONGEST:
        return None
    values = str([number(v) for v in x.ravel()]) if x.ndim == 1 else str(_nested(x))
    written = f"np.array({values.replace(chr(39), '')}, {kind})"
    return written if len(written) <= _LONGEST else None


def _nested(x: np.ndarray) -> Any:
    return number(x) if x.ndim == 0 else [_nested(each) for each in x]


def _whole(value: Any) -> bool:
    return bool(np.isfinite(np.complex128(value)))


def _counts(x: np.ndarray) -> bool:
    if x.dtype.kind not in "iuf" or x.size < 2:
        return False
    return np.array_equal(x.ravel(), np.arange(x.size).astype(x.dtype))


def number(x: Any) -> str:
    """The shortest text that gives the same number in the dtype of `x`."""
    x = np.asarray(x)
    if x.dtype.kind == "c":
        return repr(complex(x))
    if x.dtype.kind in "biu":
        return repr(x.item())
    value = float(x)
    if not np.isfinite(value):
        return f"{'-' if value < 0 else ''}np.{'nan' if np.isnan(value) else 'inf'}"
    for digits in range(1, 17):
        short = f"{value:.{digits}g}"
        if np.asarray(float(short)).astype(x.dtype) == x:
            break
    whole = abs(value) < 1e4 and float(short).is_integer() and (value or not np.signbit(value))
    return repr(int(float(short))) if whole else f"{float(short)!r}" if not value else short


def listed(x: Any) -> str:
    """Returns an array as code, whatever its length."""
    return f"np.array({np.asarray(x).tolist()}, {dtype(x.dtype)})"


def stored(x: Any) -> tuple[np.ndarray, str]:
    """Returns an array as NumPy can store it, and the code that is appended to restore it."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        raise ValueError("random keys are written as literals")
    x = np.asarray(x)
    if x.dtype.kind == "V" or x.dtype.name not in np.sctypeDict:
        plain = np.dtype(f"u{x.dtype.itemsize}")
        return x.view(plain), f".view({dtype(x.dtype)})"
    return x, ""


def placement(x: Any) -> str | None:
    """The axes of a mesh over which an array is split, as code, or None if it is on one device."""
    return ", ".join(text(axis) for axis in x.sharding.spec) if is_spread(x) else None
