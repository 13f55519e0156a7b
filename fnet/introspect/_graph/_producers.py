"""Finds the scope in which a value of a program is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fnet import _jax
from fnet.jaxpr._calls import bodies, scan
from fnet.jaxpr._scopes import Scope, in_jaxpr


class Producer(NamedTuple):
    """The scope in which a value is computed (`at`), and the value's variable in the outermost
    jaxpr (`source`)."""

    at: Scope
    source: Any


def producers(jaxpr: Any, outer: Scope) -> Callable[[Any], Producer | None]:
    """Returns a function that maps a variable of a jaxpr to its `Producer`, or to None if no
    equation computes it.

    For an output of a call, or a stacked output of a scan, the `Producer` contains the scope of the
    equation that computes the output in the body. The output of a `reduce_precision` equation has
    the same `Producer` as the input of the equation.
    """
    scope_of = in_jaxpr(jaxpr, outer)
    makers = {v: (eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.outvars)}

    def find(v):
        if isinstance(v, _jax.Literal) or v not in makers:
            return None
        eqn, i = makers[v]
        if eqn.primitive.name == "reduce_precision":
            return find(eqn.invars[0])
        return Producer(_within(eqn, i, scope_of(eqn)), v)

    return find


def _within(eqn, output, at) -> Scope:
    inside = bodies(eqn)
    if len(inside) != 1 or inside[0].kind not in ("call", "scan"):
        return at
    if inside[0].kind == "scan" and output < scan(eqn).carry:
        return at
    found = producers(inside[0].jaxpr, at)(inside[0].jaxpr.outvars[output])
    return at if found is None else found.at
