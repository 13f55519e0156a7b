"""Pieces of a jaxpr: the equations on which some of its values depend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fnet import _jax


class Piece:
    """Equations of a jaxpr with their inputs and outputs, which an `Interpreter` evaluates as it
    does a jaxpr. Its inputs include the constants of the jaxpr that it reads."""

    constvars = ()

    def __init__(self, eqns: list, invars: list, outvars: list):
        self.eqns, self.invars, self.outvars = eqns, invars, outvars


def cut_out(eqns: Sequence[Any], outvars: Sequence[Any]) -> Piece:
    """Returns the equations among `eqns` on which the variables `outvars` depend. Equations with
    side effects are left out, too, unless a variable depends on them."""
    wanted = dict.fromkeys(v for v in outvars if not isinstance(v, _jax.Literal))
    found, made = [], set()
    for eqn in reversed(eqns):
        if any(v in wanted for v in eqn.outvars):
            found.append(eqn)
            made.update(eqn.outvars)
            wanted.update(dict.fromkeys(v for v in eqn.invars if not isinstance(v, _jax.Literal)))
    return Piece(found[::-1], [v for v in wanted if v not in made], list(outvars))
