"""Estimates, from the jaxpr of a step, the memory and the transfers of the step on each chip. The
estimate takes seconds and needs no compiler.

For each operation, the shardings of the outputs are derived from the shardings of the inputs. A
value is live from the operation that produces it to the last operation that reads it. Values that a
compiler would fuse into the operations that read them are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fnet.axes import batch_axes, before, mapped_axes
from fnet.cost._fusion import Kept, heavy
from fnet.jaxpr import Frame, Scope, description, marks, nbytes, options, product, read, scan
from fnet.parallel._ledger import Ledger, Transfer
from fnet.parallel._live import Held, Inner, Live, peak


class Estimate(NamedTuple):
    """The estimated memory and transfers of a step on each chip.

    Attributes:
        peak: the maximum number of bytes in use on a chip, including the arguments of the step.
        ledger: the transfers between chips within a slice or machine, as a `Ledger` (a list of
            transfers).
        between: the transfers between slices or machines.
        largest: the largest arrays at the peak, largest first.
    """

    peak: int
    ledger: Ledger
    between: Ledger
    largest: tuple[Held, ...]


class Split(NamedTuple):
    """How an array is split over the mesh. `rows` is the batch axis, which is split over the mesh
    axes "slice" and "data". For arrays of the state, `data` is the axis that is split over the mesh
    axis "data". `more` contains a pair (axis, mesh axis) for each axis that is split over a mesh
    axis other than "slice" and "data"."""

    rows: int | None = None
    data: int | None = None
    more: tuple[tuple[int, str], ...] = ()


NOWHERE = Split()


class Followed:
    """A step whose arrays were followed through the mesh: `estimate(rows)` is then quick, for any
    number of rows.

    Args:
        closed: the jaxpr of the step.
        arguments: how each input of the jaxpr is split. The first inputs of the jaxpr are the
            leaves of the state.
        mesh: the size of each mesh axis, {name: size}. The mesh axes "slice" and "data" split the
            batch. The other mesh axes split the arrays for which sharding rules name these axes.
        whole: whether each chip stores all parameters but only a part of the optimizer's state
            (ZeRO-1). Default False.
        casts: whether the compiler casts the weights for all iterations of a loop before the loop,
            as compilers for accelerators do. Default False.
        kernels: "cuda" or "tpu" if the chip has attention kernels that never store the attention
            weights; otherwise None (default).
        blocks: a function of an equation that runs in blocks on each chip, and of their bytes
            there. It returns None for other equations. Default None: no equation does.
    """

    def __init__(
        self,
        closed,
        arguments: list[Split],
        mesh: dict[str, int],
        *,
        whole: bool = False,
        kernels: str | None = None,
        casts: bool = False,
        blocks: Callable[[Any], int | None] | None = None,
    ):
        jaxpr = closed.jaxpr
        self.whole, self.arguments = whole, list(zip(jaxpr.invars, arguments))
        self.walk = walk = _Walk(mesh, kernels, whole, casts, blocks)
        for v, split in self.arguments:
            if split.rows is None:
                walk.remember(v.aval.shape, split)
                if split.data:  # a scan reads the part of one layer
                    walk.remember(v.aval.shape[1:], _inside(split))
        self.given = _given(jaxpr, arguments)
        self.live = walk.frame(read(jaxpr), self.given, 1, _Loop(1), outermost=True)
        self.gathered = self._gathered() if whole and walk.data > 1 else 0

    def _gathered(self) -> int:
        """With ZeRO-1, new parameters are gathered while gradients and old ones are still alive."""
        walk, gathered = self.walk, 0
        for v, split in self.arguments:
            known = walk.known.get(v.aval.shape, NOWHERE)
            if split.rows is None and split.data is None and known.data is not None:
                size = walk.bytes(v.aval, split)
                walk.transfers.append(Transfer("all-gather", "", size, walk.data, 1))
                gathered += size
        return gathered

    def estimate(self, rows: float = 1.0) -> Estimate:
        """Estimates the step for a batch with `rows` times as many rows as it was traced with. The
        transfers are those of the traced batch."""
        walk = self.walk

        def size(aval, split: Split) -> int:
            times = 1.0 if split.rows is None else rows
            return math.ceil(nbytes(aval) * times / walk.chips(split))

        state = sum(size(*each) for each in self.given.values())
        most, live = peak(self.live, size)
        largest = [
            Held(size(v.aval, split), v.aval.str_short(), "an argument")
            for v, split in self.arguments
        ]
        return Estimate(
            state + max(most, 2 * self.gathered),
            Ledger(tuple(walk.transfers)),
            Ledger(tuple(walk.between)),
            tuple(sorted(largest + live, key=lambda held: -held.bytes)[:12]),
        )


def estimate(closed, arguments: list[Split], mesh: dict[str, int], **options) -> Estimate:
    """Estimates a step. The arguments are those of `Followed`."""
    return Followed(closed, arguments, mesh, **options).estimate()


class _Loop(NamedTuple):
    """Properties of a loop. `once` is the number of times that a step starts the loop (not the
    number of iterations). `same` contains the indices of the inputs of the body that are equal in
    all iterations. `summed` contains the sizes (numbers of elements) of the loop's carries, except
    scalars. If a sum over the batch has as many elements as a carry of the loop, the loop is
    assumed to accumulate this sum in the carry. The chips then add their partial sums only once,
    after the loop. If `fused` is True, the compiler is assumed to fuse a matrix product with an
    elementwise operation that is the only reader of the product's result."""

    once: int
    same: frozenset[int] = frozenset()
    summed: frozenset[int] = frozenset()
    fused: bool = False


