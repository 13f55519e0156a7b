"""Converts elementwise operations and layout operations to ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fnet.export.onnx import _functions, _special
from fnet.export.onnx._graph import INT64, added, same


def _op(kind: str, **attributes: Any) -> Callable:
    return lambda e, *xs: e.g.op(kind, *xs, **attributes)


def _boolean(number: str, boolean: str) -> Callable:
    return lambda e, *xs: e.g.op(boolean if e.dtype.kind == "b" else number, *xs)


def _bits(kind: str) -> Callable:
    return _boolean(f"Bitwise{kind}", kind)


def _not(e, x):
    return e.g.opposite(x) if e.dtype.kind == "b" else e.g.op("BitwiseNot", x)


def _not_equal(e, x, y):
    return e.g.opposite(e.g.op("Equal", x, y))


# Functions of (equation, *names) whose operands broadcast.
ELEMENTWISE: dict[str, Callable] = {
    **{
        name: _op(kind)
        for name, kind in {
            "floor": "Floor",
            "ceil": "Ceil",
            "abs": "Abs",
            "exp": "Exp",
            "log": "Log",
            "sin": "Sin",
            "cos": "Cos",
            "tan": "Tan",
            "asin": "Asin",
            "acos": "Acos",
            "atan": "Atan",
            "sinh": "Sinh",
            "cosh": "Cosh",
            "asinh": "Asinh",
            "acosh": "Acosh",
            "atanh": "Atanh",
            "sqrt": "Sqrt",
            "erf": "Erf",
            "add": "Add",
            "sub": "Sub",
            "eq": "Equal",
            "lt": "Less",
            "le": "LessOrEqual",
            "gt": "Greater",
            "ge": "GreaterOrEqual",
        }.items()
    },
    "and": _bits("And"),
    "or": _bits("Or"),
    "xor": _bits("Xor"),
    "not": _not,
    "ne": _not_equal,
    "select": _functions.select,
    "exp2": lambda e, x: e.g.op("Pow", e.number(2), x),
    "rsqrt": lambda e, x: e.g.op("Reciprocal", e.g.op("Sqrt", x)),
    "mul": _functions.multiply,
    "neg": _functions.neg,
    "sign": _functions.sign,
    "logistic": _functions.logistic,
    "expm1": _functions.expm1,
    "log1p": _functions.log1p,
    "erfc": _functions.erfc,
    "erf_inv": _special.erf_inv,
    "lgamma": _special.lgamma,
    "digamma": _special.digamma,
    "total_lt": _special.less_in_total_order,
    "total_le": _special.at_most_in_total_order,
    "tanh": _functions.tanh,
    "cbrt": _functions.cbrt,
    "atan2": _functions.atan2,
    "round": _functions.round_,
    "is_finite": _functions.is_finite,
    "power": _functions.power,
    "pow": _functions.pow_,
    "max": _functions.maximum,
    "min": _functions.minimum,
    "clamp": _functions.clamp,
    "div": _functions.divide,
    "rem": _functions.remainder,
    "convert": _functions.convert,
    "shift_left": _functions.shift_left,
    "shift_right_logical": _functions.shift_right_logical,
    "shift_right_arithmetic": _functions.shift_right_arithmetic,
}


def broadcast(e):
    name, narrow = e.loose(0)
    axes, shape = e.options["axes"], e.shape
    if narrow:  # scalars need no reshape
        where = [1] * len(shape)
        for axis, n in zip(axes, narrow):
            where[axis] = n
        name, narrow = e.g.reshape(name, narrow, where), where
    if len(narrow) == len(shape) and all(map(same, narrow, shape)):
        return [name]
    e.loosely(0, name, narrow)
    return None


def reshape(e):
    return [e.g.reshape(e.x(0), e.in_types[0][1], e.shape)]


def transpose(e):
    return [e.g.transpose(e.x(0), e.options["axes"])]


def reverse(e):
    axes = e.options["axes"]
    lowest = [np.iinfo(np.int64).min] * len(axes)
    return [
        e.g.op(
            "Slice",
            e.x(0),
            e.g.integers(*[-1] * len(axes)),
            e.g.integers(*lowest),
            e.g.integers(*axes),
            e.g.integers(*[-1] * len(axes)),
        )
    ]


def concatenate(e):
    return [e.g.op("Concat", *(e.x(i) for i in range(len(e.ins))), axis=e.options["axis"])]


def slices(e):
    x, (_, shape) = e.x(0), e.in_types[0]
    steps = e.options["step"] or [1] * len(shape)
    for axis, (start, stop, step, n) in enumerate(
        zip(e.options["start"], e.options["stop"], steps, shape)
    ):
        if start != 0 or not same(stop, n) or step != 1:
            x = e.g.slice(x, start, stop, axis, step)
    return [x]


def pad(e):
    x, _ = e.g.pad(e.x(0), e.in_types[0][1], e.options["padding"], e.x(1))
    return [x]


def iota(e):
    axis, shape = e.options["axis"], e.shape
    n = shape[axis]
    if isinstance(n, int):
        name = e.g.constant(np.arange(n), e.dtype)
    else:
        zero, one = e.g.constant(0, INT64), e.g.constant(1, INT64)
        name = e.g.op("Range", zero, e.g.op("Squeeze", e.g.size(n)), one)
        name = name if e.dtype == INT64 else e.g.cast(name, e.dtype)
    narrow = [n if i == axis else 1 for i in range(len(shape))]
    name = e.g.reshape(name, [n], narrow)
    if narrow == shape:
        return [name]
    e.loosely(0, name, narrow)
    return None


def size(e):
    return [e.g.cast(e.g.op("Squeeze", e.g.size(e.options["value"])), e.dtype)]


def _start(e, i, n, length):
    """Returns the name of an ONNX vector with one element, which is the start index of a dynamic
    slice along one axis. The start index is the i-th input, clamped so that the slice lies inside
    the operand. The axis has n elements, and the slice has `length` elements."""
    start = e.g.reshape(_functions.index(e, e.x(i), e.in_types[i][0]), [], [1])
    last = e.g.size(added(n, -length if isinstance(length, int) else f"-({length})"))
    return e.g.op("Max", e.g.op("Min", start, last), e.g.integers(0))


def dynamic_slice(e):
    x, shape = e.x(0), e.in_types[0][1]
    for axis, (n, length) in enumerate(zip(shape, e.shape)):
        if not same(n, length):
            start = _start(e, 1 + axis, n, length)
            x = e.g.op(
                "Slice", x, start, e.g.op("Add", start, e.g.size(length)), e.g.integers(axis)
            )
    return [x]


def dynamic_update_slice(e):
    shape, sizes = e.in_types[0][1], e.in_types[1][1]
    axes = [axis for axis, (n, length) in enumerate(zip(shape, sizes)) if not same(n, length)]

    def updated(x, axes):
        """Replaces a window of x by the update, and returns the name of the result. Along `axes`,
        the window is smaller than x, and along all other axes, it covers x."""
        if not axes:
            return e.x(1)
        axis, at = axes[0], e.g.integers(axes[0])
        start = _start(e, 2 + axis, shape[axis], sizes[axis])
        stop = e.g.op("Add", start, e.g.size(sizes[axis]))
        inside = e.g.op("Slice", x, start, stop, at) if len(axes) > 1 else x
        before = e.g.op("Slice", x, e.g.integers(0), start, at)
        after = e.g.op("Slice", x, stop, e.g.integers(np.iinfo(np.int64).max), at)
        return e.g.op("Concat", before, updated(inside, axes[1:]), after, axis=axis)

    return [updated(e.x(0), axes)]


OPERATIONS: dict[str, Callable] = {
    "broadcast": broadcast,
    "reshape": reshape,
    "transpose": transpose,
    "reverse": reverse,
    "concatenate": concatenate,
    "slice": slices,
    "pad": pad,
    "iota": iota,
    "size": size,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
