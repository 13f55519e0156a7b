"""Runs a scan over layers on the stages of a pipeline, inside a shard_map."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fnet import jaxpr
from fnet.jaxpr import Scope
from fnet.parallel._pipeline._by_rows import SUM, ByRows, Note, after
from fnet.parallel._pipeline._schedule import Schedule

STAGE = "stage"


@dataclasses.dataclass(frozen=True)
class Layers:
    """A scan over layers that is cut into stages.

    Attributes:
        eqn: the equation of the scan, for error messages.
        parts: its body, without constants in it.
        at: its scope.
        rows: the number of rows of its batch.
        consts, carry, slices: the notes of the inputs of its body (see `ByRows`).
        stacked: the notes of what its body returns to be stacked.
    """

    eqn: Any
    parts: jaxpr.Scan
    at: Scope
    rows: int
    consts: tuple[Note, ...]
    carry: tuple[Note, ...]
    slices: tuple[Note, ...]
    stacked: tuple[Note, ...]

    @property
    def inside(self) -> tuple[Note, ...]:
        return (*self.consts, *self.carry, *self.slices)


def staged(layers: Layers, schedule: Schedule, mesh: Any, arrays: Sequence[Any]) -> list:
    """Evaluates a scan over layers as a pipeline. Slices and stacked values lie on the stages in
    the order of the schedule (see `exchanged`)."""
    parts = layers.parts
    data = tuple(name for name in ("slice", "data") if name in mesh.shape)
    spec = _Specs(data)
    consts, carry, slices = parts.split(arrays)
    # Accumulated sums begin at zero on each device, and get their initial values afterwards.
    travels = [note != SUM for note in layers.carry]
    given = [x for x, moves in zip(carry, travels) if moves]
    in_specs = (
        [spec.rows(note) for note in layers.consts],
        [spec.carry(note) for note, moves in zip(layers.carry, travels) if moves],
        [spec.stacked(note) for note in layers.slices],
    )
    out_specs = (
        [spec.carry(note) for note in layers.carry],
        [spec.stacked(note) for note in layers.stacked],
    )
    run = _Run(layers, schedule, mesh, data)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    ends, stacked = mapped(consts, given, slices)
    ends = [y if moves else x + y for x, y, moves in zip(carry, ends, travels)]
    return [*ends, *stacked]


class _Specs:
    """The partition specs of the arrays of a scan over layers."""

    def __init__(self, data: tuple[str, ...]):
        self.data = data

    def rows(self, note: Note) -> P:
        """Of an array with rows, all of which each stage reads."""
        return P(*[None] * note, self.data) if isinstance(note, int) else P()

    def carry(self, note: Note) -> P:
        """Of an array whose rows are split over all devices, as outside of the layers."""
        return P(*[None] * note, (*self.data, STAGE)) if isinstance(note, int) else P()

    def stacked(self, note: Note) -> P:
        """Of an array with an item for each layer."""
        return P(STAGE, *self.rows(note))


class _Run:
    """What each device does with its part of the arrays."""

    def __init__(self, layers: Layers, schedule: Schedule, mesh: Any, data: tuple[str, ...]):
        self.layers, self.schedule, self.data = layers, schedule, data
        self.parts = layers.parts
        self.backward = bool(self.parts.options.get("reverse"))
        self.over = math.prod(mesh.shape[name] for name in data)
        self.count = layers.rows // self.over // schedule.microbatches  # rows of a piece
        self.each = self.parts.length // (schedule.stages * schedule.rounds)  # layers of a group

    def __call__(self, consts: list, carry: list, slices: list) -> tuple[list, list]:
        stages, rounds = self.schedule.stages, self.schedule.rounds
        # Its place on the way of a microbatch, which goes backward in the backward pass.
        stage = lax.axis_index(STAGE)
        self.place = stages - 1 - stage if self.backward else stage
        self.shard = lax.axis_index(self.data)
        travels = [note for note in self.layers.carry if note != SUM]
        moving = [self.gathered(x, note) for x, note in zip(carry, travels)]
        arriving = [
            x if isinstance(note, int) else jnp.stack([x] * rounds)
            for x, note in zip(moving, travels)
        ]
        first = [self.piece(x, note, 0) for x, note in zip(moving, travels)]
        own = [self.piece(x, note, 0) for x, note in zip(consts, self.layers.consts)]
        mine = self.pieces_of(slices, 0, 0)
        types = jax.eval_shape(self.group, own, first, mine, 0)
        sums, stacked = [
            [jnp.zeros(y.shape, _wide(y.dtype)) for y in types[1]],
            [self.room(y, note) for y, note in zip(types[2], self.layers.stacked)],
        ]
        turn = lambda held, t: (self.turn(consts, slices, travels, *held, t), None)
        start = first, arriving, sums, stacked
        (_, arriving, sums, stacked), _ = lax.scan(
            turn, start, jnp.arange(self.schedule.turns, dtype=jnp.int32)
        )
        return self.results(travels, arriving, sums, stacked, types)

    # The carry.

    def gathered(self, x: Any, note: Note) -> Any:
        """The rows of all microbatches, which are split over the stages outside of the layers."""
        if not isinstance(note, int):
            return x
        return lax.all_gather(x, STAGE, axis=note, tiled=True)

    def spread(self, x: Any, note: int) -> Any:
        """The rows of the last stage, split over all stages."""
        stages = self.schedule.stages
        last = 0 if self.backward else stages - 1
        size = x.shape[note] // stages
        mine = lax.dynamic_slice_in_dim(x, last * size, size, note)
        stage = lax.axis_index(STAGE)
        for to in range(stages):
            if to == last:
                continue
            part = lax.slice_in_dim(x, to * size, (to + 1) * size, axis=note)
            part = lax.ppermute(part, STAGE, [(last, to)])
            mine = jnp.where(stage == to, part, mine)
        return mine

    # Microbatches.

    def piece(self, x: Any, note: Note, microbatch: Any) -> Any:
        """The rows of a microbatch, those of this device."""
        if not isinstance(note, int):
            return x
        size = x.shape[note] // self.schedule.microbatches
        return lax.dynamic_slice_in_dim(x, microbatch * size, size, note)

    def put(self, x: Any, note: Note, microbatch: Any, piece: Any, when: Any) -> Any:
        """Replaces the rows of a microbatch if `when` is true."""
        old = self.piece(x, note, microbatch)
        new = jnp.where(when, piece, old)
        if not isinstance(note, int):
            return new
        return lax.dynamic_update_slice_in_dim(x, new, microbatch * new.shape[note], note)

    # Groups of layers.

    def pieces_of(self, slices: list, group: Any, microbatch: Any) -> list:
        """The slices for a group of layers and a microbatch."""
        mine = [lax.dynamic_slice_in_dim(x, group * self.each, self.each) for x in slices]
        return [self.piece(x, after(n), microbatch) for x, n in zip(mine, self.layers.slices)]

    def room(self, y: Any, note: Note) -> Any:
        """An array for what a group stacks for a microbatch, of all groups and all microbatches."""
        shape = [y.shape[0] * self.schedule.rounds, *y.shape[1:]]
        if isinstance(note, int):
            shape[note + 1] *= self.schedule.microbatches
        return jnp.zeros(shape, _wide(y.dtype) if note == SUM else y.dtype)

    def group(self, consts: list, carry: list, slices: list, microbatch: Any) -> tuple:
        """Evaluates a group of layers on a microbatch. Returns (the carry that travels on, sums
        over the rows of the microbatch that the carry accumulates, stacked values)."""
        layers, parts = self.layers, self.parts
        first = (self.shard * self.schedule.microbatches + microbatch) * self.count
        by_rows = ByRows(layers.rows, self.count, first)
        moving = iter(carry)
        types = (v.aval for v in parts.jaxpr.invars[parts.consts :])
        start = [
            jnp.zeros(v.shape, v.dtype) if note == SUM else next(moving)
            for note, v in zip(layers.carry, types)
        ]
        turn = by_rows.turn(layers.eqn, layers.at, parts, consts, layers.inside)
        options = {**parts.options, "length": self.each}
        ends, stacked = lax.scan(turn, start, slices, **options)
        sums = [y for y, note in zip(ends, layers.carry) if note == SUM]
        return [y for y, note in zip(ends, layers.carry) if note != SUM], sums, stacked

    # Turns.

    def turn(self, consts, slices, travels, received, arriving, sums, stacked, t) -> tuple:
        """One turn of this stage: receives a microbatch, evaluates a group of layers, sends it on."""
        stages, microbatches, rounds = self.schedule
        turns = microbatches * rounds
        begins, ends = self.place == 0, self.place == stages - 1
        work = t - self.place
        busy = (work >= 0) & (work < turns)
        at, microbatch = jnp.divmod(jnp.clip(work, 0, turns - 1), microbatches)
        if rounds > 1:  # what arrives at the first stage from the last waits for its next round
            came = t - stages
            waits = begins & (came >= 0) & (came < turns - microbatches)
            before, which = jnp.divmod(jnp.clip(came, 0, turns - 1), microbatches)
            arriving = [
                self.put(x, note, which, y, waits)
                if isinstance(note, int)
                else lax.dynamic_update_index_in_dim(
                    x, jnp.where(waits, y, x[before + 1]), before + 1, 0
                )
                for x, y, note in zip(arriving, received, travels)
            ]
        carry = [
            jnp.where(
                begins, self.piece(x, note, microbatch) if isinstance(note, int) else x[at], y
            )
            for x, y, note in zip(arriving, received, travels)
        ]
        group = rounds - 1 - at if self.backward else at
        mine = self.pieces_of(slices, group, microbatch)
        own = [self.piece(x, note, microbatch) for x, note in zip(consts, self.layers.consts)]
        carry, added, values = self.unless_idle(busy, own, carry, mine, microbatch)
        sums = [x + y.astype(x.dtype) for x, y in zip(sums, added)]
        stacked = [
            self.kept(x, y, note, group, microbatch, busy)
            for x, y, note in zip(stacked, values, self.layers.stacked)
        ]
        done = ends & busy & (at == rounds - 1)
        arriving = [
            self.put(x, note, microbatch, y, done)
            if isinstance(note, int)
            else lax.dynamic_update_index_in_dim(x, jnp.where(done, y, x[-1]), rounds - 1, 0)
            for x, y, note in zip(arriving, carry, travels)
        ]
        return self.sent(carry), arriving, sums, stacked

    def unless_idle(self, busy: Any, *arguments: Any) -> tuple:
        """Evaluates a group of layers, or nothing, while the stage waits."""
        types = jax.eval_shape(self.group, *arguments)
        idle = lambda *_: jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), types)
        return lax.cond(busy, self.group, idle, *arguments)

    def sent(self, carry: list) -> list:
        """Sends a carry to the next stage, and returns that of the stage before."""
        stages = self.schedule.stages
        ring = [(s, (s + 1) % stages) for s in range(stages)]
        if self.schedule.rounds == 1:
            ring = ring[:-1]
        if self.backward:
            ring = [(stages - 1 - s, stages - 1 - to) for s, to in ring]
        return [lax.ppermute(x, STAGE, ring) for x in carry]

    def kept(self, x: Any, y: Any, note: Note, group: Any, microbatch: Any, busy: Any) -> Any:
        """Adds what a group of layers has stacked for a microbatch to that of all of them."""
        old = lax.dynamic_slice_in_dim(x, group * self.each, self.each)
        if note == SUM:
            new = old + y.astype(x.dtype)
        else:
            new = self.put(old, after(note), microbatch, y, busy)
        return lax.dynamic_update_slice_in_dim(x, new, group * self.each, 0)

    def results(self, travels, arriving, sums, stacked, types) -> tuple[list, list]:
        everywhere = (*self.data, STAGE)
        ends = iter(zip(arriving, travels))
        added = iter(zip(sums, types[1]))
        carry = []
        for note in self.layers.carry:
            if note == SUM:
                total, y = next(added)
                carry.append(lax.psum(total, everywhere).astype(y.dtype))
            elif isinstance(note, int):
                carry.append(self.spread(*next(ends)))
            else:
                carry.append(self.of_last(next(ends)[0][-1]))
        stacked = [
            lax.psum(x, self.data).astype(y.dtype) if note == SUM else x
            for x, y, note in zip(stacked, types[2], self.layers.stacked)
        ]
        return carry, stacked

    def of_last(self, x: Any) -> Any:
        """A value of the last stage, on all of them."""
        return lax.all_gather(x, STAGE)[0 if self.backward else self.schedule.stages - 1]


def _wide(dtype: Any) -> Any:
    """The dtype in which sums over microbatches are accumulated, as in `ft.microbatch`."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if narrow else dtype
