"""`plan`: compares strategies for running a training step on many devices, and selects one of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import _jax
from fnet.cost._count import Count
from fnet.cost._tiles import Stored, stored
from fnet.jaxpr import misdivided
from fnet.parallel import _check, _compile, _cost, _explain, _mesh, _trace
from fnet.parallel._estimate import Estimate, Split, estimate
from fnet.parallel._pins import avoided, avoided_with_types
from fnet.parallel._plan import Candidate, Plan, rows_over
from fnet.parallel._sharding_rules import applied, path_of
from fnet.parallel._shardings import is_parameter, layout, stated
from fnet.parallel._strategies import Strategy, ladder, takes_slices
from fnet.parallel._targets import target
from fnet.transforms._modules import of_arrays

ROOM = 0.92  # fraction of a chip's memory that a program may use; the runtime needs the rest
DOUBT = 1.25  # an estimate of memory may be too high by this factor; strategies with higher estimates are not compiled
CLOSE = 1.05  # bytes or times up to this factor of the minimum count as equal
_LATER = "not compiled"
_UNKNOWN = "unknown until compiled: may send far more"
FEW = 16  # for up to this number of devices, every strategy that may fit is compiled


def plan(
    step: Callable,
    init: Callable,
    batch: Any,
    *,
    devices: str | Sequence[jax.Device] = "local",
    strategy: str = "auto",
    mesh: Mapping[str, int] | Mesh | AbstractMesh | None = None,
    rules: Mapping[str, tuple[str | None, ...]] | None = None,
    compile: bool = True,
    announce: Callable[[str], Any] | None = None,
) -> Plan:
    """Decides how to divide a training step over many devices. The step is written for one device.

        plan = parallel.plan(step, init, batch)
        print(plan)                                 # every strategy, its costs, and the choice
        state = plan.init(jax.random.key(0))
        step = plan.jit(step)

    Memory decides first, then the bytes that the chips send to each other, then time. If nothing
    fits, `plan` recomputes activations ("+remat") and then also divides the batch into slices
    ("+microbatches=N"). Costs are read from the compiled program if the step can be compiled for
    the devices, and estimated from its jaxpr otherwise. The devices need not be attached, and no
    arrays are allocated. docs/parallel.md explains the strategies, the choice and the accuracy of
    the estimates.

    Args:
        step: `step(state, batch) -> (state, metrics)`, or, for a tuple as the state,
            `step(model, opt_state, batch) -> (model, opt_state, metrics)`. A step of flax.nnx
            modules changes them in place and returns the metrics alone. For microbatches it needs a
            keyword argument `microbatches`, which it passes to `ft.microbatch`.
        init: `init(key) -> state`, of arrays and of modules. The parameters must be
            `state.params`, `state["params"]` or `state[0]`.
        batch: a batch, or its shapes and dtypes. The first axis of each leaf contains the rows (the
            examples); leaves without axes, such as a key, have none.
        devices: "local" (default: all devices of this run), a list of devices, or a name: a slice
            of TPUs ("v5e:16x16", "v5p:4x4x4*2" for two slices), GPUs ("h100:4x8" for four machines
            with eight each), a chip ("RTX 3080") or a system ("dgx-1").
        strategy: one of `parallel.STRATEGIES`, optionally with "+remat" and "+microbatches=N".
            "auto" (default) compares them all, "fsdp" compares "fsdp" and "fsdp+pins".
        mesh: the lengths of the mesh's axes, such as {"data": -1, "tensor": 4}, where one may be
            -1. The batch is split over "data", which is computed if absent, and over "slice", an
            axis that several slices or machines get by default. Or a `jax.sharding.Mesh` or
            `AbstractMesh` with an axis "data", whose axes keep their types; a `Mesh` also states
            the devices.
        rules: tensor parallelism, as a dict: a regular expression for the complete path of a
            parameter, such as "blocks/fc/kernel", to a tuple with a mesh axis or None for each of
            its axes. `parallel.rules` makes it from the axis names of layers.
        compile: whether to compile the step. An estimate alone takes seconds, for any number of
            chips. Default True.
        announce: a function that gets a text (str), such as "compiling fsdp", before each part that
            can take long. Default None.

    Returns:
        A `Plan`.

    Raises:
        TypeError: `step` or `init` is not a function.
        ValueError: no strategy fits into memory (the error lists the largest arrays); the strategy
            or the chip is unknown; the rows are not a multiple of the devices; a rule matches no
            parameter; the mesh has no axis "data"; the step changes the structure of the state; or
            a step that states its own shardings gets rules or a strategy for one device.

    Source: Rajbhandari et al., ZeRO, 2020; Zhao et al., PyTorch FSDP, 2023.

    >>> step = lambda state, batch: ({"w": state["w"] - 0.1 * batch.mean(0)}, {"mean": batch.mean()})
    >>> init = lambda key: {"w": jax.random.normal(key, (3,))}
    >>> plan = parallel.plan(step, init, jnp.ones((8, 3)), devices=jax.devices()[:1])
    >>> state = plan.init(jax.random.key(0))
    >>> state, metrics = plan.jit(step)(state, jnp.ones((8, 3)))
    >>> float(metrics["mean"])
    1.0
    """
    for name, function in (("step", step), ("init", init)):
        if not callable(function):
            raise TypeError(f"plan: {name} must be a function; got {function!r}")
    announce = announce or (lambda stage: None)
    chips = target(_mesh.devices(mesh, devices))
    axes = _mesh.sizes(chips, mesh)
    places = _mesh.make(chips, axes, mesh)
    rows_by = math.prod(axes[name] for name in rows_over(places))
    batch = jax.tree.map_with_path(_check.shape, batch)
    rows = _check.rows(batch, rows_by)
    announce("tracing the step")
    step, of_key, form = of_arrays(step, init)
    traced = _trace.traced(step, of_key, batch, places, strategy, ruled=bool(rules))
    state = traced.state
    rungs = ladder(strategy, step, rows, rows_by, typed=traced.typed)
    draft = Drafts(chips, axes, places, state, batch, traced, rules or {}, init, announce)
    judged: list[Candidate] = []
    for rung in rungs:
        made = draft.compared(rung, compile)
        judged += made
        if any(each.verdict == "" for each in made):
            break
    best = _best(judged, draft.memory)
    if best is None:
        announce("estimating the largest batch")
        largest = draft.largest_batches() if chips.count == 1 else ()
        raise ValueError(_explain.nothing_fits(chips, judged, ROOM, largest))
    verdicts = tuple(
        dataclasses.replace(each, verdict=each.verdict or _verdict(each, best, judged))
        for each in judged
    )
    chosen = draft.plan(best.options)
    find = draft.largest_batches if chips.count == 1 else None
    held: tuple = ()
    if chips.count > 1:
        announce("checking how XLA divides the operations")
        closed = traced(best.options)[0]
        if traced.typed:
            with _mesh.tracing(places, True):
                held = avoided_with_types(closed, places, (state, traced.batch))
        else:
            held = avoided(
                closed, misdivided.with_automatic_axes(places), chosen.axes, state, batch
            )
    return dataclasses.replace(
        chosen, candidates=verdicts, avoided=held, form=form(), _find_largest=find
    )


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
        parameters = [
            (path_of(path[1:]), leaf.shape)
            for path, leaf in jax.tree.leaves_with_path(state)
            if is_parameter(path, state)
        ]
        self.ruled = applied(rules, parameters, axes)
        working = {name for spec in self.ruled.values() for name in spec} | {"slice", "data"}
        # Devices that do the same work.
        self.alike = math.prod(n for name, n in axes.items() if name not in working)
        chip = chips.chip
        self.memory = None if chip.memory_bytes is None else chip.per_device.memory_bytes

    def plan(self, option: Strategy) -> Plan:
        layout = self.layout(option.state)
        place = lambda spec: NamedSharding(self.places, spec)
        state = jax.tree.map(place, layout.specs, is_leaf=lambda x: isinstance(x, P))
        over = rows_over(self.places)
        rows = P(over[0] if len(over) == 1 else over)
        batch = jax.tree.map(lambda x: place(rows if x.ndim else P()), self.batch)
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
        )

    @functools.lru_cache(None)  # noqa: B019 (lives only while a plan is created)
    def layout(self, kind):
        if kind == "explicit":
            return stated(self.state)
        return layout(self.state, kind, self.axes["data"], self.traced.scanned, self.ruled)

    def candidate(self, option: Strategy) -> Candidate:
        self.announce(f"estimating {option}")
        closed, counted = self.traced(option)
        draft = self.plan(option)
        persistent = _held(self.state, draft.state, self.chips.chip)
        arguments = persistent + _held(self.batch, draft.batch, self.chips.chip)
        candidate = Candidate(
            option,
            persistent.bytes,
            arguments.bytes,
            arguments.exact,
            _estimated(draft, closed, self.state, self.batch),
            None,
            _cost.Time(None, None, None),
        )
        return self.timed(candidate, counted)

    def timed(self, each: Candidate, counted: Count | None = None) -> Candidate:
        counted = counted or self.traced(each.options)[1]
        state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.state))
        sent, between = each.ledger.sent, each.estimate.between.sent
        if each.compiled and each.compiled.ledger:
            sent -= between  # the ledger of a compiled program includes it
        time = _cost.time(
            counted, self.chips, state, each.persistent, max(0, sent), between, alike=self.alike
        )
        return dataclasses.replace(each, time=time)

    def compared(self, rung: list[Strategy], compile: bool) -> list[Candidate]:
        """Compares the strategies in the list `rung`, and returns a candidate (a strategy with its
        costs) for each strategy. The field `verdict` of a candidate is "" if `plan` may select the
        candidate."""
        estimated = [self.candidate(option) for option in rung]
        if not compile or self.chips.devices is None:
            return [self._uncompiled(each) for each in estimated]
        # The only strategy of a rung is what the user requested, so it is compiled in any case.
        likely = estimated if len(rung) == 1 else self._likely(estimated, rung)
        done: dict[Strategy, Candidate] = {}
        for each in likely:
            if self._needless(each.options, done):
                continue
            self.announce(f"compiling {each.options}")
            program = self.plan(each.options)._compiled(self.traced.step)
            compiled = _compile.compiled(program, self.state, self.batch)
            timed = self.timed(dataclasses.replace(each, compiled=compiled))
            done[each.options] = self.judged(timed, 1.0)
        if self.traced.complete and any(map(_mispredicted, done.values())):
            estimated = [dataclasses.replace(each, exact=False) for each in estimated]
            done = {option: dataclasses.replace(each, exact=False) for option, each in done.items()}
        return [done.get(each.options) or self._not_compiled(each) for each in estimated]

    def _uncompiled(self, each: Candidate) -> Candidate:
        """Returns a candidate of a plan for which nothing is compiled."""
        judged = self.judged(each, 1.0)
        if each.options.state == "fsdp" and not each.options.pins and not judged.verdict:
            # What XLA sends is not known before it compiles.
            return dataclasses.replace(judged, verdict=_UNKNOWN)
        return judged

    def _likely(self, estimated: list[Candidate], rung: list[Strategy]) -> list[Candidate]:
        """Returns the candidates that may fit into memory, in the order in which they are
        compiled: first the one that the estimates select, then by the bytes that they send."""
        fits = lambda each: not self.memory or each.estimate.peak <= DOUBT * ROOM * self.memory
        sent = lambda each: each.estimate.ledger.sent + each.estimate.between.sent
        likely = [each for each in estimated if fits(each)]
        likely.sort(key=lambda each: (sent(each), rung.index(each.options)))
        first = _best(likely, self.memory)
        if first:
            likely = [first, *(each for each in likely if each is not first)]
        return likely

    def _needless(self, option: Strategy, done: dict[Strategy, Candidate]) -> bool:
        """Whether a strategy for many chips, whose compilation takes long, need not be compiled:
        another one may be selected already, and this one is not its form with or without pins."""
        if self.chips.count <= FEW or all(each.verdict for each in done.values()):
            return False
        return option._replace(pins=not option.pins) not in done

    def _not_compiled(self, each: Candidate) -> Candidate:
        verdict = self.judged(each, DOUBT).verdict or f"{_LATER}: estimated to send no less"
        return dataclasses.replace(each, verdict=verdict)

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
        memory of the devices.

        Peak memory is roughly linear in the number of rows. The search therefore interpolates
        linearly between two numbers of rows that it has tried: the largest number that fits into
        memory, and the smallest number that does not fit. If all or none of the tried numbers fit,
        the search extrapolates from two of these numbers.
        """
        given = max(x.shape[0] for x in jax.tree.leaves(self.batch) if x.ndim)

        def resized(x: jax.ShapeDtypeStruct, rows: int) -> jax.ShapeDtypeStruct:
            if not x.ndim:
                return x
            return jax.ShapeDtypeStruct((rows * x.shape[0] // given, *x.shape[1:]), x.dtype)

        def peak(rows: int) -> float:
            batch = jax.tree.map(lambda x: resized(x, rows), self.batch)
            program = self.traced.resized(option, batch)
            return _estimated(self.plan(option), program, self.state, batch).peak

        room = ROOM * self.memory
        unit = option.microbatches * self.chips.count
        first = max(2, given) * option.microbatches
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
        closed = _jax.make_jaxpr(plan.options.applied(step))(state, batch)
    return _estimated(plan, closed, state, batch)


def _estimated(plan, closed, state, batch) -> Estimate:
    """Estimates the memory and transfers of a plan's step on each device. The estimated peak memory
    is at least the size of the padded arguments of the step."""
    chip, axes = plan.chip, dict(plan.mesh.shape)
    alone = all(n == 1 for name, n in axes.items() if name not in ("slice", "data"))
    cudnn = chip.vendor == "NVIDIA" and float(chip.architecture or 0) >= 8
    kernels = "cuda" if cudnn else "tpu" if chip.kind == "tpu" and alone else None
    splits = [_split(where.spec) for where in jax.tree.leaves(plan.state)]
    splits += [Split(0 if x.ndim else None) for x in jax.tree.leaves(batch)]
    found = estimate(
        closed,
        splits,
        axes,
        whole=plan.options.state == "zero1",
        kernels=kernels,
        casts=chip.kind != "cpu",
    )
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
    return Split(None, data, tuple((i, name) for i, name in over if name not in (None, "data")))


def _best(judged: list[Candidate], memory: float | None) -> Candidate | None:
    """Selects a candidate (a strategy with its costs) that fits into memory, or returns None. If
    candidates were compiled, only compiled candidates are considered. The function applies the
    criteria that the docstring of `plan` describes."""
    fit = [each for each in judged if not each.verdict]
    fit = [each for each in fit if each.compiled] or fit
    if not fit:
        return None
    least = min(map(_sent, fit))
    close = [each for each in fit if _sent(each) <= CLOSE * least]
    fastest = min((each.time.seconds or 0 for each in close), default=0)
    close = [each for each in close if (each.time.seconds or 0) <= CLOSE * fastest]
    return next(
        (each for each in close if not memory or each.peak <= memory / 2),
        min(close, key=lambda each: each.peak),
    )


def _mispredicted(each: Candidate) -> bool:
    """Whether a compiled program has arguments of another size than estimated."""
    assert each.compiled is not None
    return each.compiled.peak is not None and each.arguments != each.compiled.arguments


def _sent(each: Candidate) -> float:
    if each.compiled and each.compiled.ledger is not None:
        return each.compiled.ledger.sent
    return each.estimate.ledger.sent + each.estimate.between.sent


def _verdict(each, best, judged):
    sent, least = _sent(each), _sent(best)
    if each.options == best.options:
        others = [other for other in judged if not other.verdict and other.options != each.options]
        if not others:
            if any(other.verdict.startswith(_LATER) for other in judged):
                return "chosen: estimated to send least of those that fit"
            return "chosen: the only one that fits" if len(judged) > 1 else "chosen"
        if all(sent <= _sent(other) for other in others):
            return "chosen: sends least of what fits"
        return "chosen: sends about the least, and " + _merit(
            best, next(other for other in others if _sent(other) < sent)
        )
    if not least:
        return "sends more" if sent else "sends as little, and splits more"
    if sent > CLOSE * least:
        return f"sends {sent / least:.2f} times as much"
    return f"sends as much; {best.strategy} " + _merit(best, each)


def _merit(best: Candidate, other: Candidate) -> str:
    """Returns a text that states the advantage of `best` over another strategy that sends about as
    many bytes."""
    if (other.time.seconds or 0) > CLOSE * (best.time.seconds or 0):
        return "takes less time at best"
    return "needs less memory" if other.peak > best.peak else "is simpler"
