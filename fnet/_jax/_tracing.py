"""Traces, name stacks, and primitives bound again."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
from jax.extend.core import Literal, get_opaque_trace_state

from fnet._jax._features import Missing, private

_core = private("jax._src.core", "rewriting of programs")
_source_info = private("jax._src.source_info_util", "named scopes of rewritten programs")
_Scope = private("jax._src.source_info_util.Scope", "sites of untagged scopes")
_DynamicJaxprTrace = private("jax._src.interpreters.partial_eval.DynamicJaxprTrace", "fast retracing")
_DynamicJaxprTracer = private("jax._src.interpreters.partial_eval.DynamicJaxprTracer", "fast retracing")
_LinearizeTrace = private("jax._src.interpreters.ad.LinearizeTrace", "cached linearization")
_frames = private("jax._src.config.traceback_in_locations_limit", "programs without source locations")
_reshard = private("jax._src.core.auto_insert_reshard", "operands that vary over different mesh axes")

# Here, and not in the lazy module `kernels`, because JAX traces everything again once there is another context.
kernels_in_exports = jax.make_user_context(False)
"""Whether exported programs contain kernels: `with kernels_in_exports(True): jax.export.export(...)`."""


def trace_state():
    """A token that equals another one only within the same trace.

    Two calls return equal tokens exactly when no JAX transform (scan, cond, vmap, jit, ...) was entered or left
    between them.
    """
    return get_opaque_trace_state()


def outermost() -> bool:
    """Whether no JAX transformation is active."""
    return _core.trace_state_clean()


def vary_alike(*arrays):
    """The operands, varying over the same mesh axes, as shard_map requires of the operands of one operation."""
    return _reshard(*arrays)


def varies_over(x) -> frozenset:
    """The mesh axes over which a value varies, inside a shard_map that tracks it."""
    return jax.typeof(x).manual_axis_type.varying


def without_locations():
    """A context in which lowered programs contain no source lines of operations, with paths of this machine."""
    return contextlib.nullcontext() if isinstance(_frames, Missing) else _frames(0)


# Names and source lines of equations.

def name_stack(eqn: Any) -> str:
    """The named scopes and transformation marks of an equation, such as "transpose(jvp(block))/fc"."""
    return str(eqn.source_info.name_stack)


def scope_entries(eqn: Any) -> tuple[tuple[str, int], ...]:
    """(name, identity) of the named scopes of an equation, outermost first. Each entry into a named scope has an
    identity of its own, which all equations inside share."""
    return tuple((entry.name, id(entry)) for entry in eqn.source_info.name_stack.stack if isinstance(entry, _Scope))


def origin(eqn: Any) -> tuple:
    """What `name_stack` and `equation_context` read of an equation; equations with the same origin share both."""
    info = eqn.source_info
    return id(info.name_stack), id(info.traceback), id(eqn.ctx)


def line(eqn: Any) -> str:
    """The user's line that made an equation, "model.py:58 (forward)"; "" if unknown."""
    frame = _source_info.user_frame(eqn.source_info.traceback)
    return "" if frame is None else f"{frame.file_name.rpartition('/')[2]}:{frame.start_line} ({frame.function_name})"


def current_names() -> Any:
    """The name stack that is active, for `equation_context`."""
    return _source_info.current_name_stack()


@contextlib.contextmanager
def equation_context(eqn: Any, outer: Any):
    """Operations inside carry the equation's names below the name stack `outer`, its source line and JAX context."""
    names = outer + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


@contextlib.contextmanager
def names_context(outer: Any, name: str):
    """Operations inside carry `name` below the name stack `outer`, instead of the active one."""
    with _source_info.set_name_stack(outer.extend(name)):
        yield


# Primitives bound again.

def bind_again(eqn: Any, arrays: list) -> list:
    """The outputs of an equation evaluated on these arrays.

    While JAX only records equations, an equation whose inputs have the types it was traced with is recorded unchanged,
    without inferring its output types again. This takes half the time of binding it.
    """
    primitive = eqn.primitive
    if (_DynamicJaxprTrace and type(trace := _core.trace_ctx.trace) is _DynamicJaxprTrace and not eqn.effects
            and not _high(eqn)):
        info = _source_info.current()
        inputs = [_DynamicJaxprTracer(trace, v.aval, v, info) if isinstance(v, Literal) and x is v.val
                  else trace.to_jaxpr_tracer(x, info) if isinstance(x, jax.core.Tracer) else None
                  for x, v in zip(arrays, eqn.invars)]
        if all(x is not None and x.aval == v.aval for x, v in zip(inputs, eqn.invars)):
            return trace.emit_eqn(inputs, [v.aval for v in eqn.outvars], primitive, eqn.params, eqn.effects, info,
                                  eqn.ctx)
    return bind(primitive, arrays, primitive.get_bind_params(eqn.params))


def _high(eqn: Any) -> bool:
    """Whether JAX must note that a program has this equation, in order to expand it before compilation: jnp.nonzero and
    jnp.unique are such primitives from jax 0.12 on."""
    return eqn.primitive.is_high(*(v.aval for v in eqn.invars), **eqn.params)


def bind(primitive: Any, arrays: list, params: dict) -> list:
    """The outputs of a primitive, as a list.

    While JAX linearizes, every primitive is linearized anew, unless it is inside a jit, whose linearization JAX caches.
    An inlined jit saves two thirds of the time and leaves no trace in the program.
    """
    outputs = None
    if _LinearizeTrace and type(_core.trace_ctx.trace) is _LinearizeTrace and primitive.name not in _REFS:
        with contextlib.suppress(TypeError):    # parameters without a hash
            outputs = _inlined(primitive, frozenset(params.items()))
    outputs = primitive.bind(*arrays, **params) if outputs is None else outputs(*arrays)
    return list(outputs) if primitive.multiple_results else [outputs]


@functools.lru_cache(4096)
def _inlined(primitive, params):
    return jax.jit(lambda *arrays: primitive.bind(*arrays, **dict(params)), inline=_EARLY)


_REFS = frozenset(("new_ref", "empty_ref", "freeze", "free_ref"))    # their inputs or outputs are mutable arrays
_EARLY = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True
