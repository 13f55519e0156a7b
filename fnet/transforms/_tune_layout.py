"""Removes transposes introduced by vmap, for tune: elementwise operations are applied before a transpose, not after it.

XLA:CPU keeps the order of axes of the program. Under vmap, a dense layer's result is [out, batch, time], and
elementwise operations up to the next product would read and write strided memory. The note (p, q, ...) of a value
states that the value is `y.transpose(p, q, ...)` of an array y in memory. Elementwise operations are applied to y, so
that successive transposes cancel.
"""

from __future__ import annotations

import numpy as np
from jax import lax

from fnet.jaxpr import POINTWISE, Value, permutation, plain


def transposed(y, order) -> Value:
    """Returns `y.transpose(order)` with a note."""
    order = tuple(order)
    return Value(y) if order == tuple(range(y.ndim)) else Value(lax.transpose(y, order), order)


def followed(eqn, inputs) -> list[Value] | None:
    """Applies an equation to the arrays in memory, if all of its inputs have the same transpose, and returns the
    outputs.

    Returns None if the equation is not elementwise or no input is transposed.
    """
    name, orders = eqn.primitive.name, {_order(value) for value in inputs} - {None}
    if len(orders) != 1:
        return None
    order = orders.pop()
    if name == "transpose":
        back = lax.transpose(inputs[0].x, np.argsort(order).tolist())
        return [transposed(back, [order[i] for i in permutation(eqn)])]
    if name not in POINTWISE or any(v.aval.ndim != len(order) for v in eqn.outvars):
        return None
    if not all(_order(value) or value.note is True or np.ndim(value.x) == 0 for value in inputs):
        return None
    inverse = np.argsort(order).tolist()
    straight = [Value(lax.transpose(value.x, inverse)) if np.ndim(value.x) else value for value in inputs]
    return [transposed(y.x, order) for y in plain(eqn, straight)]


def _order(value):
    """Returns the order of axes that a note contains, or None. The note of a loop's slice refers to the whole array."""
    return value.note if isinstance(value.note, tuple) and len(value.note) == np.ndim(value.x) else None
