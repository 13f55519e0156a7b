"""The analysis of a whole program: its equations in order, and what is inside loops, branches and
calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fnet import _jax
from fnet.introspect._depends._conditions import Assumptions
from fnet.introspect._depends._memory import Memory
from fnet.introspect._depends._reach import (
    Reach,
    alike,
    also,
    constant,
    everything,
    join,
    made,
    nothing,
    uniform,
    widened,
)
from fnet.introspect._depends._rules import mind_zeros, results
from fnet.jaxpr import (
    Scope,
    bodies,
    builtin,
    description,
    equations,
    operation,
    scan,
    scopes_in,
    solve_inputs,
    title,
)

_TURNS = 1024  # iterations of a loop that are followed one by one
_COUNTED = 64  # iterations that are followed one by one because the carry may count them
_JOINS = 4  # rounds after which a loop's carry is widened


class Step(NamedTuple):
    """An equation and what is known of its operands. `inner` has the steps and the jaxpr of its
    body, if it has one."""

    eqn: Any
    path: str
    operands: tuple[Reach, ...]
    inner: tuple[list[Step], Any] | None


class Walk:
    """Evaluates a jaxpr on reaches.

    Attributes:
        assumed: what may be assumed, and what was.
        opaque: {the title of a primitive without a rule: the path where it was first met}, of those
            that read something that depends on the source.
        opened: {id of an equation of one of fnet's own primitives: a jaxpr of JAX's primitives}. Several
            walks over one program share it, so that their conditions are about the same equations.
    """

    def __init__(self, assumed: Assumptions, record: bool = False, opened: dict | None = None):
        self.assumed = assumed
        self.opaque: dict[str, str] = {}
        self.opened: dict[int, tuple[Any, Any, tuple]] = {} if opened is None else opened
        self.record = record
        self.memory = Memory()
        self._forms: dict[Any, tuple[Any, tuple]] = {}

    def __call__(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Reach], at: Scope | None = None
    ) -> tuple[list[Reach], list[Step]]:
        """Returns the reach of each output of an open jaxpr, and the steps if they are recorded."""
        at = Scope() if at is None else at
        scope_of = scopes_in(jaxpr, at)
        known: dict[Any, Reach] = {}
        for v, value in zip(jaxpr.constvars, consts, strict=True):
            known[v] = value if isinstance(value, Reach) else constant(value)
        known.update(zip(jaxpr.invars, inputs, strict=True))
        steps: list[Step] = []

        def read(atom: Any) -> Reach:
            return constant(atom.val) if isinstance(atom, _jax.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            inside = scope_of(eqn)
            operands = [read(v) for v in eqn.invars]
            done, inner = self.equation(eqn, operands, inside)
            done = [self._limited(each) for each in done]
            known.update(zip(eqn.outvars, done, strict=True))
            if self.record:
                steps.append(Step(eqn, inside.path, tuple(operands), inner))
        return [read(v) for v in jaxpr.outvars], steps

    def _limited(self, reach: Reach) -> Reach:
        large = reach.value is not None and reach.value.size > self.assumed.largest
        return reach.forgotten() if large else reach

    def equation(self, eqn: Any, operands: list[Reach], at: Scope) -> tuple[list[Reach], Any]:
        name = eqn.primitive.name if builtin(eqn.primitive) else ""
        if not name:
            return self._opaque(eqn, operands, at), None
        if name in _LOOPS and not self.assumed.allowed:
            low, high = everything(operands)
            if low > high:
                return [nothing(v.aval.shape) for v in eqn.outvars], None  # nothing to follow
        if name == "scan":
            return self._scan(eqn, operands, at)
        if name == "while":
            return self._while(eqn, operands, at), None
        if name == "cond":
            return self._cond(eqn, operands, at)
        if name == "optimization_barrier":
            return operands, None
        plain = description(eqn.primitive).plain
        inside = bodies(eqn)
        if len(inside) == 1 and inside[0].kind == "call":
            done, steps = self(inside[0].jaxpr, inside[0].consts, operands, at)
            return done, (steps, inside[0].jaxpr)
        if len(inside) == 1 and inside[0].kind == "solve":
            given = [operands[i] for i in solve_inputs(eqn)]
            done, steps = self(inside[0].jaxpr, inside[0].consts, given, at)
            return done, (steps, inside[0].jaxpr)
        if (opened := self._opened(eqn, plain)) is not None:
            _, form, consts = opened
            done, steps = self(form, consts, operands, at)
            return done, (steps, form)
        done = self._results(eqn, operands, at) if not inside else None
        return (self._opaque(eqn, operands, at) if done is None else done), None

    def _opaque(self, eqn: Any, operands: list[Reach], at: Scope) -> list[Reach]:
        """The results of an equation without a rule: they depend on all that it reads."""
        self.assumed.path = at.path
        mind_zeros(eqn, self.assumed)
        low, high = everything(operands)
        if low <= high:
            self.opaque.setdefault(title(eqn), at.path)
        return [uniform(_shape(v), low, high) for v in eqn.outvars]

    def _opened(self, eqn: Any, plain: Callable | None) -> tuple[Any, Any, tuple] | None:
        """The equation, a jaxpr of JAX's primitives that computes it, and its constants, or None for
        a primitive that is one of them. Equal equations share a jaxpr."""
        if id(eqn) in self.opened:
            return self.opened[id(eqn)]
        if plain is None and _jax.hi_primitive(eqn) is None:
            return None
        kind = operation(eqn)
        form = self._forms.get(kind)
        if form is None:
            form = (plain(eqn), ()) if plain is not None else _expanded(eqn)
        if form is None:
            return None
        if kind is not None:
            self._forms[kind] = form
        self.opened[id(eqn)] = eqn, *form
        return self.opened[id(eqn)]

    def _results(self, eqn: Any, operands: list[Reach], at: Scope) -> list[Reach] | None:
        key = self.memory.key(eqn, operands)
        done = self.memory.get(key)
        if done is not None:
            return done
        self.assumed.path = at.path
        before = self.assumed.count
        mind_zeros(eqn, self.assumed)
        done = results(eqn, operands, self.assumed)
        if done is None or self.assumed.count != before:
            return done  # an assumption is about this equation, not about others like it
        return self.memory.put(key, done)

    def _cond(self, eqn: Any, operands: list[Reach], at: Scope) -> tuple[list[Reach], Any]:
        which, *inputs = operands
        branches = bodies(eqn)
        if which.all_known():
            i = min(max(int(np.asarray(which.value).reshape(-1)[0]), 0), len(branches) - 1)
            done, steps = self(branches[i].jaxpr, branches[i].consts, inputs, at)
            return done, (steps, branches[i].jaxpr)
        merged: list[Reach] | None = None
        for branch in branches:
            done, _ = self(branch.jaxpr, branch.consts, inputs, at)
            merged = done if merged is None else [join(a, b) for a, b in zip(merged, done)]
        assert merged is not None
        return [also(each, everything([which])) for each in merged], None

    def _scan(self, eqn: Any, operands: list[Reach], at: Scope) -> tuple[list[Reach], Any]:
        body = scan(eqn)
        consts, carry, slices = body.split(operands)
        varies = any(each.low.shape[:1] > (1,) or each.high.shape[:1] > (1,) for each in slices)
        masks = any(each.value is not None and each.value.shape[:1] > (1,) for each in slices)
        count = body.length
        if count == 0:
            empty = [nothing(v.aval.shape) for v in eqn.outvars[body.carry :]]
            return [*carry, *empty], None
        counts = count <= _COUNTED and any(each.shape == () and each.all_known() for each in carry)
        if (varies or masks or counts) and count <= _TURNS:
            return self._turns(eqn, body, consts, carry, slices, at)
        held = [_slice_of(each, None) for each in slices]
        call = lambda carried: self(body.jaxpr, body.closed.consts, [*consts, *carried, *held], at)
        carried, steps, outputs = self._settled(call, carry, body.carry)
        stacked = [
            each.mapped((count, *each.shape), lambda x, fill: x[None]).forgotten()
            for each in outputs[body.carry :]
        ]
        return [*carried, *stacked], (steps, body.jaxpr)

    def _settled(
        self, call: Callable, carry: list[Reach], count: int
    ) -> tuple[list[Reach], list[Step], list[Reach]]:
        """Repeats a loop's body until its carry does not change any more."""
        carried = list(carry)
        for turn in range(10_000):
            outputs, steps = call(carried)
            new = [join(a, b) for a, b in zip(carried, outputs[:count])]
            if all(map(alike, new, carried)):
                return carried, steps, outputs
            if turn >= _JOINS:
                new = [a if alike(a, b) else widened(join(a, b)) for a, b in zip(carried, new)]
            carried = new
        raise AssertionError("the positions of a loop's carry grow without end")

    def _turns(
        self,
        eqn: Any,
        body: Any,
        consts: list[Reach],
        carry: list[Reach],
        slices: list[Reach],
        at: Scope,
    ) -> tuple[list[Reach], Any]:
        """Follows the iterations of a scan one by one, because their slices differ."""
        order = range(body.length)
        rows: list[list[Reach]] = []
        steps: list[Step] = []
        inputs: tuple = ()
        before: tuple | None = None
        outputs: list[Reach] = []
        for i in reversed(order) if body.options.get("reverse") else order:
            held = [_slice_of(each, i) for each in slices]
            inputs = (*consts, *carry, *held)
            if before is None or not all(map(alike, before, inputs)):
                outputs, steps = self(body.jaxpr, body.closed.consts, inputs, at)
            before = inputs
            carry = list(outputs[: body.carry])
            rows.append(outputs[body.carry :])
        if body.options.get("reverse"):
            rows.reverse()
        stacked = []
        for k, v in enumerate(eqn.outvars[body.carry :]):
            column = [row[k] for row in rows]
            stacked.append(_stacked(column, tuple(v.aval.shape)))
        return [*carry, *stacked], (steps, body.jaxpr)

    def _while(self, eqn: Any, operands: list[Reach], at: Scope) -> list[Reach]:
        test, step = bodies(eqn)
        assert test.inputs is not None and step.inputs is not None
        start = len(eqn.invars) - len(eqn.outvars)
        tests = [operands[i] for i in test.inputs if i < start]
        consts = [operands[i] for i in step.inputs if i < start]
        carry = operands[start:]
        rows = bool(test.jaxpr.outvars[0].aval.shape)
        for _ in range(0 if rows else _TURNS):  # as long as the number of iterations is known
            (going,), _steps = self(test.jaxpr, test.consts, [*tests, *carry], at)
            if not going.all_known():
                break
            if not bool(np.asarray(going.value).reshape(-1)[0]):
                return list(carry)
            carry, _steps = self(step.jaxpr, step.consts, [*consts, *carry], at)

        def call(carried: list[Reach]) -> tuple[list[Reach], list[Step]]:
            (going,), _ = self(test.jaxpr, test.consts, [*tests, *carried], at)
            outputs, steps = self(step.jaxpr, step.consts, [*consts, *carried], at)
            if rows:  # each row ends by itself, as under jax.vmap
                return [_with_rows(each, going) for each in outputs], steps
            # Everything depends on how often the loop runs.
            return [also(each, everything([going])) for each in outputs], steps

        carried, _, _ = self._settled(call, list(carry), len(carry))
        return carried


