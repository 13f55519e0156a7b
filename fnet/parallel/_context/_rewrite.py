"""Splits a step along time: its attention runs on the parts of the devices, and sharding constraints
keep its activations split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import jaxpr
from fnet.axes import before
from fnet.jaxpr import Interpreter, Value, restore, scan
from fnet.parallel._context._mapped import AXIS, FORMS, Attention
from fnet.parallel._context._time import Note, Times

PINNED = frozenset(("dot_general", "gather", "lowered"))


def split_time(
    step: Callable,
    mesh: Mesh | AbstractMesh,
    rows: Sequence[str],
    times: Sequence[Note],
    sizes: Sequence[int],
    choose: Callable[[Attention], Any],
) -> Callable:
    """Returns a step `(state, batch) -> ...` whose activations are split along time over the mesh
    axis "context".

    Args:
        step: a complete training step, a function of arrays.
        mesh: a mesh with axes of type Auto.
        rows: the mesh axes over which the batch is split.
        times: the time axis of each leaf of the batch, or None.
        sizes: the lengths of time over which attention runs.
        choose: returns the `Choice` for an attention.
    """
    interpreter = _Split(mesh, rows, sizes, choose)

    @jaxpr.wraps(step)
    def split(*args: Any, **kwargs: Any) -> Any:
        state, *more = args
        count = sum(map(jaxpr.is_array, jax.tree.leaves(state)))
        leaves = jax.tree.leaves((more, kwargs))
        notes = [note for leaf, note in zip(leaves, times) if jaxpr.is_array(leaf)]
        interpreter.given = [*[None] * count, *notes]
        return interpreter.run(step, args, kwargs)

    return split


class _Split(Interpreter):
    """The note of a value is the index of its time axis, or None."""

    def __init__(self, mesh: Any, rows: Sequence[str], sizes: Sequence[int], choose: Callable):
        super().__init__()
        self.mesh, self.rows, self.choose = mesh, tuple(rows), choose
        self.devices = mesh.shape[AXIS]
        self.times = Times(self.devices, sizes)
        self.given: list[Note] = []

    def argument(self, x: Any) -> Value:
        return Value(x, self.given.pop(0))

    def depends(self, at: Any) -> Any:
        return None

    def equation(self, eqn: Any, at: Any, inputs: list[Value], plan: Any) -> list[Value]:
        given = [value.note for value in inputs]
        notes = self.times.outputs(eqn, given)
        attention = Attention.of(eqn)
        if attention is not None and 1 in notes and not self.mapped():
            choice = self.choose(attention)
            arrays = [restore(value, v.aval) for value, v in zip(inputs, eqn.invars)]
            run = FORMS[choice.form]
            outputs = run(attention, choice.layout, self.mesh, self.rows, eqn, *arrays)
            if choice.form == "ulysses":  # whose statistics are split over heads
                notes = [note if note == 1 else None for note in notes]
            return [Value(y, note) for y, note in zip(outputs, notes)]
        if eqn.primitive.name == "scan":
            return self.scan(eqn, at, inputs, notes)
        outputs = self.default(eqn, at, inputs, self.wanted(plan, eqn))
        pins = eqn.primitive.name in PINNED
        return [
            Value(self.held(y.x, note) if pins else y.x, note) for y, note in zip(outputs, notes)
        ]

    def mapped(self) -> bool:
        """Whether the equation is inside of a shard_map of the user's."""
        return bool(jax.sharding.get_abstract_mesh().manual_axes)

    def held(self, x: jax.Array, note: Note) -> jax.Array:
        if note is None or x.shape[note] % self.devices or self.mapped():
            return x
        spec = [P.UNCONSTRAINED] * x.ndim
        spec[note] = AXIS
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def scan(self, eqn: Any, at: Any, inputs: list[Value], notes: list[Note]) -> list[Value]:
        """Evaluates a scan whose carry stays split along time in each iteration."""
        parts = scan(eqn)
        consts, carry, slices = parts.split(inputs)
        _, carry_vars, _ = parts.split(eqn.invars)
        carried_notes = notes[: parts.carry]
        inside = [
            *(value.note for value in consts),
            *carried_notes,
            *(before(value.note) for value in slices),
        ]
        body = self.body(parts.closed, at, (None,) * len(eqn.outvars), inside)
        held = lambda arrays: list(map(self.held, arrays, carried_notes))
        constants = [value.x for value in consts]

        def turn(carried: list, sliced: list) -> tuple[list, list]:
            outputs = body(*constants, *carried, *sliced)
            return held(outputs[: parts.carry]), outputs[parts.carry :]

        start = held([restore(value, v.aval) for value, v in zip(carry, carry_vars)])
        sliced = [self.held(value.x, value.note) if value.note else value.x for value in slices]
        carried, stacked = lax.scan(turn, start, sliced, **parts.options)
        stacked_notes = [None if note is None else note + 1 for note in body.notes[parts.carry :]]
        stacked = list(map(self.held, stacked, stacked_notes))
        return list(map(Value, [*carried, *stacked], [*carried_notes, *stacked_notes]))
