"""Converts elementwise operations, reductions and layout operations to ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fnet.export._onnx_graph import INT64, added, same


def _op(kind: str, **attributes: Any) -> Callable:
    return lambda e, *xs: e.g.op(kind, *xs, **attributes)


def _boolean(number: str, boolean: str) -> Callable:
    return lambda e, *xs: e.g.op(boolean if e.dtype.kind == "b" else number, *xs)


def _bits(kind: str) -> Callable:
    return _boolean(f"Bitwise{kind}", kind)


def _shift(direction: str) -> Callable:
    def shift(e, x, n):
        if e.in_types[0][0].kind != "u":
            raise NotImplementedError("of signed integers")
        return e.g.op("BitShift", x, n, direction=direction)

    return shift


def _not_equal(e, x, y):
    return e.g.op("Not", e.g.op("Equal", x, y))


def _divide(e, x, y):
    """Converts a division. JAX and ONNX both round quotients of integers towards zero."""
    return e.g.op("Div", x, y)


def _power(e, x):
    n = e.options["exponent"]
    if n == 2:
        return e.g.op("Mul", x, x)
    if n == 3:
        return e.g.op("Mul", e.g.op("Mul", x, x), x)
    if n == -1:
        return e.g.op("Reciprocal", x)
    return e.g.op("Pow", x, e.number(n))


def _round(e, x):
    if e.options["even"]:
        return e.g.op("Round", x)
    return e.g.op("Mul", e.g.op("Sign", x), e.g.op("Floor", e.g.op("Add", e.g.op("Abs", x), e.number(0.5))))


def _select(e, which, *cases):
    if e.in_types[0][0].kind != "b":
        result = cases[-1]
        for i in range(len(cases) - 2, -1, -1):
            index = e.g.constant(i, e.in_types[0][0])
            result = e.g.op("Where", e.g.op("Equal", which, index), cases[i], result)
        return result
    if e.dtype.kind == "b":      # onnxruntime has no Where of bools
        no = e.g.op("And", e.g.op("Not", which), cases[0])
        return e.g.op("Or", e.g.op("And", which, cases[1]), no)
    return e.g.op("Where", which, cases[1], cases[0])


def _is_finite(e, x):
    return e.g.op("Not", e.g.op("Or", e.g.op("IsNaN", x), e.g.op("IsInf", x)))


def _erfc(e, x):
    return e.g.op("Sub", e.number(1), e.g.op("Erf", x))


def _cbrt(e, x):
    return e.g.op("Mul", e.g.op("Sign", x), e.g.op("Pow", e.g.op("Abs", x), e.number(1 / 3)))


def _atan2(e, y, x):
    """Computes atan(y / x), plus or minus pi where x is negative."""
    angle = e.g.op("Atan", e.g.op("Div", y, x))
    zero, pi = e.number(0), e.number(np.pi)
    shift = e.g.op("Where", e.g.op("Less", y, zero), e.g.op("Neg", pi), pi)
    return e.g.op("Where", e.g.op("Less", x, zero), e.g.op("Add", angle, shift), angle)


def _convert(e, x):
    return x if e.dtype == e.in_types[0][0] else e.g.cast(x, e.dtype)


# Functions of (equation, *names) whose operands broadcast.
ELEMENTWISE: dict[str, Callable] = {
    **{name: _op(kind) for name, kind in {
        "neg": "Neg", "sign": "Sign", "floor": "Floor", "ceil": "Ceil", "abs": "Abs", "exp": "Exp", "log": "Log",
        "tanh": "Tanh", "logistic": "Sigmoid", "sin": "Sin", "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos",
        "atan": "Atan", "sinh": "Sinh", "cosh": "Cosh", "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh",
        "sqrt": "Sqrt", "erf": "Erf", "add": "Add", "sub": "Sub", "mul": "Mul", "pow": "Pow", "eq": "Equal",
        "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}.items()},
    "max": _boolean("Max", "Or"), "min": _boolean("Min", "And"), "and": _bits("And"), "or": _bits("Or"),
    "xor": _bits("Xor"), "not": _boolean("BitwiseNot", "Not"), "ne": _not_equal, "div": _divide,
    "shift_left": _shift("LEFT"), "shift_right_logical": _shift("RIGHT"),
    "rem": lambda e, x, y: e.g.op("Mod", x, y, fmod=1),
    "exp2": lambda e, x: e.g.op("Pow", e.number(2), x),
    "expm1": lambda e, x: e.g.op("Sub", e.g.op("Exp", x), e.number(1)),
    "log1p": lambda e, x: e.g.op("Log", e.g.op("Add", x, e.number(1))),
    "rsqrt": lambda e, x: e.g.op("Reciprocal", e.g.op("Sqrt", x)), "cbrt": _cbrt, "erfc": _erfc, "power": _power,
    "round": _round, "select": _select, "is_finite": _is_finite, "atan2": _atan2, "convert": _convert,
    "clamp": lambda e, low, x, high: e.g.op("Min", e.g.op("Max", x, low), high),
}


def broadcast(e):
    name, narrow = e.loose(0)
    axes, shape = e.options["axes"], e.shape
    if narrow:      # scalars need no reshape
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
    return [e.g.op("Slice", e.x(0), e.g.integers(*[-1] * len(axes)), e.g.integers(*lowest), e.g.integers(*axes),
                   e.g.integers(*[-1] * len(axes)))]


def concatenate(e):
    return [e.g.op("Concat", *(e.x(i) for i in range(len(e.ins))), axis=e.options["axis"])]


def slices(e):
    x, (_, shape) = e.x(0), e.in_types[0]
    steps = e.options["step"] or [1] * len(shape)
    for axis, (start, stop, step, n) in enumerate(zip(e.options["start"], e.options["stop"], steps, shape)):
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


def reduce(kind: str) -> Callable:
    def convert(e):
        x = e.x(0)
        if e.dtype.kind == "b":
            x = e.g.cast(x, np.int32)
        y = e.g.op(kind, x, e.g.integers(*e.options["axes"]), keepdims=0) if e.options["axes"] else x
        return [e.g.cast(y, bool) if e.dtype.kind == "b" else y]
    return convert


def arg(kind: str) -> Callable:
    return lambda e: [e.g.cast(e.g.op(kind, e.x(0), axis=e.options["axes"][0], keepdims=0), e.dtype)]


def cumsum(e):
    return [e.g.op("CumSum", e.x(0), e.g.constant(e.options["axis"], INT64), reverse=int(e.options["reverse"]))]


def size(e):
    return [e.g.cast(e.g.op("Squeeze", e.g.size(e.options["value"])), e.dtype)]


def sort(e):
    if e.options["keys"] != 1:
        raise NotImplementedError("a sort by several keys")
    axis = e.options["axis"]
    values, order = e.g.op("TopK", e.x(0), e.g.size(e.shape[axis]), outputs=2, axis=axis, largest=0)
    return [values, *(e.g.op("GatherElements", e.x(i), order, axis=axis) for i in range(1, len(e.ins)))]


def top_k(e):
    axis = e.options["axis"] if e.options["axis"] is not None else -1
    values, order = e.g.op("TopK", e.x(0), e.g.size(e.options["k"]), outputs=2, axis=axis, largest=1)
    return [values, e.g.cast(order, e.out_types[1][0])]


def _start(e, i, n, length):
    """Returns the name of an ONNX vector with one element, which is the start index of a dynamic slice along one axis.
    The start index is the i-th input, clamped so that the slice lies inside the operand. The axis has n elements, and
    the slice has `length` elements."""
    start = e.g.reshape(e.g.cast(e.x(i), INT64), [], [1])
    last = e.g.size(added(n, -length if isinstance(length, int) else f"-({length})"))
    return e.g.op("Max", e.g.op("Min", start, last), e.g.integers(0))


def dynamic_slice(e):
    x, shape = e.x(0), e.in_types[0][1]
    for axis, (n, length) in enumerate(zip(shape, e.shape)):
        if not same(n, length):
            start = _start(e, 1 + axis, n, length)
            x = e.g.op("Slice", x, start, e.g.op("Add", start, e.g.size(length)), e.g.integers(axis))
    return [x]


def dynamic_update_slice(e):
    shape, sizes = e.in_types[0][1], e.in_types[1][1]
    axes = [axis for axis, (n, length) in enumerate(zip(shape, sizes)) if not same(n, length)]

    def updated(x, axes):
        """Replaces a window of x by the update, and returns the name of the result. Along `axes`, the window is smaller
        than x, and along all other axes, it covers x."""
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
    "broadcast": broadcast, "reshape": reshape, "transpose": transpose, "reverse": reverse, "concatenate": concatenate,
    "slice": slices, "pad": pad, "iota": iota, "size": size, "sort": sort, "top_k": top_k, "cumsum": cumsum,
    "dynamic_slice": dynamic_slice, "dynamic_update_slice": dynamic_update_slice,
    "argmax": arg("ArgMax"), "argmin": arg("ArgMin"), "reduce_sum": reduce("ReduceSum"),
    "reduce_max": reduce("ReduceMax"), "reduce_min": reduce("ReduceMin"), "reduce_prod": reduce("ReduceProd"),
    "reduce_and": reduce("ReduceMin"), "reduce_or": reduce("ReduceMax"),
}
