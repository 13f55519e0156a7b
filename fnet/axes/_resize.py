"""Evaluates a program at reduced sizes, after some indices along some axes of its inputs were
removed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.axes._atoms import Atoms, Axis
from fnet.axes._table import resized
from fnet.axes._ties import Axes, Frame, tie_axes
from fnet.axes._zero_axes import freeze_nonzero_sums
from fnet.jaxpr._enter import ENTER
from fnet.jaxpr._rewrite import Interpreter
from fnet.jaxpr._scopes import TOP, Scope
from fnet.jaxpr._values import Value, arrays_of, bind, restore


class TiedProgram:
    """A closed jaxpr that can also be evaluated after indices, for example channels, were removed
    from its inputs.

    The constructor calls `Atoms.tie` for all axes of the program that must have equal sizes.

    Args:
        closed: the program.
        changing: for each input of the program, whether indices may be removed along its axes. The
            caller passes True for parameters and state.
        parameters: for each input, whether it is a parameter. An index along an axis, for example
            channel 3, may be removed from the arrays of the program only if the removal has the
            same effect as setting all parameters to zero at this index. The constructor calls
            `Atoms.freeze` for each axis along which no index may be removed.
        returned: {index of an output: index of an input} for each output that must have the same
            axes as an input. For example, the new state must have the same axes as the old state.
        factors: {index of an input: a list of tuples}. The list contains one tuple for each axis of
            the input. The tuple contains the sizes of the smaller axes into which a reshape can
            split the axis, such as (heads, features per head). The product of these sizes is the
            size of the axis.

    Attributes:
        closed, parameters: the arguments `closed` and `parameters` of the constructor.
        inputs: the axes of each input.
        frame: a `Frame`, which maps each variable of the jaxpr to the variable's axes.
    """

    def __init__(
        self,
        closed: Any,
        changing: Sequence[bool],
        parameters: Sequence[bool],
        returned: Mapping[int, int] | None = None,
        factors: Mapping[int, Sequence[Sequence[int]]] | None = None,
    ):
        self.closed, self.atoms, self.parameters = closed, Atoms(), tuple(parameters)
        jaxpr, returned = closed.jaxpr, returned or {}
        self.inputs = [self.atoms.axes(getattr(v.aval, "shape", ())) for v in jaxpr.invars]
        self.frame = tie_axes(jaxpr, self.inputs, self.atoms)
        for axes, may_change in zip(self.inputs, changing):
            if not may_change:
                self.atoms.freeze("an axis of an argument", *axes)
        for i, v in enumerate(jaxpr.outvars):
            if i in returned:
                self.atoms.tie_all(self.frame.of(v), self.inputs[returned[i]])
            else:
                self.atoms.freeze("an axis of a result", *self.frame.of(v))
        for i, sizes in (factors or {}).items():
            for axis, each in zip(self.inputs[i], sizes):
                self.atoms.tie(axis, tuple(map(self.atoms.new, each)))
        expanded = [
            frozenset(atom for axis in axes for atom in self.atoms.expand(axis))
            for axes in self.inputs
        ]
        freeze_nonzero_sums(
            self.frame,
            [axes if masked else frozenset() for axes, masked in zip(expanded, parameters)],
            self.atoms,
        )

    def factors(self, i: int) -> tuple[Axis, ...]:
        """Returns, for each axis of input `i`, a tuple with the ids (see `Atoms`) of the smaller
        axes into which the program splits the axis. For example, an axis of size heads * features
        has two ids if the program splits the axis into heads and features."""
        return tuple(map(self.atoms.expand, self.inputs[i]))

    def evaluate(self, arrays: Sequence, kept: Mapping[int, np.ndarray]) -> list:
        """Evaluates the program on input arrays whose axes were made smaller, for example by
        pruning of channels, and returns the outputs. `kept` is {id of an axis in `atoms`: the
        remaining indices} for each axis that was made smaller."""
        return Resizer(self.atoms, kept).whole(self.closed, self.frame, list(map(Value, arrays)))

    def shape(self, i: int, kept: Mapping[int, np.ndarray]) -> tuple[int, ...]:
        """Returns the shape of input `i` after each axis in `kept` was reduced to its remaining
        indices."""
        return Resizer(self.atoms, kept).shape(self.inputs[i])


def indices(factors: Sequence[int], kept: Sequence[np.ndarray | None]) -> np.ndarray:
    """Returns the indices of an axis that remain after some of its indices were removed.

    `factors` contains the sizes of the smaller axes into which a reshape can split the axis. `kept`
    contains, for each size in `factors`, an array of the indices that remain along the smaller axis
    of this size, or None if all indices remain. For example, for the sizes (2, 3) and `kept =
    (None, [0, 2])`, the result is
    `np.arange(6).reshape(2, 3)[:, [0, 2]].ravel()`.
    """
    found = np.arange(math.prod(factors)).reshape(tuple(factors))
    for i, each in enumerate(kept):
        if each is not None:
            found = found.take(each, axis=i)
    return found.ravel()


class Resizer(Interpreter):
    """Evaluates a program with arrays whose axes were made smaller, for example by pruning of
    channels."""

    def __init__(self, atoms: Atoms, kept: Mapping[int, np.ndarray]):
        super().__init__()
        self._atoms, self._kept = atoms, kept

    def whole(self, closed: Any, frame: Frame, values: list[Value]) -> list:
        outputs = self.evaluate(closed.jaxpr, closed.consts, values, TOP, ((frame,),))
        return [restore(y, v.aval) for y, v in zip(outputs, closed.jaxpr.outvars)]

    def size(self, axis: Axis) -> int:
        return math.prod(
            len(self._kept[atom]) if atom in self._kept else self._atoms.size(atom)
            for atom in self._atoms.expand(axis)
        )

    def shape(self, axes: Axes) -> tuple[int, ...]:
        return tuple(map(self.size, axes))

    def cut(self, x: Any, axes: Axes) -> Any:
        """Returns the array `x` without the removed indices along its axes."""
        for i, axis in enumerate(axes):
            factors = self._atoms.expand(axis)
            if any(atom in self._kept for atom in factors):
                chosen = indices(
                    list(map(self._atoms.size, factors)), list(map(self._kept.get, factors))
                )
                x = (
                    jnp.take(x, chosen, axis=i)
                    if isinstance(x, jax.core.Tracer)
                    else np.asarray(x).take(chosen, i)
                )
        return x

    def plan(self, jaxpr: Any, wanted: tuple | None) -> Frame | None:
        frames = (wanted[0] if wanted else None) or ()
        return next((frame for frame in frames if frame.jaxpr is jaxpr), None)

    def wanted(self, plan: Frame | None, eqn: Any) -> tuple:
        inner = plan.inner.get(id(eqn)) if plan is not None else None
        return (inner, *[None] * (len(eqn.outvars) - 1))

    def evaluate(
        self,
        jaxpr: Any,
        consts: Any,
        args: list[Value],
        outer: Scope = TOP,
        wanted: tuple | None = None,
    ) -> list[Value]:
        frame = self.plan(jaxpr, wanted)
        if frame is not None:
            consts = [self.cut(x, frame.of(v)) for v, x in zip(jaxpr.constvars, consts)]
        return super().evaluate(jaxpr, consts, args, outer, wanted)

    def body(
        self, closed: Any, at: Scope, wanted: tuple, notes: Sequence, *, pin: Any = None
    ) -> Any:
        if self.plan(closed.jaxpr, wanted) is None and all(
            isinstance(note, tuple) for note in notes
        ):
            wanted = (self._derivative(closed.jaxpr, notes),), *wanted[1:]
        return super().body(closed, at, wanted, notes, pin=pin)

    def tangent(self, note: Any) -> Any:
        return note

    def equation(self, eqn: Any, at: Scope, inputs: list[Value], plan: Frame | None) -> Any:
        if plan is None:
            return NotImplemented
        name, shapes = (
            eqn.primitive.name,
            [self.shape(plan.of(v)) for v in (*eqn.invars, *eqn.outvars)],
        )
        if shapes == [getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars)]:
            return NotImplemented
        if (
            name == "custom_jvp_call"
        ):  # its derivative is traced at the original sizes when it is needed
            noted = [Value(value.x, plan.of(v)) for value, v in zip(inputs, eqn.invars)]
            return ENTER[name](self, eqn, at, noted, self.wanted(plan, eqn))
        if name == "iota":
            return [
                Value(self.cut(y.x, plan.of(v)))
                for y, v in zip(bind(eqn, arrays_of(inputs)), eqn.outvars)
            ]
        if (
            name == "random_bits"
        ):  # other shapes would give other numbers: draws all numbers, and removes some
            keys, (axes,) = eqn.invars[0].aval.ndim, map(plan.of, eqn.outvars)
            return [
                Value(self.cut(bind(eqn, arrays_of(inputs))[0].x, (*[()] * keys, *axes[keys:])))
            ]
        if (described := plan.maps.get(id(eqn))) is None:
            return NotImplemented
        sizes = {atom: self.size((atom,)) for atom in described.sizes}
        changes = resized(eqn, described._replace(sizes=sizes))
        return NotImplemented if changes is None else bind(eqn, arrays_of(inputs), **changes)

    def _derivative(self, jaxpr: Any, axes: Sequence[Axes]) -> Frame:
        frame = tie_axes(jaxpr, axes, self._atoms)
        if any(self._atoms.expand((atom,)) != (atom,) for atom in self._kept):
            raise ValueError(
                "shrink: the derivative of a custom_jvp splits an axis that the function itself "
                "does not split; exclude the axis with keep="
            )
        return frame
