"""Adds sharding constraints (pins) to a training step, so that its activations stay split along the
batch axis.

If parameters are sharded and activations are unconstrained, XLA may gather activations and sum them
over all chips, although gathering the parameters would send far fewer bytes. This module determines
the batch axis of each value in the jaxpr. The module adds sharding constraints to the results of
matrix products, convolutions and gathers. The model's code does not change.

If a loop accumulates a sum over the batch, such as the gradient of a weight that all iterations
use, XLA reduces the sum over the chips in every iteration. This module accumulates a partial sum on
each chip, and reduces the partial sums over the chips once, after the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import jaxpr
from fnet.axes import batch_axes, before, mapped_axes
from fnet.jaxpr import DOT, Interpreter, Value, misdivided, nbytes, plain, restore, scan
from fnet.transforms._autocast._lowered import lowered

PINNED = frozenset(
    ("dot_general", "conv_general_dilated", "gather", "lowered", "attention", "attention_backward")
)
PARTIAL = "partial"  # marks a partial sum, an array whose first axis is the axis of chips
_CALLS = jaxpr.INLINED | {"remat2", "checkpoint"}


def pin(
    step: Callable,
    mesh: Mesh,
    axis: str | tuple[str, ...] = "data",
    *,
    batch: int = 1,
    activations: bool = True,
) -> Callable:
    """Returns a training step with sharding constraints that keep its activations split along the
    batch axis.

    The sharding constraints are added to the results of matrix products, convolutions and gathers.
    If a loop accumulates sums over the batch, each chip accumulates the sums over its own rows, and
    these sums are reduced over the chips once, after the loop.

    Args:
        step: a complete training step, a function of arrays. Sharding constraints are added in the
            forward pass and in the backward pass of the step.
        mesh: a mesh with axes of type Auto.
        axis: the mesh axis or axes over which the batch is split. Default "data".
        batch: the index of the positional argument that is the batch. The first axis of each leaf
            of the batch is split. Default 1.
        activations: whether activations are constrained. Default True.
    """
    interpreter = Pins(mesh, axis, activations)

    @jaxpr.wraps(step)
    def pinned(*args, **kwargs):
        interpreter.given = row_axes((*args, kwargs), batch)
        return interpreter.run(step, args, kwargs)

    return pinned


class Avoided(NamedTuple):
    """An equation of a step that XLA would divide wrongly, and what each device holds because
    `plan` avoids this.

    Attributes:
        rows: the rows of the table `fnet.jaxpr.misdivided.TABLE` that may apply.
        scope: the named scope of the equation.
        nbytes: the bytes of the equation's arrays on each device, with the axes that must not be
            split.
    """

    rows: tuple[misdivided.Row, ...]
    scope: str
    nbytes: int


def avoided(
    closed: Any, mesh: Mesh, axis: str | tuple[str, ...], state: Any, batch: Any
) -> tuple[Avoided, ...]:
    """Returns the equations of a step `(state, batch) -> ...` that XLA would divide wrongly over
    the mesh. `closed` is the jaxpr of the step."""
    if not any(misdivided.in_equation(eqn, mesh) for eqn in jaxpr.equations(closed.jaxpr)):
        return ()
    interpreter = Pins(mesh, axis, False)
    interpreter.given = row_axes((state, batch), 1)
    jax.eval_shape(
        lambda arrays: interpreter.outputs(closed, arrays), jax.tree.leaves((state, batch))
    )
    return tuple(interpreter.avoided.values())


def rightly_divided(step: Callable, mesh: Mesh) -> Callable:
    """Returns a step that states its own shardings on a mesh with explicit axes, in which the
    equations that XLA would divide wrongly gather the axes that must not be split."""
    interpreter = _Typed(mesh)

    @jaxpr.wraps(step)
    def divided(*args, **kwargs):
        return interpreter.run(step, args, kwargs)

    return divided


def avoided_with_types(closed: Any, mesh: Mesh, arguments: Any) -> tuple[Avoided, ...]:
    """As `avoided`, for a step that states its own shardings. `arguments` are the shapes of its
    state and batch, with shardings."""
    if not any(_whole(eqn, mesh) for eqn in jaxpr.equations(closed.jaxpr)):
        return ()
    interpreter = _Typed(mesh)
    jax.eval_shape(lambda arrays: interpreter.outputs(closed, arrays), jax.tree.leaves(arguments))
    return tuple(interpreter.avoided.values())


class _Typed(Interpreter):
    """Gathers axes that must not be split, where the types on the explicit mesh split them."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh, self.avoided = mesh, {}

    def equation(self, eqn, at, inputs, plan):
        if jaxpr.mapped_whole(eqn):
            return plain(eqn, inputs)
        whole = _whole(eqn, self.mesh)
        if whole is None:
            return NotImplemented
        arrays = [restore(value, v.aval) for value, v in zip(inputs, eqn.invars)]
        mesh = misdivided.with_automatic_axes(self.mesh)
        unstated = jaxpr.without_shardings(eqn)

        def compute(*arrays):
            if misdivided.NEGATIVE in whole.rows:
                return [misdivided.cropped(eqn, *arrays)]
            arrays = [misdivided.unsplit(x, mesh, axes) for x, axes in zip(arrays, whole.inputs)]
            outputs = [y.x for y in jaxpr.bind(eqn, arrays, **unstated)]
            return [misdivided.unsplit(y, mesh, axes) for y, axes in zip(outputs, whole.outputs)]

        held = sum(
            self.held_bytes(v.aval, axes)
            for v, axes in zip((*eqn.invars, *eqn.outvars), (*whole.inputs, *whole.outputs))
            if axes
        )
        self.avoided[id(eqn)] = Avoided(whole.rows, at.path, held)
        places = [jaxpr.typed(v.aval) for v in eqn.outvars]
        return list(map(Value, jaxpr.automatic(compute, places)(*arrays)))

    def held_bytes(self, aval, axes) -> int:
        over = [names for i, names in enumerate(jaxpr.split_over(aval)) if i not in axes]
        spec = P(*(names for names in over if names))
        devices = math.prod(self.mesh.shape[name] for name in _names(spec))
        return nbytes(aval) // devices


