"""The passes that find the equations at fault: they cut a program into smaller ones that fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fnet import _jax
from fnet.introspect._reduce import _loops
from fnet.introspect._reduce._program import Program, Recorded, is_number
from fnet.introspect._reduce._search import Search, first, minimized

_NESTED = 8  # loops inside loops


def located(search: Search, program: Program) -> Program:
    """Returns the smallest part of a program that was found to fail."""
    program = _outputs(search, program)
    for _ in range(_NESTED):
        values = search.values(program)
        program = _alone(search, program, values) or _window(search, program, values)
        search.progress("cut", program)
        values = search.values(program)
        inner = _loops.opened(search, program, values)
        if inner is None:
            break
        program = inner
        search.progress("opened a loop", program)
    return _outputs(search, program)


def _outputs(search: Search, program: Program) -> Program:
    """Drops the outputs without which the program fails, too."""
    values = dict(zip(program.jaxpr.invars, program.arrays))
    part = lambda outvars: program.of(program.equations, outvars, values)
    outvars = list(dict.fromkeys(program.jaxpr.outvars))
    kept = minimized(outvars, lambda outvars: search.holds(part(outvars)))
    return (len(kept) < len(outvars) and part(kept)) or program


def _alone(search: Search, program: Program, values: Recorded) -> Program | None:
    """Returns the first suspect that fails alone, on its recorded inputs."""
    if len(program.equations) == 1:
        return program
    for i in search.predicate.suspects(program, values):
        eqn = program.equations[i]
        one = program.of([eqn], [v for v in eqn.outvars if is_number(v)], values)
        if search.holds(one):
            return one
    return None


def _window(search: Search, program: Program, values: Recorded) -> Program:
    """Drops equations at the end, at the beginning and then between them."""
    eqns = program.equations

    def until(i: int) -> Program | None:
        return program.of(eqns[: i + 1], _live(program, i), values)

    end = first(len(eqns), lambda i: search.holds(until(i)))
    if end is not None and (shorter := until(end)) is not None:
        program = _outputs(search, shorter)
    search.progress("cut the end", program)
    eqns, outvars = program.equations, program.jaxpr.outvars

    def since(i: int) -> Program | None:  # the last i + 1 equations
        return program.of(eqns[len(eqns) - 1 - i :], outvars, values)

    begin = first(len(eqns), lambda i: search.holds(since(i)))
    if begin is not None and (shorter := since(begin)) is not None:
        program = shorter
    search.progress("cut the beginning", program)
    return _between(search, program, values)


def _between(search: Search, program: Program, values: Recorded) -> Program:
    eqns, outvars = program.equations, program.jaxpr.outvars

    def part(kept: Sequence[int]) -> Program | None:
        return program.of([eqns[i] for i in sorted(kept)], outvars, values)

    kept = minimized(range(len(eqns)), lambda kept: search.holds(part(kept)))
    smaller = part(kept)
    return program if smaller is None or len(kept) == len(eqns) else smaller


def _live(program: Program, i: int) -> list[Any]:
    """The values that the first i + 1 equations compute and that are needed afterwards."""
    made = dict.fromkeys(
        v for eqn in program.equations[: i + 1] for v in eqn.outvars if is_number(v)
    )
    used = {
        v
        for eqn in program.equations[i + 1 :]
        for v in eqn.invars
        if not isinstance(v, _jax.Literal)
    }
    used.update(v for v in program.jaxpr.outvars if not isinstance(v, _jax.Literal))
    return [v for v in made if v in used]
