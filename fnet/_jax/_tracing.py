"""Functions for the active trace, for the name stacks and source lines of equations, and for the
evaluation of primitives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import Literal, get_opaque_trace_state
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fnet._jax._features import Missing, private
from fnet._jax._hijax import is_high

_core = private("jax._src.core", "rewriting of programs")
_source_info = private("jax._src.source_info_util", "named scopes of rewritten programs")
_Scope = private("jax._src.source_info_util.Scope", "sites of untagged scopes")
_DynamicJaxprTrace = private(
    "jax._src.interpreters.partial_eval.DynamicJaxprTrace", "fast retracing"
)
_DynamicJaxprTracer = private(
    "jax._src.interpreters.partial_eval.DynamicJaxprTracer", "fast retracing"
)
_LinearizeTrace = private("jax._src.interpreters.ad.LinearizeTrace", "cached linearization")
_frames = private(
    "jax._src.config.traceback_in_locations_limit", "programs without source locations"
)
_thread_resources = private("jax._src.mesh.thread_resources", "the mesh of `with mesh:`")
_reshard = private(
    "jax._src.core.auto_insert_reshard", "operands that vary over different mesh axes"
)

# Not in the lazily imported module `kernels`, because JAX retraces all functions when a new user
# context is created.
kernels_in_exports = jax.make_user_context(False)
"""Whether exported programs contain kernels: `with kernels_in_exports(True):
jax.export.export(...)`."""


def trace_state() -> Any:
    """Returns a value that identifies the current JAX trace.

    Two calls of `trace_state` return equal values if and only if both calls run in the same trace,
    that is, inside the same JAX transformations (scan, cond, vmap, jit, ...).
    """
    return get_opaque_trace_state()


def outermost() -> bool:
    """Whether no JAX transformation is active."""
    return _core.trace_state_clean()


def context_mesh() -> jax.sharding.AbstractMesh:
    """Returns the mesh of the innermost `with mesh:`, which `jax.sharding.get_abstract_mesh` does
    not show, or an empty mesh. JAX traces a function again in another `with mesh:`."""
    if isinstance(_thread_resources, Missing):
        return jax.sharding.AbstractMesh((), ())
    return _thread_resources.env.physical_mesh.abstract_mesh


def mesh_of_type(x: Any) -> contextlib.AbstractContextManager[object]:
    """Returns a context with the mesh of an array's type. JAX rejects an operation on an array if
    the axes of the mesh are explicit in the context and automatic in the array, or vice versa."""
    here = jax.sharding.get_abstract_mesh()
    if here.empty:
        return contextlib.nullcontext()
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    if mesh is None or mesh.empty or mesh == here or here.manual_axes or mesh.manual_axes:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def vary_alike(*arrays: Any) -> Any:
    """Converts arrays so that all of them vary over the same mesh axes, as shard_map requires for
    the operands of an operation."""
    return _reshard(*arrays)


def varies_over(x: Any) -> frozenset:
    """Returns the mesh axes over which an array varies, inside a shard_map that tracks these axes.
    `x` is an array, or the abstract value of an array (`jax.typeof(array)`)."""
    kind = x if hasattr(x, "manual_axis_type") else jax.typeof(x)
    return frozenset(getattr(getattr(kind, "manual_axis_type", None), "varying", ()))


def zeros(kind: Any, *, lead: tuple = (), dtype: Any = None, axes: frozenset = frozenset()) -> Any:
    """Returns an array of zeros of a type, with further axes before its own. The initial carry of a
    scan must have the type of the results of its iterations.

    Inside shard_map, the zeros vary over the same mesh axes as the type, and over `axes`. On a mesh
    with explicit axes, they have the sharding of the type.

    Args:
        kind: an abstract value (`jax.typeof(array)`) or a `jax.ShapeDtypeStruct`.
        lead: the sizes of further axes, which are not split.
        dtype: the dtype. Default None: that of the type.
        axes: mesh axes of a shard_map.
    """
    sharding: Any = getattr(kind, "sharding", None)
    place = None
    if AxisType.Explicit in getattr(getattr(sharding, "mesh", None), "axis_types", ()):
        spec = PartitionSpec(*[None] * len(lead), *sharding.spec.partitions)
        place = NamedSharding(sharding.mesh, spec)
    zeros = jax.numpy.zeros((*lead, *kind.shape), dtype or kind.dtype, out_sharding=place)
    varying = varies_over(kind) | axes
    return jax.lax.pcast(zeros, tuple(sorted(varying, key=str)), to="varying") if varying else zeros


def without_locations() -> Any:
    """Returns a context in which lowered programs contain no source lines, because source lines
    contain file paths of this machine."""
    return contextlib.nullcontext() if isinstance(_frames, Missing) else _frames(0)


# Names and source lines of equations.


def name_stack(eqn: Any) -> str:
    """Returns the named scopes and transformations of an equation, such as
    "transpose(jvp(block))/fc"."""
    return str(eqn.source_info.name_stack)


def scope_entries(eqn: Any) -> tuple[tuple[str, int], ...]:
    """Returns (name, id) for each named scope of an equation, from the outermost to the innermost
    scope. Each time a program enters a `jax.named_scope`, JAX creates a scope object, and `id` is
    the Python id of this object. All equations inside the scope have the same scope object."""
    return tuple(
        (entry.name, id(entry))
        for entry in eqn.source_info.name_stack.stack
        if isinstance(entry, _Scope)
    )


def origin(eqn: Any) -> tuple:
    """Returns three Python ids for an equation: the id of its name stack, the id of its traceback,
    and the id of its attribute `ctx` (the JAX settings). Equations for which `origin` returns the
    same value have the same `name_stack` and `equation_context`."""
    info = eqn.source_info
    return id(info.name_stack), id(info.traceback), id(eqn.ctx)


def line(eqn: Any) -> str:
    """Returns the line of the user's code that created an equation, such as "model.py:58
    (forward)", or "" if it is unknown."""
    frame = _source_info.user_frame(eqn.source_info.traceback)
    return (
        ""
        if frame is None
        else f"{frame.file_name.rpartition('/')[2]}:{frame.start_line} ({frame.function_name})"
    )


