"""Computes the mean square of each input feature of a program's matrix products and convolutions
with parameters."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from fnet.axes._atoms import Axis
from fnet.axes._resize import Resizer, TiedProgram
from fnet.axes._ties import Frame
from fnet.jaxpr._equations import product
from fnet.jaxpr._scopes import Scope
from fnet.jaxpr._tags import tag
from fnet.jaxpr._values import Value

NAME = "activations of {}"  # the name of a tag, with the number of an atom


_WEIGHTS = "weights"  # the note on values that are computed only from parameters and constants


def observe(program: TiedProgram, arrays: list) -> list:
    """Evaluates a program, and records the mean squares of the data that the program multiplies
    with parameters.

    For each contracted axis of the data, the function squares the data and computes the mean over
    all other axes. If the program splits a contracted axis into smaller axes, for example heads and
    features per head, the function computes one array of mean squares for each of the smaller axes.
    Axes whose sizes cannot be reduced are omitted. Each array of mean squares is named by `tag`, so
    that `transforms.capture` can return it. The name of the array is `NAME.format(i)`, where the
    integer i is the id of the axis in `program.atoms`.
    """
    values = [
        Value(x, _WEIGHTS if masked else None) for x, masked in zip(arrays, program.parameters)
    ]
    return _Observer(program.atoms, {}).whole(program.closed, program.frame, values)


class _Observer(Resizer):
    def literal(self, atom: Any) -> Value:
        return Value(atom.val, _WEIGHTS)

    def equation(self, eqn: Any, at: Scope, inputs: list[Value], plan: Frame | None) -> Any:
        if plan is not None and (found := product(eqn)) is not None:
            contracted = (
                found.dimensions[0]
                if found.op.name == "dot_general"
                else ((found.dimensions.lhs_spec[1],), (found.dimensions.rhs_spec[1],))
            )
            data = [value.note != _WEIGHTS for value in inputs[:2]]
            if sum(data) == 1:
                side = data.index(True)
                for i in contracted[side]:
                    self._record(inputs[side].x, i, plan.of(eqn.invars[side])[i])
        return NotImplemented

    def default(self, eqn: Any, at: Scope, inputs: list[Value], wanted: Any) -> list[Value]:
        note = _WEIGHTS if all(value.note == _WEIGHTS for value in inputs) else None
        return [Value(y.x, note) for y in super().default(eqn, at, inputs, wanted)]

    def _record(self, x: Any, i: int, axis: Axis) -> None:
        factors = self._atoms.expand(axis)
        sizes: list[int] = [self._atoms.size(atom) for atom in factors]
        square = jnp.moveaxis(jnp.square(x.astype(jnp.float32)), i, -1).reshape(-1, *sizes)
        for k, atom in enumerate(factors):
            if self._atoms.reason(atom) is None and 0 not in sizes:
                others = tuple(j for j in range(square.ndim) if j != k + 1)
                tag(square.mean(others), NAME.format(atom))
