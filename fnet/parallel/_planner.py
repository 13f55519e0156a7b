"""plan: how a plain step is best spread over chips, reckoned, compiled and chosen."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fnet.hardware._count import Count, count_jaxpr
from fnet.hardware._tiles import Stored, stored
from fnet.parallel import _check, _compile, _cost, _explain, _mesh
from fnet.parallel._estimate import Estimate, Split, estimate
from fnet.parallel._plan import Candidate, Plan, rows_over
from fnet.parallel._rules import applied, path_of
from fnet.parallel._shardings import is_parameter, layout, scanned_leaves
from fnet.parallel._targets import target
from fnet.parallel._ways import Way, ladder, takes_slices

ROOM = 0.92    # of a chip's memory that a program may take; the rest is the runtime's
DOUBT = 1.25   # by which an estimate of memory may be too high: what it puts above is not compiled
CLOSE = 1.05   # times the least sent that counts as equal
_LATER = "not compiled"
_UNKNOWN = "unknown without compiling: it may send several times as much"
FEW = 16       # devices up to which every way that may fit is compiled


def plan(step: Callable, init: Callable, batch: Any, *, devices: str | Sequence[jax.Device] = "local",
         strategy: str = "auto", mesh: Mapping[str, int] | None = None,
         rules: Mapping[str, tuple[str | None, ...]] | None = None, compile: bool = True) -> Plan:
    """How a plain `step(state, batch) -> (state, metrics)` is best spread over chips.

        plan = parallel.plan(step, init, batch)
        print(plan)
        state = plan.init(jax.random.key(0))
        step = plan.jit(step)

    What each strategy needs and sends is reckoned from the step's jaxpr, and read from the program where it can be
    compiled for the chips, which need not be there. Of those that fit into memory the one that sends least is chosen;
    of about equals the fastest, and of those the simplest that leaves half the memory free, or the one that leaves
    most. Nothing is allocated.

    "data" is plain data parallelism; "zero1" splits the optimizer's state (Rajbhandari et al., 2020, ZeRO, stage 1);
    "fsdp" splits the parameters too and gathers them where they are used (stage 3; Zhao et al., 2023, PyTorch FSDP);
    "fsdp+pins" is the same with activations held to the batch, without which XLA may sum activations over all chips
    instead of gathering weights. Which of the two sends less depends on the model, so that both are compiled. Where
    none fits, each is tried with "+remat" (`ft.rematerialize`: activations are computed again in the backward pass),
    and then with "+microbatches=2", 4, ..., if the step takes a keyword `microbatches` and hands it to `ft.microbatch`.

    Args:
        step: written for one device.
        init: `init(key) -> state`. The model's parameters are `state.params`, `state["params"]` or `state[0]`.
        batch: a batch, or its shapes: of each leaf the first axis is the rows.
        devices: "local", all devices of this run; a list of devices; or by name what need not be there: a slice of TPUs
            ("v5e:16x16", "v5p:4x4x4*2" for two slices), GPUs ("h100:4x8", four machines of eight), a chip ("RTX 3080"),
            a system ("dgx-1"). For TPUs libtpu compiles (`pip install 'fnet[tpu-plan]'`), for some GPUs jax's CUDA
            plugin; without them the plan is an estimate and says so.
        strategy: one of `parallel.STRATEGIES`, to choose oneself, also with "+remat" and "+microbatches=N"; "fsdp" is
            with pins or without.
        mesh: lengths of the mesh's axes, one of which may be -1: {"data": -1, "tensor": 4}; "data" takes what is left
            where it is not named. By default all devices are along "data", and slices of TPUs or machines of GPUs along
            "slice" outside it: the state is split within one, and gradients alone are summed over all.
        rules: tensor parallelism: {a regular expression for a parameter's whole path, such as "blocks/fc/kernel": the
            mesh axis that each of its axes is split over, or None}. `parallel.rules` makes them from layers' names of
            axes.
        compile: False: estimate only, which takes seconds for any number of chips.

    Raises:
        ValueError: for an unknown strategy or chip, rows that the devices do not divide, a rule that fits no parameter,
            a step that does not return the state as it was given, or where nothing fits: then it names what takes
            most.
    """
    for name, function in (("step", step), ("init", init)):
        if not callable(function):
            raise TypeError(f"plan: {name} must be a function; got {function!r}")
    chips = target(devices)
    axes = _mesh.sizes(chips, mesh)
    places = _mesh.make(chips, axes)
    rows_by = math.prod(axes[name] for name in rows_over(places))
    batch = jax.tree.map_with_path(_check.shape, batch)
    rows = _check.rows(batch, rows_by)
    rungs = ladder(strategy, step, rows, rows_by)
    state = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    traced = _Traced(step, state, batch)
    _check.state(state, traced.out)
    draft = _Drafts(chips, axes, places, state, batch, traced, rules or {}, init)
    judged: list[Candidate] = []
    for rung in rungs:
        made = draft.compared(rung, compile)
        judged += made
        if any(each.verdict == "" for each in made):
            break
    best = _best(judged, draft.memory)
    if best is None:
        raise ValueError(_explain.nothing_fits(chips, judged, ROOM, draft.most() if chips.count == 1 else ()))
    verdicts = tuple(dataclasses.replace(each, verdict=each.verdict or _verdict(each, best, judged)) for each in judged)
    chosen = draft.plan(best.way)
    return dataclasses.replace(chosen, candidates=verdicts, find=draft.most if chips.count == 1 else None)


class _Traced:
    """A step's jaxprs, each traced once."""

    def __init__(self, step, state, batch):
        self.step, self.state, self.batch = step, state, batch
        closed, self.out = jax.make_jaxpr(step, return_shape=True)(state, batch)
        self._found = {(False, 1): (closed, count_jaxpr(closed))}
        leaves = [path for path, _ in jax.tree.leaves_with_path(state)]
        self.scanned = scanned_leaves(closed.jaxpr, leaves)
        self.unused = _check.unused(closed.jaxpr.invars[len(leaves):], closed.jaxpr, batch)
        # A program has no arguments for leaves that the step does not read.
        self.complete = not self.unused and not _check.unused(closed.jaxpr.invars[:len(leaves)], closed.jaxpr, state)

    def __call__(self, way: Way) -> tuple[Any, Count]:
        key = way.remat, way.microbatches
        if key not in self._found:
            closed = jax.make_jaxpr(way.applied(self.step))(self.state, self.batch)
            self._found[key] = closed, count_jaxpr(closed)
        return self._found[key]


