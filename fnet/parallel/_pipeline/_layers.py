"""Finds the loops over layers in a step: scans with a matrix of each layer among their slices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fnet import _jax, jaxpr
from fnet.jaxpr import POINTWISE

_KEEPS = POINTWISE | frozenset(
    ("transpose", "reshape", "optimization_barrier", "sharding_constraint", "name", "site")
)


def layer_scans(program: Any, state: int) -> dict[int, Any]:
    """Returns {id: equation} for the scans over layers in an open jaxpr, at any depth, but not
    those inside of each other.

    A scan over layers carries arrays, and slices one of the first `state` inputs of the program, or
    a value computed from it elementwise, that has a matrix for each layer. So does one that slices
    what another scan over layers has stacked, such as a backward pass.
    """
    found: dict[int, Any] = {}
    _walk(program, [i < state for i in range(len(program.invars))], found)
    return found


def _walk(program: Any, stacked: list[bool], found: dict[int, Any]) -> list[bool]:
    """Adds the scans of a jaxpr. `stacked` says which of its inputs may be stacked parameters; the
    result says so of its outputs."""
    known = dict(zip(program.invars, stacked))
    read = lambda v: not isinstance(v, _jax.Literal) and known.get(v, False)
    for eqn in program.eqns:
        inputs = [read(v) for v in eqn.invars]
        known.update(zip(eqn.outvars, _outputs(eqn, inputs, found)))
    return [read(v) for v in program.outvars]


def _outputs(eqn: Any, inputs: list[bool], found: dict[int, Any]) -> list[bool]:
    nothing = [False] * len(eqn.outvars)
    if eqn.primitive.name == "scan":
        parts = jaxpr.scan(eqn)
        consts, _, slices = parts.split(inputs)
        _, carry, sliced = parts.split(eqn.invars)
        if any(map(_moves, carry)) and any(
            mark and v.aval.ndim >= 3 for mark, v in zip(slices, sliced)
        ):
            found[id(eqn)] = eqn
            return [i >= parts.carry for i in range(len(eqn.outvars))]
        inside = [*consts, *[False] * (parts.carry + parts.slices)]
        _walk(parts.jaxpr, inside, found)
        return nothing
    if any(inputs) and eqn.primitive.name in _KEEPS:
        first = eqn.invars[inputs.index(True)].aval.shape[:1]
        return [bool(first) and v.aval.shape[:1] == first for v in eqn.outvars]
    bodies = jaxpr.bodies(eqn)
    outputs = [
        _walk(body.jaxpr, [inputs[i] for i in body.inputs], found)
        for body in bodies
        if body.inputs is not None
    ]
    if len(bodies) == 1 and bodies[0].kind == "call":
        return outputs[0]
    return nothing


def _moves(v: Any) -> bool:
    dtype = v.aval.dtype
    return (
        v.aval.ndim > 0
        and not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
        and (jnp.issubdtype(dtype, jnp.inexact))
    )
