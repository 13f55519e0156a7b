"""Rewrites programs so that they contain only a small set of primitives.

Calls are inlined. fnet's own primitives and composite operations are replaced by simpler
operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet.jaxpr._calls import CALLS, INLINED
from fnet.jaxpr._enter import inline
from fnet.jaxpr._primitives import description
from fnet.jaxpr._rewrite import Interpreter
from fnet.jaxpr._values import Value

_SAME = (
    "copy",
    "copy_p",
    "stop_gradient",
    "name",
    "optimization_barrier",
    "sharding_constraint",
    "divided",
    "pvary",
    "pbroadcast",
    "layout_constraint",
    "reshard",
    "device_put",
    "mesh_cast",
)


def inlined(closed: Any, *, unless: Callable[[Any], bool] | None = None) -> Any:
    """Returns the closed jaxpr with jitted calls inlined. A jitted call is not inlined if the
    function `unless` returns True for the equation of the call. Arrays in the closures of the
    inlined calls become constants."""
    return _again(_Inliner(INLINED, unless), closed)


def flatten(closed: Any) -> Any:
    """Rewrites a closed jaxpr for inference, so that it contains only a small set of primitives.

    The primitives `scan`, `while` and `cond` are kept. Calls are inlined, including calls with
    custom derivatives or custom batching. Because inlining removes custom derivatives, the
    rewritten program should not be differentiated.
    """
    return _again(_Flattener(CALLS), closed)


def _again(interpreter, closed):
    return jax.make_jaxpr(lambda *arrays: interpreter.outputs(closed, arrays))(*closed.in_avals)


class _Inliner(Interpreter):
    def __init__(self, calls: frozenset[str], unless: Callable[[Any], bool] | None = None):
        super().__init__()
        self.calls, self.unless = calls, unless

    def depends(self, at):
        return None

    def equation(self, eqn, at, inputs, plan):
        if eqn.primitive.name in self.calls and not (self.unless and self.unless(eqn)):
            return inline(self, eqn, at, inputs, (None,) * len(eqn.outvars))
        return NotImplemented


class _Flattener(_Inliner):
    def equation(self, eqn, at, inputs, plan):
        name, own = eqn.primitive.name, description(eqn.primitive)
        if own.plain is not None:
            jaxpr = own.plain(eqn)
            return self.evaluate(jaxpr, (), inputs, at)
        if own.stands_for is not None:
            op, options, compute = own.stands_for(eqn.params)
            operands = [value.x.astype(compute) for value in inputs]
            wide = op.bind(
                *operands, **{**options, "preferred_element_type": jnp.dtype(jnp.float32)}
            )
            return [Value(wide.astype(eqn.outvars[0].aval.dtype))]
        if name in _SAME:
            return inputs[: len(eqn.outvars)]  # "divided" has further operands
        if name in _SIMPLER:
            arrays = [value.x for value in inputs]
            return [Value(y) for y in _SIMPLER[name](eqn.params, eqn.outvars, *arrays)]
        return super().equation(eqn, at, inputs, plan)


def _split(params, outvars, x):
    start, axis, parts = 0, params["axis"], []
    for size in params["sizes"]:
        parts.append(lax.slice_in_dim(x, start, start + size, axis=axis))
        start += size
    return parts


def _unstack(params, outvars, x):
    axis = params["axis"]
    return [
        lax.reshape(lax.slice_in_dim(x, i, i + 1, axis=axis), v.aval.shape)
        for i, v in enumerate(outvars)
    ]


def _stack(params, outvars, *arrays):
    axis = params["axis"]
    return [
        lax.concatenate(
            [lax.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])) for x in arrays], axis
        )
    ]


def _tile(params, outvars, x):
    reps = params["reps"]
    both = tuple(size for pair in zip(reps, x.shape) for size in pair)
    return [
        lax.reshape(
            lax.broadcast_in_dim(x, both, tuple(range(1, 2 * x.ndim, 2))), outvars[0].aval.shape
        )
    ]


def _reshape(params, outvars, x):
    return [lax.reshape(x, outvars[0].aval.shape)]


def _dimensions(params, outvars, x):
    """Replaces a reshape. If the reshape has the parameter `dimensions`, the axes of the operand
    are first permuted to the order `dimensions`."""
    order = params.get("dimensions")
    return _reshape(params, outvars, x if order is None else lax.transpose(x, order))


def _mul(params, outvars, *operands):
    dtype = params.get("out_dtype")
    return [
        lax.mul(
            *(operands if dtype is None else (lax.convert_element_type(x, dtype) for x in operands))
        )
    ]


def _scatter_sub(params, outvars, x, indices, updates):
    options = {name: params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
    return [lax.scatter_add(x, indices, lax.neg(updates), params["dimension_numbers"], **options)]


_SIMPLER = {
    "mul": _mul,
    "scatter-sub": _scatter_sub,
    "square": lambda params, outvars, x: [lax.mul(x, x)],
    "one_minus_square": lambda params, outvars, x: [lax.sub(lax.full_like(x, 1), lax.mul(x, x))],
    "add_any": lambda params, outvars, x, y: [lax.add(x, y)],
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "reshape": _dimensions,
    "split": _split,
    "unstack": _unstack,
    "stack": _stack,
    "tile": _tile,
    "empty": lambda params, outvars: [lax.full(outvars[0].aval.shape, 0, outvars[0].aval.dtype)],
    "empty2": lambda params, outvars, *_: [
        lax.full(outvars[0].aval.shape, 0, outvars[0].aval.dtype)
    ],
}