class _Drafts:
    """Plans by their way, what they need, and which of them fit."""

    def __init__(self, chips, axes, places, state, batch, traced, rules, init):
        self.chips, self.axes, self.places, self.state, self.batch = chips, axes, places, state, batch
        self.traced, self.init = traced, init
        parameters = [(path_of(path[1:]), leaf.shape) for path, leaf in jax.tree.leaves_with_path(state)
                      if is_parameter(path, state)]
        self.ruled = applied(rules, parameters, axes)
        working = {name for spec in self.ruled.values() for name in spec} | {"slice", "data"}
        self.alike = math.prod(n for name, n in axes.items() if name not in working)    # devices that do the same work
        chip = chips.chip
        self.memory = None if chip.memory_bytes is None else chip.per_device.memory_bytes
        alone = all(n == 1 for name, n in axes.items() if name not in ("slice", "data"))
        cudnn = chip.vendor == "NVIDIA" and float(chip.architecture or 0) >= 8
        self.casts = chip.kind != "cpu"
        self.kernels = "cuda" if cudnn else "tpu" if chip.kind == "tpu" and alone else None

    def plan(self, way: Way) -> Plan:
        found = self.layout(way.state)
        place = lambda spec: NamedSharding(self.places, spec)
        state = jax.tree.map(place, found.specs, is_leaf=lambda x: isinstance(x, P))
        over = rows_over(self.places)
        spec = P(over[0] if len(over) == 1 else over)
        rows = jax.tree.map(lambda x: place(spec if x.ndim else P()), self.batch)
        return Plan(self.chips, self.places, way, state, rows, tuple(found.whole), self.batch, self.traced.unused,
                    self.init)

    @functools.lru_cache(None)    # noqa: B019 (as short-lived as the plan's making)
    def layout(self, kind):
        return layout(self.state, kind, self.axes["data"], self.traced.scanned, self.ruled)

    def candidate(self, way: Way) -> Candidate:
        closed, counted = self.traced(way)
        draft = self.plan(way)
        placed = jax.tree.leaves(draft.state)
        persistent = _held(self.state, draft.state, self.chips.chip)
        arguments = persistent + _held(self.batch, draft.batch, self.chips.chip)
        unpadded = _unpadded(self.state, draft.state) + _unpadded(self.batch, draft.batch)
        splits = [_split(where.spec) for where in placed]
        splits += [Split(0 if x.ndim else None) for x in jax.tree.leaves(self.batch)]
        reckoned = estimate(closed, splits, self.axes, whole=way.state == "zero1", kernels=self.kernels,
                            casts=self.casts)
        reckoned = _padded(reckoned, arguments.bytes, unpadded)
        return self.timed(Candidate(way, persistent.bytes, arguments.bytes, arguments.exact, reckoned, None,
                                    _cost.Time(None, None, None)), counted)

    def timed(self, each: Candidate, counted: Count | None = None) -> Candidate:
        counted = counted or self.traced(each.way)[1]
        state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.state))
        between = each.estimate.between.sent
        sent = each.ledger.sent - (between if each.compiled and each.compiled.ledger else 0)
        return dataclasses.replace(each, time=_cost.time(counted, self.chips, state, each.persistent, max(0, sent),
                                                         between, alike=self.alike))

    def compared(self, rung: list[Way], compile: bool) -> list[Candidate]:
        """The candidates of a rung; those that may be chosen have no verdict yet."""
        reckoned = [self.candidate(way) for way in rung]
        if not compile or self.chips.devices is None:
            free = lambda way: way.state == "fsdp" and not way.pins
            judged = [self.judged(each, 1.0) for each in reckoned]
            return [dataclasses.replace(each, verdict=each.verdict or _UNKNOWN) if free(each.way) else each
                    for each in judged]
        likely = [each for each in reckoned if not self.memory or each.estimate.peak <= DOUBT * ROOM * self.memory]
        likely.sort(key=lambda each: (each.estimate.ledger.sent + each.estimate.between.sent, rung.index(each.way)))
        if first := _best(likely, self.memory):
            likely = [first, *(each for each in likely if each is not first)]
        if len(rung) == 1:
            likely = reckoned    # as asked
        done: dict[Way, Candidate] = {}
        for each in likely:
            if self.chips.count > FEW and any(not made.verdict for made in done.values()):
                ways = {way._replace(pins=not way.pins) for way in done}
                if each.way not in ways:
                    continue
            compiled = _compile.compiled(self.plan(each.way).jit(self.traced.step), self.state, self.batch)
            done[each.way] = self.judged(self.timed(dataclasses.replace(each, compiled=compiled)), 1.0)
        sizes = [(each.arguments, each.compiled.arguments) for each in done.values() if each.compiled.peak is not None]
        if self.traced.complete and any(predicted != size for predicted, size in sizes):
            reckoned = [dataclasses.replace(each, exact=False) for each in reckoned]
            done = {way: dataclasses.replace(each, exact=False) for way, each in done.items()}
        rest = lambda each: dataclasses.replace(each, verdict=self.judged(each, DOUBT).verdict
                                                or f"{_LATER}: by the estimate it sends no less")
        return [done.get(each.way) or rest(each) for each in reckoned]

    def judged(self, each: Candidate, doubt: float) -> Candidate:
        if each.compiled and each.compiled.peak is None:
            return dataclasses.replace(each, verdict=f"rejected by the compiler: {each.compiled.said}")
        if self.memory and each.peak > doubt * ROOM * self.memory:
            return dataclasses.replace(each, verdict=f"rejected: needs more than {ROOM:.0%} of "
                                                     f"{self.memory / 2 ** 30:.1f} GiB")
        return each

    @functools.lru_cache(None)    # noqa: B019
    def most(self) -> tuple[tuple[Way, int], ...]:
        """The most rows that one chip holds: as it is, with activations computed again, and in eight microbatches."""
        if not self.memory:
            return ()
        ways = [Way("data"), Way("data", remat=True)]
        ways += [Way("data", remat=True, microbatches=8)] if takes_slices(self.traced.step) else []
        return tuple((way, self.rows(way)) for way in ways)

    def rows(self, way: Way) -> int:
        """Peaks grow about in proportion with the rows: each guess lies on the line through the two nearest."""
        def peak(rows):
            resized = lambda x: jax.ShapeDtypeStruct((rows * x.shape[0] // given, *x.shape[1:]), x.dtype)
            batch = jax.tree.map(lambda x: resized(x) if x.ndim else x, self.batch)
            closed = jax.make_jaxpr(way.applied(self.traced.step))(self.state, batch)
            splits = [Split()] * len(jax.tree.leaves(self.state))
            splits += [Split(0 if x.ndim else None) for x in jax.tree.leaves(batch)]
            reckoned = estimate(closed, splits, self.axes, kernels=self.kernels, casts=self.casts)
            draft = self.plan(way)    # of one device: each array is whole
            held = _held(self.state, draft.state, self.chips.chip) + _held(batch, draft.batch, self.chips.chip)
            unpadded = _unpadded(self.state, draft.state) + _unpadded(batch, draft.batch)
            return _padded(reckoned, held.bytes, unpadded).peak

        room = ROOM * self.memory
        given = max(x.shape[0] for x in jax.tree.leaves(self.batch) if x.ndim)
        first = max(2, given) * way.microbatches
        tried = {rows: peak(rows) for rows in (first, 2 * first)}
        for _ in range(8):
            below = sorted((n for n in tried if tried[n] <= room), reverse=True)
            above = sorted(n for n in tried if tried[n] > room)
            if below and tried[below[0]] > 0.98 * room:
                break
            a, b = (below[0], above[0]) if below and above else (below or above)[:2]
            each = max(1.0, (tried[b] - tried[a]) / (b - a))
            guess = max(1, int(a + (room - tried[a]) / each) // way.microbatches) * way.microbatches
            if guess in tried:
                break
            tried[guess] = peak(guess)
        return max((rows for rows, needs in tried.items() if needs <= room), default=0)


def _shards(tree, shardings) -> list[jax.ShapeDtypeStruct]:
    """What each chip holds of a tree."""
    return [jax.ShapeDtypeStruct(where.shard_shape(x.shape), x.dtype)
            for x, where in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings))]


def _held(tree, shardings, chip) -> Stored:
    """Bytes of a tree in each chip's memory."""
    return sum((stored(x, chip) for x in _shards(tree, shardings)), Stored(0, True))


def _unpadded(tree, shardings) -> int:
    return sum(x.size * x.dtype.itemsize for x in _shards(tree, shardings))


def _padded(reckoned: Estimate, arguments: int, unpadded: int) -> Estimate:
    """The estimate with the padding of its arguments, below which no peak is."""
    return reckoned._replace(peak=max(arguments, reckoned.peak + arguments - unpadded))


def _split(spec) -> Split:
    data = next((i for i, name in enumerate(spec) if name == "data"), None)
    return Split(None, data, tuple((i, name) for i, name in enumerate(spec) if name not in (None, "data")))


def _best(judged: list[Candidate], memory: float | None) -> Candidate | None:
    """Of those that fit the one that sends least; of about equals the fastest at best; of those the simplest that
    leaves half of the memory free, or the one that leaves most. What was compiled comes before what was not."""
    fit = [each for each in judged if not each.verdict]
    fit = [each for each in fit if each.compiled] or fit
    if not fit:
        return None
    least = min(map(_sent, fit))
    close = [each for each in fit if _sent(each) <= CLOSE * least]
    fastest = min((each.time.seconds or 0 for each in close), default=0)
    close = [each for each in close if (each.time.seconds or 0) <= CLOSE * fastest]
    return next((each for each in close if not memory or each.peak <= memory / 2),
                min(close, key=lambda each: each.peak))


def _sent(each: Candidate) -> float:
    if each.compiled and each.compiled.ledger is not None:
        return each.compiled.ledger.sent
    return each.estimate.ledger.sent + each.estimate.between.sent


def _verdict(each, best, judged):
    sent, least = _sent(each), _sent(best)
    if each.way == best.way:
        others = [other for other in judged if not other.verdict and other.way != each.way]
        if not others:
            if any(other.verdict.startswith(_LATER) for other in judged):
                return "chosen: by the estimate it sends least of those that fit"
            return "chosen: the only one that fits" if len(judged) > 1 else "chosen"
        if all(sent <= _sent(other) for other in others):
            return "chosen: it sends least of those that fit"
        return "chosen: it sends about the least, and " + _merit(best, next(
            other for other in others if _sent(other) < sent))
    if not least:
        return "sends more" if sent else "sends as little, and splits more"
    if sent > CLOSE * least:
        return f"sends {sent / least:.2f} times as much"
    return f"sends about as much ({sent / least:.2f}); {best.strategy} " + _merit(best, each)


def _merit(best: Candidate, other: Candidate) -> str:
    """What one of two that send about as much has for itself."""
    if (other.time.seconds or 0) > CLOSE * (best.time.seconds or 0):
        return "takes less time at best"
    return "needs less memory" if other.peak > best.peak else "is simpler"
