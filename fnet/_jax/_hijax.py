"""JAX's next form of custom derivatives, checkpoints and loops, and how to read it.

With `jax_custom_jvp3`, `jax_custom_vjp3`, `jax_remat3` and `jax_scan3`, JAX traces each of these
constructs to the one primitive `call_hi_primitive`, whose only parameter is an object of the class
`jax.experimental.hijax.HiPrim`. `lax.custom_root` and `jnp.searchsorted` already do so without a
switch, and users can write such classes themselves. The rules of fnet know the older form.
Therefore, fnet traces with the switches off, and `classic_form` converts what is a HiPrim anyway.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.experimental import hijax
from jax.extend.core import ClosedJaxpr, Jaxpr, primitives

from fnet._jax._features import private

HI_PRIMITIVE = "call_hi_primitive"
_config = private("jax._src.config", "programs with the switches jax_custom_vjp3 and others")
_ValAccum = private("jax._src.interpreters.ad.ValAccum", "derivatives of HiPrims")
_SWITCHES = tuple(
    getattr(_config, name)
    for name in ("scan3", "remat3", "custom_vjp3", "custom_jvp3")
    if hasattr(_config, name)  # jax 0.10 has no custom_jvp3
)
# jax < 0.11 calls the class VJPHiPrimitive, and has no rules that are derived from others.
_HiPrim: Any = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive
# Inside of `classic_tracing`, the switches that were on outside.
_set_by_user: contextvars.ContextVar[tuple] = contextvars.ContextVar("switches", default=())
_NEEDS_A_SWITCH = "custom_vjp.defremat requires", "Enabling `jax_remat3`"  # in JAX's errors
# These classes transpose what `expand` computes. The transpose rule of any other class is its own.
_TRANSPOSED_AS_EXPANDED = "CustomJVPTraced", "_RootLinearMap"
_converted: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_DERIVED = tuple(
    getattr(hijax, name).vjp_fwd
    for name in ("vjp_from_jvp", "vjp_from_lin")
    if hasattr(hijax, name)
)


def make_jaxpr(
    f: Callable, *, return_shape: bool = False, static_argnums: tuple[int, ...] = ()
) -> Callable:
    """Like `jax.make_jaxpr`, but the jaxpr contains the primitives that fnet's rules know: JAX traces
    `classically`, and what is a HiPrim anyway becomes a call of its `classic_form`."""
    trace = jax.make_jaxpr(f, return_shape=return_shape, static_argnums=static_argnums)

    def traced(*args: Any) -> Any:
        result = classically(lambda: trace(*args))
        if return_shape:
            closed, shapes = result
            return without_hi_primitives(closed), shapes
        return without_hi_primitives(result)

    return traced


def classically(call: Callable[[], Any]) -> Any:
    """Returns call(), evaluated with the switches off. What exists only with a switch, such as
    `custom_vjp.defremat` without `defvjp`, is evaluated with the switches that the user has set."""
    try:
        with classic_tracing() as on:
            return call()
    except NotImplementedError as error:
        if not on or not any(words in str(error) for words in _NEEDS_A_SWITCH):
            raise
    with contextlib.ExitStack() as stack:
        for switch in on:
            stack.enter_context(switch(True))
        return call()


@contextlib.contextmanager
def classic_tracing() -> Iterator[tuple]:
    """Returns a context in which JAX traces custom derivatives, checkpoints and loops to their
    older primitives, whatever the switches say. Its value are the switches that the user has set."""
    on = tuple(switch for switch in _SWITCHES if switch.value)
    if not on:
        yield _set_by_user.get()
        return
    token = _set_by_user.set(on)
    try:
        with contextlib.ExitStack() as stack:
            for switch in on:
                stack.enter_context(switch(False))
            yield on
    finally:
        _set_by_user.reset(token)


def without_hi_primitives(closed: Any) -> Any:
    """Returns a closed jaxpr in which each HiPrim with a `classic_form`, at any depth, is a call of
    this form."""
    if ClosedJaxpr is Jaxpr:  # jax >= 0.11 has one class for both
        return _replaced(closed)
    return closed.replace(jaxpr=_replaced(closed.jaxpr)) if closed.jaxpr.is_high else closed


def _replaced(jaxpr: Any) -> Any:
    """Returns an open jaxpr without HiPrims. Equations that share a body share it afterwards too.
    The bodies of shard_map stay as they are, because a HiPrim may expand to collectives over axes
    that exist only there."""
    if not jaxpr.is_high:
        return jaxpr
    if jaxpr not in _converted:
        eqns = [_replaced_equation(eqn) for eqn in jaxpr.eqns]
        high = any(map(is_high, eqns))
        _converted[jaxpr] = jaxpr.replace(eqns=eqns, is_high=high)
    return _converted[jaxpr]


def _replaced_equation(eqn: Any) -> Any:
    prim = hi_primitive(eqn)
    if prim is not None:
        with classic_tracing():  # jax 0.10 decides when a function is decorated
            form = classic_form(prim)
        if form is None:
            return eqn
        call = make_jaxpr(form)(*prim.in_avals_flat)
        return eqn.replace(primitive=primitives.closed_call_p, params={"call_jaxpr": call})
    if eqn.primitive.name == "shard_map":
        return eqn
    params = {name: _replaced_value(value) for name, value in eqn.params.items()}
    return eqn.replace(params=params)


def _replaced_value(value: Any) -> Any:
    """Returns the value of a parameter of an equation, with its jaxprs converted."""
    if isinstance(value, Jaxpr):
        return _replaced(value)
    if isinstance(value, ClosedJaxpr):
        return without_hi_primitives(value)
    if isinstance(value, tuple):
        items = [_replaced_value(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def is_high(eqn: Any) -> bool:
    """Whether JAX must expand an equation before compilation."""
    return eqn.primitive.is_high(*(v.aval for v in eqn.invars), **eqn.params)


def hi_primitive(eqn: Any) -> Any:
    """Returns the HiPrim of an equation, or None for the equation of another primitive."""
    return eqn.params.get("_prim") if eqn.primitive.name == HI_PRIMITIVE else None


def classic_form(prim: Any) -> Callable[..., tuple] | None:
    """Returns a HiPrim as a function of arrays with custom derivatives in the older form, whose
    bodies fnet's rules read, or None if it stays as it is.

    It does if its inputs or outputs are not all arrays, if it has a transpose rule of its own,
    which no older form has, and if all outputs are integers, as those of `jnp.searchsorted`.

    The function computes what `prim.expand` computes, and its derivatives are those of the HiPrim:
    its `vjp_fwd` and `vjp_bwd` if it has its own, otherwise its `jvp` or `lin`. A HiPrim that
    defines both is differentiated in reverse mode only. Its own batching rule is not used: batching
    the function batches what it computes.
    """
    if not isinstance(prim, _HiPrim):
        return None
    avals = (*prim.in_avals_flat, *prim.out_avals_flat)
    if any(type(aval) is not jax.core.ShapedArray for aval in avals):
        return None
    if not any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in prim.out_avals_flat):
        return None
    kind = type(prim)
    if kind.transpose is not _HiPrim.transpose and kind.__name__ not in _TRANSPOSED_AS_EXPANDED:
        return None
    if kind.vjp_fwd not in (_HiPrim.vjp_fwd, *_DERIVED):
        return _with_vjp(prim)
    return _with_jvp(prim)


def expanded(eqn: Any) -> Any:
    """Returns what the HiPrim of an equation computes, as a closed jaxpr. Returns None for other
    equations, and if the definition of the HiPrim raises an error."""
    prim = hi_primitive(eqn)
    if prim is None:
        return None
    try:
        form = make_jaxpr(_expanded(prim))(*(v.aval for v in eqn.invars))
    except Exception:  # whatever a definition of somebody else raises: it stays unknown
        return None
    return form if len(form.jaxpr.outvars) == len(eqn.outvars) else None


def _expanded(prim: Any) -> Callable[..., tuple]:
    def expand(*arrays: Any) -> tuple:
        result = prim.expand(*jax.tree.unflatten(prim.in_tree, arrays))
        return tuple(prim.out_tree.flatten_up_to(result))

    return expand


def _with_jvp(prim: Any) -> Callable[..., tuple]:
    kind = type(prim)
    rule = prim.jvp
    if kind.jvp is _HiPrim.jvp and kind.lin is not _HiPrim.lin:
        rule = lambda primals, tangents: hijax.jvp_from_lin(prim, primals, tangents)
    function = jax.custom_jvp(_expanded(prim))

    def jvp(primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
        moving = [_internal(t) for t in tangents]
        outputs, derivatives = rule(
            jax.tree.unflatten(prim.in_tree, primals), jax.tree.unflatten(prim.in_tree, moving)
        )
        values = prim.out_tree.flatten_up_to(outputs)
        flat = prim.out_tree.flatten_up_to(derivatives)
        zeros = (zero_tangent(y) if isinstance(t, hijax.Zero) else t for y, t in zip(values, flat))
        return tuple(values), tuple(zeros)

    function.defjvp(jvp, symbolic_zeros=True)
    return function


def _with_vjp(prim: Any) -> Callable[..., tuple]:
    function = jax.custom_vjp(_expanded(prim))

    def forward(*inputs: Any) -> tuple[tuple, tuple]:
        arrays = [x.value for x in inputs]
        perturbed = [bool(x.perturbed) for x in inputs]
        outputs, residuals, *rest = prim.vjp_fwd(
            jax.tree.unflatten(prim.in_tree, perturbed), *jax.tree.unflatten(prim.in_tree, arrays)
        )
        structured = tuple(rest[1:]) if len(rest) > 1 and rest[1] is not None else ()
        moving = jax.tree.broadcast(rest[0] if rest else True, prim.out_aval)
        saved = residuals, structured, _Flags(tuple(jax.tree.leaves(moving)))
        return tuple(prim.out_tree.flatten_up_to(outputs)), saved

    def backward(saved: tuple, cotangents: Any) -> tuple:
        residuals, structured, moving = saved
        received = [
            _internal(c) if moves else hijax.Zero(aval.to_ct_aval())
            for c, moves, aval in zip(cotangents, moving.values, prim.out_avals_flat)
        ]
        accumulators = [_ValAccum(aval.to_ct_aval()) for aval in prim.in_avals_flat]
        prim.vjp_bwd(
            residuals,
            *structured,
            jax.tree.unflatten(prim.out_tree, received),
            *jax.tree.unflatten(prim.in_tree, accumulators),
        )
        gradients = [accumulator.freeze() for accumulator in accumulators]
        return tuple(None if isinstance(g, hijax.Zero) else g for g in gradients)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Flags:
    """Which outputs have tangents, according to `vjp_fwd`. A part of the tree of the residuals."""

    values: tuple[bool, ...]


def _internal(x: Any) -> Any:
    """Converts the symbolic zero that JAX passes to a user's rule to the one that it passes to the
    rules of a HiPrim, which also receive a zero for each integer."""
    if isinstance(x, SymbolicZero) or getattr(x, "dtype", None) == jax.dtypes.float0:
        aval = x.aval if isinstance(x, SymbolicZero) else jax.core.ShapedArray(x.shape, x.dtype)
        return hijax.Zero(aval)
    return x


def zero_tangent(x: Any) -> Any:
    """Returns a zero tangent of x: of float0, JAX's tangent dtype for integers, if x has none."""
    if jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(jnp.shape(x), jax.dtypes.float0)
