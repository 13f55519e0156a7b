"""The equations of a step, and the shardings that XLA gives to their arrays.

XLA chooses the shardings of most arrays of a program while it compiles it. They can be read from
the shardings of results, so the step is rewritten to return each array that it computes. It is
compiled, and never run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fnet import _jax
from fnet.jaxpr import CALLS, Scope, bodies, has_shardings, scan, scopes_in
from fnet.parallel._sanitizer import _cases

# They compute nothing, and state nothing but where an array lies.
_IDENTITIES = frozenset(
    ("sharding_constraint", "reshard", "optimization_barrier", "name", "copy", "copy_p", "pvary")
)
_OWN = {
    "shard_map": "it states itself how it is divided",
    "custom_partitioning": "it states itself how it is divided",
    "pallas_call": "it is a kernel, which XLA does not divide",
    "pure_callback": "it calls Python",
    "ffi_call": "it calls foreign code, which XLA does not divide",
    "rng_bit_generator": "its numbers may depend on the sharding, as documented",
    "rng_uniform": "its numbers may depend on the sharding, as documented",
}


class Held:
    """An array of the step, and the number of axes that loops put before its own."""

    __slots__ = ("depth", "x")

    def __init__(self, x: Any, depth: int = 0):
        self.x, self.depth = x, depth


class Entry(NamedTuple):
    """An equation of the step.

    Attributes:
        eqn: JAX's equation.
        scope: its scope.
        inputs, outputs: its arrays. None for a literal, and for an array that cannot be returned.
    """

    eqn: Any
    scope: Scope
    inputs: list[Held | None]
    outputs: list[Held | None]


class Equation(NamedTuple):
    """An equation, and the shardings of its arrays. Those of literals are None."""

    eqn: Any
    scope: Scope
    inputs: tuple[_cases.Spec, ...]
    outputs: tuple[_cases.Spec, ...]


def why_not(eqn: Any) -> str | None:
    """Returns why an equation is not run alone, or None if it is."""
    if eqn.primitive.name in _OWN:
        return _OWN[eqn.primitive.name]
    if eqn.effects:
        return "it has side effects"
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if any(not hasattr(aval, "dtype") or _extended(aval) for aval in avals):
        return "it has random keys, or values that are no arrays"
    return None


def recording(closed: Any) -> tuple[Callable, Callable[[], tuple[list[Entry], list[Held]]]]:
    """Returns a function of the arguments of a jaxpr that returns all arrays that the jaxpr
    computes, and a function that, once the first has been traced, returns the equations and these
    arrays."""
    kept: list[Entry] = []
    held: list[Held] = []

    def everything(*args: Any) -> list:
        with _jax.classic_tracing():
            _, kept[:] = _evaluate(closed.jaxpr, closed.consts, [*map(Held, args)], Scope())
        held[:] = _distinct(kept)
        return [each.x for each in held]

    return everything, lambda: (kept, held)


def equations(entries: list[Entry], held: list[Held], specs: Sequence[Any]) -> list[Equation]:
    """Returns the equations with the shardings `specs` of the arrays `held`."""
    by_id = {
        id(each): None if spec is None else spec[each.depth :] for each, spec in zip(held, specs)
    }
    of = lambda sides: tuple(None if side is None else by_id[id(side)] for side in sides)
    return [Equation(e.eqn, e.scope, of(e.inputs), of(e.outputs)) for e in entries]


def _extended(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jax.dtypes.extended) or aval.dtype == jax.dtypes.float0


def _returned(side: Held) -> Held | None:
    aval = jax.typeof(side.x)
    return None if not hasattr(aval, "dtype") or _extended(aval) else side


def _distinct(entries: list[Entry]) -> list[Held]:
    sides = (side for entry in entries for side in (*entry.inputs, *entry.outputs))
    return list({id(side): side for side in sides if side is not None}.values())


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], args: list[Held], outer: Scope
) -> tuple[list[Held], list[Entry]]:
    scope_of = scopes_in(jaxpr, outer)
    env: dict[Any, Held] = dict(zip(jaxpr.constvars, map(Held, consts)))
    env.update(zip(jaxpr.invars, args))
    read = lambda atom: Held(atom.val) if isinstance(atom, _jax.Literal) else env[atom]
    names = _jax.current_names()
    entries: list[Entry] = []
    for eqn in jaxpr.eqns:
        inputs, at = [read(atom) for atom in eqn.invars], scope_of(eqn)
        with _jax.equation_context(eqn, names):
            outputs, inside = _opened(eqn, at, inputs)
        env.update(zip(eqn.outvars, outputs))
        entries += inside
        if not inside and eqn.primitive.name not in _IDENTITIES | CALLS:
            literal = [isinstance(atom, _jax.Literal) for atom in eqn.invars]
            read_from = [None if flag else _returned(x) for flag, x in zip(literal, inputs)]
            entries.append(Entry(eqn, at, read_from, [_returned(y) for y in outputs]))
    return [read(atom) for atom in jaxpr.outvars], entries


def _opened(eqn: Any, at: Scope, inputs: list[Held]) -> tuple[list[Held], list[Entry]]:
    """Evaluates an equation. Returns its outputs, and the equations inside of it."""
    name = eqn.primitive.name
    if name in CALLS:
        return _call(eqn, at, inputs)
    if name == "scan":
        return _scan(eqn, at, inputs)
    if name == "while":
        return _while(eqn, at, inputs)
    if name == "cond":
        return _cond(eqn, at, inputs)
    return [*map(Held, _jax.bind_again(eqn, [each.x for each in inputs]))], []


def _call(eqn: Any, at: Scope, inputs: list[Held]) -> tuple[list[Held], list[Entry]]:
    body = bodies(eqn)[0]
    if not has_shardings(eqn):
        return _evaluate(body.jaxpr, body.consts, inputs, at)
    before, after = _stated(**eqn.params)
    placed = [*map(_placed, inputs, before)]
    outputs, entries = _evaluate(body.jaxpr, body.consts, placed, at)
    return [*map(_placed, outputs, after)], entries


def _stated(
    *, in_shardings: Sequence[Any] = (), out_shardings: Sequence[Any] = (), **_: Any
) -> tuple[Sequence[Any], Sequence[Any]]:
    return in_shardings, out_shardings


def _placed(side: Held, sharding: Any) -> Held:
    if not isinstance(sharding, jax.sharding.Sharding):
        return side
    return Held(lax.with_sharding_constraint(side.x, sharding), side.depth)


def _scan(eqn: Any, at: Scope, inputs: list[Held]) -> tuple[list[Held], list[Entry]]:
    parts, kept = scan(eqn), []
    consts, carry, slices = parts.split([each.x for each in inputs])

    def body(carry: Any, xs: Any) -> Any:
        args = [*map(Held, (*consts, *carry, *xs))]
        outputs, entries = _evaluate(parts.jaxpr, parts.closed.consts, args, at)
        kept[:] = entries
        results = [each.x for each in outputs]
        arrays = [each.x for each in _distinct(entries)]
        return results[: len(carry)], (results[len(carry) :], arrays)

    carry, (ys, stacked) = lax.scan(body, carry, slices, **parts.options)
    outer = {id(inner): Held(x, inner.depth + 1) for inner, x in zip(_distinct(kept), stacked)}
    moved = lambda sides: [None if side is None else outer[id(side)] for side in sides]
    entries = [e._replace(inputs=moved(e.inputs), outputs=moved(e.outputs)) for e in kept]
    return [*map(Held, (*carry, *ys))], entries


def _while(eqn: Any, at: Scope, inputs: list[Held]) -> tuple[list[Held], list[Entry]]:
    """Two iterations, of which the second reads what the first one returns, as all later ones."""
    test, step = bodies(eqn)
    first = len(step.inputs or ()) - len(eqn.outvars)
    consts, carry = [inputs[i] for i in step.inputs or ()][:first], inputs[-len(eqn.outvars) :]
    carry, _ = _evaluate(step.jaxpr, step.consts, [*consts, *carry], at)
    tested = [inputs[i] for i in test.inputs or ()][: -len(eqn.outvars)]
    _, before = _evaluate(test.jaxpr, test.consts, [*tested, *carry], at)
    carry, inside = _evaluate(step.jaxpr, step.consts, [*consts, *carry], at)
    return carry, before + inside


def _cond(eqn: Any, at: Scope, inputs: list[Held]) -> tuple[list[Held], list[Entry]]:
    """All branches, and a selection of their results."""
    entries: list[Entry] = []
    results = []
    for branch in bodies(eqn):
        outputs, inside = _evaluate(branch.jaxpr, branch.consts, inputs[1:], at)
        entries += inside
        results.append([each.x for each in outputs])
    which = jnp.clip(inputs[0].x, 0, len(results) - 1)
    if len(results) == 1:
        return [*map(Held, results[0])], entries
    if len(results) == 2:
        which = which.astype(bool)
    return [Held(lax.select_n(which, *each)) for each in zip(*results)], entries
