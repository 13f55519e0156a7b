"""A jaxpr as a flat list of operations with their scopes: calls are inlined, loops and branches stay frames."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

from fnet._jax import SubJaxpr, sub_jaxprs


@dataclasses.dataclass
class Op:
    """One equation: its scope path, the ids of what it reads (None for a literal) and writes, and what it holds."""

    eqn: Any
    scope: str
    recomputed: bool
    ins: tuple[int | None, ...]
    outs: tuple[int, ...]
    bodies: tuple[tuple[SubJaxpr, Frame], ...] = ()


@dataclasses.dataclass
class Frame:
    """A straight piece of program: its operations in order, and the ids of what leaves it."""

    ops: list[Op]
    outputs: set[int | None]


def read(jaxpr: Any, scope: str = "", recomputed: bool = False) -> Frame:
    """Reads a jaxpr. `scope` is the path outside it; the paths of its equations follow on it."""
    ids = itertools.count()
    ops: list[Op] = []

    def look(env: dict[Any, int], atom: Any) -> int | None:
        return None if hasattr(atom, "val") else env[atom]

    def run(jaxpr: Any, env: dict[Any, int | None], scope: str, recomputed: bool) -> None:
        for eqn in jaxpr.eqns:
            path, again = scope_path(str(eqn.source_info.name_stack))
            path, again = join(scope, path), again or recomputed
            ins = tuple(look(env, atom) for atom in eqn.invars)
            subs = sub_jaxprs(eqn)
            if len(subs) == 1 and subs[0].kind == "call":
                body = subs[0].jaxpr
                inner = dict(zip(body.invars, ins)) | {v: next(ids) for v in body.constvars}
                run(body, inner, path, again)
                env |= {v: look(inner, atom) for v, atom in zip(eqn.outvars, body.outvars)}
                continue
            outs = tuple(next(ids) for _ in eqn.outvars)
            env |= dict(zip(eqn.outvars, outs))
            bodies = tuple((sub, read(sub.jaxpr, path, again)) for sub in subs)
            ops.append(Op(eqn, path, again, ins, outs, bodies))

    env: dict[Any, int | None] = {v: next(ids) for v in (*jaxpr.constvars, *jaxpr.invars)}
    run(jaxpr, env, scope, recomputed)
    return Frame(ops, {look(env, atom) for atom in jaxpr.outvars})


def scope_path(stack: str) -> tuple[str, bool]:
    """A name stack without what transforms wrote into it, and whether it belongs to a recomputation.

    Forward and backward pass thereby fall to the same path.

    >>> scope_path("transpose(jvp(block))/fc")
    ('block/fc', False)
    """
    previous = None
    while previous != stack:
        previous = stack
        stack = re.sub(r"(?<![\w.-])(?:jvp|transpose|vmap|linearize|batched)\(([^()]*)\)", r"\1", stack)
    parts = [part for part in stack.split("/") if part]
    again = "rematted_computation" in parts
    return "/".join(part for part in parts if part != "rematted_computation"), again


def join(scope: str, path: str) -> str:
    return f"{scope}/{path}" if scope and path else scope or path
