"""`pipelined`: rewrites a step so that its layers run on the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from fnet import _jax, jaxpr
from fnet.jaxpr import Value
from fnet.parallel._pins import Pins, only_added_to, row_axes
from fnet.parallel._pipeline._by_rows import ZERO, ByRows, NotByRows, after, before
from fnet.parallel._pipeline._layers import opened
from fnet.parallel._pipeline._order import exchanged
from fnet.parallel._pipeline._records import Pipelined, recorded
from fnet.parallel._pipeline._schedule import schedule
from fnet.parallel._pipeline._stages import STAGE, Layers, staged


def pipelined(
    step: Callable,
    mesh: Any,
    *,
    microbatches: int | None = None,
    rounds: int = 1,
    batch: int = 1,
    record: Callable[[Pipelined], Any] | None = None,
) -> Callable:
    """Returns a training step whose scans over layers run as a pipeline over the mesh axis "stage".

    Each stage holds the same number of consecutive layers, of the parameters, of what the forward
    pass keeps for the backward pass, and of gradients. The batch is cut into microbatches, which
    travel from stage to stage: forward, and backward in the backward pass. Outside of the layers,
    in embeddings and heads, the rows of the batch are split over all devices, stages included, so
    that no stage has more of that work than another.

    Results are those of `step` up to rounding. It is proved for each scan that its body computes
    the rows of the batch apart from each other, up to sums over them that it returns.

    Args:
        step: a complete training step, a function of arrays. It has one or more scans over layers,
            which carry the activations and slice stacked parameters.
        mesh: a mesh with axes of type Auto, among them "data" and "stage".
        microbatches, rounds: see `schedule`.
        batch: the index of the positional argument that is the batch. The arguments before it are
            the state.
        record: a function that gets a `Pipelined` for each scan that runs as a pipeline.

    Raises:
        ValueError: there is no scan over layers, or a layer, such as one with BatchNorm, needs all
            rows at once; the layers or the rows are not multiples of the stages.
    """
    interpreter = _Pipeline(mesh, microbatches, rounds, record)

    @jaxpr.wraps(step)
    def pipelined(*args: Any, **kwargs: Any) -> Any:
        interpreter.given = row_axes((*args, kwargs), batch)
        interpreter.state = len(jax.tree.leaves(args[:batch]))
        return interpreter.run(step, args, kwargs)

    return pipelined


def stages(
    closed: Any,
    mesh: Any,
    state: Any,
    batch: Any,
    *,
    microbatches: int | None = None,
    rounds: int = 1,
) -> tuple[Pipelined, ...]:
    """Returns what `pipelined` makes of a step `(state, batch) -> ...` with the jaxpr `closed`."""
    found: list[Pipelined] = []
    interpreter = _Pipeline(mesh, microbatches, rounds, found.append)
    interpreter.given = row_axes((state, batch), 1)
    interpreter.state = len(jax.tree.leaves(state))
    program = interpreter.opened(closed)
    jax.eval_shape(
        lambda arrays: interpreter.outputs(program, arrays), jax.tree.leaves((state, batch))
    )
    return tuple(dict.fromkeys(found))


def depth(closed: Any, state: Any) -> int:
    """Returns the number of layers of a step `(state, ...) -> ...` with the jaxpr `closed`: the
    greatest common divisor of those of its scans over layers."""
    return opened(closed, len(jax.tree.leaves(state))).depth


class _Ordered(Value):
    """Stacked values that lie on the stages in the order of a circular schedule."""

    __slots__ = ()


class _Pipeline(Pins):
    def __init__(self, mesh, microbatches, rounds, record):
        names = tuple(name for name in ("slice", "data", STAGE) if name in mesh.shape)
        super().__init__(mesh, names, True)
        self.microbatches, self.rounds, self.record = microbatches, rounds, record
        self.stages = mesh.shape[STAGE]
        self.state = 0
        self.found: dict[int, Any] = {}
        self.rolled = False

    def opened(self, closed):
        closed, self.found, self.rolled = opened(closed, self.state)
        if not self.found:
            raise ValueError(
                "pipeline: the step has no layers: neither a lax.scan whose carry are the "
                "activations, and which slices stacked parameters, as nn.Stack makes it, nor "
                "equal blocks one after another"
            )
        return closed

    def equation(self, eqn, at, inputs, plan):
        if id(eqn) not in self.found or self.stages == 1:
            return super().equation(eqn, at, list(map(self.whole, inputs)), plan)
        inputs = [value if isinstance(value, _Ordered) else self.whole(value) for value in inputs]
        try:
            return self.pipeline(eqn, at, inputs)
        except NotByRows as error:
            raise ValueError(
                f"pipeline: the layers{_where(at)} cannot be computed for some rows of the "
                f"batch without the others: {error}. Use another strategy, or a layer that treats "
                "each row alone"
            ) from None

    def whole(self, value):
        return self.restored(value) if isinstance(value, _Ordered) else super().whole(value)

    def pipeline(self, eqn, at, inputs) -> list[Value]:
        parts, inputs = _without_constants(jaxpr.scan(eqn), inputs)
        layers, devices = self.layers(eqn, parts, at, inputs), self.chips // self.stages
        if parts.length % (self.stages * self.rounds):
            raise ValueError(_uneven(parts.length, at, self.stages, self.rounds))
        plan = schedule(self.stages, layers.rows, self.microbatches, self.rounds, over=devices)
        arrays = [jaxpr.restore(value, v.aval) for value, v in zip(inputs, parts.jaxpr.invars)]
        start = parts.consts + parts.carry
        moved = []
        for i, note in enumerate(layers.slices, start):
            if self.rounds > 1 and not isinstance(inputs[i], _Ordered):
                moved.append(arrays[i])
                arrays[i] = self.exchange(arrays[i], note, back=False)
        outputs = staged(layers, plan, self.mesh, arrays)
        if self.record is not None:
            self.record(recorded(layers, plan, dict(self.mesh.shape), moved, rolled=self.rolled))
        notes = [note if isinstance(note, int) else None for note in layers.carry]
        ends = [Value(y, note) for y, note in zip(outputs, notes)]
        kind = _Ordered if self.rounds > 1 else Value
        over = [after(note) if isinstance(note, int) else None for note in layers.stacked]
        return [*ends, *(kind(y, note) for y, note in zip(outputs[parts.carry :], over))]

    def layers(self, eqn, parts, at, inputs) -> Layers:
        """Finds the rows in a scan over layers, and proves that its body computes them apart."""
        consts, carry, slices = parts.split(inputs)
        program = parts.jaxpr
        given = [value.note for value in consts]
        sliced = [before(value.note) if value.note else None for value in slices]
        started = [value.note for value in carry]
        for i, note in enumerate(started):
            before_, after_ = program.invars[parts.consts + i], program.outvars[i]
            if note is None and only_added_to(program, before_, after_) and _float(before_):
                started[i] = ZERO  # perhaps a sum over the batch, which begins at zero
        inside = [*given, *started, *sliced]
        sizes = [v.aval.shape[note] for v, note in zip(program.invars, inside) if _is_axis(note)]
        if not sizes:
            raise NotByRows("none of its arrays has the rows of the batch")
        rows = min(sizes)
        if odd := [size for size in sizes if size % rows]:
            raise NotByRows(f"it has arrays of {rows} and of {odd[0]} rows")
        # One row at a time: what holds for it holds for any number.
        proof = ByRows(rows, 1)
        carried, _ = proof.carried(eqn, at, parts, inside)
        carried = [None if note == ZERO else note for note in carried]
        # Again, with the notes that the stages have: they begin with other values than zero.
        carried, stacked = proof.carried(eqn, at, parts, [*given, *carried, *sliced])
        stacked = [None if note == ZERO else note for note in stacked]
        return Layers(eqn, parts, at, rows, *map(tuple, (given, carried, sliced, stacked)))

    def restored(self, value) -> Value:
        """Stacked values in the order of their layers."""
        return Value(self.exchange(value.x, before(value.note), back=True), value.note)

    def exchange(self, x, note, *, back):
        move = functools.partial(
            exchanged, stages=self.stages, rounds=self.rounds, axis=STAGE, back=back
        )
        data = tuple(name for name in self.axis if name != STAGE)
        spec = P(STAGE, *([None] * note + [data] if _is_axis(note) else []))
        return jax.shard_map(move, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)(
            x
        )


def _without_constants(parts: jaxpr.Scan, inputs: list) -> tuple[jaxpr.Scan, list]:
    """Passes the constants of the body of a scan as inputs, because a shard_map may not close over
    values of an outer trace."""
    constants = parts.closed.consts
    closed = _jax.close(_jax.consts_as_inputs(parts.closed))
    parts = dataclasses.replace(parts, closed=closed, consts=parts.consts + len(constants))
    return parts, [*map(Value, constants), *inputs]


def _is_axis(note) -> bool:
    return isinstance(note, int)


def _float(v) -> bool:
    return jax.numpy.issubdtype(v.aval.dtype, jax.numpy.inexact)


def _uneven(layers: int, at, stages: int, rounds: int) -> str:
    groups = stages * rounds
    held = f"{rounds} groups on each of {stages} stages" if rounds > 1 else f"{stages} stages"
    fits = [n for n in range(2, layers + 1) if layers % (n * rounds) == 0]
    return (
        f"pipeline: {layers} layers{_where(at)} are not a multiple of {held} (the mesh axis "
        f"'stage' of length {stages}); "
        + (f"use a mesh axis of length {' or '.join(map(str, fits))}" if fits else f"use {groups}")
        + ("" if fits else " layers")
    )


def _where(at) -> str:
    return f" at '{at.path}'" if at.path else ""