_LOOPS = ("scan", "while")


def _expanded(eqn: Any) -> tuple[Any, tuple] | None:
    """What a HiPrim of JAX computes, as an open jaxpr and its constants, or None if it does not
    say."""
    form = _jax.expanded(eqn)
    return None if form is None else (form.jaxpr, tuple(form.consts))


def keeps_state(jaxpr: Any) -> str | None:
    """What of a program has a state that is no value of it: a `jax.Ref`, or an operation with side
    effects, which may return what an earlier one was given. None if there is nothing."""
    if any(map(_is_ref, (*jaxpr.invars, *jaxpr.constvars))):
        return "jax.Ref"
    for eqn in equations(jaxpr):
        if any(map(_is_ref, (*eqn.invars, *eqn.outvars))):
            return "jax.Ref"
        if eqn.outvars and any("NamedAxis" not in type(each).__name__ for each in eqn.effects):
            return title(eqn)
        if _jax.hi_primitive(eqn) is not None and (form := _expanded(eqn)) is not None:
            if (found := keeps_state(form[0])) is not None:
                return found
    return None


def _is_ref(v: Any) -> bool:
    return "Ref" in type(v.aval).__name__


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _with_rows(reach: Reach, going: Reach) -> Reach:
    """What also depends on its row of a loop's condition."""
    rest = (1,) * (len(reach.shape) - len(going.shape))
    low, high = going.low, going.high
    return made(
        reach.shape,
        np.minimum(reach.low, low.reshape((*low.shape, *rest))).astype(np.int32),
        np.maximum(reach.high, high.reshape((*high.shape, *rest))).astype(np.int32),
    )


def _slice_of(reach: Reach, i: int | None) -> Reach:
    """An iteration's slice of a scan's input, or what all of them have in common."""
    shape = reach.shape[1:]
    if i is not None:
        return reach.mapped(shape, lambda x, fill: x[min(i, x.shape[0] - 1)])
    low, high = reach.low.min(0), reach.high.max(0)
    if reach.value is not None and reach.value.shape[0] == 1 and reach.known is not None:
        if reach.known.shape[0] == 1:
            return made(shape, low, high, reach.value[0], reach.known[0])
    return made(shape, low, high)


def _stacked(column: Sequence[Reach], shape: tuple[int, ...]) -> Reach:
    first = column[0]
    if all(each is first for each in column) or all(alike(each, first) for each in column):
        return first.mapped(shape, lambda x, fill: x[None])
    low = np.stack(np.broadcast_arrays(*(each.low for each in column)))
    high = np.stack(np.broadcast_arrays(*(each.high for each in column)))
    return made(shape, low, high)
