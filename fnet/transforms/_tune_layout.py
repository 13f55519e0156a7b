"""Layouts that vmap leaves behind, for tune: what is computed elementwise from a transposed product follows it.

XLA:CPU keeps the order of axes that a program is written in. Under vmap a dense layer's result is [out, batch, time],
and all that is computed from it until the next product would be read and written across. A value's note (p, q, ...)
says that it is `y.transpose(p, q, ...)` of a y that stands in memory as it is; what is elementwise is then computed
from y, and the transposes between cancel out.
"""

from __future__ import annotations

import numpy as np
from jax import lax

from fnet.jaxpr import POINTWISE, Value, permutation, plain


def transposed(y, order) -> Value:
    """`y.transpose(order)`, with a note of it."""
    order = tuple(order)
    return Value(y) if order == tuple(range(y.ndim)) else Value(lax.transpose(y, order), order)


def followed(eqn, inputs) -> list[Value] | None:
    """The equation on the arrays that stand in memory, where its inputs are transposed alike; None where it is not
    elementwise or nothing is transposed."""
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
    """The note of a transpose, or None; slices of a loop come with notes that are not theirs."""
    return value.note if isinstance(value.note, tuple) and len(value.note) == np.ndim(value.x) else None
