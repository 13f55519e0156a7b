"""The costs of strategies on one mesh: their memory, transfers and time, estimated from the jaxpr
of the step or read from the compiled program."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import _jax
from fnet.cost import MFU, mfu
from fnet.cost._count import Count
from fnet.cost._tiles import Stored, stored
from fnet.jaxpr import misdivided
from fnet.parallel import _cost, _mesh, _trace
from fnet.parallel._context._context import Context
from fnet.parallel._context._mapped import AXIS
from fnet.parallel._estimate import Estimate, Followed, Split
from fnet.parallel._experts._experts import Experts, active, placed
from fnet.parallel._ledger import Ledger
from fnet.parallel._pipeline import Pipelined, stages, waiting, with_stages
from fnet.parallel._plan import Candidate, Plan, rows_over
from fnet.parallel._sharding_rules import applied, path_of
from fnet.parallel._shardings import is_parameter, layout, stated
from fnet.parallel._strategies import Strategy, takes_slices

ROOM = 0.92  # fraction of a chip's memory that a program may use; the runtime needs the rest
DOUBT = 1.25  # an estimate of memory may be too high by this factor; strategies with higher estimates are not compiled
_FAR = 64  # rows, in batches: up to here, it is checked whether memory grows with them


class Drafts:
    """Creates a plan for each of several strategies, and determines the memory, transfers and time
    of each strategy. Also determines which strategies fit into memory."""

    def __init__(
        self, chips, axes, places, state, batch, traced, rules, init, announce=lambda stage: None
    ):
        self.chips, self.axes, self.places, self.state, self.batch = (
            chips,
            axes,
            places,
            state,
            batch,
        )
        self.traced, self.init, self.announce = traced, init, announce
        self.context = None
        if axes.get(AXIS, 1) > 1 and not traced.typed:
            closed = traced.program(Strategy("data"))
            self.context = Context.of(closed, state, batch, chips, axes, rows_over(places))
        self.placed, self.experts = traced, None
        if active(places) and not traced.typed:
            spread = placed(traced.step, misdivided.with_automatic_axes(places))
            self.placed = _trace.Traced(spread, state, batch, places)
            self.experts = Experts.of(self.placed.program(Strategy("data")), state, places)
        parameters = [
            (path_of(path[1:]), leaf.shape)
            for path, leaf in jax.tree.leaves_with_path(state)
            if is_parameter(path, state)
        ]
        self.ruled = applied(rules, parameters, axes)
        if self.experts is not None:
            self.ruled = self.experts.rules | self.ruled
        working = {name for spec in self.ruled.values() for name in spec}
        working |= {"slice", "data", "stage", AXIS, *rows_over(places)}
        # Devices that do the same work.
        self.alike = math.prod(n for name, n in axes.items() if name not in working)
        chip = chips.chip
        self.memory = None if chip.memory_bytes is None else chip.per_device.memory_bytes

    def plan(self, option: Strategy) -> Plan:
        layout = self.layout(option.state)
        place = lambda spec: NamedSharding(self.places, spec)
        state = jax.tree.map(place, layout.specs, is_leaf=lambda x: isinstance(x, P))
        over = rows_over(self.places)
        rows = over[0] if len(over) == 1 else over
        if self.context is None:
            batch = jax.tree.map(lambda x: place(P(rows) if x.ndim else P()), self.batch)
        else:
            specs = self.context.batch(rows, self.batch)
            batch = jax.tree.map(place, specs, is_leaf=lambda x: isinstance(x, P))
        return Plan(
            self.chips,
            self.places,
            option,
            state,
            batch,
            tuple(layout.whole),
            self.batch,
            self.traced.unused,
            self.init,
            context=self.context,
            experts=self.experts,
            pipeline=self.pipeline(option),
        )

    @functools.lru_cache(None)  # noqa: B019
    def pipeline(self, option: Strategy) -> tuple[Pipelined, ...]:
        if option.state != "pipeline":
            return ()
        return stages(
            self.traced.program(option),
            misdivided.with_automatic_axes(self.places),
            self.state,
            self.batch,
            microbatches=option.microbatches if option.microbatches > 1 else None,
            rounds=option.rounds,
        )

    @functools.lru_cache(None)  # noqa: B019 (lives only while a plan is created)
    def layout(self, kind):
        if kind == "explicit":
            return stated(self.state)
        shared = ("expert",) if self.experts is not None else ()
        return layout(self.state, kind, self.axes, self.traced.scanned, self.ruled, shared)

    def candidate(self, option: Strategy) -> Candidate:
        self.announce(f"estimating {option}")
        counted = self.traced.count(option)
        draft = self.plan(option)
        found = self.followed(option).estimate()
        found = _with_exchanges(found, draft, self.placed.program(option))
        persistent = _held(self.state, draft.state, self.chips.chip)
        arguments = persistent + _held(self.batch, draft.batch, self.chips.chip)
        candidate = Candidate(
            option,
            self.axes,
            persistent.bytes,
            arguments.bytes,
            arguments.exact,
            _with_padding(found, draft, self.state, self.batch),
            None,
            _cost.Time(None, None, None),
            MFU(None),
        )
        return self.timed(candidate, counted)

    def followed(self, option: Strategy) -> Followed:
        plan = self.plan(option)
        splits, options = _situation(plan, self.state, self.batch)
        return self.placed.followed(option, tuple(splits), _axes(plan), **options)

    def timed(self, each: Candidate, counted: Count | None = None) -> Candidate:
        counted = counted or self.traced.count(each.options)
        state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.state))
        sent, between = each.ledger.sent, each.estimate.between.sent
        if each.compiled and each.compiled.ledger:
            sent -= between  # the ledger of a compiled program includes it
        time = _cost.time(
            counted,
            self.chips,
            state,
            each.persistent,
            max(0, sent),
            between,
            alike=self.alike,
            messages=each.ledger.transfers,
            messages_between=each.estimate.between.transfers,
        )
        time = waiting(time, self.pipeline(each.options))
        if self.context is not None:
            time = self.context.slowed(time, self.traced.program(each.options))
        return dataclasses.replace(each, time=time, mfu=self.utilization(counted, time.seconds))

    def utilization(self, counted: Count, seconds: float | None) -> MFU:
        if not seconds or not counted.dtype:
            why = "the step has no matrix products" if seconds else "the time of a step is unknown"
            return MFU(None, why)
        return mfu(counted.model_flops, seconds, self.chips.chip, counted.dtype, self.chips.count)

    def judged(self, each: Candidate, doubt: float) -> Candidate:
        verdict = ""
        if each.compiled and each.compiled.peak is None:
            verdict = f"rejected by the compiler: {each.compiled.said}"
        elif self.memory and each.peak > doubt * ROOM * self.memory:
            verdict = f"rejected: over {ROOM:.0%} of {self.memory / 2**30:.1f} GiB"
        return dataclasses.replace(each, verdict=verdict) if verdict else each

    @functools.lru_cache(None)  # noqa: B019
    def largest_batches(self) -> tuple[tuple[Strategy, int], ...]:
        """Returns pairs (strategy, largest number of rows that fits on one chip). The result has a
        pair (strategy, rows) for "data", "data+remat" and, if the step supports microbatches,
        "data+remat+microbatches=8"."""
        if not self.memory:
            return ()
        options = [Strategy("data"), Strategy("data", remat=True)]
        options += (
            [Strategy("data", remat=True, microbatches=8)] if takes_slices(self.traced.step) else []
        )
        return tuple((option, self.rows(option)) for option in options)

    def rows(self, option: Strategy) -> int:
        """Returns the largest number of rows of a batch with which the given strategy fits into the
        memory of the devices."""
        given = max(x.shape[0] for x in jax.tree.leaves(self.batch) if x.ndim)
        plan = self.plan(option)
        search = functools.partial(
            largest,
            room=ROOM * self.memory,
            first=max(2, given) * option.microbatches,
            unit=option.microbatches * self.chips.count,
        )
        resized = lambda rows: _resized(self.batch, given, rows)

        def retraced(rows: int) -> float:
            program = self.traced.resized(option, resized(rows))
            return _estimated(plan, program, self.state, resized(rows)).peak

        if given % option.microbatches:
            return search(retraced)
        followed = self.followed(option)

        def scaled(rows: int) -> float:
            estimate = followed.estimate(rows / given)
            return _with_padding(estimate, plan, self.state, resized(rows)).peak

        most = search(scaled)
        far = given * max(_FAR, 2 ** math.ceil(math.log2(max(given, most) / given)))
        if self.traced.proportional(option, far // given, resized(far)):
            return most
        return search(retraced)


def _resized(batch, given: int, rows: int):
    """Returns the shapes of a batch with `rows` rows instead of the `given` ones."""

    def leaf(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not x.ndim:
            return x
        return jax.ShapeDtypeStruct((rows * x.shape[0] // given, *x.shape[1:]), x.dtype)

    return jax.tree.map(leaf, batch)


def largest(peak: Callable[[int], float], *, room: float, first: int, unit: int) -> int:
    """Returns the largest number of rows, a multiple of `unit`, whose peak is at most `room`, or 0.

    Peak memory is roughly linear in the number of rows. The search therefore interpolates linearly
    between two numbers of rows that it has tried: the largest number that fits into memory, and the
    smallest number that does not fit. If all or none of the tried numbers fit, the search
    extrapolates from two of these numbers.
    """
    tried = {rows: peak(rows) for rows in (first, 2 * first)}
    for _ in range(8):
        below = sorted((rows for rows in tried if tried[rows] <= room), reverse=True)
        above = sorted(rows for rows in tried if tried[rows] > room)
        if below and tried[below[0]] > 0.98 * room:
            break
        a, b = (below[0], above[0]) if below and above else (below or above)[:2]
        bytes_per_row = max(1.0, (tried[b] - tried[a]) / (b - a))
        guess = max(1, int(a + (room - tried[a]) / bytes_per_row) // unit) * unit
        if guess in tried:
            break
        tried[guess] = peak(guess)
    return max((rows for rows, needs in tried.items() if needs <= room), default=0)


def _shards(tree, shardings) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of the leaves' shards on each chip."""
    return [
        jax.ShapeDtypeStruct(where.shard_shape(x.shape), x.dtype)
        for x, where in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings))
    ]


