"""Functions that rewrite the jaxprs inside an equation, such as the body of a loop, and then
evaluate the equation.

Each function that evaluates an equation has the arguments (interpreter, equation, scope, inputs,
requirements on the outputs) and returns the outputs. The traced dtype of a value is the dtype that
the value had when JAX traced the program; rewriting may change the dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fnet import _jax
from fnet.jaxpr._calls import RECURRENCES, bodies, scan, title
from fnet.jaxpr._primitives import UNKNOWN, Description, description, traits
from fnet.jaxpr._scopes import Scope
from fnet.jaxpr._values import Value, arrays_of, bind, restore


class Evaluates(Protocol):
    """The methods of an `Interpreter` that this module needs."""

    def evaluate(
        self, jaxpr: Any, consts: Any, args: list[Value], outer: Scope, wanted: tuple, /
    ) -> list[Value]: ...

    def body(
        self, closed: Any, at: Scope, wanted: tuple, notes: Sequence, *, pin: Any = None
    ) -> Callable[..., list]: ...

    def kept(
        self, jaxpr: Any, at: Scope, wanted: tuple, inputs: list[Value], /
    ) -> tuple[Any, list]: ...

    def tangent(self, note: Any, /) -> Any: ...

    def saveable(self, policy: Any, /) -> Any: ...


def _jit(
    interpreter: Evaluates, eqn: Any, scope: Scope, inputs: list[Value], wanted: tuple
) -> list[Value]:
    closed, notes = interpreter.kept(eqn.params["jaxpr"], scope, wanted, inputs)
    changes: dict[str, Any] = {"jaxpr": closed}
    consts: list = []
    if any(isinstance(c, jax.core.Tracer) for c in closed.consts):
        changes, consts = _jax.hoisted(eqn.params, closed)
    outputs = bind(eqn, [*consts, *arrays_of(inputs)], **changes)
    return [Value(y.x, note) for y, note in zip(outputs, notes)]


def inline(
    interpreter: Evaluates, eqn: Any, scope: Scope, inputs: list[Value], wanted: tuple
) -> list[Value]:
    """Evaluates the body of a call in place of the call."""
    closed = bodies(eqn)[0].closed
    return interpreter.evaluate(closed.jaxpr, closed.consts, inputs, scope, wanted)


def _recurrence(
    interpreter: Evaluates, eqn: Any, scope: Scope, inputs: list[Value], wanted: tuple
) -> list[Value]:
    """Evaluates a call whose body a kernel may replace. It stays a call if the body is unchanged."""
    body = eqn.params["call_jaxpr"]
    closed, notes = interpreter.kept(body, scope, wanted, inputs)
    if str(closed) == str(body):
        outputs = arrays_of(bind(eqn, arrays_of(inputs)))
    else:
        outputs = _jax.evaluate(closed, closed.consts, arrays_of(inputs))
    return [Value(y, note) for y, note in zip(outputs, notes)]


def _scan(
    interpreter: Evaluates, eqn: Any, scope: Scope, inputs: list[Value], wanted: tuple
) -> list[Value]:
    """Rewrites a scan.

    The carry of the rewritten scan keeps its traced dtypes. The constants, slices and stacked
    outputs of the rewritten scan may have other dtypes than in the original program.
    """
    parts = scan(eqn)
    consts, carry, slices = parts.split(inputs)
    _, carry_vars, _ = parts.split(eqn.invars)
    start = [restore(value, v.aval) for value, v in zip(carry, carry_vars)]
    notes = [*_notes(consts), *[None] * len(start), *_notes(slices)]
    is_carry = [i < parts.carry for i in range(len(eqn.outvars))]
    body = interpreter.body(parts.closed, scope, wanted, notes, pin=is_carry)
    constants = arrays_of(consts)

    def step(carried: list, sliced: list) -> tuple[list, list]:
        outputs = body(*constants, *carried, *sliced)
        return outputs[: parts.carry], outputs[parts.carry :]

    options = dict(parts.options)
    if not isinstance(options.get("length"), int):
        # lax.scan accepts no symbolic length, but determines it from the slices.
        options.pop("length", None)
    carried, stacked = lax.scan(step, start, arrays_of(slices), **options)
    return [*map(Value, carried), *map(Value, stacked)]


def _while(
    interpreter: Evaluates, eqn: Any, scope: Scope, inputs: list[Value], wanted: tuple
) -> list[Value]:
    """Rewrites a while loop. The carry of a while loop keeps its traced dtypes."""
    params = eqn.params
    a, b = params["cond_nconsts"], params["body_nconsts"]
    test_consts, step_consts, carry = inputs[:a], inputs[a : a + b], inputs[a + b :]
    start = [restore(value, v.aval) for value, v in zip(carry, eqn.invars[a + b :])]

    def rewritten(closed: Any, consts: list[Value], wanted: tuple) -> Any:
        notes = [*_notes(consts), *[None] * len(start)]
        types = map(jax.typeof, [*arrays_of(consts), *start])
        return _jax.make_jaxpr(interpreter.body(closed, scope, wanted, notes))(*types)

    test = rewritten(params["cond_jaxpr"], test_consts, (None,))
    step = rewritten(params["body_jaxpr"], step_consts, wanted)
    # The primitive is bound directly, because lax.while_loop rejects the batched conditions that
    # vmap creates.
    return bind(
        eqn,
        [
            *test.consts,
            *arrays_of(test_consts),
            *step.consts,
            *arrays_of(step_consts),
            *start,
        ],
        cond_nconsts=len(test.consts) + a,
        cond_jaxpr=_jax.close(_jax.consts_as_inputs(test)),
        body_nconsts=len(step.consts) + b,
        body_jaxpr=_jax.close(_jax.consts_as_inputs(step)),
    )


def _cond(
    interpreter: Evaluates, eqn: Any, scope: Scope, inputs: list[Value], wanted: tuple
) -> list[Value]:
    """Rewrites a cond. The outputs of a cond keep their traced dtypes, because all branches must
    return the same dtypes."""
    index, *operands = inputs
    notes = _notes(operands)
    branches = [interpreter.body(branch.closed, scope, wanted, notes) for branch in bodies(eqn)]
    types = [jax.typeof(value.x) for value in operands]
    closed = [_jax.make_jaxpr(branch)(*types) for branch in branches]
    if any(isinstance(c, (jax.core.Tracer, jax.Ref)) for each in closed for c in each.consts):
        # The branches close over values, which lax.switch passes as operands.
        return [Value(y) for y in lax.switch(index.x, branches, *arrays_of(operands))]
    return bind(eqn, [index.x, *arrays_of(operands)], branches=tuple(closed))


def _remat(
    interpreter: Evaluates, eqn: Any, scope: Scope, inputs: list[Value], wanted: tuple
) -> list[Value]:
    closed, notes = interpreter.kept(eqn.params["jaxpr"], scope, wanted, inputs)
    outputs = bind(
        eqn,
        [*closed.consts, *arrays_of(inputs)],
        jaxpr=_jax.consts_as_inputs(closed),
        policy=interpreter.saveable(eqn.params["policy"]),
    )
    return [Value(y.x, note) for y, note in zip(outputs, notes)]


def _shard_map(
    interpreter: Evaluates, eqn: Any, scope: Scope, inputs: list[Value], wanted: tuple
) -> list[Value]:
    params = eqn.params
    closed = _jax.close(params["jaxpr"])
    body = interpreter.body(closed, scope, wanted, _notes(inputs), pin=_unpinned(wanted))
    mapped = jax.shard_map(
        lambda *xs: tuple(body(*xs)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        check_vma=params["check_vma"],
        axis_names=set(params["newly_manual_axes"]),
    )
    return [Value(y) for y in mapped(*arrays_of(inputs))]


def _custom_jvp(
    interpreter: Evaluates, eqn: Any, scope: Scope, inputs: list[Value], wanted: tuple
) -> list[Value]:
    """Rewrites the function of a custom_jvp and its JVP rule separately. The outputs of the
    custom_jvp equation have the dtypes that the rewritten function returns. As in JAX, the JVP rule
    of a custom_jvp is traced without the tangents that are symbolic zeros."""
    notes, types = _notes(inputs), [jax.typeof(value.x) for value in inputs]
    rule = _jax.CustomJvp(eqn.params)
    primal = interpreter.body(bodies(eqn)[0].closed, scope, wanted, notes, pin=_unpinned(wanted))
    function = jax.custom_jvp(lambda *xs: tuple(primal(*xs)))

    def jvp(primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
        primals, tangents = primals[rule.consts :], tangents[rule.consts :]
        primal_notes = notes[rule.consts :]
        zero = [not _moves(x) or isinstance(t, SymbolicZero) for x, t in zip(primals, tangents)]
        closed, zero_out = rule.jaxpr([True] * rule.consts + zero)

        tangent_notes = [interpreter.tangent(note) for note in _unless(zero, primal_notes)]
        both_wanted = (*wanted, *_unless(zero_out, wanted))
        both = interpreter.body(
            closed,
            scope,
            both_wanted,
            [*primal_notes, *tangent_notes],
            pin=_unpinned(both_wanted),
        )
        outputs = both(*primals, *_unless(zero, tangents))

        values = _restored(outputs, jax.eval_shape(primal, *types))
        moving = iter(outputs[len(values) :])
        tangents_out = []
        for y, is_zero in zip(values, zero_out):
            tangent = None if is_zero else next(moving)
            if tangent is None or not _moves(y):
                tangents_out.append(_jax.zero_tangent(y))
            else:
                tangents_out.append(restore(Value(tangent), y))
        return tuple(values), tuple(tangents_out)

    function.defjvp(jvp, symbolic_zeros=rule.symbolic_zeros)
    return [Value(y) for y in function(*arrays_of(inputs))]


def _custom_vjp(
    interpreter: Evaluates, eqn: Any, scope: Scope, inputs: list[Value], wanted: tuple
) -> list[Value]:
    """Rewrites the forward and the backward function of a custom_vjp separately. The inputs of the
    backward function have their traced dtypes, which the user's backward function expects. As in
    JAX, the user's backward function receives symbolic zeros, and the user's forward function
    receives the information about which inputs are differentiated."""
    notes, types = _notes(inputs), [jax.typeof(value.x) for value in inputs]
    rule = _jax.CustomVjp(eqn.params)
    primal = interpreter.body(bodies(eqn)[0].closed, scope, wanted, notes, pin=_unpinned(wanted))
    function = jax.custom_vjp(lambda *xs: tuple(primal(*xs)))
    # The user's backward function belongs to the forward function that was traced last.
    forwards: dict[tuple[bool, ...], Any] = {}

    def forward(*xs: Any) -> tuple[tuple, tuple]:
        perturbed = (True,) * len(xs)
        if rule.symbolic_zeros:
            perturbed = tuple(bool(x.perturbed) for x in xs)
            xs = tuple(x.value for x in xs)
        traced = forwards[perturbed] = rule.forward(perturbed)
        both_wanted = (None,) * traced.residuals + wanted
        both = interpreter.body(
            traced.closed, scope, both_wanted, notes[rule.consts :], pin=_unpinned(both_wanted)
        )
        outputs = both(*xs[rule.consts :])
        residuals, primals = outputs[: traced.residuals], outputs[traced.residuals :]
        values = _restored(primals, jax.eval_shape(primal, *types))
        return tuple(values), (list(xs), residuals, _Perturbed(perturbed))

    def backward(saved: tuple, cotangents: tuple) -> tuple:
        xs, residuals, perturbed = saved
        zeros = [isinstance(c, SymbolicZero) for c in cotangents]
        closed, live = rule.backward(forwards[perturbed.inputs], zeros)

        moving = []
        for cotangent, v, zero in zip(cotangents, eqn.outvars, zeros):
            if not zero and jnp.issubdtype(v.aval.dtype, jnp.inexact):
                moving.append(cotangent)
        arrays = _restored([*xs, *residuals, *moving], [v.aval for v in closed.jaxpr.invars])
        call = interpreter.body(
            closed, scope, (None,) * len(closed.jaxpr.outvars), [None] * len(arrays)
        )
        gradients = iter(call(*arrays))
        return tuple(
            restore(Value(next(gradients)), jax.typeof(x)) if moves else None
            for x, moves in zip(xs, live)
        )

    function.defvjp(forward, backward, symbolic_zeros=rule.symbolic_zeros)
    return [Value(y) for y in function(*arrays_of(inputs))]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Perturbed:
    """Records which inputs of a custom_vjp are differentiated. JAX treats a `_Perturbed` object as
    a part of the tree structure of the residuals."""

    inputs: tuple[bool, ...]


def _custom_vmap(
    interpreter: Evaluates, eqn: Any, scope: Scope, inputs: list[Value], wanted: tuple
) -> list[Value]:
    """Rewrites the function of a custom_vmap and its batching rule separately. The rewritten
    function and the rewritten batching rule return outputs with the same dtypes as before the
    rewriting."""
    notes = _notes(inputs)
    function = jax.custom_batching.custom_vmap(
        interpreter.body(bodies(eqn)[0].closed, scope, wanted, notes)
    )

    @function.def_vmap
    def batch(size: int, batched: list, *xs: Any) -> tuple[list, Any]:
        types = [jax.ShapeDtypeStruct(jnp.shape(x), v.aval.dtype) for x, v in zip(xs, eqn.invars)]
        closed, batched_out = _jax.custom_vmap_rule(eqn.params, size, batched, types)
        return interpreter.body(closed, scope, wanted, notes)(*xs), batched_out

    return [Value(y) for y in function(*arrays_of(inputs))]


def _notes(values: list[Value]) -> list:
    return [value.note for value in values]


def _unpinned(wanted: tuple) -> list[bool]:
    """Returns the argument `pin` of `body` for outputs that keep the dtypes of the rewritten
    program."""
    return [False] * len(wanted)


def _restored(arrays: Sequence, avals: Sequence) -> list:
    """Converts arrays to their traced dtypes. There may be more arrays than avals."""
    return [restore(Value(x), aval) for x, aval in zip(arrays, avals)]


def _unless(drop: Sequence[bool], items: Sequence) -> list:
    return [item for item, dropped in zip(items, drop) if not dropped]


def _moves(x: Any) -> bool:
    """Whether x can have a nonzero tangent."""
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


ENTER = {
    **dict.fromkeys(("jit", "pjit"), _jit),
    **dict.fromkeys(("closed_call", "core_call", "call", "eval_jaxpr"), inline),
    **dict.fromkeys(RECURRENCES, _recurrence),
    **dict.fromkeys(("remat2", "checkpoint"), _remat),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "custom_vmap_call": _custom_vmap,
}
ENTERED = frozenset(ENTER)
"""Primitives whose bodies an `Interpreter` evaluates equation by equation."""


def opaque(eqn: Any) -> bool:
    """Whether fnet neither knows what an equation's primitive does, nor evaluates its bodies. Rules
    do not reach the operations inside it, such as those of a callback or a kernel. An equation of
    integers alone is not opaque."""
    name = eqn.primitive.name
    return (
        name not in ENTERED
        and traits(name) is UNKNOWN
        and description(eqn.primitive) == Description(UNKNOWN)
        and any(map(_inexact_or_unknown, (*eqn.invars, *eqn.outvars)))
    )


def _inexact_or_unknown(v: Any) -> bool:
    dtype = getattr(v.aval, "dtype", None)
    return dtype is None or jnp.issubdtype(dtype, jnp.inexact)


def opaque_operations(jaxpr: Any) -> dict[str, int]:
    """Returns {"name of a primitive": number of equations} for the opaque equations of an open
    jaxpr, at any depth, but not inside other opaque equations."""
    found: dict[str, int] = {}

    def count(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if opaque(eqn):
                found[title(eqn)] = found.get(title(eqn), 0) + 1
                continue
            for body in bodies(eqn):
                count(body.jaxpr)

    count(jaxpr)
    return found
