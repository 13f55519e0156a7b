"""Opens loops and branches: a program that fails in one iteration becomes the body of the loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import _jax
from fnet.introspect._reduce._program import Program, held
from fnet.introspect._reduce._search import Search
from fnet.jaxpr import bodies, options, scan

_MOST = 1000  # iterations
_UNROLLED = 4  # iterations of the longest loop that is unrolled


def opened(search: Search, program: Program, values: dict) -> Program | None:
    """Returns the body of a loop or branch in a program, in the first iteration in which it fails
    alone; else the loop with fewer iterations, or None."""
    for i, eqn in enumerate(program.equations):
        inputs = [v.val if isinstance(v, _jax.Literal) else values[v] for v in eqn.invars]
        runs = not (search.child or search.predicate.by_type)
        for inner in _inside(program, i, eqn, inputs, runs):
            if search.holds(inner):
                return inner
        if eqn.primitive.name == "scan" and len(program.equations) == 1:
            return _shortened(search, program, eqn, inputs)
    return None


def _inside(program: Program, i: int, eqn: Any, inputs: list, runs: bool) -> Iterator[Program]:
    name = eqn.primitive.name
    if name == "scan":
        yield from _iterations(program, i, eqn, inputs, runs)
    elif name == "while":
        yield from _rounds(program, i, eqn, inputs, runs)
    elif name == "cond":
        which = int(np.clip(inputs[0], 0, len(bodies(eqn)) - 1))
        yield _body(program, i, bodies(eqn)[which].closed, inputs[1:], f"branch {which}")


def _body(program: Program, i: int, closed: Any, arrays: list, which: str) -> Program:
    jaxpr = _jax.consts_as_inputs(closed)
    given = tuple(map(held, map(jnp.asarray, (*closed.consts, *arrays))))
    return dataclasses.replace(
        program,
        jaxpr=jaxpr,
        arrays=given,
        outer=program.scopes[i],
        iterations=(*program.iterations, which),
    )


def _iterations(program: Program, i: int, eqn: Any, inputs: list, runs: bool) -> Iterator[Program]:
    parts = scan(eqn)
    consts, carry, slices = parts.split(inputs)
    body = jax.jit(lambda *arrays: _jax.evaluate(parts.closed, parts.closed.consts, list(arrays)))
    order = range(parts.length)
    if parts.options.get("reverse"):
        order = order[::-1]
    for t in order[: _MOST if runs else 1]:
        arrays = [*consts, *carry, *(x[t] for x in slices)]
        yield _body(program, i, parts.closed, arrays, f"iteration {t} of {parts.length}")
        if runs:
            carry = body(*arrays)[: parts.carry]


def _rounds(program: Program, i: int, eqn: Any, inputs: list, runs: bool) -> Iterator[Program]:
    loop = options(eqn)
    test, body = (each.closed for each in bodies(eqn))
    a, b = loop.cond_nconsts, loop.cond_nconsts + loop.body_nconsts
    carry = inputs[b:]
    evaluated = lambda closed: jax.jit(
        lambda *arrays: _jax.evaluate(closed, closed.consts, list(arrays))
    )
    goes_on, step = evaluated(test), evaluated(body)
    for t in range(_MOST if runs else 1):
        if runs and not np.all(goes_on(*inputs[:a], *carry)[0]):
            return
        arrays = [*inputs[a:b], *carry]
        yield _body(program, i, body, arrays, f"iteration {t}")
        if runs:
            carry = step(*arrays)


def _shortened(search: Search, program: Program, eqn: Any, inputs: list) -> Program | None:
    """Returns a scan over the half of the iterations in which it fails, again and again, and
    unrolls a short one."""
    parts = scan(eqn)
    consts, carry, slices = parts.split(inputs)
    smaller: Program | None = None
    while parts.length > 1:
        half = parts.length // 2
        ranges = ((0, half), (half, parts.length))
        if parts.options.get("reverse"):
            ranges = ranges[::-1]
        start, found = carry, None
        for low, high in ranges:
            piece = [x[low:high] for x in slices]
            cut = _scanned(program, parts, consts, start, piece, high - low)
            if search.holds(cut):
                found = cut, start, piece, high - low
                break
            if search.child or search.predicate.by_type:
                break
            start = cut.run_whole(start)
        if found is None:
            break
        smaller, carry, slices, length = found
        parts = dataclasses.replace(parts, options={**parts.options, "length": length})
    if parts.length <= _UNROLLED:
        flat = _unrolled(program, parts, consts, carry, slices)
        if search.holds(flat):
            return flat
    return smaller


class _Cut(Program):
    """A scan over some of the iterations."""


def _scanned(
    program: Program, parts: Any, consts: list, carry: list, slices: list, length: int
) -> Any:
    a = len(consts)
    b = a + len(carry)

    def run(*arrays: Any) -> list:
        def step(carried: list, sliced: list) -> tuple[list, list]:
            outputs = _jax.evaluate(
                parts.closed, parts.closed.consts, [*arrays[:a], *carried, *sliced]
            )
            return outputs[: parts.carry], outputs[parts.carry :]

        reverse = bool(parts.options.get("reverse"))
        last, stacked = lax.scan(
            step, list(arrays[a:b]), list(arrays[b:]), length=length, reverse=reverse
        )
        return [*last, *stacked]

    arrays = [*consts, *carry, *slices]
    cut = program.retraced(run, arrays)
    whole = jax.jit(run)
    object.__setattr__(cut, "run_whole", lambda _: list(whole(*arrays))[: parts.carry])
    return cut


def _unrolled(program: Program, parts: Any, consts: list, carry: list, slices: list) -> Program:
    a = len(consts)
    b = a + len(carry)
    order = range(parts.length)
    if parts.options.get("reverse"):
        order = order[::-1]

    def run(*arrays: Any) -> list:
        carried, stacked = list(arrays[a:b]), []
        for t in order:
            outputs = _jax.evaluate(
                parts.closed,
                parts.closed.consts,
                [*arrays[:a], *carried, *(x[t] for x in arrays[b:])],
            )
            carried, rest = outputs[: parts.carry], outputs[parts.carry :]
            stacked += rest
        return [*carried, *stacked]

    return program.retraced(run, [*consts, *carry, *slices])
