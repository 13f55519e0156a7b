"""Sizes of axes that are expressions of letters, such as `floordiv(t + 1, 2)`: their values, and
their bounds over a range of lengths."""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import export

_GRID = 1 << 18  # the most combinations of lengths at which a size is evaluated to bound it
_FUNCTIONS = ("floordiv", "mod", "max", "min")


def is_open(size: Any) -> bool:
    """Whether a size is an expression of letters, and not a number."""
    return bool(export.is_symbolic_dim(size))


def letters(text: str) -> list[str]:
    """Returns the letters of an expression, in order.

    >>> letters("floordiv(h + 1, 2)*b^2")
    ['h', 'b']
    """
    words = re.findall(r"[A-Za-z_]\w*", text)
    return [word for word in dict.fromkeys(words) if word not in _FUNCTIONS]


def value(size: Any, values: Mapping[str, Any]) -> Any:
    """Returns the value of a size. The values of the letters may be numbers, arrays or traced
    scalars.

    >>> value("floordiv(h + 1, 2)*b^2", {"h": 6, "b": 3})
    27
    """
    if isinstance(size, (int, np.integer)):
        return int(size)
    return _value(_parsed(str(size)), values)


def bounds(size: Any, ranges: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Returns the smallest and the largest value of a size, or safe bounds of them if there are too
    many combinations of lengths. `ranges` is {letter: (shortest length, longest length)}.

    >>> bounds("t - mod(t, 4)", {"t": (9, 15)})
    (8, 12)
    """
    if isinstance(size, (int, np.integer)):
        return int(size), int(size)
    names = letters(str(size))
    lengths = [np.arange(ranges[name][0], ranges[name][1] + 1) for name in names]
    if math.prod(map(len, lengths)) > _GRID:
        each = value(size, {name: _Interval(*ranges[name]) for name in names})
        return each.low, each.high
    grid = np.meshgrid(*lengths, indexing="ij", sparse=True)
    values = np.asarray(value(size, dict(zip(names, grid))))
    return int(values.min()), int(values.max())


@functools.lru_cache(4096)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text.replace("^", "**"), mode="eval").body


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -1 * _value(operand, values)
        case ast.BinOp(left=left, op=operation, right=right):
            return _OPERATORS[type(operation)](_value(left, values), _value(right, values))
        case ast.Call(func=ast.Name(id=name), args=[left, right]):
            return _CALLS[name](_value(left, values), _value(right, values))
    raise ValueError(f"bucket: {ast.unparse(node)} is no size")


def _extreme(plain: Callable, numpy: Callable, traced: Callable) -> Callable:
    def apply(a: Any, b: Any) -> Any:
        if isinstance(a, _Interval) or isinstance(b, _Interval):
            a, b = _interval(a), _interval(b)
            return _Interval(plain(a.low, b.low), plain(a.high, b.high))
        if isinstance(a, int) and isinstance(b, int):
            return plain(a, b)
        if any(isinstance(x, np.ndarray) for x in (a, b)):
            return numpy(a, b)
        return traced(a, b)

    return apply


_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALLS: dict[str, Callable] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": _extreme(max, np.maximum, jnp.maximum),
    "min": _extreme(min, np.minimum, jnp.minimum),
}


class _Interval:
    """All numbers between two."""

    def __init__(self, low: int, high: int):
        self.low, self.high = low, high

    def __add__(self, other: Any) -> _Interval:
        other = _interval(other)
        return _Interval(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Any) -> _Interval:
        return self + _interval(other) * -1

    def __rsub__(self, other: Any) -> _Interval:
        return _interval(other) - self

    def __mul__(self, other: Any) -> _Interval:
        other = _interval(other)
        return _around(a * b for a in (self.low, self.high) for b in (other.low, other.high))

    def __pow__(self, exponent: int) -> _Interval:
        power = self
        for _ in range(exponent - 1):
            power = power * self
        return power

    def __floordiv__(self, other: Any) -> _Interval:
        other = _interval(other)
        if other.low <= 0 <= other.high:
            raise ValueError("bucket: a size is divided by one that may be 0")
        return _around(a // b for a in (self.low, self.high) for b in (other.low, other.high))

    def __rfloordiv__(self, other: Any) -> _Interval:
        return _interval(other) // self

    def __mod__(self, other: Any) -> _Interval:
        other = _interval(other)
        return _Interval(min(0, other.low + 1), max(0, other.high - 1))

    def __rmod__(self, other: Any) -> _Interval:
        return _interval(other) % self

    __radd__, __rmul__ = __add__, __mul__


def _interval(x: Any) -> _Interval:
    return x if isinstance(x, _Interval) else _Interval(x, x)


def _around(values: Iterable[int]) -> _Interval:
    values = list(values)
    return _Interval(min(values), max(values))
