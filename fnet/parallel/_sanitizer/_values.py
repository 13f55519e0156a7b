"""The values of arguments: small ones whose sums are exact, and hostile ones."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

DRAWS = ("exact", "hostile")
"""The kinds of values. Each case runs with both."""


Types: TypeAlias = Sequence[tuple[tuple[int, ...], str]]


def draw(kind: str, inputs: Types, domain: str = "", cotangents: Types = ()) -> list[Any]:
    """Draws the inputs of a program, and cotangents of its outputs.

    Args:
        kind: "exact": floating-point numbers are multiples of 1/2 between -3 and 3, so that sums of
            a few thousand products are exact. "hostile": beside them are -0, subnormal numbers,
            numbers of 1e4, and many ties.
        inputs, cotangents: (shape, dtype) of each array.
        domain: that of the inputs. "definite": matrices are symmetric and positive definite. "triangular": the first
            array consists of matrices that can be solved. "positive": floating-point numbers are
            positive. "distinct": the numbers of an array differ. Default "": none of these.
    """
    types = [(tuple(shape), dtype) for shape, dtype in inputs]
    random = np.random.default_rng(zlib.crc32(repr((kind, types)).encode()))
    arrays = [_array(random, kind, shape, jax.numpy.dtype(dtype)) for shape, dtype in types]
    within = [_within(x, domain, i) for i, x in enumerate(arrays)]
    draw = lambda shape, dtype: _array(random, kind, tuple(shape), jax.numpy.dtype(dtype))
    return [*within, *(draw(shape, dtype) for shape, dtype in cotangents)]


def _array(random: Any, kind: str, shape: tuple[int, ...], dtype: Any) -> Any:
    if dtype.kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if jax.numpy.issubdtype(dtype, np.integer):
        low = 0 if jax.numpy.issubdtype(dtype, np.unsignedinteger) else -2
        return random.integers(low, 7, shape).astype(dtype)
    x = random.integers(-6, 7, shape) / 2
    if kind == "hostile":
        x = np.where(random.random(shape) < 0.4, _hostile(random, shape), x)
    if jax.numpy.issubdtype(dtype, np.complexfloating):
        x = x + 1j * random.integers(-6, 7, shape) / 2
    return np.asarray(x).astype(dtype)


def _hostile(random: Any, shape: tuple[int, ...]) -> Any:
    return random.choice(np.array([0.0, -0.0, 1e-40, -1e-40, 1e4, -1e4, 1.0, 1.0, -1.0]), shape)


def _within(x: Any, domain: str, i: int) -> Any:
    if not jax.numpy.issubdtype(x.dtype, np.inexact) or not domain:
        return x
    if domain == "positive":
        return (np.abs(np.asarray(x, np.float64)) + 0.5).astype(x.dtype)
    if domain == "distinct":
        order = np.random.default_rng(x.size).permutation(x.size).reshape(x.shape)
        return (order - x.size // 2).astype(x.dtype)
    n = x.shape[-1] if x.ndim else 0
    if x.ndim < 2 or x.shape[-2] != n or (domain == "triangular" and i):
        return x
    bounded = np.clip(np.asarray(x, np.float64), -3, 3)
    ramp = np.diag(np.arange(n, dtype=np.float64))
    if domain == "triangular":
        return (bounded + (4 * n + 1) * np.eye(n)).astype(x.dtype)
    product = bounded @ np.swapaxes(bounded, -1, -2) / math.sqrt(n)
    return (product + (n + 1) * np.eye(n) + ramp).astype(x.dtype)


def shaken(x: Any) -> Any:
    """Returns an array whose floating-point numbers differ in their last bits."""
    if not jax.numpy.issubdtype(x.dtype, np.inexact):
        return x
    signs = np.random.default_rng(x.size).choice(np.array([-1.0, 1.0]), x.shape)
    scale = 1 + signs * float(jax.numpy.finfo(x.dtype).eps)
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    return (np.asarray(x).astype(wide) * scale).astype(x.dtype)