def _held(tree, shardings, chip) -> Stored:
    """Returns the bytes of a tree in each chip's memory, including padding."""
    return sum((stored(x, chip) for x in _shards(tree, shardings)), Stored(0, True))


def _unpadded(tree, shardings) -> int:
    return sum(x.size * x.dtype.itemsize for x in _shards(tree, shardings))


def needs(plan: Plan, step: Callable, state: Any, batch: Any) -> Estimate:
    """Estimates the memory and transfers of a plan's step on each device, for a batch with any
    number of rows.

    Args:
        plan: the plan.
        step: the step that was passed to `parallel.plan`.
        state, batch: trees of shapes. The number of rows of the batch must be a multiple of the
            number of devices times the number of microbatches.
    """
    typed = plan.options.state == "explicit"
    with _mesh.tracing(plan.mesh, typed):
        if typed:
            state, batch = _trace.with_types((state, batch), (plan.state, plan.batch))
        if plan.experts is not None:
            step = placed(step, misdivided.with_automatic_axes(plan.mesh))
        closed = _jax.make_jaxpr(plan.options.applied(step))(state, batch)
    return _estimated(plan, closed, state, batch)


def _estimated(plan, closed, state, batch) -> Estimate:
    """Estimates the memory and transfers of a plan's step on each device."""
    splits, options = _situation(plan, state, batch)
    found = Followed(closed, splits, _axes(plan), **options).estimate()
    found = _with_exchanges(found, plan, closed)
    return _with_padding(found, plan, state, batch)


