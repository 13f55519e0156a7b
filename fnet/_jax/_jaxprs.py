"""Converts open jaxprs to closed jaxprs, converts the constants of a jaxpr to inputs, and evaluates
a jaxpr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, primitives

from fnet._jax._features import private

_dce = private("jax.interpreters.partial_eval.dce_jaxpr", "layers made from linen modules")
UNSPECIFIED = private("jax._src.sharding_impls.UNSPECIFIED", "calls with shardings")


def close(jaxpr: Any) -> Any:
    """Converts an open jaxpr to a closed jaxpr, whose first inputs are the constants of the open
    jaxpr. A closed jaxpr is returned unchanged."""
    if hasattr(jaxpr, "consts"):
        return jaxpr
    return ClosedJaxpr(_without_constants(jaxpr) if jaxpr.constvars else jaxpr, ())


def consts_as_inputs(closed: Any) -> Any:
    """Converts a closed jaxpr to an open jaxpr without constants. The first inputs of the open
    jaxpr are the former constants of the closed jaxpr."""
    return _without_constants(closed.jaxpr)


def _without_constants(jaxpr: Any) -> Any:
    invars, info = [*jaxpr.constvars, *jaxpr.invars], jaxpr.debug_info
    if info.arg_names is not None and len(info.arg_names) != len(invars):
        info = info._replace(
            arg_names=("",) * (len(invars) - len(info.arg_names)) + tuple(info.arg_names)
        )
    return Jaxpr((), invars, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, info, jaxpr.is_high)


def jaxpr_of(eqns: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any], like: Any) -> Any:
    """Returns the open jaxpr of some equations. `like` is the `debug_info` of the jaxpr from which
    they come."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    info = like._replace(arg_names=("",) * len(invars), result_paths=("",) * len(outvars))
    return Jaxpr((), list(invars), list(outvars), list(eqns), effects, info)


def is_dropped(v: Any) -> bool:
    """Whether a variable stands for an output of an equation that nothing reads."""
    return type(v).__name__ == "DropVar"


def evaluate(closed: Any, consts: list, inputs: list) -> list:
    """Evaluates a closed jaxpr with other constants."""
    return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*inputs)


def used_inputs(jaxpr: Any, wanted: list[bool]) -> list[bool]:
    """Returns for each input of an open jaxpr whether the wanted outputs depend on it."""
    return list(_dce(jaxpr, wanted)[1])


def without_unused(jaxpr: Any, kept: list[bool]) -> tuple[Any, list[bool]]:
    """Returns an open jaxpr without the equations whose results it does not need, and which of its
    inputs are left: those that it reads, and those for which `kept` is True."""
    reduced, used = _dce(jaxpr, [True] * len(jaxpr.outvars), instantiate=kept)
    return reduced, list(used)


def unplaced(params: dict) -> bool:
    """Whether all input and output shardings in the parameters of a jit equation are unspecified."""
    shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    return all(sharding is UNSPECIFIED for sharding in shardings)


def hoisted(params: dict, closed: Any, outputs: int = 0) -> tuple[dict, list]:
    """Changes the parameters of a jit equation so that the equation evaluates `closed`. The
    constants of `closed` become the first inputs of the equation. `outputs` is the number of
    outputs that `closed` has in addition to the outputs of the original equation. Returns the new
    parameters, and the values of the constants."""
    count = len(closed.consts)
    first = {"in_shardings": UNSPECIFIED, "in_layouts": None, "donated_invars": False}
    changes = {name: (value,) * count + tuple(params[name]) for name, value in first.items()}
    last = {"out_shardings": UNSPECIFIED, "out_layouts": None}
    changes |= {name: tuple(params[name]) + (value,) * outputs for name, value in last.items()}
    return {**changes, "jaxpr": close(consts_as_inputs(closed))}, list(closed.consts)


PUBLIC_PRIMITIVES = "from jax.extend.core import primitives"
"""The import after which a program reads `primitives.<public_name(primitive)>`."""


def public_name(primitive: Any) -> str | None:
    """Returns the name of a primitive among JAX's public ones, such as "sin_p", or None."""
    return next((name for name in dir(primitives) if getattr(primitives, name) is primitive), None)
