"""Removes transposes introduced by vmap, for tune: elementwise operations are applied before a transpose, not after it.

XLA:CPU does not change the order of the axes in a program. Under vmap, the result of a dense layer has the shape [out,
batch, time] and is then transposed. The elementwise operations between the transpose and the next product would read
and write strided memory. In tune, the value `y.transpose(order)` gets the tuple `order` as its note (attached
information). Elementwise operations after the transpose are applied to y instead, so that successive transposes cancel.
"""

from __future__ import annotations

import numpy as np
from jax import lax

from fnet.jaxpr import POINTWISE, Value, permutation, plain


def transposed(y, order) -> Value:
    """Returns `y.transpose(order)` with the note (attached information) `order`."""
    order = tuple(order)
    return Value(y) if order == tuple(range(y.ndim)) else Value(lax.transpose(y, order), order)


def followed(eqn, inputs) -> list[Value] | None:
    """Applies an equation to the arrays before their transposes, if all transposed inputs have the same order of axes.
    Returns the outputs.

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
    """Returns the order of axes in the note (attached information) of a value, or None. Inside a loop, a slice may have
    the order of the whole array, which has more axes and is ignored."""
    return value.note if isinstance(value.note, tuple) and len(value.note) == np.ndim(value.x) else None
