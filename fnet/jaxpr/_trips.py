"""The number of iterations of while loops that count up or down to a constant."""

from __future__ import annotations

import math
from typing import Any

from fnet import _jax

_ENDS = {"lt": 0, "le": 1, "gt": 0, "ge": 1}  # name of the condition -> whether it includes the end
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def trips(eqn: Any) -> int | None:
    """Returns the number of iterations of a while loop whose carry has a counter, an integer that
    begins at a constant, to which each iteration adds a constant, and that the condition compares
    with a constant. Returns None for any other loop."""
    params = eqn.params
    test, step = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    tests, steps = params["cond_nconsts"], params["body_nconsts"]
    compared = _made(test, test.outvars[0])
    if compared is None or compared.primitive.name not in _ENDS:
        return None
    name, (counter, end) = compared.primitive.name, compared.invars
    if isinstance(counter, _jax.Literal):
        name, counter, end = _MIRRORED[name], end, counter
    if not isinstance(end, _jax.Literal) or counter not in test.invars[tests:]:
        return None
    place = test.invars.index(counter) - tests
    by = _added(step, place, steps)
    begin = eqn.invars[tests + steps + place]
    if by is None or not isinstance(begin, _jax.Literal) or not _integers(begin.val, end.val):
        return None
    distance = int(end.val) - int(begin.val)
    if name in ("gt", "ge"):
        distance, by = -distance, -by
    if by <= 0:
        return None
    return max(0, math.floor(distance / by) + 1 if _ENDS[name] else math.ceil(distance / by))


def _added(jaxpr: Any, place: int, consts: int) -> int | None:
    """Returns what an iteration adds to an element of the carry, or None."""
    counter, made = jaxpr.invars[consts + place], _made(jaxpr, jaxpr.outvars[place])
    if made is None or made.primitive.name not in ("add", "sub"):
        return None
    first, second = made.invars
    if made.primitive.name == "add" and isinstance(first, _jax.Literal):
        first, second = second, first
    if first is not counter or not isinstance(second, _jax.Literal) or not _integers(second.val):
        return None
    return int(second.val) if made.primitive.name == "add" else -int(second.val)


def _made(jaxpr: Any, v: Any) -> Any | None:
    return next((eqn for eqn in jaxpr.eqns if v in eqn.outvars), None)


def _integers(*values: Any) -> bool:
    return all(getattr(value, "shape", ()) == () and int(value) == value for value in values)