def _names(spec) -> list:
    return [name for names in spec for name in (names if isinstance(names, tuple) else (names,))]


def _whole(eqn, mesh) -> misdivided.Whole | None:
    """Returns what avoids a wrong result of an equation with the shardings that its types state."""
    whole = misdivided.in_equation(eqn, misdivided.with_automatic_axes(mesh))
    if whole is None or not any(jaxpr.typed(v.aval) for v in eqn.outvars):
        return None
    if jax.sharding.get_abstract_mesh().manual_axes:  # each device computes its own part
        return None
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if misdivided.NEGATIVE in whole.rows:
        return whole if any(map(jaxpr.explicit, avals)) else None
    for aval, axes in zip(avals, (*whole.inputs, *whole.outputs)):
        over = jaxpr.split_over(aval)
        if any(over[axis] is not None for axis in axes):
            return whole
    return None


def row_axes(args, batch) -> list[int | None]:
    """Returns for each array of the arguments the index of its batch axis, which is 0 in argument
    number `batch`."""
    return [
        0 if i == batch and leaf.ndim else None
        for i, arg in enumerate(args)
        for leaf in jax.tree.leaves(arg)
        if jaxpr.is_array(leaf)
    ]


class Pins(Interpreter):
    """Evaluates a jaxpr, and adds sharding constraints that keep activations split along the batch
    axis. The attribute `note` of each value in the jaxpr is the index of its batch axis, `PARTIAL`
    for a partial sum over the batch, or None."""

    def __init__(self, mesh, axis, activations):
        super().__init__()
        self.mesh, self.axis, self.activations, self.given = mesh, axis, activations, []
        self.names = (axis,) if isinstance(axis, str) else axis
        self.chips = math.prod(mesh.shape[name] for name in self.names)
        self.alone = all(n == 1 for name, n in mesh.shape.items() if name not in self.names)
        self.late = False  # whether sums over the batch may stay partial
        self.avoided: dict[
            int, Avoided
        ] = {}  # by the id of the equation: a loop's body is evaluated several times

    def depends(self, at):
        return self.late

    def argument(self, x):
        return Value(x, self.given.pop(0))

    def equation(self, eqn, at, inputs, plan):
        name = eqn.primitive.name
        if name not in _CALLS and (found := self.partial(eqn, inputs)) is not None:
            return [found]
        inputs = [self.whole(value) for value in inputs]
        notes = batch_axes(eqn, [value.note for value in inputs])
        if name == "scan":
            return self.scan(eqn, at, inputs, notes)
        if name in _CALLS:
            outputs = self.default(eqn, at, inputs, (PARTIAL,) * len(eqn.outvars))
            return [y if y.note == PARTIAL else Value(y.x, note) for y, note in zip(outputs, notes)]
        if jaxpr.mapped_whole(eqn):
            outputs, notes = plain(eqn, inputs), mapped_axes(eqn, self.names)
            return [Value(y.x, note) for y, note in zip(outputs, notes)]
        if name == "shard_map":  # the user divides the rows, XLA the rest
            inputs = [Value(value.x) for value in inputs]
        if (apart := self.apart(eqn, inputs, notes)) is not None:
            return apart
        whole = misdivided.in_equation(eqn, self.mesh)
        if (
            whole is not None
            and misdivided.GROUPED in whole.rows
            and (summed := self.over_rows(eqn, at, inputs))
        ):
            return summed
        if whole is not None:
            self.avoided[id(eqn)] = Avoided(
                whole.rows, at.path, self.held_bytes(eqn, whole, inputs, notes)
            )
            if misdivided.NEGATIVE in whole.rows:
                arrays = [restore(value, v.aval) for value, v in zip(inputs, eqn.invars)]
                return [Value(misdivided.cropped(eqn, *arrays), notes[0])]
            inputs = [
                Value(misdivided.unsplit(value.x, self.mesh, axes), value.note)
                for value, axes in zip(inputs, whole.inputs)
            ]
        late, self.late = self.late, False
        outputs = self.default(eqn, at, inputs, self.wanted(plan, eqn))
        self.late = late
        if whole is not None:
            outputs = [
                Value(misdivided.unsplit(y.x, self.mesh, axes), y.note)
                for y, axes in zip(outputs, whole.outputs)
            ]
        pins = name in PINNED and self.activations
        return [
            Value(self.held(y.x, note) if pins else y.x, note) for y, note in zip(outputs, notes)
        ]

    def held(self, x, note):
        if note is None or x.ndim < 2 or x.shape[note] % self.chips:
            return x
        free = [P.UNCONSTRAINED] * x.ndim  # None would replicate the axis
        free[note] = self.axis
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*free)))

    def over_rows(self, eqn, at, inputs) -> list[Value] | None:
        """Computes the gradient of a grouped convolution's kernel on the rows of each chip, and
        sums it over the chips. Returns None if the rows are unknown, or not a multiple of the
        number of chips.

        XLA would gather the batch, and also sum over the mesh axes over which the batch is not
        split.
        """
        numbers = jaxpr.product(eqn).dimensions
        # The gradient contracts the batch, like a feature axis.
        rows = (numbers.lhs_spec[1], numbers.rhs_spec[1])
        if tuple(value.note for value in inputs) != rows or inputs[0].x.shape[rows[0]] % self.chips:
            return None
        arrays = [restore(value, v.aval) for value, v in zip(inputs, eqn.invars)]
        specs = tuple(P(*[None] * row, self.axis) for row in rows)
        mapped = jax.shard_map(
            lambda *xs: lax.psum(jaxpr.bind(eqn, xs)[0].x, self.axis),
            mesh=self.mesh,
            in_specs=specs,
            out_specs=P(),
            check_vma=False,
        )
        self.avoided[id(eqn)] = Avoided((misdivided.GROUPED,), at.path, nbytes(eqn.outvars[0].aval))
        return [Value(mapped(*arrays))]

    def held_bytes(self, eqn, whole, inputs, notes) -> int:
        """The bytes on each chip of the arrays that have axes that must not be split."""
        arrays = [
            *zip(eqn.invars, whole.inputs, (value.note for value in inputs)),
            *zip(eqn.outvars, whole.outputs, notes),
        ]
        spread = lambda note, axes: self.chips if note is not None and note not in axes else 1
        return sum(nbytes(v.aval) // spread(note, axes) for v, axes, note in arrays if axes)

    def apart(self, eqn, inputs, notes) -> list[Value] | None:
        """Runs attention in a shard_map over the rows of the batch, because XLA cannot partition a
        TPU kernel."""
        refusal = jaxpr.description(eqn.primitive).refusal
        if refusal is None or not self.alone or self.chips == 1 or any(notes) or None in notes:
            return None
        if isinstance(self.mesh, AbstractMesh):  # of devices that are absent
            return None
        if self.mesh.devices.flat[0].platform != "tpu" or refusal("tpu", eqn) is not None:
            return None
        specs = []
        for value, v in zip(inputs, eqn.invars):
            if value.note not in (None, 0) or (value.note == 0 and v.aval.shape[0] % self.chips):
                return None
            specs.append(P() if value.note is None else P(self.axis))
        arrays = [restore(value, v.aval) for value, v in zip(inputs, eqn.invars)]
        mapped = jax.shard_map(
            lambda *xs: tuple(y.x for y in jaxpr.bind(eqn, xs)),
            mesh=self.mesh,
            in_specs=tuple(specs),
            out_specs=(P(self.axis),) * len(notes),
            check_vma=False,
        )
        return [Value(y, 0) for y in mapped(*arrays)]

    def scan(self, eqn, at, inputs, notes):
        """Evaluates a scan. The sharding of the carry of a loop is constrained before the loop and
        at the end of each iteration.

        Partial sums over the batch are reduced once, after the loop.
        """
        parts = scan(eqn)
        consts, carry = parts.consts, parts.carry
        given = [value.note for value in inputs]
        inside = [
            *given[:consts],
            *notes[:carry],
            *(before(note) for note in given[consts + carry :]),
        ]
        init = [
            restore(value, v.aval)
            for value, v in zip(inputs[consts : consts + carry], eqn.invars[consts:])
        ]
        late, self.late = self.late, False
        summed = self.summed(parts, at, inside)
        for i in summed:
            inside[consts + i] = PARTIAL
        self.late = bool(summed)
        body = self.body(parts.closed, at, _wanted(summed, eqn.outvars), inside)
        constants = [
            self.ready(value.x, note, parts.jaxpr, i)
            for i, (value, note) in enumerate(zip(inputs, inside[:consts]))
        ]
        held = lambda carried: [
            x if i in summed or not self.activations else self.held(x, note)
            for i, (x, note) in enumerate(zip(carried, notes))
        ]

        def turn(carried, slices):
            outputs = body(*constants, *carried, *slices)
            return held(outputs[:carry]), outputs[carry:]

        start = held([self.zeros(x) if i in summed else x for i, x in enumerate(init)])
        carried, stacked = lax.scan(
            turn, start, [value.x for value in inputs[consts + carry :]], **parts.options
        )
        self.late = late
        carried = [init[i] + x.sum(0) if i in summed else x for i, x in enumerate(carried)]
        return [Value(y, note) for y, note in zip([*carried, *stacked], notes)]

    def ready(self, x, note, program, i):
        """Gathers `x`, a constant of a scan, on all chips before the scan, or returns `x`
        unchanged.

        `x` is gathered only if three conditions are met. First, `x` is a weight of a matrix
        product, convolution or gather in the scan. Second, the interpreter constrains activations
        (`self.activations`). Third, the batch is split over all axes of the mesh (`self.alone`).
        """
        if (
            note is not None
            or not self.activations
            or not self.alone
            or x.ndim < 2
            or self.chips == 1
        ):
            return x
        if not _taken(program, program.invars[i]):
            return x
        # The barrier prevents XLA from moving the gather back into the loop.
        return lax.optimization_barrier(
            lax.with_sharding_constraint(x, NamedSharding(self.mesh, P()))
        )

    # Partial sums.

    def evaluate(self, jaxpr, consts, args, outer, wanted):
        """Partial sums among the outputs are reduced over the chips, unless the caller accepts
        partial sums."""
        outputs = super().evaluate(jaxpr, consts, args, outer, wanted)
        return [y if want == PARTIAL else self.whole(y) for y, want in zip(outputs, wanted)]

    def whole(self, value):
        return Value(value.x.sum(0)) if value.note == PARTIAL else value

    def zeros(self, x):
        """Returns the initial value of a partial sum, an array of zeros [chips, ...], with one row
        on each chip."""
        return self.spread(jnp.zeros((self.chips, *x.shape), x.dtype))

    def spread(self, x):
        spec = P(self.axis, *[None if self.alone else P.UNCONSTRAINED] * (x.ndim - 1))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def summed(self, parts, at, inside) -> frozenset[int]:
        """Returns the indices of those carries of a scan that accumulate sums over the batch and
        are used for nothing else."""
        if self.chips == 1:
            return frozenset()
        consts, carry, closed, program = parts.consts, parts.carry, parts.closed, parts.jaxpr
        found = frozenset(
            i
            for i in range(carry)
            if inside[consts + i] is None
            and len(program.invars[consts + i].aval.shape) > 1
            and only_added_to(program, program.invars[consts + i], program.outvars[i])
        )
        while found:
            notes = [PARTIAL if i - consts in found else note for i, note in enumerate(inside)]
            self.late = True
            body = self.body(closed, at, _wanted(found, program.outvars), notes)
            types = [
                jax.ShapeDtypeStruct(
                    ((self.chips,) if note == PARTIAL else ()) + v.aval.shape, v.aval.dtype
                )
                for v, note in zip(program.invars, notes)
            ]
            jax.eval_shape(body, *types)
            self.late = False
            kept = frozenset(i for i in found if body.notes[i] == PARTIAL)
            if kept == found:
                break
            found = kept
        return found

    def partial(self, eqn, inputs) -> Value | None:
        """Returns the output of a jaxpr equation if this output is a partial sum over the batch,
        and None otherwise. A partial sum is a sum over only those rows of the batch that are on one
        chip. A matrix product that contracts the batch axis can return partial sums. Sums,
        transposes and some casts of partial sums are also partial sums."""
        name, notes = eqn.primitive.name, [value.note for value in inputs]
        if name in ("add", "add_any") and notes == [PARTIAL, PARTIAL]:
            return Value(inputs[0].x + inputs[1].x, PARTIAL)
        if name == "transpose" and notes == [PARTIAL]:
            order = (0, *(i + 1 for i in jaxpr.options(eqn).permutation))
            return Value(lax.transpose(inputs[0].x, order), PARTIAL)
        if name == "convert_element_type" and notes == [PARTIAL] and _linear(eqn):
            return Value(lax.convert_element_type(inputs[0].x, eqn.outvars[0].aval.dtype), PARTIAL)
        if self.late and (found := jaxpr.product(eqn)) is not None and found.op is DOT:
            return self.product(found, inputs)
        return None

    def product(self, found, inputs) -> Value | None:
        """Computes a matrix product that contracts the batch axis. Each chip contracts only its own
        rows, so each chip has a partial sum. Returns None if the matrix product does not contract
        the batch axis, or if its result has a dtype of fewer than 32 bits. Also returns None if the
        number of rows is not a multiple of the number of
        chips."""
        eqn, ((left, right), (left_batch, right_batch)) = found.eqn, found.dimensions
        rows = tuple(value.note for value in inputs[:2])
        if rows not in zip(left, right):
            return None
        if eqn.outvars[0].aval.dtype.itemsize < 4 or inputs[0].x.shape[rows[0]] % self.chips:
            return None
        x, y = (self.cut(value.x, value.note) for value in inputs[:2])
        move = lambda axes, row: tuple(axis + (axis >= row) for axis in axes)
        numbers = (
            (move(left, rows[0]), move(right, rows[1])),
            ((rows[0], *move(left_batch, rows[0])), (rows[1], *move(right_batch, rows[1]))),
        )
        options = {**found.options, "dimension_numbers": numbers}
        if eqn.primitive is DOT:
            out = DOT.bind(x, y, **options)
        else:
            out = lowered(DOT, x, y, options, compute=found.dtype, out=eqn.outvars[0].aval.dtype)
        return Value(self.spread(out), PARTIAL)

    def cut(self, x, row):
        """Reshapes x from [..., rows, ...] to [..., chips, rows / chips, ...]."""
        x = self.held(x, row)
        x = x.reshape(*x.shape[:row], self.chips, x.shape[row] // self.chips, *x.shape[row + 1 :])
        return self.held(x, row)


def _wanted(summed, outvars) -> tuple:
    return tuple(PARTIAL if i in summed else None for i in range(len(outvars)))


def _linear(eqn) -> bool:
    """Whether a sum of cast arrays is the cast of their sum, up to rounding. `eqn` is the cast."""
    before, after = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return after.itemsize >= 4 and (
        jnp.issubdtype(after, jnp.inexact) or jnp.issubdtype(before, jnp.integer)
    )


def only_added_to(program, before, after) -> bool:
    """Whether the body of a scan only adds a value to a carry, and does not use the carry in any
    other way."""
    # c + c reads c twice.
    readers = [eqn for eqn in program.eqns for v in eqn.invars if v is before]
    return (
        len(readers) == 1
        and readers[0].primitive.name in ("add", "add_any")
        and readers[0].outvars[0] is after
        and not any(v is after for eqn in program.eqns for v in eqn.invars)
        and not any(v is before for v in program.outvars)  # a returned carry must be complete
        and sum(v is after for v in program.outvars) == 1
    )


def _taken(program, v) -> bool:
    """Whether a matrix product, convolution or gather reads a value, directly or after a cast or
    transpose."""
    for eqn in program.eqns:
        where = [i for i, each in enumerate(eqn.invars) if each is v]
        if not where:
            continue
        name = eqn.primitive.name
        if name in PINNED:
            return True
        if name in ("convert_element_type", "transpose") and _taken(program, eqn.outvars[0]):
            return True
        for body in jaxpr.bodies(eqn):
            if body.kind == "call" and any(_taken(body.jaxpr, body.jaxpr.invars[i]) for i in where):
                return True
    return False
