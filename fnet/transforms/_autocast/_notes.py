"""The information (`Value.note`) that autocast attaches to each value while it evaluates a jaxpr."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp

from fnet.jaxpr import DOT, product, traits

# Bounds of constants: 1,000 times the largest does not overflow in float16.
_SMALL, _LARGE = (2.0**-10, 2.0**6)
VECTOR = "vector"  # an array that repeats a smaller array, such as a broadcast bias
PRODUCT = "product"  # the result of a product, in the low dtype
WEIGHT = "weight"  # a weight gradient, a product of the backward pass that sums over the examples, and sums of it
BRANCH = "branch"  # a value of the forward pass that is the result of a product plus a bias, or a multiple of it


def branch(eqn, inputs) -> bool:
    """Whether an equation scales, shifts, masks, reshapes or transposes the result of a matrix
    product or convolution. Returns False for an equation that reads only a slice of the result of a
    matrix product or convolution."""
    size = math.prod(eqn.outvars[0].aval.shape)
    results = [
        value
        for value in inputs
        if value.note in (PRODUCT, BRANCH) and math.prod(value.x.shape) == size
    ]
    layout = traits(eqn.primitive.name).kind in ("layout", "alias")
    return bool(results) and (
        layout
        or (
            eqn.primitive.name in ("add", "sub", "mul", "div", "select_n")
            and all(value.x.shape == eqn.outvars[0].aval.shape for value in results)
        )
    )


def sums_examples(eqn) -> bool:
    """Whether a matrix product sums over axis 0 of both operands, which are the examples, as a
    weight gradient does."""
    found = product(eqn)
    if found is None or found.op is not DOT:
        return False
    left, right = found.dimensions[0]
    return (0, 0) in zip(left, right)


class Size(NamedTuple):
    """The smallest and largest magnitude of a constant's elements. Zeros and infinities are
    ignored, because every dtype can represent them."""

    smallest: float
    largest: float

    @classmethod
    def of(cls, size: float) -> Size:
        return cls(size or math.inf, 0.0 if size == math.inf else size)


@functools.cache
def fits(name: str, magnitude: Size, dtype) -> bool:
    """Whether a constant operand of the primitive `name` may be converted to the low-precision
    dtype `dtype`.

    `magnitude` contains the smallest and the largest magnitude of the constant's elements. The
    result is False if one of these two magnitudes is outside the range of the normal numbers of
    `dtype`. The normal numbers of float16 have magnitudes between 6e-5 and 65504. A constant that
    is added or subtracted must not be so large that the other operand is lost when the result is
    rounded to `dtype`. In a multiplication or division, the constant must not make the result
    overflow or underflow.
    """
    info, (smallest, largest) = jnp.finfo(dtype), magnitude
    if smallest < float(info.tiny) or largest > float(info.max):
        return False
    if name in ("add", "sub"):
        return largest <= _LARGE
    return (
        name not in ("mul", "div")
        or float(info.max) > 1e30
        or (_SMALL <= smallest and largest <= _LARGE)
    )
