"""Converts open jaxprs to closed jaxprs, and the constants of a jaxpr to inputs."""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from fnet._jax._features import private

UNSPECIFIED = private("jax._src.sharding_impls.UNSPECIFIED", "calls with shardings")


def close(jaxpr: Any) -> Any:
    """Returns a closed jaxpr. The constants of an open jaxpr become its first inputs."""
    if hasattr(jaxpr, "consts"):
        return jaxpr
    return ClosedJaxpr(_without_constants(jaxpr) if jaxpr.constvars else jaxpr, ())


def consts_as_inputs(closed: Any) -> Any:
    """Returns the open jaxpr of a closed jaxpr, with the constants as its first inputs."""
    return _without_constants(closed.jaxpr)


def _without_constants(jaxpr):
    invars, info = [*jaxpr.constvars, *jaxpr.invars], jaxpr.debug_info
    if info.arg_names is not None and len(info.arg_names) != len(invars):
        info = info._replace(arg_names=("",) * (len(invars) - len(info.arg_names)) + tuple(info.arg_names))
    return Jaxpr((), invars, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, info, jaxpr.is_high)


def unplaced(params: dict) -> bool:
    """Whether the parameters of a jit equation specify no shardings."""
    shardings = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    return all(sharding is UNSPECIFIED for sharding in shardings)


def hoisted(params: dict, closed: Any) -> tuple[dict, list]:
    """Returns the parameters of a jit equation that evaluates `closed` with its constants as the first inputs, and the
    values of these constants."""
    count = len(closed.consts)
    first = {"in_shardings": UNSPECIFIED, "in_layouts": None, "donated_invars": False}
    changes = {name: (value,) * count + tuple(params[name]) for name, value in first.items()}
    return {**changes, "jaxpr": close(consts_as_inputs(closed))}, list(closed.consts)


def widened(params: dict, closed: Any, outputs: int) -> tuple[dict, list]:
    """Does the same as `hoisted`, for a jaxpr that has `outputs` more outputs than the equation with these
    parameters."""
    changes, consts = hoisted(params, closed)
    more = {"out_shardings": UNSPECIFIED, "out_layouts": None}
    return {**changes, **{name: (*params[name], *(value,) * outputs) for name, value in more.items()}}, consts