def current_names() -> Any:
    """Returns the active name stack, for `equation_context`."""
    return _source_info.current_name_stack()


@contextlib.contextmanager
def equation_context(eqn: Any, outer: Any) -> Iterator:
    """Returns a context in which new equations get the source line and the JAX settings (`ctx`) of
    the equation `eqn`. The name stack of the new equations is `outer`, followed by the name stack
    of `eqn`."""
    names = outer + eqn.source_info.name_stack
    with _source_info.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


@contextlib.contextmanager
def names_context(outer: Any, name: str) -> Iterator:
    """Returns a context that replaces the active name stack by `outer`, followed by `name`, for new
    equations."""
    with _source_info.set_name_stack(outer.extend(name)):
        yield


# Evaluation of primitives.


def bind_again(eqn: Any, arrays: list) -> list:
    """Returns the outputs of an equation, evaluated on `arrays`.

    If JAX is tracing to a jaxpr, and the arrays have the types of the equation's inputs,
    `bind_again` appends a copy of the equation to the jaxpr. Appending the copy of the equation
    takes half the time of a call of the primitive's method `bind`, because JAX does not infer the
    output types again.
    """
    primitive = eqn.primitive
    if (
        _DynamicJaxprTrace
        and type(trace := _core.trace_ctx.trace) is _DynamicJaxprTrace
        and not eqn.effects
        and not is_high(eqn)  # a copy of it would not mark its jaxpr as high
    ):
        info = _source_info.current()
        inputs = [
            _DynamicJaxprTracer(trace, v.aval, v, info)
            if isinstance(v, Literal) and x is v.val
            else trace.to_jaxpr_tracer(x, info)
            if isinstance(x, jax.core.Tracer)
            else None
            for x, v in zip(arrays, eqn.invars)
        ]
        if all(x is not None and x.aval == v.aval for x, v in zip(inputs, eqn.invars)):
            return trace.emit_eqn(
                inputs,
                [v.aval for v in eqn.outvars],
                primitive,
                eqn.params,
                eqn.effects,
                info,
                eqn.ctx,
            )
    return bind(primitive, arrays, primitive.get_bind_params(eqn.params))


def bind(primitive: Any, arrays: list, params: dict) -> list:
    """Evaluates a primitive and returns its outputs as a list.

    While JAX linearizes a program, `bind` calls the primitive inside a `jax.jit` with inlining. JAX
    caches the linearization of a jitted function, but not the linearization of a primitive.
    Therefore, `jax.jit` with inlining reduces the time to linearize a program by two thirds.
    Because of the inlining, the traced program contains an equation of the primitive, but no jit
    equation.
    """
    outputs = None
    if (
        _LinearizeTrace
        and type(_core.trace_ctx.trace) is _LinearizeTrace
        and primitive.name not in _NEVER_INLINED
    ):
        with contextlib.suppress(TypeError):  # some parameters are not hashable
            # Params that are equal but not alike, such as a fill_value of 0.0 and of -0.0, are
            # different programs.
            numbers = tuple(
                repr(value) for value in params.values() if isinstance(value, (int, float, complex))
            )
            outputs = _inlined(primitive, frozenset(params.items()), numbers)
    outputs = primitive.bind(*arrays, **params) if outputs is None else outputs(*arrays)
    return list(outputs) if primitive.multiple_results else [outputs]


@functools.lru_cache(4096)
def _inlined(primitive: Any, params: frozenset, _numbers: Any) -> Any:
    return jax.jit(lambda *arrays: primitive.bind(*arrays, **dict(params)), inline=_EARLY)


# Primitives of mutable arrays, and shard_map, whose `bind` does not return a list of arrays.
_NEVER_INLINED = frozenset(("new_ref", "empty_ref", "freeze", "free_ref", "shard_map"))
_EARLY = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True
