"""Evaluates a program on some rows of its batch, and proves on the way that this is what the whole
program computes for these rows.

Each value has a note:

- an int: the value has rows, along this axis, and only those that are evaluated;
- None: the value does not depend on rows, and is complete;
- `ZERO`: the same, and all of its numbers are known to be zero;
- `SUM`: a part of a sum over all rows. The parts of all rows, added, are the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import _jax, jaxpr
from fnet.axes import AxisMap, axis_map, resized
from fnet.jaxpr import Interpreter, Scope, Value

# They say where arrays lie outside of the shard_map.
_PLACED = frozenset(("reshard", "sharding_constraint", "mesh_cast", "device_put", "divided"))
SUM = "sum"
ZERO = "zero"
Note = int | str | None

# Operations that are linear in their first operand, and keep zeros.
_LINEAR = frozenset(
    """
    neg transpose reshape squeeze expand_dims broadcast_in_dim reduce_sum convert_element_type copy copy_p slice rev
    cumsum name site optimization_barrier split reduce_window_sum real imag stop_gradient unstack tile
    dynamic_slice gather pvary
""".split()
)
# Operations that are linear in all of their operands together, without those in `_POSITIONS`.
_TOGETHER = frozenset(
    "add add_any sub concatenate stack dynamic_update_slice scatter-add pad select_n".split()
)
_POSITIONS = {"select_n": (0,), "scatter-add": (1,), "dynamic_update_slice": range(2, 99)}


class NotByRows(ValueError):
    """An operation that cannot be computed for some rows of the batch without the others."""


class ByRows(Interpreter):
    """Evaluates a program on some rows.

    Args:
        rows: the number of rows of the whole program.
        count: the number of rows that are evaluated, a divisor of `rows`.
        first: the index of the first of them, an int or a scalar array.
    """

    def __init__(self, rows: int, count: int, first: Any = 0):
        super().__init__()
        self.rows, self.count, self.first = rows, count, first
        self.mesh = jax.sharding.get_abstract_mesh()

    # Notes.

    def literal(self, atom: Any) -> Value:
        return Value(atom.val, ZERO if np.ndim(atom.val) == 0 and atom.val == 0 else None)

    def local(self, aval: Any, note: Note) -> jax.ShapeDtypeStruct:
        """Returns the type of a value on the evaluated rows."""
        shape = list(aval.shape)
        if isinstance(note, int):
            shape[note] = shape[note] // self.rows * self.count
        return jax.ShapeDtypeStruct(tuple(shape), aval.dtype)

    def notes_of(self, closed: Any, at: Scope, notes: Sequence[Note]) -> list[Note]:
        """Returns the notes of the outputs of a program."""
        body = self.body(closed, at, (None,) * len(closed.jaxpr.outvars), notes)
        jax.eval_shape(body, *map(self.local, (v.aval for v in closed.jaxpr.invars), notes))
        return body.notes

    def carried(
        self, eqn: Any, at: Scope, parts: jaxpr.Scan, inside: Sequence[Note]
    ) -> tuple[list, list]:
        """Returns the notes of the carry of a scan, and those of the values that it stacks, each
        for one iteration. `inside` are the notes of the inputs of its body in the first one."""
        consts, carry, slices = parts.split(inside)
        for _ in range(2 * parts.carry + 1):
            outputs = self.notes_of(parts.closed, at, [*consts, *carry, *slices])
            joined = [self.joined(eqn, at, a, b) for a, b in zip(carry, outputs)]
            if joined == carry:
                break
            carry = joined
        return carry, outputs[parts.carry :]

    def joined(self, eqn: Any, at: Scope, a: Note, b: Note) -> Note:
        """The note of a value that has one of two notes."""
        if a == b or b == ZERO:
            return a
        if a == ZERO or (a is None and isinstance(b, int)):
            return b
        if b is None and isinstance(a, int):
            return a
        raise _refused(eqn, at, "mixes values with rows and sums over rows")

    def as_noted(self, eqn: Any, at: Scope, value: Value, note: Note, aval: Any) -> Any:
        """Returns the array of a value, with another note."""
        x = jaxpr.restore(value, aval)
        if value.note == note or (value.note == ZERO and not isinstance(note, int)):
            return x
        if value.note in (None, ZERO) and isinstance(note, int):
            return self.cut(eqn, at, value, note)
        raise _refused(eqn, at, "mixes values with rows and sums over rows")

    # Equations.

    def equation(self, eqn: Any, at: Scope, inputs: list[Value], plan: Any) -> list[Value]:
        # Not in the mesh context in which the equation was traced, outside of the shard_map.
        with jax.sharding.use_abstract_mesh(self.mesh):
            return self.outputs_of(eqn, at, inputs)

    def outputs_of(self, eqn: Any, at: Scope, inputs: list[Value]) -> list[Value]:
        name, notes = eqn.primitive.name, [value.note for value in inputs]
        if name in _PLACED:
            return inputs[: len(eqn.outvars)]
        if all(v.aval.size == 0 for v in eqn.outvars):
            return [Value(jnp.zeros(v.aval.shape, v.aval.dtype), ZERO) for v in eqn.outvars]
        if name in jaxpr.CALLS:
            return jaxpr.inline(self, eqn, at, inputs, (None,) * len(eqn.outvars))
        if all(note in (None, ZERO) for note in notes):
            return self.complete(eqn, inputs)
        if name == "scan":
            return self.scan(eqn, at, inputs)
        if name == "cond":
            return self.cond(eqn, at, inputs)
        if SUM in notes:
            return self.summed(eqn, at, inputs)
        if jaxpr.description(eqn.primitive).batch_first:
            return self.first_axis(eqn, at, inputs)
        return self.with_rows(eqn, at, inputs)

    def complete(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """Evaluates an equation that does not depend on rows."""
        name, notes = eqn.primitive.name, [value.note for value in inputs]
        zero = (
            (name in _LINEAR and notes[0] == ZERO)
            or (name == "mul" and ZERO in notes)
            or (name in ("add", "add_any", "sub") and set(notes) == {ZERO})
        )
        outputs = [Value(y.x, ZERO if zero else None) for y in _again(eqn, inputs)]
        if name == "broadcast_in_dim":
            return [_Broadcast(outputs[0], eqn, inputs)]
        return outputs

    def with_rows(self, eqn: Any, at: Scope, inputs: list[Value]) -> list[Value]:
        axes = axis_map(eqn)
        if axes is None:
            raise _refused(eqn, at, "has no rule that says what it does to rows")
        rows = {
            _major(axes, axes.operands[i][value.note])
            for i, value in enumerate(inputs)
            if isinstance(value.note, int)
        }
        if len(rows) > 1:
            raise _refused(eqn, at, "combines rows with other rows")
        letter = rows.pop()
        added = eqn.primitive.name == "scatter-add" and inputs[0].note == ZERO
        if letter in axes.fixed and not added:
            raise _refused(eqn, at, f"needs all rows at once: {axes.fixed[letter]}")
        if axes.sizes[letter] % self.rows:
            raise _refused(eqn, at, "splits the axis of rows within a row")
        arrays = [
            self.operand(eqn, at, value, axes, axes.operands[i], letter, v.aval)
            for i, (value, v) in enumerate(zip(inputs, eqn.invars))
        ]
        notes = [self.result(eqn, at, axes, array, letter) for array in axes.results]
        if SUM in notes and not (added or _sums(eqn)):
            raise _refused(eqn, at, "reduces the rows of the batch in another way than by a sum")
        sizes = {**axes.sizes, letter: axes.sizes[letter] // self.rows * self.count}
        outputs = _bind(eqn, arrays, **(resized(eqn, axes._replace(sizes=sizes)) or {}))
        return [Value(y.x, note) for y, note in zip(outputs, notes)]

    def operand(self, eqn, at, value, axes: AxisMap, array, letter, aval) -> Any:
        """Returns an operand of an equation, restricted to the evaluated rows."""
        x = jaxpr.restore(value, aval)
        for i, axis in enumerate(array):
            if letter not in axis or i == value.note:
                continue
            if isinstance(value.note, int) or _major(axes, axis) != letter:
                raise _refused(eqn, at, "combines rows with other rows")
            x = self.cut(eqn, at, value, i)
        return x

    def result(self, eqn, at, axes: AxisMap, array, letter) -> Note:
        places = [i for i, axis in enumerate(array) if letter in axis]
        if not places:
            return SUM
        if len(places) > 1 or _major(axes, array[places[0]]) != letter:
            raise _refused(eqn, at, "moves the axis of rows behind another axis")
        return places[0]

    def first_axis(self, eqn: Any, at: Scope, inputs: list[Value]) -> list[Value]:
        """Evaluates one of fnet's own operations, all of whose axes 0 are the rows."""
        if any(isinstance(value.note, int) and value.note for value in inputs):
            raise _refused(eqn, at, "has the rows along another axis than its first")
        arrays = []
        for value, v in zip(inputs, eqn.invars):
            whole = value.note != 0 and v.aval.ndim and v.aval.shape[0] != 1
            x = self.cut(eqn, at, value, 0) if whole else jaxpr.restore(value, v.aval)
            arrays.append(x)
        return [Value(y.x, 0) for y in _bind(eqn, arrays)]

    def cut(self, eqn: Any, at: Scope, value: Value, axis: int) -> Any:
        """Returns the evaluated rows of a value that has all rows along an axis."""
        if isinstance(value, _Broadcast) and (smaller := value.smaller(self, axis)) is not None:
            return smaller
        x = jnp.asarray(value.x)
        if x.shape[axis] % self.rows:
            raise _refused(eqn, at, f"has an axis of {x.shape[axis]} for {self.rows} rows")
        each = x.shape[axis] // self.rows
        return lax.dynamic_slice_in_dim(x, self.first * each, self.count * each, axis)

    def summed(self, eqn: Any, at: Scope, inputs: list[Value]) -> list[Value]:
        """Evaluates an equation that reads sums over rows: it must be linear in them."""
        name, notes = eqn.primitive.name, [value.note for value in inputs]
        sums = [i for i, note in enumerate(notes) if note == SUM]
        others = [note for note in notes if note != SUM]
        positions = _POSITIONS.get(name, ())
        linear = (
            (name in _LINEAR and sums == [0])
            or (name == "mul" and len(sums) == 1)
            or (name == "div" and sums == [0])
            or (jaxpr.product(eqn) is not None and sums in ([0], [1]))
        )
        together = name in _TOGETHER and all(
            note is None or note == ZERO if i in positions else note in (SUM, ZERO)
            for i, note in enumerate(notes)
        )
        if any(isinstance(note, int) for note in others):
            raise _refused(eqn, at, "combines each row with a sum over all rows")
        if not (linear or together) or not _inexact(eqn):
            raise _refused(eqn, at, "is not linear in a sum over all rows")
        return [Value(y.x, SUM) for y in _again(eqn, inputs)]

    def scan(self, eqn: Any, at: Scope, inputs: list[Value]) -> list[Value]:
        parts = jaxpr.scan(eqn)
        consts, carry, slices = parts.split(inputs)
        if any(value.note == 0 and isinstance(value.note, int) for value in slices):
            raise _refused(eqn, at, "scans over the rows of the batch")
        sliced = [before(value.note) for value in slices]
        given = [value.note for value in consts]
        carried, stacked = self.carried(eqn, at, parts, [*given, *(v.note for v in carry), *sliced])
        start = [
            self.as_noted(eqn, at, value, note, v.aval)
            for value, note, v in zip(carry, carried, parts.jaxpr.invars[parts.consts :])
        ]
        turn = self.turn(eqn, at, parts, [value.x for value in consts], [*given, *carried, *sliced])
        ends, ys = lax.scan(turn, start, [value.x for value in slices], **parts.options)
        notes = [*carried, *map(after, stacked)]
        return [Value(y, note) for y, note in zip([*ends, *ys], notes)]

    def turn(
        self, eqn: Any, at: Scope, parts: jaxpr.Scan, consts: list, notes: Sequence[Note]
    ) -> Any:
        """Returns the body of a scan, as a function for `lax.scan`."""
        body = self.body(parts.closed, at, (None,) * len(parts.jaxpr.outvars), notes)
        carried = notes[parts.consts : parts.consts + parts.carry]

        def turn(carry: list, slices: list) -> tuple[list, list]:
            outputs = list(map(Value, body(*consts, *carry, *slices), body.notes))
            kept = [
                self.as_noted(eqn, at, value, note, v.aval)
                for value, note, v in zip(outputs, carried, parts.jaxpr.outvars)
            ]
            return kept, [value.x for value in outputs[parts.carry :]]

        return turn

    def cond(self, eqn: Any, at: Scope, inputs: list[Value]) -> list[Value]:
        index, *operands = inputs
        if index.note not in (None, ZERO):
            raise _refused(eqn, at, "chooses a branch by the rows of the batch")
        notes, arrays = [value.note for value in operands], [value.x for value in operands]
        closed = [branch.closed for branch in jaxpr.bodies(eqn)]
        joined = self.notes_of(closed[0], at, notes)
        for other in closed[1:]:
            outputs = self.notes_of(other, at, notes)
            joined = [self.joined(eqn, at, a, b) for a, b in zip(joined, outputs)]

        def branch(program: Any) -> Any:
            body = self.body(program, at, (None,) * len(eqn.outvars), notes)

            def call(*arrays: Any) -> list:
                outputs = list(map(Value, body(*arrays), body.notes))
                types = [v.aval for v in eqn.outvars]
                each = zip(outputs, joined, types)
                return [self.as_noted(eqn, at, y, note, aval) for y, note, aval in each]

            return call

        return list(map(Value, lax.switch(index.x, list(map(branch, closed)), *arrays), joined))


