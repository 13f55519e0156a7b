"""`plan`: compares strategies for running a training step on many devices, and selects one of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from fnet.jaxpr import misdivided
from fnet.parallel import _check, _combinations, _compile, _explain, _mesh, _ranking, _trace
from fnet.parallel._combinations import Combination
from fnet.parallel._context import _meshes as _context_meshes
from fnet.parallel._context._mapped import AXIS
from fnet.parallel._drafts import DOUBT, ROOM, Drafts
from fnet.parallel._experts import _meshes as _expert_meshes
from fnet.parallel._pins import avoided, avoided_with_types
from fnet.parallel._pipeline import depth
from fnet.parallel._plan import Candidate, Plan, rows_over
from fnet.parallel._strategies import Strategy, ladder, takes_slices
from fnet.parallel._targets import dividing, target
from fnet.transforms._modules import of_arrays

FIRST = (
    2  # candidates that are compiled, the best by their estimates; more only if these were wrong
)


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

    Memory decides first, then time, then the bytes that the chips send to each other. If nothing
    fits, `plan` recomputes activations ("+remat") and then also divides the batch into slices
    ("+microbatches=N"). All strategies are ranked by estimates from the step's jaxpr. If the step
    can be compiled for the devices, the first two are, and more only if the programs contradict
    their estimates. The devices need not be attached, and no arrays are allocated. docs/parallel.md
    explains the strategies, the choice and the accuracy of the estimates.

    Args:
        step: `step(state, batch) -> (state, metrics)`, or, for a tuple as the state,
            `step(model, opt_state, batch) -> (model, opt_state, metrics)`. A step of flax.nnx
            modules changes them in place and returns the metrics alone. For microbatches it needs a
            keyword argument `microbatches`, which it passes to `ft.microbatch`.
        init: `init(key) -> state`, of arrays and of modules. The parameters must be
            `state.params`, `state["params"]` or `state[0]`.
        batch: a batch, or its shapes and dtypes. The first axis of each leaf contains the rows (the
            examples); leaves without axes, such as a key, have none.
        devices: "local" (default: all devices of this run), "dividing" (the most of them over
            which the rows can be divided), a list of devices, or a name: a slice of TPUs
            ("v5e:16x16", "v5p:4x4x4*2" for two slices), GPUs ("h100:4x8" for four machines with
            eight each), a chip ("RTX 3080") or a system ("dgx-1").
        strategy: one of `parallel.STRATEGIES`, optionally with "+remat" and "+microbatches=N".
            "auto" (default) compares them all, "fsdp" compares "fsdp" and "fsdp+pins".
        mesh: the lengths of the mesh's axes, such as {"data": -1, "tensor": 4}, where one may be
            -1. The batch is split over "data", which is computed if absent, and over "slice", an
            axis that several slices or machines get by default, the layers of the step over
            "stage", which makes a pipeline, the time of texts over "context", and the experts of
            `nn.MixtureOfExperts` over "expert", as well as the batch. Or a `jax.sharding.Mesh` or
            `AbstractMesh` with an axis "data", whose axes keep their types; a `Mesh` also states
            the devices.
        rules: tensor parallelism, as a dict: a regular expression for the complete path of a
            parameter, such as "blocks/fc/kernel", to a tuple with a mesh axis or None for each of
            its axes. `parallel.rules` makes it from the axis names of layers.
        compile: whether to compile the step with the strategies that are best by their estimates.
            Estimates alone take seconds, for any number of chips. Default True.
        announce: a function that gets a text (str), such as "compiling fsdp", before each part that
            can take long. Default None.

    Returns:
        A `Plan`.

    Raises:
        TypeError: `step` or `init` is not a function.
        ValueError: no strategy fits into memory (the error lists the largest arrays); the strategy
            or the chip is unknown; the rows are not a multiple of the devices; a rule matches no
            parameter; the mesh has no axis "data"; the layers cannot be divided into stages; the
            axis "context" splits a step without attention, or a time that is too short; the axis
            "expert" splits a step without experts, or a number of them that is no multiple; the step
            changes the structure of the state; or a step that states its own shardings gets rules
            or a strategy for one device.

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
    batch = jax.tree.map_with_path(_check.shape, batch)
    if isinstance(devices, str) and devices == "dividing":
        devices = dividing(_check.sizes(batch), mesh)
    chips = target(_mesh.devices(mesh, devices))
    axes, rows = _mesh.sizes(chips, mesh), _check.rows(batch, 1)
    asked = strategy.split("+")[0] == AXIS
    over_time = _context_meshes.candidates(chips, mesh, rows, asked=asked)
    if asked and over_time:
        axes = over_time[0]
    places = _mesh.make(chips, axes, mesh)
    rows_by = math.prod(axes[name] for name in rows_over(places))
    over = ", ".join(f"{name}={axes[name]}" for name in rows_over(places))
    over = f" ({over})" if "," in over else ""
    if rows >= rows_by or strategy != "auto" or not over_time:
        _check.rows(batch, rows_by, over)
    announce("tracing the step")
    step, of_key, form = of_arrays(step, init)
    traced = _trace.traced(step, of_key, batch, places, strategy, ruled=bool(rules))
    state = traced.state
    if rules and (axes.get("stage", 1) > 1 or strategy.startswith("pipeline")):
        raise ValueError(
            "plan: rules= cannot be combined with the stages of a pipeline, whose layers are split "
            "over 'stage' alone; leave out rules= or the stages"
        )
    helps = asked or rows % rows_by or takes_slices(step)  # gives a device fewer tokens at a time
    over_time = _context_meshes.suitable(over_time, traced, asked=asked) if helps else []
    if not over_time:
        _check.rows(batch, rows_by, over)
    asked = strategy.split("+")[0] == "expert"
    apart = []
    if asked or (strategy == "auto" and chips.count > 1):
        apart = _expert_meshes.candidates(chips, mesh, rows, traced, asked=asked)
    options = ladder(
        strategy,
        step,
        rows,
        rows_by,
        typed=traced.typed,
        staged=axes.get("stage", 1) > 1,
        context=bool(over_time),
        experts=bool(apart),
    )
    rungs = _combinations.combinations(
        options,
        chips,
        mesh,
        lambda: depth(traced.program(Strategy("pipeline")), state),
        functools.partial(_context_meshes.shared, over_time, rows),
        apart,
    )

    @functools.lru_cache(None)
    def drafts(axes: tuple[tuple[str, int], ...]) -> Drafts:
        on = places if dict(axes) == dict(places.shape) else _mesh.make(chips, dict(axes), mesh)
        return Drafts(chips, dict(axes), on, state, batch, traced, rules or {}, init, announce)

    judged: list[Candidate] = []
    for rung in rungs:
        made = _compared(rung, drafts, compile and chips.devices is not None, announce)
        judged += made
        if any(each.verdict == "" for each in made):
            break
    draft = drafts(tuple(axes.items()))
    fit = [each for each in judged if not each.verdict]
    fit = [each for each in fit if each.compiled] or fit
    if not fit:
        announce("estimating the largest batch")
        largest = draft.largest_batches() if chips.count == 1 else ()
        raise ValueError(_explain.nothing_fits(chips, judged, ROOM, largest))
    best = _ranking.best(fit, draft.memory)
    verdicts = tuple(
        dataclasses.replace(each, verdict=each.verdict or _ranking.verdict(each, best, judged))
        for each in judged
    )
    chosen = drafts(tuple(best.mesh.items())).plan(best.options)
    places = chosen.mesh
    find = draft.largest_batches if chips.count == 1 else None
    held: tuple = ()
    if chips.count > 1:
        announce("checking how XLA divides the operations")
        closed = traced.program(best.options)
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


def _compared(
    rung: Sequence[Combination],
    drafts: Callable[[tuple[tuple[str, int], ...]], Drafts],
    compile: bool,
    announce: Callable[[str], Any],
) -> list[Candidate]:
    """Returns a candidate for each combination of a rung: all estimated, and the best of them
    compiled. The verdict of a candidate that may be chosen is ""."""
    estimated = [drafts(axes).candidate(strategy) for strategy, axes in rung]
    if not compile:
        return [_uncompiled(each, drafts) for each in estimated]
    # The only combination of a rung is what the user asked for, so it is compiled in any case.
    first = drafts(rung[0].axes)
    if len(rung) > 1:
        refused = [first.judged(each, DOUBT) for each in estimated]
        likely = [each for each in refused if not each.verdict]
        order = _ranking.ranked(likely, first.memory, ROOM)
    else:
        order = estimated
    done = _compiled(order, drafts, announce)
    if first.traced.complete and any(map(_mispredicted, done.values())):
        estimated = [dataclasses.replace(each, exact=False) for each in estimated]
        done = {key: dataclasses.replace(each, exact=False) for key, each in done.items()}
    places = {each.combination: place for place, each in enumerate(order, 1)}

    def described(each: Candidate) -> Candidate:
        if each.combination in done:
            return done[each.combination]
        judged = first.judged(each, DOUBT)
        if judged.verdict:
            return judged
        said = _ranking.not_compiled(each, places[each.combination], order[0])
        return dataclasses.replace(each, verdict=said)

    return [described(each) for each in estimated]


def _compiled(
    order: Sequence[Candidate],
    drafts: Callable[[tuple[tuple[str, int], ...]], Drafts],
    announce: Callable[[str], Any],
) -> dict[Combination, Candidate]:
    """Compiles the first candidates, and further ones as long as the compiled programs contradict
    their estimates."""
    done: dict[Combination, Candidate] = {}
    for place, each in enumerate(order, 1):
        why = "" if place <= FIRST else _why_more(done, order, each)
        if place > FIRST and not why:
            break
        of = f"{place} of {min(FIRST, len(order))}" if place <= FIRST else why
        announce(f"compiling {each.strategy} ({of})")
        draft = drafts(each.combination.axes)
        program = draft.plan(each.options)._compiled(draft.traced.step)
        compiled = _compile.compiled(program, draft.state, draft.batch)
        timed = draft.timed(dataclasses.replace(each, compiled=compiled))
        done[each.combination] = draft.judged(timed, 1.0)
    return done


def _why_more(done: Mapping[Combination, Candidate], order: Sequence[Candidate], following) -> str:
    """Why the following candidate is compiled, too, or "" if it need not be."""
    fit = [each for each in done.values() if not each.verdict]
    if not fit:
        return "nothing compiled so far fits"
    estimates = {each.combination: each for each in order}
    for each in fit:
        if not _ranking.contradicted(each, estimates[each.combination], following):
            return ""
    return "the compiled programs are worse than estimated"


def _uncompiled(each: Candidate, drafts) -> Candidate:
    """Returns a candidate of a plan for which nothing is compiled."""
    judged = drafts(each.combination.axes).judged(each, 1.0)
    if each.options.state == "fsdp" and not each.options.pins and not judged.verdict:
        # What XLA sends is not known before it compiles.
        return dataclasses.replace(judged, verdict=_ranking.UNKNOWN)
    return judged


def _mispredicted(each: Candidate) -> bool:
    """Whether a compiled program has arguments of another size than estimated."""
    assert each.compiled is not None
    return each.compiled.peak is not None and each.arguments != each.compiled.arguments
