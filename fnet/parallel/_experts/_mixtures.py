"""Finds the mixtures of experts of a step that is traced for several devices: which parameters are
kernels of experts, and what is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from fnet import _jax
from fnet.jaxpr import Frame, bodies, nbytes, options, read, scan
from fnet.layers._experts_apart import FURTHER
from fnet.parallel._ledger import Transfer

AXIS = "expert"
_KEEPS = frozenset(("convert_element_type", "copy", "optimization_barrier", "sharding_constraint"))
_COLLECTIVES = {"all_to_all": "all-to-all", "psum": "all-reduce"}


class Mixture(NamedTuple):
    """A mixture of experts of a step: its named scope, the number of experts, and how often a step
    runs it forward."""

    scope: str
    experts: int
    times: int


def mixtures(closed: Any) -> tuple[Mixture, ...]:
    """Returns the mixtures of a step."""
    found: dict[str, Mixture] = {}
    for op, times in _mapped(read(closed.jaxpr), 1):
        kernels = [op.eqn.invars[i].aval.shape[0] for i in kernel_inputs(op.eqn)]
        if op.scope not in found and kernels:
            found[op.scope] = Mixture(op.scope, kernels[0], times)
    return tuple(found.values())


def kernel_inputs(eqn: Any) -> list[int]:
    """Returns the indices of the inputs of a shard_map that are kernels of experts."""
    return [i for i, spec in enumerate(options(eqn).in_specs) if tuple(spec)[:1] == (AXIS,)]


def kernel_axes(jaxpr: Any, leaves: int) -> dict[int, int]:
    """Returns the axis of the experts for each of the first `leaves` inputs of a jaxpr that is an
    array of kernels. It is not the first axis if a scan runs over layers."""
    origins = [(i, 0) if i < leaves else None for i in range(len(jaxpr.invars))]
    return dict(_kernels(jaxpr, origins))


def _kernels(jaxpr: Any, origins: Sequence[tuple[int, int] | None]) -> Iterator[tuple[int, int]]:
    came = dict(zip(jaxpr.invars, origins))
    look = lambda v: None if isinstance(v, _jax.Literal) else came.get(v)
    for eqn in jaxpr.eqns:
        inputs = list(map(look, eqn.invars))
        if eqn.primitive.name == "shard_map":
            yield from (inputs[i] for i in kernel_inputs(eqn) if inputs[i] is not None)
        elif eqn.primitive.name == "scan":
            parts = scan(eqn)
            consts, carry, slices = parts.split(inputs)
            inside = [origin and (origin[0], origin[1] + 1) for origin in slices]
            yield from _kernels(parts.jaxpr, [*consts, *(None for _ in carry), *inside])
        elif eqn.primitive.name in _KEEPS and len(inputs) == 1:
            came[eqn.outvars[0]] = inputs[0]
        else:
            for body in bodies(eqn):
                if body.kind == "call":
                    yield from _kernels(body.jaxpr, inputs)


def transfers(closed: Any, mesh: Any) -> list[Transfer]:
    """Returns the transfers of the mixtures of a step, as far as they always happen: those of the
    first round of tokens, and of the gradients of kernels."""
    found = []
    for op, times in _mapped(read(closed.jaxpr), 1):
        for _, frame in op.bodies:
            found += [
                Transfer(collective, op.scope, size, group, times)
                for collective, size, group in _collectives(frame, mesh)
            ]
    return found


def _mapped(frame: Frame, times: int) -> Iterator[tuple[Any, int]]:
    """Yields each shard_map over the axis of the experts, and how often a step runs it."""
    for op in frame.ops:
        if op.eqn.primitive.name == "shard_map":
            if AXIS in options(op.eqn).newly_manual_axes:
                yield op, times
            continue
        for body, inside in op.bodies:
            yield from _mapped(inside, times * (body.times or 1))


def _collectives(frame: Frame, mesh: Any) -> Iterator[tuple[str, int, int]]:
    for op in frame.ops:
        kind = _COLLECTIVES.get(op.eqn.primitive.name)
        if kind is None or FURTHER in op.scope:
            continue
        names = options(op.eqn).axes if kind == "all-reduce" else (AXIS,)
        group, result = math.prod(mesh[name] for name in names), op.eqn.outvars[0].aval
        if group > 1 and jnp.issubdtype(result.dtype, jnp.inexact):
            yield kind, nbytes(result), group
