"""Operations whose operators in LiteRT compute other values than JAX: compositions of other
operators that compute the same, and descriptions of the differences that remain.

The operators of LiteRT's interpreter approximate logarithms and exponentials near zero and for
large numbers, ignore NaN in a maximum, and shift integers modulo the number of their bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet.export import _evaluate

# What remains different for float32, where a composition would replace an operator that every
# network contains by several ones, and prevent the fusion of softmax. {operation: difference}
DIFFERS = {
    **dict.fromkeys(
        (
            "max",
            "min",
            "clamp",
            "reduce_max",
            "reduce_min",
            "window_max",
            "window_min",
            "cummax",
            "cummin",
        ),
        "NaN is ignored, and the sign of a zero may differ",
    ),
    "exp": "exp(NaN) is 0, and results above 2.4e38 are infinite",
    "logistic": "results below 1.2e-38 differ",
    "tanh": "results below 1.2e-38 are 0",
    "erf": "results below 1.2e-38 are 0",
    **dict.fromkeys(
        ("neg", "expm1", "log1p", "asinh", "cbrt", "rem"), "numbers below 1.2e-38 are taken for 0"
    ),
    **dict.fromkeys(
        ("sin", "cos", "tan"), "digits are lost beyond 1000, and the result beyond 1e9 is NaN"
    ),
    "top_k": "0.0 and -0.0 are equal",
    "lgamma": "the absolute error near 1 and 2 is 1e-6",
    **dict.fromkeys(
        ("reduce_sum", "reduce_prod", "cumsum", "cumprod", "window_sum"),
        "elements are combined in another order, so other sums overflow",
    ),
    "convolution": "a result beyond 3.4e38 is 3.4e38 instead of infinite",
    "-0.0": "an array of this constant alone becomes 0.0",
}


class Unsupported(NotImplementedError):
    """Raised for a program that LiteRT does not support."""


def _number(x, value):
    return np.asarray(value, x.dtype)


def _choose(condition, x, y):
    """Selects x where the condition is true. Each of them may be a number."""
    shape = np.broadcast_shapes(*map(np.shape, (condition, x, y)))
    dtype = next(z.dtype for z in (x, y) if hasattr(z, "dtype"))
    x, y = (jnp.broadcast_to(jnp.asarray(z, dtype), shape) for z in (x, y))
    return lax.select(jnp.broadcast_to(condition, shape), x, y)


def _polynomial(z, *coefficients):
    """Returns c[0] + z*(c[1] + z*(c[2] + ...))."""
    total = _number(z, coefficients[-1])
    for c in coefficients[-2::-1]:
        total = z * total + _number(z, c)
    return total


def _log_near_1(f):
    """log(1 + f) for abs(f) < 0.3."""
    s = 2 * f / (f + 2)
    return s * _polynomial(s * s / 4, 1, 1 / 3, 1 / 5, 1 / 7, 1 / 9, 1 / 11)


def _log(x):
    large = x > 1e30
    y = lax.log(_choose(large, x * 2.0**-64, x)) + _choose(large, _number(x, 64 * math.log(2)), 0.0)
    y = _choose(jnp.abs(x - 1) < 0.25, _log_near_1(x - 1), y)
    return _choose((x != x) | (x < 0), np.nan, _choose(x == np.inf, np.inf, y))


def _log1p(x):
    return _choose(jnp.abs(x) < 0.25, _log_near_1(x), _log(x + 1))


def _exp(x):
    half = lax.exp(x * 0.5)
    return _choose(x != x, x, _choose(x > 88, half * half, lax.exp(x)))


def _expm1(x):
    small = x * _polynomial(x, *(1 / math.factorial(n) for n in range(1, 11)))
    return _choose(jnp.abs(x) < 0.5, small, _exp(x) - 1)


def _sinh(x):
    small = x * _polynomial(x * x, *(1 / math.factorial(n) for n in (1, 3, 5, 7, 9, 11)))
    return _choose(x != x, x, _choose(jnp.abs(x) < 1, small, lax.sinh(x)))


def _cosh(x):
    return _choose(x != x, x, lax.cosh(x))


def _with_sign(x, magnitude):
    """Returns the magnitude with the sign of x, and x where it is zero."""
    return _choose(x == 0, x, _choose(x < 0, magnitude * -1, magnitude))


def _asinh(x):
    size = jnp.abs(x)
    large = size > 1e9
    small = _choose(large, _number(x, 1), size)
    y = _log1p(small * (1 + small / (_sqrt(small * small + 1) + 1)))
    return _with_sign(x, _choose(large, _log(size) + math.log(2), y))


def _acosh(x):
    y = _choose(x > 1e9, _log(x) + math.log(2), lax.acosh(x))
    return _choose((x != x) | (x < 1), np.nan, y)


def _atanh(x):
    size = jnp.abs(x)
    y = 0.5 * _log1p(2 * size / (1 - size))
    y = _choose(size == 1, np.inf, _choose((size > 1) | (x != x), np.nan, y))
    return _choose(x != x, x, _with_sign(x, y))


def _sqrt(x):
    large = (x > 1e30) & (x < np.inf)
    return lax.sqrt(_choose(large, x * 2.0**-40, x)) * _choose(large, _number(x, 2.0**20), 1.0)


def _rsqrt(x):
    return _number(x, 1) / _sqrt(x)


def _cbrt(x):
    size = jnp.abs(x)
    ordinary = (size > 0) & (size < np.inf)
    size = _choose(ordinary, size, _number(x, 1))
    y = lax.pow(size, _number(x, 1 / 3) * jnp.ones_like(size))
    y = y - (y - size / (y * y)) / 3  # one step of Newton
    return _choose(ordinary, _with_sign(x, y), x)


def _rem(x, y):
    """LiteRT has only the remainder of the division that rounds down."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        divisor = _divisor(y)
        return _choose(y == 0, x, x - lax.div(x, divisor) * divisor)  # 0 for -1 as well
    size, divisor = jnp.abs(x), jnp.abs(y)
    valid = (size < np.inf) & (divisor > 0)
    inner = lax.rem(_choose(valid, size, 0.0), _choose(valid & (divisor < np.inf), divisor, 1.0))
    r = _choose(divisor == np.inf, size, inner)
    return _choose(valid, _with_sign(x, r), np.nan)


