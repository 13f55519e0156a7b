"""While loops whose rows end one by one, as `jax.vmap` makes them."""

from __future__ import annotations

from typing import Any

from jax import lax

from fnet.jaxpr._calls import bodies
from fnet.jaxpr._scopes import Scope
from fnet.jaxpr._values import Value, restore


def ends_by_rows(eqn: Any) -> bool:
    """Whether a while loop has a condition for each row of its carry."""
    return bool(bodies(eqn)[0].jaxpr.outvars[0].aval.shape)


def while_of_rows(interpreter: Any, eqn: Any, at: Scope, inputs: list[Value]) -> list[Value]:
    """Evaluates such a loop as one with a single condition: it runs until the last row ends, and
    rows that have ended stay as they are."""
    test, step = bodies(eqn)
    start = len(eqn.invars) - len(eqn.outvars)
    tests, steps = ([inputs[i] for i in each.inputs or () if i < start] for each in (test, step))
    kinds = [v.aval for v in eqn.outvars]

    def going(carry: list) -> Any:
        values = [*tests, *map(Value, carry)]
        return interpreter.evaluate(test.jaxpr, test.consts, values, at)[0].x

    def turn(carry: list) -> list:
        rows = going(carry)
        values = [*steps, *map(Value, carry)]
        outputs = interpreter.evaluate(step.jaxpr, step.consts, values, at)
        return [
            lax.select(
                lax.broadcast_in_dim(rows, kind.shape, range(rows.ndim)), restore(y, kind), x
            )
            for y, x, kind in zip(outputs, carry, kinds)
        ]

    begin = [restore(value, kind) for value, kind in zip(inputs[start:], kinds)]
    return list(map(Value, lax.while_loop(lambda carry: going(carry).any(), turn, begin)))
