"""Converts reductions, cumulative operations and sorts to ONNX.

onnxruntime's reductions differ from JAX's in three ways. ReduceMax, ReduceMin, ArgMax, ArgMin and
TopK overlook a NaN or not, depending on its place. ReduceSum adds the numbers of an axis one after
the other, so that the mean of a million numbers is up to 1 % off. Sums of integers stop at the
largest integer.

ReduceL1, the sum of absolute values, is NaN exactly if an element is NaN, and finite only if all
are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fnet.export.onnx._graph import INT64, product
from fnet.export.onnx._special import log_add_exp

_BLOCK = 256  # summands that float32 adds one after the other with an error below 1e-5
_CONTIGUOUS = 2048  # along the last axes, onnxruntime adds several partial sums
_LONGEST = 1 << 14  # elements along an axis for compositions whose length grows with the axis
_PASSING = {"exp", "convert", "mul", "add", "sub", "div", "neg"}


def _dtype(e):
    return e.in_types[0][0]


def reduce_max(e):
    return [_extreme(e, "ReduceMax")]


def reduce_min(e):
    return [_extreme(e, "ReduceMin")]


def _extreme(e, kind):
    x, axes = e.x(0), e.options["axes"]
    if not axes:
        return x
    ordered, back = _signed(e, x)
    y = back(e.g.op(kind, ordered, e.g.integers(*axes), keepdims=0))
    if e.dtype.kind != "f" or _becomes_nan(e):
        return y
    total = e.g.op("ReduceL1", x, e.g.integers(*axes), keepdims=0)
    return e.g.op("Where", e.g.op("IsNaN", total), e.number(np.nan), y)


def _signed(e, x) -> tuple[str, Callable]:
    """Returns x in a dtype that onnxruntime can order, and the function that converts back."""
    dtype = _dtype(e)
    if dtype.kind == "b":
        return e.g.cast(x, np.uint8), lambda y: e.g.cast(y, bool)
    if dtype.name in (
        "int16",
        "uint16",
        "uint32",
    ):  # of no elements, the maximum is the wide dtype's smallest
        wide = np.dtype(np.int64)
        ends = [e.g.constant(end, wide) for end in (np.iinfo(dtype).min, np.iinfo(dtype).max)]
        return e.g.cast(x, wide), lambda y: e.g.cast(e.g.op("Clip", y, *ends), dtype)
    if dtype != np.uint64:
        return x, lambda y: y
    lowest = e.g.constant(np.iinfo(np.int64).min, INT64)
    return e.g.op("Sub", e.g.cast(x, INT64), lowest), lambda y: e.g.cast(
        e.g.op("Add", y, lowest), np.uint64
    )


def _becomes_nan(e) -> bool:
    """Whether the maximum m is only used in x - m, as in a softmax, and a NaN in x makes all
    results NaN anyway.

    "Some" are the values in which the elements that depend on a NaN of x are NaN, "all" those in
    which every element of the reduced axes is.
    """
    source, axes = e.ins[0], set(e.options["axes"])
    maxima, some, every = {e.outs[0]}, set(), set()
    for operation, ins, outs, options, _ in e.equations:
        used = {a for a in ins if isinstance(a, int)} & (maxima | some | every)
        if not used:
            continue
        if used <= every and operation in _PASSING | {"broadcast", "reshape", "log"}:
            every.update(outs)
        elif operation in ("broadcast", "reshape") and ins[0] in maxima:
            maxima.update(outs)
        elif operation == "max" and ["float32", "-inf"] in ins and used <= maxima:
            maxima.update(outs)  # max(m, -inf) is m
        elif operation == "sub" and ins[0] == source and ins[1] in maxima:
            some.update(outs)
        elif used & maxima:
            return False
        elif operation == "reduce_sum" and set(options["axes"]) == axes:
            every.update(outs)
        elif operation in _PASSING and used & every:
            every.update(outs)
        elif operation in ("exp", "convert"):
            some.update(outs)
        else:
            return False
    results = {a for a in e.body_outputs if isinstance(a, int)}
    return results.isdisjoint(maxima | some)


def reduce_sum(e):
    x, axes, shape = e.x(0), e.options["axes"], e.in_types[0][1]
    if not axes:
        return [x]
    if e.dtype.kind != "f":
        return [_integer_sum(e, x)]
    sizes = [shape[axis] for axis in axes]
    count = product(sizes)
    last = [axis for axis, n in enumerate(shape) if n != 1 or axis in axes][-len(axes) :]
    limit = _CONTIGUOUS if sorted(axes) == last else _BLOCK
    known = isinstance(count, int)

    def plain(x):
        return e.g.op("ReduceSum", x, e.g.integers(*axes), keepdims=0)

    def exact():
        return [e.g.cast(plain(e.g.cast(x, np.float64)), e.dtype)]

    if e.dtype == np.float64 or (known and count <= limit):
        return [plain(x)]
    if not known:
        long = e.g.op("Greater", e.g.op("Squeeze", e.g.size(count)), e.g.constant(limit, INT64))
        return e.branch(long, exact, lambda: [plain(x)])
    factors = [_factors(n) for n in sizes]
    if e.dtype != np.float32 or any(f is None for f in factors):
        return exact()
    return [_sum_in_blocks(e, x, shape, dict(zip(axes, factors)))]


def _sum_in_blocks(e, x, shape, factors):
    """Sums over the axes {axis: factors of its size}, one factor after another, the last first."""
    split, summed = [], []
    for axis, size in enumerate(shape):
        parts = factors.get(axis, [size])
        if axis in factors:
            summed += range(len(split), len(split) + len(parts))
        split += parts
    y = e.g.reshape(x, shape, split)
    for place in reversed(summed):
        y = e.g.op("ReduceSum", y, e.g.integers(place), keepdims=0)
    return y


def _factors(n: int) -> list[int] | None:
    """Returns factors of n that are at most _BLOCK, or None if n has none."""
    found = []
    while n > _BLOCK:
        factor = next((i for i in range(_BLOCK, 15, -1) if n % i == 0), None)
        if factor is None:
            return None
        found.append(factor)
        n //= factor
    return [n, *found]


def _flat(e, x) -> tuple[str, list, int | str]:
    """Moves the reduced axes of x to the end and joins them. Returns (the name, the other sizes,
    the joined size)."""
    axes, shape = e.options["axes"], e.in_types[0][1]
    rest = [axis for axis in range(len(shape)) if axis not in axes]
    moved = [shape[axis] for axis in (*rest, *axes)]
    count, kept = product([shape[axis] for axis in axes]), [shape[axis] for axis in rest]
    return e.g.reshape(e.g.transpose(x, [*rest, *axes]), moved, [*kept, count]), kept, count


def _integer_sum(e, x):
    """Sums integers by a matrix product, which wraps, unlike ReduceSum."""
    flat, kept, count = _flat(e, x)
    if count == 0:
        return e.g.expand(e.number(0), kept)
    wide = e.dtype if e.dtype.itemsize >= 4 else np.dtype(np.int32)
    flat = flat if wide == _dtype(e) else e.g.cast(flat, wide)
    ones = (
        e.g.constant(np.ones((count, 1)), wide)
        if isinstance(count, int)
        else e.g.expand(e.g.constant(1, wide), [count, 1])
    )
    y = e.g.op("MatMul", flat, ones)
    y = e.g.reshape(y, [*kept, 1], kept)
    return y if wide == e.dtype else e.g.cast(y, e.dtype)


def reduce_prod(e):
    x, axes = e.x(0), e.options["axes"]
    if not axes:
        return [x]
    if e.dtype.kind == "f":
        return [e.g.op("ReduceProd", x, e.g.integers(*axes), keepdims=0)]
    flat, kept, n = _flat(e, x)
    if not isinstance(n, int) or n > _LONGEST:
        raise NotImplementedError(f"of integers along an axis of size {n}")
    if n == 0:
        return [e.g.expand(e.number(1), kept)]
    axis = len(kept)
    while n > 1:  # halves, multiplied by each other, because ReduceProd does not wrap
        half = n // 2
        y = e.g.op("Mul", e.g.slice(flat, 0, half, axis), e.g.slice(flat, half, 2 * half, axis))
        flat = e.g.op("Concat", y, e.g.slice(flat, 2 * half, n, axis), axis=axis) if n % 2 else y
        n = n - half
    return [e.g.reshape(flat, [*kept, 1], kept)]


def _logical(kind: str) -> Callable:
    def convert(e):
        x, axes = e.x(0), e.options["axes"]
        if e.dtype.kind != "b":
            raise NotImplementedError("of the bits of integers")
        if not axes:
            return [x]
        if kind == "xor":
            total = e.g.op("ReduceSum", e.g.cast(x, np.int32), e.g.integers(*axes), keepdims=0)
            return [e.g.cast(e.g.op("Mod", total, e.g.constant(2, np.int32)), bool)]
        return [
            e.g.cast(e.g.op(kind, e.g.cast(x, np.uint8), e.g.integers(*axes), keepdims=0), bool)
        ]

    return convert


def _has_nan(e, x) -> str:
    return e.g.op("IsNaN", e.g.op("ReduceL1", x, keepdims=0))


def _arg(kind: str) -> Callable:
    def convert(e):
        x, axis = e.x(0), e.options["axes"][0]
        ordered, _ = _signed(e, x)

        def plain():
            return [e.g.op(kind, ordered, axis=axis, keepdims=0)]

        def with_nan():  # the first NaN wins
            nan = e.g.cast(e.g.op("IsNaN", x), np.uint8)
            some = e.g.cast(e.g.op("ReduceMax", nan, e.g.integers(axis), keepdims=0), bool)
            first = e.g.op("ArgMax", nan, axis=axis, keepdims=0)
            return [e.g.op("Where", some, first, *plain())]

        if _dtype(e).kind == "f":
            (place,) = e.branch(_has_nan(e, x), with_nan, plain)
        else:
            (place,) = plain()
        return [e.g.cast(place, e.dtype)]

    return convert


def cumsum(e):
    x, axis = e.x(0), e.g.constant(e.options["axis"], INT64)
    wide = {"float32": "float64", "float16": "float64", "uint64": "int64"}.get(e.dtype.name)
    x = x if wide is None else e.g.cast(x, np.dtype(wide))
    y = e.g.op("CumSum", x, axis, reverse=int(e.options["reverse"]))
    y = y if wide is None else e.g.cast(y, e.dtype)
    return [e.g.without_negative_zeros(y) if e.dtype.kind == "f" else y]


def _operator(kind: str) -> Callable:
    return lambda e, x, y: e.g.op(kind, x, y)


def _cumulative(function: Callable) -> Callable:
    def convert(e):
        y, axis = e.x(0), e.options["axis"]
        n, reverse = e.shape[axis], e.options["reverse"]
        if not isinstance(n, int) or n > _LONGEST:
            raise NotImplementedError(f"along an axis of size {n}")
        for i in range(math.ceil(math.log2(n)) if n > 1 else 0):
            step = 1 << i
            first, rest = e.g.slice(y, 0, step, axis), e.g.slice(y, step, n, axis)
            if reverse:
                first, rest = e.g.slice(y, 0, n - step, axis), e.g.slice(y, n - step, n, axis)
                first = function(e, first, e.g.slice(y, step, n, axis))
            else:
                rest = function(e, rest, e.g.slice(y, 0, n - step, axis))
            y = e.g.op("Concat", first, rest, axis=axis)
        return [y]

    return convert


def _cumulative_extreme(kind: str) -> Callable:
    """Returns the conversion of cummax ("Max") or cummin ("Min"). Along an axis of symbolic size,
    integers are compared with all before them, because the steps of `_cumulative` need the size."""
    by_steps = _cumulative(_operator(kind))

    def convert(e):
        axis, n = e.options["axis"], e.shape[e.options["axis"]]
        if isinstance(n, int) or e.dtype.kind not in "iu" or e.dtype == np.uint64:
            return by_steps(e)
        zero, one = e.g.constant(0, INT64), e.g.constant(1, INT64)
        places = e.g.op("Range", zero, e.g.op("Squeeze", e.g.size(n)), one)
        after = [1] * (len(e.shape) - axis - 1)
        rows = e.g.reshape(places, [n], [n, 1, *after])
        columns = e.g.reshape(places, [n], [n, *after])
        seen = ("LessOrEqual", "GreaterOrEqual")[bool(e.options["reverse"])]
        limits = np.iinfo(np.int64)
        end = e.g.constant(limits.min if kind == "Max" else limits.max, INT64)
        x = e.g.unsqueeze(e.g.cast(e.x(0), INT64), axis)
        x = e.g.op("Where", e.g.op(seen, columns, rows), x, end)
        y = e.g.op(f"Reduce{kind}", x, e.g.integers(axis + 1), keepdims=0)
        return [e.g.cast(y, e.dtype)]

    return convert


def _order(e, x, dtype, count, axis, largest) -> str:
    """Returns the places of the first `count` elements of x in sorted order. NaN is larger than all
    numbers."""
    top = lambda x, count: e.g.op(
        "TopK", x, e.g.size(count), outputs=2, axis=axis, largest=int(largest)
    )[1]
    if dtype.kind == "b":
        x, dtype = e.g.cast(x, np.int32), np.dtype(np.int32)
    elif dtype == np.uint64:
        x = e.g.op("Sub", e.g.cast(x, INT64), e.g.constant(np.iinfo(np.int64).min, INT64))
    if dtype.kind != "f":
        return top(x, count)
    length = e.in_types[0][1][axis]

    def with_nan():  # TopK keeps the order of equal elements, so NaN is sorted in a second pass
        nan = e.g.op("IsNaN", x)
        end = e.g.constant(-np.inf if largest else np.inf, dtype)
        first = top(e.g.op("Where", nan, end, x), length)
        second = top(e.g.op("GatherElements", e.g.cast(nan, np.int32), first, axis=axis), count)
        return [e.g.op("GatherElements", first, second, axis=axis)]

    return e.branch(_has_nan(e, x), with_nan, lambda: [top(x, count)])[0]


def sort(e):
    axis, n = e.options["axis"], e.shape[e.options["axis"]]
    arrays, order = [e.x(i) for i in range(len(e.ins))], None
    if 0 in e.shape:
        return arrays
    for i in range(e.options["keys"])[::-1]:  # the first key last, because each sort is stable
        key = arrays[i] if order is None else e.g.op("GatherElements", arrays[i], order, axis=axis)
        places = _order(e, key, e.in_types[i][0], n, axis, largest=False)
        order = places if order is None else e.g.op("GatherElements", order, places, axis=axis)
    return [e.g.op("GatherElements", x, order, axis=axis) for x in arrays]


def top_k(e):
    x, dtype, (places_dtype, shape) = e.x(0), _dtype(e), e.out_types[1]
    axis = e.options["axis"] if e.options["axis"] is not None else len(shape) - 1
    if 0 in shape:
        return [e.g.expand(e.number(0), shape), e.g.expand(e.g.constant(0, places_dtype), shape)]
    key = x
    if dtype.kind == "f" and not e.g.never_negative_zero(x):
        wide = np.dtype(np.float32) if dtype == np.float16 else dtype
        key, dtype = (e.g.cast(x, wide) if wide != dtype else x), wide
        key = _with_order_of_zeros(e, key, wide)
    order = _order(e, key, dtype, e.options["k"], axis, largest=True)
    return [e.g.op("GatherElements", x, order, axis=axis), e.g.cast(order, places_dtype)]


def _with_order_of_zeros(e, x, dtype):
    """Replaces -0.0 by the largest negative number, because -0.0 is less than 0.0 in JAX's top_k."""
    zero = e.g.op("Equal", x, e.g.constant(0, dtype))
    below = e.g.op("Less", e.g.op("Reciprocal", x), e.g.constant(0, dtype))
    least = e.g.constant(-np.finfo(dtype).smallest_subnormal, dtype)
    return e.g.op("Where", e.g.op("And", zero, below), least, x)


OPERATIONS: dict[str, Callable] = {
    "reduce_sum": reduce_sum,
    "reduce_prod": reduce_prod,
    "reduce_max": reduce_max,
    "reduce_min": reduce_min,
    "reduce_and": _logical("ReduceMin"),
    "reduce_or": _logical("ReduceMax"),
    "reduce_xor": _logical("xor"),
    "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"),
    "cumsum": cumsum,
    "cumprod": _cumulative(_operator("Mul")),
    "cummax": _cumulative_extreme("Max"),
    "cummin": _cumulative_extreme("Min"),
    "cumlogsumexp": lambda e: [e.g.without_negative_zeros(y) for y in _cumulative(log_add_exp)(e)],
    "sort": sort,
    "top_k": top_k,
}