def _div(x, y):
    """Division of integers by zero ends LiteRT's interpreter, and its -2^31 / -1 is 2^31 - 1."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return lax.div(x, y)
    signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
    quotient = lax.div(x, _divisor(y))
    if signed:
        quotient = _choose(y == -1, _number(x, 0) - x, quotient)
    return _choose(y == 0, _number(x, -1 if signed else np.iinfo(x.dtype).max), quotient)


def _divisor(y):
    """The divisor of integers, and 1 in place of 0 and -1."""
    special = (y == 0) | (y == -1) if jnp.issubdtype(y.dtype, jnp.signedinteger) else y == 0
    return _choose(special, _number(y, 1), y)


def _neg(x):
    return x * -1 if jnp.issubdtype(x.dtype, jnp.floating) else lax.neg(x)


def _sign(x):
    y = lax.sign(x)
    return _choose(x == 0, x, y) if jnp.issubdtype(x.dtype, jnp.floating) else y


def _total_lt(x, y):
    """Whether x < y in the total order, in which -0.0 is less than 0.0 and NaN larger than all other
    numbers. The sign of a NaN is not seen; `jnp.searchsorted` removes it before it compares."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x < y
    zeros = (x == y) & (_number(x, 1) / x < _number(y, 1) / y)
    return (x < y) | (x == x) & (y != y) | zeros


def _clamp(low, x, high):
    low, high = (jnp.broadcast_to(limit, x.shape) for limit in (low, high))
    return lax.min(lax.max(x, low), high)


def _shift_right_logical(x, n):
    """LiteRT shifts negative numbers arithmetically, so the first bit of the shift is computed by
    an addition."""
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return lax.shift_right_logical(x, n)
    one = jnp.ones_like(x)
    half = lax.shift_right_arithmetic(x, one) + _number(x, np.iinfo(x.dtype).min)
    negative = (x < 0) & (n > 0)
    return _choose(
        negative,
        lax.shift_right_arithmetic(half, _choose(negative, n - 1, 0)),
        lax.shift_right_arithmetic(x, n),
    )


def _shifted(shift: Callable, beyond: Callable) -> Callable:
    def shifted(x, n):
        inside = (n >= 0) & (n < 8 * x.dtype.itemsize)
        return _choose(inside, shift(x, _choose(inside, n, 0)), beyond(x))

    return shifted