def _with_exchanges(found: Estimate, plan, closed) -> Estimate:
    """Adds to an estimate what attention over a split time and experts on other devices send."""
    more = plan.context.transfers(closed) if plan.context is not None else []
    if plan.experts is not None:
        more += plan.experts.transfers(closed, plan.mesh)
    return found._replace(ledger=Ledger((*found.ledger.transfers, *more)))


def _axes(plan) -> dict[str, int]:
    """The mesh of a plan, as `Followed` sees it."""
    axes = dict(plan.mesh.shape)
    if plan.context is not None:  # time is split as rows are
        axes["data"] *= axes.pop(AXIS)
    if plan.pipeline:  # what is kept is split over as many chips as the rows outside of the layers
        axes["data"] *= axes["stage"]
    if plan.experts is not None:  # rows are split over the devices of all experts
        axes["data"] *= axes["expert"]
    return axes


def _situation(plan, state, batch) -> tuple[list[Split], dict[str, Any]]:
    """Returns how the inputs of a plan's step are split, and the options of `Followed`."""
    chip = plan.chip
    alone = all(n == 1 for name, n in plan.mesh.shape.items() if name not in rows_over(plan.mesh))
    cudnn = chip.vendor == "NVIDIA" and float(chip.architecture or 0) >= 8
    kernels = "cuda" if cudnn else "tpu" if chip.kind == "tpu" and alone else None
    splits = [_split(where.spec) for where in jax.tree.leaves(plan.state)]
    splits += [Split(0 if x.ndim else None) for x in jax.tree.leaves(batch)]
    whole = plan.options.state == "zero1"
    options = {"whole": whole, "kernels": kernels, "casts": chip.kind != "cpu"}
    if plan.context is not None:
        options["blocks"] = plan.context.held
    return splits, options


def _with_padding(found: Estimate, plan, state, batch) -> Estimate:
    """Adds the padding of the step's arguments to an estimate. The peak is at least their size."""
    chip = plan.chip
    if plan.pipeline:
        found = with_stages(found, plan.pipeline)
    padded = (_held(state, plan.state, chip) + _held(batch, plan.batch, chip)).bytes
    unpadded = _unpadded(state, plan.state) + _unpadded(batch, plan.batch)
    return found._replace(peak=max(padded, found.peak + padded - unpadded))


def _split(spec) -> Split:
    over = [
        (i, name)
        for i, names in enumerate(spec)
        for name in (names if isinstance(names, tuple) else (names,))
    ]
    data = next((i for i, name in over if name == "data"), None)
    if data is not None:  # outside of the layers of a pipeline, also over "stage"
        over = [(i, name) for i, name in over if name not in ("stage", AXIS, "expert")]
    return Split(None, data, tuple((i, name) for i, name in over if name not in (None, "data")))
