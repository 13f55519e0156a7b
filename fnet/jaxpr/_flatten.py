"""Rewrites programs so that they contain only a small set of primitives.

Calls are inlined. fnet's own primitives and composite operations are replaced by simpler
operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet import _jax
from fnet.jaxpr._calls import CALLS, INLINED
from fnet.jaxpr._enter import inline
from fnet.jaxpr._primitives import description
from fnet.jaxpr._rewrite import Interpreter
from fnet.jaxpr._rows import ends_by_rows, while_of_rows
from fnet.jaxpr._scopes import Scope
from fnet.jaxpr._tags import is_tag
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


def opened_calls(closed: Any) -> Any:
    """Returns the closed jaxpr with all calls inlined, also those with custom derivatives, and with
    fnet's own primitives and names of values replaced by JAX's. Other equations stay as they are.
    The program should not be differentiated afterwards."""
    return _again(_Opener(CALLS), closed)


def flatten(closed: Any, *, kept: Iterable[str] = ()) -> Any:
    """Rewrites a closed jaxpr for inference, so that it contains only a small set of primitives.

    The primitives `scan`, `while` (with a single condition) and `cond` are kept. Calls are inlined,
    those with custom derivatives or custom batching too. Because that removes the derivatives, the
    rewritten program should not be differentiated. The primitives whose names are in `kept` are not
    replaced either, such as "sharding_constraint", which inference does without.
    """
    return _again(_Flattener(CALLS, frozenset(kept)), closed)


def _again(interpreter: Interpreter, closed: Any) -> Any:
    return _jax.make_jaxpr(lambda *arrays: interpreter.outputs(closed, arrays))(*closed.in_avals)


class _Inliner(Interpreter):
    def __init__(self, calls: frozenset[str], unless: Callable[[Any], bool] | None = None):
        super().__init__()
        self.calls, self.unless = calls, unless

    def depends(self, at: Scope) -> None:
        return None

    def equation(self, eqn: Any, at: Scope, inputs: list[Value], plan: Any) -> Any:
        if eqn.primitive.name in self.calls and not (self.unless and self.unless(eqn)):
            return inline(self, eqn, at, inputs, (None,) * len(eqn.outvars))
        return NotImplemented


class _Opener(_Inliner):
    def equation(self, eqn: Any, at: Scope, inputs: list[Value], plan: Any) -> Any:
        own = description(eqn.primitive)
        if own.plain is not None:
            return self.evaluate(own.plain(eqn), (), inputs, at)
        if own.stands_for is not None:
            op, options, compute = own.stands_for(eqn.params)
            operands = [value.x.astype(compute) for value in inputs]
            options = {**options, "preferred_element_type": jnp.dtype(jnp.float32)}
            wide = op.bind(*operands, **options)
            return [Value(wide.astype(eqn.outvars[0].aval.dtype))]
        if (form := _jax.expanded(eqn)) is not None:  # jnp.searchsorted since jax 0.11
            return self.evaluate(form.jaxpr, form.consts, inputs, at)
        if is_tag(eqn):
            return inputs
        return super().equation(eqn, at, inputs, plan)


class _Flattener(_Opener):
    def __init__(self, calls: frozenset[str], kept: frozenset[str]):
        super().__init__(calls)
        self.left = kept

    def equation(self, eqn: Any, at: Scope, inputs: list[Value], plan: Any) -> Any:
        name = eqn.primitive.name
        if name in self.left:
            return _Inliner.equation(self, eqn, at, inputs, plan)
        if name == "while" and ends_by_rows(eqn):
            return while_of_rows(self, eqn, at, inputs)
        if name in _SAME:
            return inputs[: len(eqn.outvars)]  # "divided" has further operands
        if name in _SIMPLER:
            arrays = [value.x for value in inputs]
            return [Value(y) for y in _SIMPLER[name](eqn.params, eqn.outvars, *arrays)]
        return super().equation(eqn, at, inputs, plan)


def _split(params: dict, outvars: list, x: jax.Array) -> list:
    start, axis, parts = 0, params["axis"], []
    for size in params["sizes"]:
        parts.append(lax.slice_in_dim(x, start, start + size, axis=axis))
        start += size
    return parts


def _unstack(params: dict, outvars: list, x: jax.Array) -> list:
    axis = params["axis"]
    slices = [lax.slice_in_dim(x, i, i + 1, axis=axis) for i in range(len(outvars))]
    return [lax.reshape(each, v.aval.shape) for each, v in zip(slices, outvars)]


def _stack(params: dict, outvars: list, *arrays: jax.Array) -> list:
    axis = params["axis"]
    slices = [lax.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])) for x in arrays]
    return [lax.concatenate(slices, axis)]


def _tile(params: dict, outvars: list, x: jax.Array) -> list:
    repeated = []  # [repetitions of axis 0, axis 0, repetitions of axis 1, axis 1, ...]
    for times, size in zip(params["reps"], x.shape):
        repeated += [times, size]
    y = lax.broadcast_in_dim(x, repeated, tuple(range(1, 2 * x.ndim, 2)))
    return [lax.reshape(y, outvars[0].aval.shape)]


def _reshape(params: dict, outvars: list, x: Any) -> list:
    return [lax.reshape(x, outvars[0].aval.shape)]


def _dimensions(params: dict, outvars: list, x: Any) -> Any:
    """Replaces a reshape. If the reshape has the parameter `dimensions`, the axes of the operand
    are first permuted to the order `dimensions`."""
    order = params.get("dimensions")
    return _reshape(params, outvars, x if order is None else lax.transpose(x, order))


def _mul(params: dict, outvars: list, *operands: jax.Array) -> list:
    dtype = params.get("out_dtype")
    if dtype is not None:
        operands = tuple(lax.convert_element_type(x, dtype) for x in operands)
    return [lax.mul(*operands)]


def _scatter_sub(params: dict, outvars: list, x: Any, indices: Any, updates: Any) -> list:
    options = {name: params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
    return [lax.scatter_add(x, indices, lax.neg(updates), params["dimension_numbers"], **options)]


def _log2(params: dict, outvars: list, x: Any) -> list:
    y = lax.log(x, accuracy=params["accuracy"])
    return [lax.mul(y, lax.full_like(y, 1 / math.log(2)))]


def _polynomial(params: dict, outvars: list, x: Any, *coefficients: Any) -> list:
    """Horner's rule, from the highest power down, as JAX computes it."""
    y = coefficients[-1]
    for c in reversed(coefficients[:-1]):
        y = lax.add(lax.mul(y, x), c)
    return [y]


_SIMPLER: dict[str, Callable[..., list]] = {
    "mul": _mul,
    "scatter-sub": _scatter_sub,
    "square": lambda params, outvars, x: [lax.mul(x, x)],
    "one_minus_square": lambda params, outvars, x: [lax.sub(lax.full_like(x, 1), lax.mul(x, x))],
    "log2": _log2,
    "polynomial": _polynomial,
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