def _each(function: Callable) -> Callable:
    return lambda run, options, types, *arrays: function(*map(jnp.asarray, arrays))


def _floats(name: str, function: Callable) -> Callable:
    """Evaluates the composition for float32, and JAX's primitive for other dtypes."""

    def operation(run, options, types, *arrays):
        if arrays[0].dtype == jnp.float32:
            return function(*map(jnp.asarray, arrays))
        return _evaluate.OPERATIONS[name](run, options, types, *arrays)

    return operation


def _convert(run, options, types, x):
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(
        jnp.dtype(types[0][0]), jnp.integer
    ):
        x = jnp.asarray(x)
        x = _choose(x != x, 0.0, x)
    return _evaluate.OPERATIONS["convert"](run, options, types, x)


def _combined(name: str) -> Callable:
    """LiteRT does not combine unsigned integers over a window or an axis. Their sums and products
    have the bits of the signed ones."""

    def combined(run, options, types, x, *start):
        combine = _evaluate.OPERATIONS[name]
        if x.dtype != jnp.uint32:
            return combine(run, options, types, x, *start)
        signed = [jnp.asarray(each).astype(jnp.int32) for each in (x, *start)]
        return combine(run, options, [("int32", types[0][1])], *signed).astype(jnp.uint32)

    return combined


def _pad(run, options, types, x, value):
    """LiteRT pads with 0.0 instead of a computed -0.0, and its converter ends the process if it
    crops a constant to nothing."""
    padded = functools.partial(_evaluate.OPERATIONS["pad"], run, options)
    with jax.ensure_compile_time_eval():
        inside = np.asarray(
            padded([("bool", types[0][1])], np.ones(x.shape, np.bool_), np.zeros((), np.bool_))
        )
    if not inside.any():
        return jnp.broadcast_to(value, inside.shape)
    y = padded(types, x, value)
    if y.dtype != jnp.float32 or not isinstance(value, jax.core.Tracer):
        return y
    return _choose(inside, y, jnp.broadcast_to(value, y.shape))


def _position(name: str) -> Callable:
    """The first NaN, if there is one. LiteRT ignores NaN, and has no indices of fewer or more than
    32 bits."""

    def position(run, options, types, x):
        narrow = [("int32", types[0][1])]
        find = _evaluate.OPERATIONS[name]
        y = find(run, options, narrow, x)
        if jnp.issubdtype(x.dtype, jnp.floating):
            nan = (jnp.asarray(x) != x).astype(jnp.float32)
            first = _evaluate.OPERATIONS["argmax"](run, options, narrow, nan)
            y = _choose(lax.reduce_max(nan, tuple(options["axes"])) > 0, first, y)
        return y.astype(types[0][0])

    return position


OPERATIONS: dict[str, Callable] = {
    **{
        name: _floats(name, function)
        for name, function in {
            "log": _log,
            "log1p": _log1p,
            "expm1": _expm1,
            "sinh": _sinh,
            "cosh": _cosh,
            "asinh": _asinh,
            "acosh": _acosh,
            "atanh": _atanh,
            "sqrt": _sqrt,
            "rsqrt": _rsqrt,
            "cbrt": _cbrt,
            "exp2": lambda x: _exp(x * _number(x, math.log(2))),
        }.items()
    },
    **{
        name: _each(function)
        for name, function in {
            "neg": _neg,
            "sign": _sign,
            "rem": _rem,
            "div": _div,
            "clamp": _clamp,
            "total_lt": _total_lt,
            "total_le": lambda x, y: ~_total_lt(y, x),
            "shift_right_logical": _shifted(_shift_right_logical, lambda x: _number(x, 0)),
            "shift_right_arithmetic": _shifted(
                lax.shift_right_arithmetic,
                lambda x: lax.shift_right_arithmetic(
                    x, jnp.full(x.shape, 8 * x.dtype.itemsize - 1, x.dtype)
                ),
            ),
        }.items()
    },
    **{name: _combined(name) for name in ("cumsum", "cumprod", "window_sum")},
    "convert": _convert,
    "pad": _pad,
    "argmax": _position("argmax"),
    "argmin": _position("argmin"),
}
