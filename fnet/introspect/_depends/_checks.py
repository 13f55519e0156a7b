"""Computes a program together with the conditions of a proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental import checkify

from fnet.introspect._depends._conditions import Condition
from fnet.jaxpr import Interpreter, bodies, ends_by_rows, solve_inputs, while_of_rows


def checked(closed: Any, opened: Mapping[int, Any], conditions: Sequence[Condition]) -> Callable:
    """Returns a function of arrays that returns (error, outputs of a program). `error.get()` is None
    if the conditions hold for the values of this call. It can be compiled. The conditions of a
    branch that is not taken hold.

    Args:
        closed: the program.
        opened: what `Walk` has opened in it.
        conditions: conditions on its equations.
    """

    def run(*arrays: Any) -> list:
        checker = _Checker(opened, conditions)
        outputs = checker.outputs(closed, arrays)
        if checker.met != set(range(len(conditions))):
            checkify.check(jnp.zeros((), bool), "an operation of a condition was not met")
        return outputs

    return checkify.checkify(run, errors=checkify.user_checks)


class _Checker(Interpreter):
    """Evaluates a program with checks at the equations of conditions.

    Attributes:
        met: the indices of the conditions that were met.
    """

    def __init__(self, opened: Mapping[int, Any], conditions: Sequence[Condition]):
        super().__init__()
        self.opened_equations = opened
        self.conditions: dict[int, list[tuple[int, Condition]]] = {}
        for i, each in enumerate(conditions):
            self.conditions.setdefault(id(each.eqn), []).append((i, each))
        self.met: set[int] = set()

    def equation(self, eqn: Any, at: Any, inputs: list, plan: Any) -> Any:
        here = self.conditions.get(id(eqn), ())
        for i, each in here:
            if each.operand is not None:
                self._check(i, each, inputs[each.operand].x)
        if eqn.primitive.name == "while" and ends_by_rows(eqn):
            # checkify takes loops with a single condition only
            outputs = while_of_rows(self, eqn, at, inputs)
        elif eqn.primitive.name == "custom_linear_solve":
            (body,) = bodies(eqn)
            given = [inputs[i] for i in solve_inputs(eqn)]
            outputs = self.evaluate(body.jaxpr, body.consts, given, at)
        elif id(eqn) in self.opened_equations:
            _, opened, consts = self.opened_equations[id(eqn)]
            outputs = self.evaluate(opened, consts, inputs, at)
        else:
            outputs = self.default(eqn, at, inputs, (None,) * len(eqn.outvars))
        for i, each in here:
            if each.operand is None:
                self._check(i, each, outputs[0].x)
        return outputs

    def _check(self, i: int, condition: Condition, x: Any) -> None:
        self.met.add(i)
        checkify.check(_true(condition, jnp.asarray(x)), f"condition {i}")


def _true(condition: Condition, x: Any) -> Any:
    if condition.kind == "finite":
        return jnp.isfinite(x).all()
    if condition.kind == "nonzero":
        return ((x != 0) & ~jnp.isnan(x)).all()
    wide = jnp.promote_types(x.dtype, jnp.float32)
    bound, y = jnp.asarray(condition.bound, wide), x.astype(wide)
    if condition.kind == "within":
        return (jnp.abs(y) <= bound).all()
    if condition.kind == "at most":
        return (y <= bound).all()
    return (y >= bound).all() if condition.kind == "at least" else (y > bound).all()