class _Broadcast(Value):
    """A complete value that repeats another one, and need not be computed for all rows."""

    __slots__ = ("eqn", "inputs")

    def __init__(self, value: Value, eqn: Any, inputs: list[Value]):
        super().__init__(value.x, value.note)
        self.eqn, self.inputs = eqn, inputs

    def smaller(self, by_rows: ByRows, axis: int) -> Any:
        axes = axis_map(self.eqn)
        assert axes is not None
        letters = axes.results[0][axis]
        if any(letter in each for array in axes.operands for each in array for letter in letters):
            return None
        shape = list(axes.shape(axes.results[0]))
        shape[axis] = shape[axis] // by_rows.rows * by_rows.count
        return _bind(self.eqn, [value.x for value in self.inputs], shape=tuple(shape))[0].x


def _again(eqn: Any, inputs: list[Value]) -> list[Value]:
    """Evaluates an equation as it is. (`jaxpr.plain` would copy its types, which have the mesh
    outside of the shard_map.)"""
    arrays = [jaxpr.restore(value, v.aval) for value, v in zip(inputs, eqn.invars)]
    return _bind(eqn, arrays)


def _bind(eqn: Any, arrays: list, **changes: Any) -> list[Value]:
    return jaxpr.bind(eqn, arrays, **{**jaxpr.without_shardings(eqn), **changes})


def before(note: Note) -> Note:
    """The note of x[0], given that of x."""
    return note - 1 if isinstance(note, int) else note


def after(note: Note) -> Note:
    """The note of stacked values, given that of one of them."""
    return note + 1 if isinstance(note, int) else note


def _major(axes: AxisMap, axis: Sequence) -> Any:
    """The major letter of an axis, of those that are longer than 1."""
    return next((letter for letter in axis if axes.sizes[letter] != 1), axis[0] if axis else None)


def _sums(eqn: Any) -> bool:
    return eqn.primitive.name == "reduce_sum" or jaxpr.product(eqn) is not None


def _inexact(eqn: Any) -> bool:
    return all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)


def _refused(eqn: Any, at: Scope, why: str) -> NotByRows:
    where = f" at '{at.path}'" if at.path else ""
    line = _jax.line(eqn)
    return NotByRows(f"'{jaxpr.title(eqn)}'{where}{f' ({line})' if line else ''} {why}")
