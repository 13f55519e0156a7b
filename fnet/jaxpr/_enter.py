"""Functions that rewrite the jaxprs inside an equation, such as the body of a loop, and then
evaluate the equation.

Each function that evaluates an equation has the arguments (interpreter, equation, scope, inputs,
requirements on the outputs) and returns the outputs. The traced dtype of a value is the dtype that
the value had when JAX traced the program; rewriting may change the dtype.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fnet import _jax
from fnet.jaxpr._calls import bodies, scan
from fnet.jaxpr._values import Value, arrays_of, bind, restore


def _jit(self, eqn, scope, inputs, wanted):
    closed, notes = self.kept(eqn.params["jaxpr"], scope, wanted, inputs)
    tracers = any(isinstance(c, jax.core.Tracer) for c in closed.consts)
    changes, consts = _jax.hoisted(eqn.params, closed) if tracers else ({"jaxpr": closed}, [])
    return [
        Value(y.x, note)
        for y, note in zip(bind(eqn, [*consts, *arrays_of(inputs)], **changes), notes)
    ]


def inline(self, eqn, scope, inputs, wanted):
    """Evaluates the body of a call in place of the call."""
    closed = bodies(eqn)[0].closed
    return self.evaluate(closed.jaxpr, closed.consts, inputs, scope, wanted)


def _scan(self, eqn, scope, inputs, wanted):
    """Rewrites a scan.

    The carry of the rewritten scan keeps its traced dtypes. The constants, slices and stacked
    outputs of the rewritten scan may have other dtypes than in the original program.
    """
    parts = scan(eqn)
    consts, carry, slices = parts.split(inputs)
    start = [restore(value, v.aval) for value, v in zip(carry, parts.split(eqn.invars)[1])]
    notes = [value.note for value in (*consts, *(Value(x) for x in start), *slices)]
    body = self.body(
        parts.closed, scope, wanted, notes, pin=[i < parts.carry for i in range(len(eqn.outvars))]
    )
    constants = arrays_of(consts)

    def step(carried, sliced):
        outputs = body(*constants, *carried, *sliced)
        return outputs[: parts.carry], outputs[parts.carry :]

    # lax.scan accepts no symbolic length, but determines it from the slices.
    options = {
        name: x for name, x in parts.options.items() if name != "length" or isinstance(x, int)
    }
    carried, stacked = lax.scan(step, start, arrays_of(slices), **options)
    return [*map(Value, carried), *map(Value, stacked)]


def _while(self, eqn, scope, inputs, wanted):
    """Rewrites a while loop. The carry of a while loop keeps its traced dtypes."""
    params = eqn.params
    a, b = params["cond_nconsts"], params["body_nconsts"]
    init = [restore(value, v.aval) for value, v in zip(inputs[a + b :], eqn.invars[a + b :])]
    free = [None] * len(init)
    test = self.body(params["cond_jaxpr"], scope, (None,), [*(v.note for v in inputs[:a]), *free])
    body = self.body(
        params["body_jaxpr"], scope, wanted, [*(v.note for v in inputs[a : a + b]), *free]
    )
    types = [jax.typeof(x) for x in [*arrays_of(inputs[: a + b]), *init]]
    # The primitive is bound directly, because lax.while_loop rejects the batched conditions that
    # vmap creates.
    tests, steps = (
        jax.make_jaxpr(test)(*types[:a], *types[a + b :]),
        jax.make_jaxpr(body)(*types[a:]),
    )
    return bind(
        eqn,
        [
            *tests.consts,
            *arrays_of(inputs[:a]),
            *steps.consts,
            *arrays_of(inputs[a : a + b]),
            *init,
        ],
        cond_nconsts=len(tests.consts) + a,
        cond_jaxpr=_jax.close(_jax.consts_as_inputs(tests)),
        body_nconsts=len(steps.consts) + b,
        body_jaxpr=_jax.close(_jax.consts_as_inputs(steps)),
    )


def _cond(self, eqn, scope, inputs, wanted):
    """Rewrites a cond. The outputs of a cond keep their traced dtypes, because all branches must
    return the same dtypes."""
    index, *rest = inputs
    branches = [
        self.body(branch.closed, scope, wanted, [v.note for v in rest]) for branch in bodies(eqn)
    ]
    types = [jax.typeof(value.x) for value in rest]
    closed = [jax.make_jaxpr(branch)(*types) for branch in branches]
    if any(isinstance(c, (jax.core.Tracer, jax.Ref)) for each in closed for c in each.consts):
        return [Value(y) for y in lax.switch(index.x, branches, *arrays_of(rest))]
    return bind(eqn, [index.x, *arrays_of(rest)], branches=tuple(closed))


def _remat(self, eqn, scope, inputs, wanted):
    closed, notes = self.kept(eqn.params["jaxpr"], scope, wanted, inputs)
    outputs = bind(
        eqn,
        [*closed.consts, *arrays_of(inputs)],
        jaxpr=_jax.consts_as_inputs(closed),
        policy=self.saveable(eqn.params["policy"]),
    )
    return [Value(y.x, note) for y, note in zip(outputs, notes)]


def _shard_map(self, eqn, scope, inputs, wanted):
    params = eqn.params
    body = self.body(
        _jax.close(params["jaxpr"]),
        scope,
        wanted,
        [v.note for v in inputs],
        pin=[False] * len(eqn.outvars),
    )
    mapped = jax.shard_map(
        lambda *xs: tuple(body(*xs)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        check_vma=params["check_vma"],
        axis_names=set(params["newly_manual_axes"]),
    )
    return [Value(y) for y in mapped(*arrays_of(inputs))]


def _custom_jvp(self, eqn, scope, inputs, wanted):
    """Rewrites the function of a custom_jvp and its JVP rule separately. The outputs of the
    custom_jvp equation have the dtypes that the rewritten function returns. As in JAX, the JVP rule
    of a custom_jvp is traced without the tangents that are symbolic zeros."""
    notes, types = [value.note for value in inputs], [jax.typeof(value.x) for value in inputs]
    rule = _jax.CustomJvp(eqn.params)
    free = [False] * len(eqn.outvars)
    primal = self.body(bodies(eqn)[0].closed, scope, wanted, notes, pin=free)
    function = jax.custom_jvp(lambda *xs: tuple(primal(*xs)))

    def jvp(primals, tangents):
        primals, tangents = primals[rule.consts :], tangents[rule.consts :]
        zero = [not _moves(x) or isinstance(t, SymbolicZero) for x, t in zip(primals, tangents)]
        closed, zero_out = rule.jaxpr([True] * rule.consts + zero)
        moving = [t for t, z in zip(tangents, zero) if not z]
        tangents_wanted = tuple(w for w, z in zip(wanted, zero_out) if not z)
        moving_notes = [self.tangent(note) for note, z in zip(notes[rule.consts :], zero) if not z]
        both = self.body(
            closed,
            scope,
            (*wanted, *tangents_wanted),
            [*notes[rule.consts :], *moving_notes],
            pin=[False] * (len(wanted) + len(tangents_wanted)),
        )
        outputs = both(*primals, *moving)
        like = jax.eval_shape(primal, *types)
        values = [restore(Value(y), s) for y, s in zip(outputs, like)]
        rest = iter(outputs[len(values) :])
        moved = [None if z else next(rest) for z in zero_out]
        return tuple(values), tuple(
            _zero(y) if tangent is None or not _moves(y) else restore(Value(tangent), y)
            for y, tangent in zip(values, moved)
        )

    function.defjvp(jvp, symbolic_zeros=rule.symbolic_zeros)
    return [Value(y) for y in function(*arrays_of(inputs))]


def _custom_vjp(self, eqn, scope, inputs, wanted):
    """Rewrites the forward and the backward function of a custom_vjp separately. The inputs of the
    backward function have their traced dtypes, which the user's backward function expects. As in
    JAX, the user's backward function receives symbolic zeros, and the user's forward function
    receives the information about which inputs are differentiated."""
    notes, types = [value.note for value in inputs], [jax.typeof(value.x) for value in inputs]
    rule = _jax.CustomVjp(eqn.params)
    free = [False] * len(eqn.outvars)
    primal = self.body(bodies(eqn)[0].closed, scope, wanted, notes, pin=free)
    function = jax.custom_vjp(lambda *xs: tuple(primal(*xs)))
    forwards = {}  # the user's backward function belongs to the forward function that was traced last

    def forward(*xs):
        if rule.symbolic_zeros:
            perturbed, xs = tuple(bool(x.perturbed) for x in xs), [x.value for x in xs]
        else:
            perturbed = (True,) * len(xs)
        traced = forwards[perturbed] = rule.forward(perturbed)
        both = self.body(
            traced.closed,
            scope,
            (None,) * traced.residuals + wanted,
            notes[rule.consts :],
            pin=[False] * traced.residuals + free,
        )
        outputs = both(*xs[rule.consts :])
        like = jax.eval_shape(primal, *types)
        values = [restore(Value(y), s) for y, s in zip(outputs[traced.residuals :], like)]
        return tuple(values), (list(xs), outputs[: traced.residuals], _Perturbed(perturbed))

    def backward(saved, cotangents):
        xs, residuals, perturbed = saved
        zeros = [isinstance(c, SymbolicZero) for c in cotangents]
        closed, live = rule.backward(forwards[perturbed.inputs], zeros)
        moving = [
            c
            for c, v, zero in zip(cotangents, eqn.outvars, zeros)
            if not zero and jnp.issubdtype(v.aval.dtype, jnp.inexact)
        ]
        arrays = [
            restore(Value(x), v.aval)
            for x, v in zip([*xs, *residuals, *moving], closed.jaxpr.invars)
        ]
        call = self.body(closed, scope, (None,) * len(closed.jaxpr.outvars), [None] * len(arrays))
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


def _custom_vmap(self, eqn, scope, inputs, wanted):
    """Rewrites the function of a custom_vmap and its batching rule separately. The rewritten
    function and the rewritten batching rule return outputs with the same dtypes as before the
    rewriting."""
    notes = [value.note for value in inputs]
    function = jax.custom_batching.custom_vmap(
        self.body(bodies(eqn)[0].closed, scope, wanted, notes)
    )

    @function.def_vmap
    def batch(size, batched, *xs):
        types = [jax.ShapeDtypeStruct(jnp.shape(x), v.aval.dtype) for x, v in zip(xs, eqn.invars)]
        closed, batched = _jax.custom_vmap_rule(eqn.params, size, batched, types)
        return self.body(closed, scope, wanted, notes)(*xs), batched

    return [Value(y) for y in function(*arrays_of(inputs))]


def _moves(x) -> bool:
    """Whether x can have a nonzero tangent."""
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _zero(x):
    """Returns a zero tangent of x."""
    return jnp.zeros_like(x) if _moves(x) else np.zeros(jnp.shape(x), jax.dtypes.float0)


ENTER = {
    **dict.fromkeys(("jit", "pjit"), _jit),
    **dict.fromkeys(("closed_call", "core_call", "call", "eval_jaxpr"), inline),
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
