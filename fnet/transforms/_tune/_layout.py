"""Moves transposes past elementwise operations, for tune, so that transposes introduced by vmap
cancel each other.

XLA:CPU stores the axes of an array in memory in the order of the array's shape in the program.
Under vmap, the result of a dense layer has the shape [out, batch, time] and is then transposed.
Elementwise operations on the transposed array would read and write strided memory. The function
`transposed(y, order)` returns the array `y.transpose(order)` as a `Value`, and stores the tuple
`order` in the attribute `note` of the `Value`, unless `order` moves no axis. An elementwise
operation on a transposed array is applied to the original array, and the result of the operation is
transposed. A transpose of a transposed array is merged with the first transpose, so that inverse
transposes cancel.
"""

from __future__ import annotations

import numpy as np
from jax import lax

from fnet.jaxpr import POINTWISE, Value, options, plain


def transposed(y, order) -> Value:
    """Returns `y.transpose(order)` as a `Value` whose attribute `note` is the tuple `order`."""
    order = tuple(order)
    return Value(y) if order == tuple(range(y.ndim)) else Value(lax.transpose(y, order), order)


def followed(eqn, inputs) -> list[Value] | None:
    """Moves a transpose from the inputs of an elementwise equation to its outputs, or merges two
    transposes.

    Returns the outputs of the equation, or None if the rewrite does not apply. The rewrite applies
    only to elementwise equations and to transposes. All inputs that were transposed must have the
    same order of axes.
    """
    name, orders = eqn.primitive.name, {_order(value) for value in inputs} - {None}
    if len(orders) != 1:
        return None
    order = orders.pop()
    if name == "transpose":
        back = lax.transpose(inputs[0].x, np.argsort(order).tolist())
        return [transposed(back, [order[i] for i in options(eqn).permutation])]
    if name not in POINTWISE or any(v.aval.ndim != len(order) for v in eqn.outvars):
        return None
    if not all(_order(value) or value.note is True or np.ndim(value.x) == 0 for value in inputs):
        return None
    inverse = np.argsort(order).tolist()
    straight = [
        Value(lax.transpose(value.x, inverse)) if np.ndim(value.x) else value for value in inputs
    ]
    return [transposed(y.x, order) for y in plain(eqn, straight)]


def _order(value):
    """Returns the order of axes to which a value was transposed, or None if the value was not
    transposed.

    The attribute `note` of a transposed value is the order of its axes, a tuple as in
    `jnp.transpose`. If the length of the tuple `note` differs from the number of axes of the value,
    `_order` returns None, as for a value that was not transposed. For example, a slice of a
    transposed array in a loop has one axis fewer than the array, but its attribute `note` may still
    be the order of the axes of the whole array.
    """
    return (
        value.note
        if isinstance(value.note, tuple) and len(value.note) == np.ndim(value.x)
        else None
    )
