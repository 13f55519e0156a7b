"""Every name of JAX's that is not public stands here, and nowhere else.

Each has a test in tests/test_jax_names.py that fails in words when JAX moves it.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# From jax._src rather than jax.extend.core, whose import loads Pallas and costs 60 ms.
from jax._src import ad_util, source_info_util
from jax._src.core import Jaxpr, Literal, Primitive, get_opaque_trace_state
from jax._src.sharding_impls import UNSPECIFIED

try:
    from jax._src.core import ClosedJaxpr
except ImportError:    # jax >= 0.12: one class for both
    ClosedJaxpr = Jaxpr

__all__ = ["CustomJvp", "CustomVjp", "Literal", "Primitive", "SubJaxpr", "close", "consts_as_inputs",
           "equation_context", "hoisted", "scan_parts", "scope_path", "sub_jaxprs", "trace_state"]


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


# Rewriting: equations evaluated again, with their names and context, and jaxprs put back into them.

_TRANSFORM = re.compile(r"[A-Za-z_]+\(|\)")


def scope_path(eqn: Any, outer: str = "") -> str:
    """The named scopes of an equation below `outer`, joined by "/", without the marks that jvp, transpose and vmap
    leave, so that forward and backward pass have one path."""
    inner = _TRANSFORM.sub("", str(eqn.source_info.name_stack)).strip("/")
    return f"{outer}/{inner}" if outer and inner else outer or inner


@contextlib.contextmanager
def equation_context(eqn: Any):
    """Operations done inside carry the equation's names, source line and JAX context (mesh, compute type, ...)."""
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


def close(jaxpr: Any) -> Any:
    """A jaxpr with its constants; some equations hold it without any."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def consts_as_inputs(closed: Any) -> Any:
    """The open jaxpr whose first inputs are the constants."""
    jaxpr = closed.jaxpr
    invars, info = [*jaxpr.constvars, *jaxpr.invars], jaxpr.debug_info
    if info.arg_names is not None and len(info.arg_names) != len(invars):
        info = info._replace(arg_names=("",) * (len(invars) - len(info.arg_names)) + tuple(info.arg_names))
    return Jaxpr((), invars, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, info)


def hoisted(params: dict, closed: Any) -> tuple[dict, list]:
    """(parameters of a jit equation, values) with the jaxpr's constants as its first inputs."""
    count = len(closed.consts)
    first = {"in_shardings": UNSPECIFIED, "in_layouts": None, "donated_invars": False}
    changes = {name: (value,) * count + tuple(params[name]) for name, value in first.items()}
    return {**changes, "jaxpr": ClosedJaxpr(consts_as_inputs(closed), ())}, list(closed.consts)


class CustomJvp:
    """The rule of a custom_jvp equation."""

    def __init__(self, params: dict):
        self._fun, self._consts = params["jvp_jaxpr_fun"], params["num_consts"]

    def jaxpr(self, zeros: list[bool]) -> tuple[Any, list[bool]]:
        """(the jaxpr from primals and moving tangents to outputs and moving slopes, which slopes are zero).

        `zeros` says which tangents are zero; constants that the function closed over come first and never move.
        """
        jaxpr, consts, zeros_out = self._fun.call_wrapped(*zeros[self._consts:])
        return ClosedJaxpr(jaxpr, consts), list(zeros_out)

    @property
    def consts(self) -> int:
        return self._consts


class CustomVjp:
    """The rules of a custom_vjp equation."""

    def __init__(self, params: dict):
        self._params, self.consts = params, params["num_consts"]
        self._types = [v.aval for v in params["call_jaxpr"].jaxpr.invars] if hasattr(
            params["call_jaxpr"], "jaxpr") else [v.aval for v in params["call_jaxpr"].invars]

    def forward(self) -> tuple[Any, int]:
        """(the jaxpr from the inputs to saved residuals and outputs, how many residuals it saves)."""
        jaxpr, consts = self._params["fwd_jaxpr_thunk"].call_wrapped(*[True] * (len(self._types) - self.consts))
        self._saved = ClosedJaxpr(jaxpr, consts)
        _, tree, forwarded = self._params["out_trees"]()
        self._forwarded = forwarded
        return self._saved, tree.num_leaves - sum(i is not None for i in forwarded)

    def backward(self) -> tuple[Any, list[bool]]:
        """(the jaxpr from inputs, saved residuals and cotangents to slopes, which inputs have one); after `forward`.

        Traced at the original types, which the user's rule is held to. A residual that is a Python number in the
        forward jaxpr stays one.
        """
        count = len(self._forwarded) - sum(i is not None for i in self._forwarded)
        saved, outputs = self._saved.jaxpr.outvars[:count], self._saved.jaxpr.outvars[count:]
        live = []

        def run(inputs, residuals, cotangents):
            rest = iter([v.val if isinstance(v, Literal) else x for v, x in zip(saved, residuals)])
            full = [next(rest) if i is None else inputs[i] for i in self._forwarded]
            slopes = self._params["bwd"].call_wrapped(*full, *_cotangents(outputs, cotangents))
            if isinstance(slopes, tuple) and len(slopes) == 2 and isinstance(slopes[0], (list, tuple)):
                slopes = slopes[0]    # jax >= 0.12 logs beside them
            live[:] = [not isinstance(s, ad_util.Zero) for s in slopes]
            return [s for s, moving in zip(slopes, live) if moving]

        closed = jax.make_jaxpr(run)(self._types, [_aval(v) for v in saved],
                                     [v.aval for v in outputs if jnp.issubdtype(v.aval.dtype, jnp.inexact)])
        return closed, [False] * self.consts + live


def _aval(atom):
    return jax.typeof(jnp.asarray(atom.val)) if isinstance(atom, Literal) else atom.aval


def _cotangents(outputs, given):
    """Cotangents of all outputs; those that are no floats have none to speak of."""
    rest = iter(given)
    return [next(rest) if jnp.issubdtype(v.aval.dtype, jnp.inexact) else np.zeros(v.aval.shape, jax.dtypes.float0)
            for v in outputs]
