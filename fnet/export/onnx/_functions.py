"""Elementwise functions for which ONNX has no operator that equals JAX's everywhere, composed of
other operators.

onnxruntime's Where returns 0.0 where its second operand is chosen and -0.0, so a value that may be
-0.0 is the third. The compositions equal JAX for NaN, infinities and both zeros, and are accurate
relative to the result near 0 and far out. Where a shorter composition is right (a constant operand,
for example), it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fnet.export.onnx._graph import INT64

# erfc(x) = exp(-x * x) * t * P(t) with t = 1 / (1 + 0.4 x): the polynomial P was fitted to erfcx(x)
# / t for x from 0 to 27, where float64 underflows. Its relative error is at most 1.2e-7.
_ERFC_STEP = 0.4
_ERFC = (
    0.225674603,
    0.225700076,
    0.207556512,
    0.169930019,
    0.137564695,
    0.000813345395,
    0.162811744,
    -0.179575077,
    0.0495241994,
)

# erfc(|z|) / 2 = -exp(-z * z) * t * P(t) with t = 1.84885975 / (|z| + 2.7), for the exact GELU. The
# highest coefficient of the polynomial P is 1. P was fitted to erfcx, for z from -10 to 10; its
# relative error is at most 8.4e-7.
_GELU_SHIFT, _GELU_SCALE = 2.7, 1.84885975
_GELU = -0.15233072, -0.228909435, -0.241418032, -0.7084208, 0.590271963, -2.08103103
_TANH_LIMIT = 7.99881172  # XLA's, where its tanh is 1


def select(e, which, *cases):
    if e.in_types[0][0].kind != "b":
        result = cases[-1]
        for i in range(len(cases) - 2, -1, -1):
            index = e.g.constant(i, e.in_types[0][0])
            result = chosen(e, e.g.op("Equal", which, index), cases[i], result)
        return result
    return chosen(e, which, cases[1], cases[0])


def chosen(e, which, yes, no):
    """Selects `yes` where `which` is true, and otherwise `no`."""
    if e.dtype.kind == "b":  # onnxruntime has no Where of bools
        return e.g.op("Or", e.g.op("And", which, yes), e.g.op("And", e.g.op("Not", which), no))
    if e.dtype.kind != "f" or e.g.never_negative_zero(yes):
        return e.g.op("Where", which, yes, no)
    other = e.g.opposite(which)
    if e.g.never_negative_zero(no):
        return e.g.op("Where", other, no, yes)
    one = e.number(1)
    return e.g.op("Mul", e.g.op("Where", other, one, yes), e.g.op("Where", which, one, no))


def _without_zeros(e: Any, x: str) -> bool:
    known = e.g.known(x)
    return known is not None and not (known == 0).any()


def maximum(e, x, y):
    return _extremum(e, x, y, "Max", "Or")


def minimum(e, x, y):
    return _extremum(e, x, y, "Min", "And")


def _extremum(e, x, y, kind, boolean):
    """Of 0.0 and -0.0, the operators Max and Min return any, JAX the larger or smaller."""
    if e.dtype.kind == "b":
        return e.g.op(boolean, x, y)
    plain = e.g.op(kind, x, y)
    if (
        e.dtype.kind != "f"
        or any(_without_zeros(e, a) for a in (x, y))
        or (all(map(e.g.never_negative_zero, (x, y))))
    ):
        return plain
    if kind == "Max" and _is_zero(e, x, y):
        return plain if _sign_of_zero_unused(e) else e.g.op("Abs", plain)
    other = e.g.op(kind, y, x)
    if kind == "Max":
        sum_of_zeros = e.g.op("Add", plain, other)
    else:
        sum_of_zeros = e.g.op("Neg", e.g.op("Sub", e.g.op("Neg", plain), other))
    return e.g.op("Where", e.g.opposite(e.g.op("Equal", plain, e.number(0))), plain, sum_of_zeros)


def _is_zero(e, x, y) -> bool:
    """Whether an operand is the number 0.0, as in relu."""
    known = [e.g.known(a) for a in (x, y)]
    return any(
        a is not None and a.size == 1 and (a == 0).all() and not np.signbit(a).any() for a in known
    )


_SINKS = {
    "convolution",
    "dot",
    "reduce_sum",
    "window_sum",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "is_finite",
    "exp",
    "abs",
    "cumsum",
}
_CARRIERS = {
    "add",
    "max",
    "min",
    "reshape",
    "broadcast",
    "transpose",
    "reverse",
    "concatenate",
    "pad",
    "slice",
    "window_max",
    "clamp",
}


def _sign_of_zero_unused(e) -> bool:
    """Whether all results are the same for 0.0 and -0.0, as after a relu whose result is only
    convolved."""
    either = {e.outs[0]}
    for operation, ins, outs, _, _ in e.equations:
        if not any(isinstance(a, int) and a in either for a in ins) or operation in _SINKS:
            continue
        if operation not in _CARRIERS:
            return False
        either.update(outs)
    return not either & {a for a in e.body_outputs if isinstance(a, int)}


def clamp(e, low, x, high):
    return minimum(e, maximum(e, x, low), high)


def neg(e, x):
    return e.g.op("Sub", e.number(0), x) if e.dtype.kind == "u" else e.g.op("Neg", x)


def sign(e, x):
    """The operator Sign is 0.0 for -0.0 and for NaN of float16."""
    if e.dtype.kind != "f":
        return e.g.op("Sign", x)
    return e.g.op("Where", e.g.op("Greater", e.g.op("Abs", x), e.number(0)), e.g.op("Sign", x), x)


def logistic(e, x):
    """The operator Sigmoid is accurate to 1e-7 of 1 only, so that the logarithm of sigmoid(-20) is
    wrong."""
    inverse = e.g.op("Add", e.g.op("Exp", e.g.op("Neg", x)), e.number(1))
    users = [(operation, ins) for operation, ins, *_ in e.equations if e.outs[0] in ins]
    if (
        e.outs[0] not in e.body_outputs
        and users
        and all(operation == "mul" and e.ins[0] in ins for operation, ins in users)
    ):
        e.g.model.inverse.add(inverse)  # silu, x * logistic(x), is x divided by it
        return inverse
    return e.g.op("Div", e.number(1), inverse)


def multiply(e, x, y):
    if y in e.g.model.inverse:
        return e.g.op("Div", x, y)
    return e.g.op("Div", y, x) if x in e.g.model.inverse else e.g.op("Mul", x, y)


def expm1(e, x):
    """For |x| < 1, exp(x) - 1 = 2 t / (1 - t) with t = tanh(x / 2)."""
    t = e.g.op("Tanh", e.g.op("Mul", x, e.number(0.5)))
    near = e.g.op("Div", e.g.op("Add", t, t), e.g.op("Sub", e.number(1), t))
    far = e.g.op("Sub", e.g.op("Exp", x), e.number(1))
    distance = e.g.op("Abs", x)
    # onnxruntime's Tanh is not accurate for subnormal numbers, and the third operand of Where keeps
    # -0.0.
    near = e.g.op("Where", e.g.op("Greater", distance, e.number(1e-7)), near, x)
    return e.g.op("Where", e.g.op("GreaterOrEqual", distance, e.number(1)), far, near)


def log1p(e, x):
    """Adds to log(u), u = 1 + x, what u has lost by rounding. Where log(u) equals x (0 and
    infinity), x is right."""
    one = e.number(1)
    u = e.g.op("Add", x, one)
    logarithm = e.g.op("Log", u)
    lost = e.g.op("Sub", x, e.g.op("Sub", u, one))
    whole = e.g.op("Add", logarithm, e.g.op("Div", lost, e.g.op("Max", u, one)))
    return e.g.op("Where", e.g.opposite(e.g.op("Equal", logarithm, x)), whole, x)


def erfc(e, x):
    distance = e.g.op("Abs", x)
    t = e.g.op(
        "Reciprocal", e.g.op("Add", e.g.op("Mul", distance, e.number(_ERFC_STEP)), e.number(1))
    )
    value = e.number(_ERFC[-1])
    for coefficient in _ERFC[-2::-1]:
        value = e.g.op("Add", e.g.op("Mul", value, t), e.number(coefficient))
    decay = e.g.op("Exp", e.g.op("Neg", e.g.op("Mul", x, x)))
    right = e.g.op("Mul", decay, e.g.op("Mul", t, value))
    # onnxruntime's Where takes as long as 30 additions.
    two = e.g.op("Mul", e.g.cast(e.g.op("Less", x, e.number(0)), e.dtype), e.number(2))
    return e.g.op("Abs", e.g.op("Sub", two, right))


def gelu(e, x):
    """x * erfc(-x / sqrt(2)) / 2, in few operators, because each one reads and writes a whole
    array. x / sqrt(2) is rounded and squared as in the program: far out, exp shows this
    rounding."""
    z = e.g.op("Mul", x, e.number(0.5**0.5))
    t = e.g.op("Div", e.number(_GELU_SCALE), e.g.op("Add", e.g.op("Abs", z), e.number(_GELU_SHIFT)))
    value = t
    for coefficient in _GELU[::-1]:
        value = e.g.op("Mul", e.g.op("Add", value, e.number(coefficient)), t)
    tail = e.g.op("Div", value, e.g.op("Exp", e.g.op("Mul", z, z)))  # -erfc(|z|) / 2
    step = e.g.op("HardSigmoid", x, alpha=3e38, beta=0.0)  # 1 where x > 0, otherwise 0
    return e.g.op("Mul", x, e.g.op("Abs", e.g.op("Add", step, tail)))


def tanh(e, x):
    """onnxruntime's Tanh exceeds 1 between 8 and 9. Within the limit, it equals XLA's in the last
    place of 1 (if XLA uses fused multiply-adds, as it does by default), and so does 1 + tanh(x)."""
    if e.dtype != np.float32:
        return e.g.op("Tanh", x)
    return e.g.op("Tanh", e.g.op("Clip", x, e.number(-_TANH_LIMIT), e.number(_TANH_LIMIT)))


def cbrt(e, x):
    return e.g.op("Mul", sign(e, x), e.g.op("Pow", e.g.op("Abs", x), e.number(1 / 3)))


def negative(e, x):
    """Returns whether the sign bit of x is set, -0.0 included."""
    zero = e.number(0)
    return e.g.op("Or", e.g.op("Less", x, zero), e.g.op("Less", e.g.op("Reciprocal", x), zero))


def atan2(e, y, x):
    """Computes the angle in the first octant, and reflects it."""
    down, across = e.g.op("Abs", y), e.g.op("Abs", x)
    longest, shortest = e.g.op("Max", down, across), e.g.op("Min", down, across)
    ratio = e.g.op(
        "Where", e.g.op("Equal", shortest, longest), e.number(1), e.g.op("Div", shortest, longest)
    )
    ratio = e.g.op("Where", e.g.op("Equal", longest, e.number(0)), e.number(0), ratio)
    angle = e.g.op("Atan", ratio)
    steep = e.g.op("Greater", down, across)
    angle = e.g.op("Where", steep, e.g.op("Sub", e.number(np.pi / 2), angle), angle)
    angle = e.g.op("Where", negative(e, x), e.g.op("Sub", e.number(np.pi), angle), angle)
    sign_of_y = e.g.op("Where", negative(e, y), e.number(-1), e.number(1))
    return e.g.op("Mul", sign_of_y, angle)


def round_(e, x):
    if e.options["even"]:
        return e.g.op("Round", x)
    whole = e.g.op("Floor", e.g.op("Abs", x))
    rest = e.g.op("Sub", e.g.op("Abs", x), whole)  # floor(|x| + 0.5) would round 0.49999997 up
    up = e.g.op("GreaterOrEqual", rest, e.number(0.5))
    return e.g.op("Mul", sign(e, x), e.g.op("Where", up, e.g.op("Add", whole, e.number(1)), whole))


def is_finite(e, x):
    return e.g.op("Less", e.g.op("Abs", x), e.g.constant(np.inf, e.in_types[0][0]))


def power(e, x):
    """Computes powers by multiplications, so that integers wrap."""
    n = abs(e.options["exponent"])
    if n == 0:
        return _ones(e, x)
    result, square = None, x
    while n:
        if n & 1:
            result = square if result is None else e.g.op("Mul", result, square)
        n >>= 1
        if n:
            square = e.g.op("Mul", square, square)
    return e.g.op("Reciprocal", result) if e.options["exponent"] < 0 else result


def _ones(e, x):
    if e.dtype.kind == "f":
        return e.g.op("Pow", x, e.number(0))
    return e.g.op("Add", e.g.op("Sub", x, x), e.number(1))


def pow_(e, x, y):
    kind = e.in_types[1][0]
    return e.g.op("Pow", x, y if kind == e.dtype else e.g.cast(y, e.dtype))


def divide(e, x, y):
    """Divides. XLA divides integers by 0 without an error, and the smallest by -1: onnxruntime ends
    with either."""
    if e.dtype.kind == "f":
        return e.g.op("Div", x, y)
    if _harmless(e, y):
        return e.g.op("Div", x, y)
    zero, minus, safe = _divisor(e, y)
    quotient = e.g.op("Div", x, safe)
    if minus is not None:
        quotient = e.g.op("Where", minus, e.g.op("Sub", e.number(0), x), quotient)
    return e.g.op(
        "Where", zero, e.number(-1 if e.dtype.kind == "i" else np.iinfo(e.dtype).max), quotient
    )


def remainder(e, x, y):
    if e.dtype.kind == "f" or _harmless(e, y):
        return e.g.op("Mod", x, y, fmod=1)
    zero, minus, safe = _divisor(e, y)
    rest = e.g.op("Mod", x, safe, fmod=1)
    if minus is not None:
        rest = e.g.op("Where", minus, e.number(0), rest)
    return e.g.op("Where", zero, x, rest)


def _harmless(e, y) -> bool:
    known = e.g.known(y)
    return known is not None and not ((known == 0) | (e.dtype.kind == "i") & (known == -1)).any()


def _divisor(e, y):
    """Returns whether y is 0, whether it is -1 (None for unsigned integers), and y with 1 in place
    of both."""
    one, zero = e.number(1), e.g.op("Equal", y, e.number(0))
    if e.dtype.kind == "u":
        return zero, None, e.g.op("Where", zero, one, y)
    minus = e.g.op("Equal", y, e.number(-1))
    return zero, minus, e.g.op("Where", e.g.op("Or", zero, minus), one, y)


def shift_left(e, x, n):
    return _logical_shift(e, x, n, "LEFT")


def shift_right_logical(e, x, n):
    return _logical_shift(e, x, n, "RIGHT")


def shift_right_arithmetic(e, x, n):
    """Shifts the complement of a negative number, whose highest bit is 0. A shift by too many bits
    is one by all."""
    name = e.dtype.name.removeprefix("u")
    signed, unsigned = np.dtype(name), np.dtype(f"u{name}")
    last = e.g.constant(8 * e.dtype.itemsize - 1, unsigned)
    if e.dtype == signed:
        n = e.g.cast(n, unsigned)
    else:
        x = e.g.cast(x, signed)
    n = e.g.op("Where", e.g.op("Less", n, last), n, last)
    below = e.g.op("Less", x, e.g.constant(0, signed))
    bits = e.g.cast(e.g.op("Where", below, e.g.op("BitwiseNot", x), x), unsigned)
    moved = e.g.cast(e.g.op("BitShift", bits, n, direction="RIGHT"), signed)
    result = e.g.op("Where", below, e.g.op("BitwiseNot", moved), moved)
    return result if e.dtype == signed else e.g.cast(result, e.dtype)


def _logical_shift(e, x, n, direction):
    """ONNX shifts unsigned integers only, and by at most all bits but one."""
    unsigned = np.dtype(f"u{e.dtype.name.removeprefix('u')}")
    bits = 8 * e.dtype.itemsize
    known = e.g.known(n)
    if e.dtype != unsigned:
        x, n = e.g.cast(x, unsigned), e.g.cast(n, unsigned)
    inside = None
    if known is None or (known < 0).any() or (known >= bits).any():
        inside = e.g.op("Less", n, e.g.constant(bits, unsigned))
        n = e.g.op("Where", inside, n, e.g.constant(0, unsigned))
    result = e.g.op("BitShift", x, n, direction=direction)
    if inside is not None:
        result = e.g.op("Where", inside, result, e.g.constant(0, unsigned))
    return result if e.dtype == unsigned else e.g.cast(result, e.dtype)


def convert(e, x):
    source = e.in_types[0][0]
    if source == e.dtype:
        return x
    if source.kind == "f" and e.dtype.kind in "iu":
        return _saturated(e, x, source)
    return e.g.cast(x, e.dtype)


def _saturated(e, x, source):
    """Converts floating-point numbers to integers as XLA does: NaN becomes 0, and what is too large
    the largest."""
    if source == np.float16:
        x, source = e.g.cast(x, np.float32), np.dtype(np.float32)
    low, high = np.iinfo(e.dtype).min, np.iinfo(e.dtype).max
    number = lambda value: e.g.constant(value, source)
    x = e.g.op("Where", e.g.op("IsNaN", x), number(0), x)
    last = source.type(high)
    if int(last) == high:
        return e.g.cast(e.g.op("Clip", x, number(low), number(high)), e.dtype)
    inside = e.g.cast(
        e.g.op("Clip", x, number(low), number(np.nextafter(last, source.type(0)))), e.dtype
    )
    return e.g.op("Where", e.g.op("Less", x, number(last)), inside, e.number(high))


def index(e, x, dtype):
    """Converts the integers x, which have the dtype `dtype`, to int64. What int64 cannot hold
    becomes its largest."""
    if dtype == INT64:
        return x
    if dtype == np.uint64:
        x = e.g.op("Min", x, e.g.constant(np.iinfo(np.int64).max, np.uint64))
    return e.g.cast(x, INT64)
