"""The inverse error function, the logarithm of the gamma function and its derivative, composed of
ONNX's operators by the formulas of XLA, and XLA's total order of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fnet.export.onnx._functions import log1p
from fnet.export.standalone._interpret import LANCZOS

# Giles (2010), Approximating the erfinv function: for w = -log(1 - x^2) up to a limit, a polynomial
# in w or sqrt(w) minus a shift; the highest coefficient first.
_ERF_INV_32 = (
    (
        5.0,
        2.5,
        (
            2.81022636e-08,
            3.43273939e-07,
            -3.5233877e-06,
            -4.39150654e-06,
            0.00021858087,
            -0.00125372503,
            -0.00417768164,
            0.246640727,
            1.50140941,
        ),
    ),
    (
        math.inf,
        3.0,
        (
            -0.000200214257,
            0.000100950558,
            0.00134934322,
            -0.00367342844,
            0.00573950773,
            -0.0076224613,
            0.00943887047,
            1.00167406,
            2.83297682,
        ),
    ),
)
_ERF_INV_64 = (
    (
        6.25,
        3.125,
        (
            -3.6444120640178196996e-21,
            -1.685059138182016589e-19,
            1.2858480715256400167e-18,
            1.115787767802518096e-17,
            -1.333171662854620906e-16,
            2.0972767875968561637e-17,
            6.6376381343583238325e-15,
            -4.0545662729752068639e-14,
            -8.1519341976054721522e-14,
            2.6335093153082322977e-12,
            -1.2975133253453532498e-11,
            -5.4154120542946279317e-11,
            1.051212273321532285e-09,
            -4.1126339803469836976e-09,
            -2.9070369957882005086e-08,
            4.2347877827932403518e-07,
            -1.3654692000834678645e-06,
            -1.3882523362786468719e-05,
            0.0001867342080340571352,
            -0.00074070253416626697512,
            -0.0060336708714301490533,
            0.24015818242558961693,
            1.6536545626831027356,
        ),
    ),
    (
        16.0,
        3.25,
        (
            2.2137376921775787049e-09,
            9.0756561938885390979e-08,
            -2.7517406297064545428e-07,
            1.8239629214389227755e-08,
            1.5027403968909827627e-06,
            -4.013867526981545969e-06,
            2.9234449089955446044e-06,
            1.2475304481671778723e-05,
            -4.7318229009055733981e-05,
            6.8284851459573175448e-05,
            2.4031110387097893999e-05,
            -0.0003550375203628474796,
            0.00095328937973738049703,
            -0.0016882755560235047313,
            0.0024914420961078508066,
            -0.0037512085075692412107,
            0.005370914553590063617,
            1.0052589676941592334,
            3.0838856104922207635,
        ),
    ),
    (
        math.inf,
        5.0,
        (
            -2.7109920616438573243e-11,
            -2.5556418169965252055e-10,
            1.5076572693500548083e-09,
            -3.7894654401267369937e-09,
            7.6157012080783393804e-09,
            -1.4960026627149240478e-08,
            2.9147953450901080826e-08,
            -6.7711997758452339498e-08,
            2.2900482228026654717e-07,
            -9.9298272942317002539e-07,
            4.5260625972231537039e-06,
            -1.9681778105531670567e-05,
            7.5995277030017761139e-05,
            -0.00021503011930044477347,
            -0.00013871931833623122026,
            1.0103004648645343977,
            4.8499064014085844221,
        ),
    ),
)

_LANCZOS_G = 7.0


class _As(NamedTuple):
    """An equation whose functions are computed in another dtype."""

    g: Any
    dtype: np.dtype

    def number(self, x: float) -> str:
        return self.g.constant(x, self.dtype)


def _precise(function: Callable) -> Callable:
    """Computes float16 in float32, as XLA does."""

    def convert(e, x):
        if e.dtype != np.float16:
            return function(e, x)
        wide = np.dtype(np.float32)
        return e.g.cast(function(_As(e.g, wide), e.g.cast(x, wide)), e.dtype)

    return convert


def _polynomial(e, x: str, coefficients: Sequence[float]) -> str:
    value = e.number(coefficients[0])
    for coefficient in coefficients[1:]:
        value = e.g.op("Add", e.g.op("Mul", value, x), e.number(coefficient))
    return value


@_precise
def erf_inv(e, x):
    w = e.g.op("Neg", log1p(e, e.g.op("Neg", e.g.op("Mul", x, x))))
    root, factor = e.g.op("Sqrt", w), None
    pieces = _ERF_INV_64 if e.dtype == np.float64 else _ERF_INV_32
    for i, (limit, shift, coefficients) in reversed(list(enumerate(pieces))):
        piece = _polynomial(e, e.g.op("Sub", root if i else w, e.number(shift)), coefficients)
        below = e.g.op("Less", w, e.number(limit))
        factor = piece if factor is None else e.g.op("Where", below, piece, factor)
    end = e.g.op("Mul", x, e.number(math.inf))
    at_end = e.g.op("Equal", e.g.op("Abs", x), e.number(1))
    return e.g.op("Where", at_end, end, e.g.op("Mul", factor, x))


def _lanczos(e, x):
    """Returns (whether x < 0.5, z, t, log(t), the sum and its derivative) of Lanczos' formula for
    log(gamma(z + 1)), where z is -x or x - 1, and t = z + g + 0.5."""
    add = lambda a, b: e.g.op("Add", a, b)
    reflected = e.g.op("Less", x, e.number(0.5))
    z = e.g.op("Where", reflected, e.g.op("Neg", x), e.g.op("Sub", x, e.number(1)))
    total, slope = e.number(LANCZOS[0]), e.number(0)
    for i, coefficient in enumerate(LANCZOS[1:], 1):
        place = add(z, e.number(i))
        term = e.g.op("Div", e.number(coefficient), place)
        total = add(total, term)
        slope = e.g.op("Sub", slope, e.g.op("Div", term, place))
    half = _LANCZOS_G + 0.5
    t = add(z, e.number(half))
    log_t = add(e.number(math.log(half)), log1p(e, e.g.op("Div", z, e.number(half))))
    return reflected, z, t, log_t, total, slope


@_precise
def lgamma(e, x):
    """Where x < 0.5, log|gamma(x)| = log(pi) - log|sin(pi x)| - log(gamma(1 - x))."""
    op, number = e.g.op, e.number
    reflected, z, t, log_t, total, _ = _lanczos(e, x)
    power = op("Sub", op("Add", z, number(0.5)), op("Div", t, log_t))
    constant = number(math.log(2 * math.pi) / 2)
    right = op("Add", op("Add", constant, op("Mul", power, log_t)), op("Log", total))
    distance = op("Abs", x)
    rest = op("Sub", distance, op("Floor", distance))
    rest = op("Min", rest, op("Sub", number(1), rest))
    sine = op("Log", op("Sin", op("Mul", number(math.pi), rest)))
    # The sine of a subnormal number has few digits.
    small = op("Add", op("Log", rest), number(math.log(math.pi)))
    sine = op("Where", op("Less", rest, number(1e-8)), small, sine)
    left = op("Sub", op("Sub", number(math.log(math.pi)), sine), right)
    infinite = op("Equal", op("Abs", sine), number(math.inf))  # at a pole
    left = op("Where", infinite, number(math.inf), left)
    result = op("Where", reflected, left, right)
    return op("Where", op("Equal", distance, number(math.inf)), distance, result)


@_precise
def digamma(e, x):
    """Where x < 0.5, digamma(x) = digamma(1 - x) - pi / tan(pi x)."""
    op, number = e.g.op, e.number
    reflected, _, t, log_t, total, slope = _lanczos(e, x)
    right = op("Add", log_t, op("Div", slope, total))
    right = op("Sub", right, op("Div", number(_LANCZOS_G), t))
    whole = op("Floor", op("Add", x, number(0.5)))
    angle = op("Mul", number(math.pi), op("Sub", x, whole))
    slope_of_sine = op("Div", op("Mul", number(math.pi), op("Cos", angle)), op("Sin", angle))
    result = op("Where", reflected, op("Sub", right, slope_of_sine), right)
    pole = op("And", op("Less", x, number(0)), op("Equal", x, op("Floor", x)))
    result = op("Where", pole, number(math.nan), result)
    zero = op("Less", op("Abs", x), number(float(np.finfo(e.dtype).tiny)))
    return op("Where", zero, number(-math.inf), result)  # NaN before jax 0.11


def log_add_exp(e, x, y):
    """log(exp(x) + exp(y)), where a difference of infinities is NaN."""
    distance = e.g.op("Abs", e.g.op("Sub", x, y))
    more = log1p(e, e.g.op("Exp", e.g.op("Neg", distance)))
    finite = e.g.op("Add", e.g.op("Max", x, y), more)
    return e.g.op("Where", e.g.op("IsNaN", distance), e.g.op("Add", x, y), finite)


def less_in_total_order(e, x, y):
    """-0.0 is less than 0.0, and NaN larger than all other numbers. ONNX does not see the sign of a
    NaN, which `jnp.searchsorted` and `lax.sort` remove before they compare."""
    less = e.g.op("Less", x, y)
    if e.in_types[0][0].kind != "f":
        return less
    nan = e.g.op("And", e.g.opposite(e.g.op("IsNaN", x)), e.g.op("IsNaN", y))
    less = e.g.op("Or", less, nan)
    if e.g.never_negative_zero(x):
        return less
    zeros = e.g.op("Less", e.g.op("Reciprocal", x), e.g.op("Reciprocal", y))
    return e.g.op("Or", less, e.g.op("And", e.g.op("Equal", x, y), zeros))


def at_most_in_total_order(e, x, y):
    return e.g.opposite(less_in_total_order(e, y, x))
