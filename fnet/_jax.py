"""Every name of JAX's that is not public stands here, and nowhere else.

Each has a test in tests/test_jax_names.py that fails in words when JAX moves it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

try:    # jax >= 0.11
    from jax.extend.core import get_opaque_trace_state
except ImportError:    # jax 0.10
    from jax.core import get_opaque_trace_state

__all__ = ["SubJaxpr", "scan_parts", "sub_jaxprs", "trace_state"]


def trace_state():
    """A token that equals another one only within the same trace.

    Two calls give equal tokens exactly when no jax transform (scan, cond, vmap, jit, ...) was entered or left
    between them.
    """
    return get_opaque_trace_state()


# Traversal: which jaxprs an equation holds, and how often each runs.

class SubJaxpr(NamedTuple):
    """A jaxpr inside an equation.

    Attributes:
      kind: "call" (runs once, its inputs are the equation's, one to one: jit, closed_call, remat, custom_jvp,
        custom_vjp), "scan", "while_cond", "while_body", "branch" (of a cond), "shard_map", "solve" (the forward
        solve of a custom_linear_solve), or "other" (held by a primitive that is not known here).
      jaxpr: the open jaxpr, with `eqns`, `invars`, `constvars`, `outvars`.
      consts: values of `constvars`.
      times: how often it runs: the length of a scan, the shards of a shard_map, None for a loop of unknown length.
    """

    kind: str
    jaxpr: Any
    consts: tuple
    times: int | None


_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr",
          "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
_COMBINERS = ("update_jaxpr", "select_jaxpr", "scatter_jaxpr")     # a scalar function that says how two numbers combine


def sub_jaxprs(eqn: Any) -> tuple[SubJaxpr, ...]:
    """The jaxprs inside an equation, with what they are; none for an ordinary operation."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        return (_sub("call", params[_CALLS[name]], 1),)
    if name == "scan":
        return (_sub("scan", params["jaxpr"], params["length"]),)
    if name == "while":
        return (_sub("while_cond", params["cond_jaxpr"], None), _sub("while_body", params["body_jaxpr"], None))
    if name == "cond":
        return tuple(_sub("branch", branch, 1) for branch in params["branches"])
    if name == "shard_map":
        shards = 1
        for axis in params["newly_manual_axes"]:
            shards *= params["mesh"].shape[axis]
        return (_sub("shard_map", params["jaxpr"], shards),)
    if name == "custom_linear_solve":
        return (_sub("solve", params["jaxprs"].solve, 1),)
    if name in ("reduce", "reduce_window", "select_and_scatter"):
        return ()
    found = []
    for key, value in params.items():
        if key not in _COMBINERS:
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(item, "jaxpr", item), "eqns"):
                    found.append(_sub("other", item, 1))
    return tuple(found)


def scan_parts(eqn: Any) -> tuple[int, int, int]:
    """How many of a scan equation's inputs are constants, carries and slices."""
    params = eqn.params
    if "ft_in" in params:    # jax >= 0.11
        consts, carry, xs = (len(part) for part in params["ft_in"].unpack())
        return consts, carry, xs
    consts, carry = params["num_consts"], params["num_carry"]
    return consts, carry, len(eqn.invars) - consts - carry


def _sub(kind: str, jaxpr: Any, times: int | None) -> SubJaxpr:
    return SubJaxpr(kind, getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ())), times)