class _Walk:
    def __init__(self, mesh, kernels, whole, casts, blocks):
        self.kernels, self.whole, self.casts, self.blocks = kernels, whole, casts, blocks
        self.mesh, self.data, self.slices = mesh, mesh.get("data", 1), mesh.get("slice", 1)
        self.known: dict[tuple, Split] = {}
        self.transfers: list[Transfer] = []
        self.between: list[Transfer] = []

    def remember(self, shape, split):
        if len(shape) and (shape not in self.known or self.known[shape].data is None):
            self.known[shape] = split

    def chips(self, split) -> int:
        n = (
            self.data * self.slices
            if split.rows is not None
            else self.data
            if split.data is not None
            else 1
        )
        return n * math.prod(self.mesh[name] for _, name in split.more)

    def bytes(self, aval, split) -> int:
        return math.ceil(nbytes(aval) / self.chips(split))

    def frame(
        self,
        frame: Frame,
        given: dict[int, tuple[Any, Split]],
        times: int,
        loop: _Loop,
        *,
        outermost=False,
    ) -> Live:
        """Follows the operations of one jaxpr. Returns what decides which arrays are live."""
        kept, values, same = Kept(frame, epilogues=loop.fused), dict(given), set(loop.same)
        inner: dict[int, list[Inner]] = {}
        extra: dict[int, int] = {}
        gathered = set()
        for at, op in enumerate(frame.ops):
            # Neither literals nor the constants of jitted functions have an entry.
            splits = [values[i][1] if i in values else NOWHERE for i in op.ins]
            if all(i is None or i in same for i in op.ins):
                same.update(op.outs)
            # Inputs common to all iterations are gathered once. Accumulated sums are reduced over
            # the chips at the end.
            weights = [loop.once if i in same else times for i in op.ins]
            found, gathers = self.operation(op, splits, weights, times, loop, gathered)
            for i, v, split in zip(op.outs, op.eqn.outvars, found):
                values[i] = v.aval, split
            blocks = self.blocks(op.eqn) if self.blocks else None
            extra[at] = gathers + (blocks or 0)
            if op.bodies:
                inner[at] = self.bodies(op, splits, found, times)
            elif blocks is None and description(op.eqn.primitive).plain and self.plainly(op.eqn):
                inner[at] = [self.stand_in(op, splits)]
        return Live(frame, kept, values, frozenset(given), inner, extra, outermost)

    def bodies(self, op, splits, found, times) -> list[Inner]:
        """Follows the bodies of an operation, for example the body of a scan or the branches of a
        `cond`."""
        followed = []
        for sub, frame in op.bodies:
            jaxpr, inputs = sub.jaxpr, list(splits)
            if sub.kind == "scan":
                parts = scan(op.eqn)
                consts, carry = parts.consts, parts.carry
                inputs = [*splits[:consts], *found[:carry], *map(_inside, splits[consts + carry :])]
            elif sub.kind == "branch":
                inputs = splits[1:]
            elif sub.kind == "shard_map":  # its values are the parts of a chip
                inputs = [NOWHERE] * len(inputs)
            inputs = inputs if len(inputs) == len(jaxpr.invars) else [NOWHERE] * len(jaxpr.invars)
            loop = _Loop(times)
            if sub.kind == "scan":
                ahead = len(jaxpr.constvars)
                summed = frozenset(v.aval.size for v in jaxpr.outvars[:carry] if v.aval.shape)
                loop = _Loop(times, frozenset(range(ahead + consts)), summed)
            live = self.frame(
                frame,
                _given(jaxpr, inputs),
                times * (sub.times or 1) if sub.kind == "scan" else times,
                loop,
            )
            casts = sub.kind == "scan" and self.casts
            more = self.cast(frame, op.eqn, splits, len(jaxpr.constvars)) if casts else 0
            followed.append(Inner(live, more))
        return followed

    def cast(self, frame, eqn, splits, ahead) -> int:
        """Returns the number of bytes that the stacked weights of a scan need on a chip after a
        cast to the dtype of the matrix products in the scan. Only weights that become smaller by
        the cast are counted."""
        first, found = scan(eqn).consts + scan(eqn).carry, {}
        for op in frame.ops:
            if (multiplied := product(op.eqn)) is not None:
                found.update(
                    (i - ahead, multiplied.dtype.itemsize) for i in op.ins if i is not None
                )
        return sum(
            self.bytes(v.aval, split) * found[i] // v.aval.dtype.itemsize
            for i, (v, split) in enumerate(zip(eqn.invars, splits))
            if i >= first and i in found and split.rows is None and found[i] < v.aval.dtype.itemsize
        )

    def plainly(self, eqn) -> bool:
        """Whether a composite operation is lowered to ordinary operations instead of a kernel."""
        refusal = description(eqn.primitive).refusal
        return self.kernels is None or refusal is None or refusal(self.kernels, eqn) is not None

    def stand_in(self, op, splits) -> Inner:
        """Follows a composite operation that is lowered to ordinary operations."""
        sent = self.transfers, self.between
        self.transfers, self.between = [], []
        plain = description(op.eqn.primitive).plain(op.eqn)
        found = self.frame(
            read(plain, Scope(op.scope)), _given(plain, splits), 1, _Loop(1, fused=True)
        )
        self.transfers, self.between = sent
        return Inner(found, 0)

    # Shardings and transfers.

    def operation(self, op, splits, weights, times, loop, gathered):
        """Returns the sharding of each output of an operation, and the bytes of the weights
        gathered for the operation.

        Before a matrix product of activations and sharded weights, the weights are gathered,
        because each chip needs the complete weights.
        """
        eqn, scope = op.eqn, op.scope
        rows = [split.rows for split in splits]
        out_rows = batch_axes(eqn, rows)
        takes_rows = any(note is not None for note in rows)
        # A product with activations needs complete weights.
        whole = heavy(op) and takes_rows and not op.bodies
        out_data = (
            [None] * len(eqn.outvars)
            if takes_rows and not op.bodies and whole
            else batch_axes(
                eqn, [None if r is not None else split.data for r, split in zip(rows, splits)]
            )
        )
        temporary = 0
        if whole and self.data > 1:
            for i, v, split, turns in zip(op.ins, eqn.invars, splits, weights):
                if split.data is not None and split.rows is None:
                    size = math.ceil(
                        nbytes(v.aval) / math.prod(self.mesh[name] for _, name in split.more)
                    )
                    if (multiplied := product(eqn)) is not None:  # cast, then gathered
                        size = size * multiplied.dtype.itemsize // v.aval.dtype.itemsize
                    temporary += size
                    if (key := (i, "transpose" in marks(eqn))) not in gathered:
                        gathered.add(key)
                        self.transfers.append(Transfer("all-gather", scope, size, self.data, turns))
        if eqn.primitive.name == "shard_map":
            return _mapped(eqn), temporary
        found = []
        more = self.further(eqn, splits, out_rows, scope, times)
        for v, row, data, names in zip(eqn.outvars, out_rows, out_data, more):
            split = Split(row, None if row is not None else data, names)
            floats = hasattr(v.aval, "dtype") and jax.dtypes.issubdtype(
                v.aval.dtype, jax.numpy.floating
            )
            final = split
            if (
                row is None
                and data is None
                and v.aval.shape in self.known
                and (takes_rows or op.bodies)
            ):
                final = split._replace(data=self.known[v.aval.shape].data)
            if takes_rows and row is None and floats and heavy(op) and not op.bodies:
                self.reduced(
                    v.aval, final, scope, loop.once if v.aval.size in loop.summed else times
                )
            # With replicated parameters, gradients are replicated until the optimizer reads its
            # part of them.
            found.append(split if self.whole else final)
        return found, temporary

    def reduced(self, aval, split, scope, times):
        """Records the transfer for a sum over the batch: each chip has a partial sum, and the
        partial sums are
        added."""
        local = self.bytes(aval, split)
        if self.data > 1:
            collective, size = (
                ("reduce-scatter", local) if split.data is not None else ("all-reduce", local)
            )
            self.transfers.append(Transfer(collective, scope, size, self.data, times))
        if self.slices > 1:
            self.between.append(Transfer("all-reduce", scope, local, self.slices, times))

    def further(self, eqn, splits, out_rows, scope, times):
        """Returns `Split.more` for each output of an equation, that is, the axes of the output that
        are split over a mesh axis other than "slice" and "data". If the contracted axis of a matrix
        product is split, the partial results must be summed over the chips, and this transfer is
        recorded."""
        names = {name for split in splits for _, name in split.more}
        found = [[] for _ in eqn.outvars]
        for name in sorted(names):
            notes = [
                next((axis for axis, each in split.more if each == name), None) for split in splits
            ]
            outs = batch_axes(eqn, notes, self.mesh[name])
            for k, (axis, row) in enumerate(zip(outs, out_rows)):
                if axis is not None and axis != row:
                    found[k].append((axis, name))
            if (
                product(eqn) is not None
                and outs == [None]
                and all(note is not None for note in notes[:2])
            ):
                split = Split(out_rows[0], None, tuple(found[0]))
                self.transfers.append(
                    Transfer(
                        "all-reduce",
                        scope,
                        self.bytes(eqn.outvars[0].aval, split),
                        self.mesh[name],
                        times,
                    )
                )
        return [tuple(each) for each in found]


def _given(jaxpr, splits) -> dict[int, tuple[Any, Split]]:
    """Returns the type and the sharding (a `Split`) of each constant and each input of a jaxpr. The
    constants are replicated."""
    types = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]
    return dict(enumerate(zip(types, [*[NOWHERE] * len(jaxpr.constvars), *splits])))


def _mapped(eqn) -> list[Split]:
    """Returns the sharding of each output of a shard_map."""
    experts = mapped_axes(eqn, ("expert",))
    found = []
    for spec, part in zip(options(eqn).out_specs, experts):
        row = next((i for i, names in enumerate(spec) if "data" in (names or ())), None)
        found.append(Split(row) if part is None else Split(more=((part, "expert"),)))
    return found


def _inside(split: Split) -> Split:
    """Returns the sharding of x[i], which is `x` without its first axis. `split` is the sharding of
    `x`."""
    return Split(
        before(split.rows),
        before(split.data),
        tuple((axis - 1, name) for axis, name in split.more if axis),
    )
