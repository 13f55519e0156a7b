"""Finds the loops over layers in a step: scans with a matrix of each layer among their slices."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fnet import _jax, jaxpr
from fnet.jaxpr import POINTWISE

_KEEPS = POINTWISE | frozenset(
    """
    transpose reshape broadcast_in_dim expand_dims concatenate stack optimization_barrier sharding_constraint name
    site
""".split()
)


class Opened(NamedTuple):
    """A step whose scans over layers are known.

    Attributes:
        closed: its jaxpr, with calls inlined.
        scans: {id: equation} of the scans over layers in it.
        rolled: whether these are blocks that the step repeats without a loop, with parameters of
            their own.
    """

    closed: Any
    scans: dict[int, Any]
    rolled: bool

    @property
    def depth(self) -> int:
        """The number of layers: the greatest common divisor of the lengths of the scans."""
        return math.gcd(*(jaxpr.scan(eqn).length for eqn in self.scans.values())) or 1


def opened(closed: Any, state: int) -> Opened:
    """Finds the layers of a step, given its jaxpr. The first `state` inputs are its state."""
    kept = lambda eqn: eqn.primitive.name not in ("jit", "pjit") or jaxpr.has_shardings(eqn)
    closed = jaxpr.inlined(closed, unless=kept)
    if scans := layer_scans(closed.jaxpr, state):
        return Opened(closed, scans, False)
    rolled = jaxpr.rolled(closed)
    return Opened(rolled, layer_scans(rolled.jaxpr, state), True)


def layer_scans(program: Any, state: int) -> dict[int, Any]:
    """Returns {id: equation} for the scans over layers in an open jaxpr, at any depth, but not
    those inside of each other.

    A scan over layers carries arrays, and slices one of the first `state` inputs of the program, or
    a value computed from it elementwise or by stacking, that has a matrix for each layer. So does
    one that slices what another scan over layers has stacked, such as a backward pass.
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
        return [True] * len(eqn.outvars)
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
