"""Converts a jaxpr to a flat list of operations with their scopes. Calls are inlined, loops and
branches are not."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from fnet import _jax
from fnet.jaxpr import _scopes
from fnet.jaxpr._calls import Body, bodies
from fnet.jaxpr._scopes import TOP, Scope


@dataclasses.dataclass
class Op:
    """One equation: its scope, the ids of the values that it reads (None for a literal) and writes,
    and its bodies."""

    eqn: Any
    at: Scope
    ins: tuple[int | None, ...]
    outs: tuple[int, ...]
    bodies: tuple[tuple[Body, Frame], ...] = ()

    @property
    def scope(self) -> str:
        return self.at.path

    @property
    def recomputed(self) -> bool:
        return self.at.phase == _scopes.RECOMPUTED


@dataclasses.dataclass
class Frame:
    """A jaxpr with inlined calls: its operations in order, and the ids of its results in order."""

    ops: list[Op]
    results: tuple[int | None, ...]

    @property
    def outputs(self) -> set[int | None]:
        """The ids of the results."""
        return set(self.results)


def read(jaxpr: Any, outer: Scope = TOP) -> Frame:
    """Returns the `Frame` (a flat list of operations) of a jaxpr in the scope `outer`.

    Each value in the `Frame` has an integer id. The first ids (0, 1, ...) belong to the constants
    of the jaxpr, and the next ids belong to its inputs.
    """
    ids = itertools.count()
    ops: list[Op] = []

    def look(env: dict[Any, int | None], atom: Any) -> int | None:
        return None if isinstance(atom, _jax.Literal) else env[atom]

    def run(jaxpr: Any, env: dict[Any, int | None], outer: Scope) -> None:
        scope_of = _scopes.in_jaxpr(jaxpr, outer)
        for eqn in jaxpr.eqns:
            at = scope_of(eqn)
            ins = tuple(look(env, atom) for atom in eqn.invars)
            inside = bodies(eqn)
            if len(inside) == 1 and inside[0].kind == "call":
                body = inside[0].jaxpr
                inner = dict(zip(body.invars, ins)) | {v: next(ids) for v in body.constvars}
                run(body, inner, at)
                env |= {v: look(inner, atom) for v, atom in zip(eqn.outvars, body.outvars)}
                continue
            outs = tuple(next(ids) for _ in eqn.outvars)
            env |= dict(zip(eqn.outvars, outs))
            ops.append(
                Op(eqn, at, ins, outs, tuple((body, read(body.jaxpr, at)) for body in inside))
            )

    env: dict[Any, int | None] = {v: next(ids) for v in (*jaxpr.constvars, *jaxpr.invars)}
    run(jaxpr, env, outer)
    return Frame(ops, tuple(look(env, atom) for atom in jaxpr.outvars))
