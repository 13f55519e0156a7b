"""The strategies for running a step on many devices, simplest first."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from fnet.parallel._pins import pin, rightly_divided
from fnet.parallel._pipeline import pipelined
from fnet.transforms._rematerialize import rematerialize

# name -> description, simplest first
STRATEGIES = {
    "data": "every chip holds the whole state",
    "zero1": "parameters replicated, the optimizer's state split",
    "fsdp": "parameters and optimizer's state split",
    "fsdp+pins": "parameters and optimizer's state split, activations pinned to the batch",
    "context": "time split, parameters and optimizer's state split over all chips, activations pinned",
    "expert": "experts apart, parameters and optimizer's state split over all chips, activations pinned",
    "explicit": "state and activations split as their types on the explicit mesh say",
    "pipeline": "layers on the stages of a pipeline, the rest of the state split over all chips",
}
MOST = 64  # maximum number of microbatches


class Strategy(NamedTuple):
    """A way to run a step on many devices. `str()` is its name; docs/parallel.md explains them.

    Attributes:
        state: what of the state is split: "data" (nothing), "zero1" (the optimizer's state), "fsdp"
            (everything), "context" (everything, and the activations along time), "expert"
            (everything, the experts each on their own chips), "explicit" (what
            init and the step state themselves) or "pipeline" (the layers over the stages of a
            pipeline, the rest over all chips).
        pins: whether sharding constraints keep the activations split along the batch axis.
        remat: whether the backward pass recomputes activations instead of reading stored ones.
        microbatches: the number of slices of a batch that are processed one after another. In a
            pipeline, that of the microbatches that travel from stage to stage, or 1 for the default.
        rounds: the number of groups of layers on each stage of a pipeline.

    >>> str(parallel.Strategy("fsdp", pins=True, remat=True))
    'fsdp+pins+remat'
    """

    state: str
    pins: bool = False
    remat: bool = False
    microbatches: int = 1
    rounds: int = 1

    def __str__(self):
        slices = f"microbatches={self.microbatches}" if self.microbatches > 1 else ""
        rounds = f"rounds={self.rounds}" if self.rounds > 1 else ""
        return "+".join(
            filter(None, (self.state, "pins" * self.pins, "remat" * self.remat, slices, rounds))
        )

    @property
    def slices(self) -> int:
        """The number of slices into which the step itself divides a batch, with `ft.microbatch`."""
        return 1 if self.state == "pipeline" else self.microbatches

    @property
    def words(self) -> str:
        """The description of the strategy, a text."""
        more = [", activations recomputed in the backward pass"] * self.remat
        more += [f", {self.slices} microbatches one after another"] * (self.slices > 1)
        return STRATEGIES[f"{self.state}{'+pins' * self.pins}"] + "".join(more)

    def applied(
        self, step: Callable, mesh: Mesh | None = None, axes: Sequence[str] = ()
    ) -> Callable:
        """Returns `step`, rewritten for the strategy. Without a mesh, or with a single device,
        there are neither pins nor sums that move out of loops. `axes` are the mesh axes over which
        the batch is split. Only for "explicit" may the axes of `mesh` be explicit.
        """
        if self.slices > 1:
            step = functools.partial(step, microbatches=self.slices)
        step = rematerialize(step) if self.remat else step
        if mesh is None or mesh.size == 1:
            return step
        if self.state == "explicit":
            return rightly_divided(step, mesh)
        if self.state == "pipeline":
            number = self.microbatches if self.microbatches > 1 else None
            return pipelined(step, mesh, microbatches=number, rounds=self.rounds)
        over = axes[0] if len(axes) == 1 else axes
        return pin(step, mesh, over, activations=self.pins or self.state in ("context", "expert"))


def parse(strategy: str) -> Strategy | None:
    """Parses the name of a strategy. Returns None for "auto".

    Raises:
        ValueError: no strategy has the given name.
    """
    if strategy == "auto":
        return None
    state, *more = strategy.split("+")
    number = lambda name: next(
        (int(found[1]) for part in more if (found := re.fullmatch(rf"{name}=(\d+)", part))), 1
    )
    option = Strategy(
        state, "pins" in more, "remat" in more, number("microbatches"), number("rounds")
    )
    if (
        state not in ("data", "zero1", "fsdp", "context", "expert", "explicit", "pipeline")
        or str(option) != strategy
        or (option.pins and state != "fsdp")
        or (option.rounds > 1 and state != "pipeline")
    ):
        raise ValueError(
            f"plan: unknown strategy {strategy!r}; there are auto, {', '.join(STRATEGIES)}, each "
            "also with +remat and +microbatches=N, in this order, and pipeline with +rounds=N"
        )
    return option


def ladder(
    strategy: str,
    step: Callable,
    rows: int,
    chips: int,
    *,
    typed: bool = False,
    staged: bool = False,
    context: bool = False,
    experts: bool = False,
) -> list[list[Strategy]]:
    """Returns the strategies to try, as a list of lists of strategies. The strategies of a list are
    tried only if no strategy of the preceding lists fits into memory. `typed` states whether the
    step states its own shardings, `staged` whether the mesh has an axis "stage", `context` whether
    time can be split, and `experts` whether experts can lie apart. If the chips cannot share the
    rows, nothing else than splitting time is tried."""
    option = parse(strategy)
    if option is not None and option.slices > 1:
        slices(step, option.slices, rows, chips)
    if staged and option is not None and option.state != "pipeline":
        raise ValueError(
            f"plan: the mesh axis 'stage' is for the stages of a pipeline; got strategy "
            f"{strategy!r}. Use strategy='pipeline' or 'auto', or another name for the axis"
        )
    if staged and option is None:
        option = Strategy("pipeline")
        return [[option], [option._replace(remat=True)]]
    if option is not None:
        return [
            [option, option._replace(pins=True)]
            if option.state == "fsdp" and not option.pins
            else [option]
        ]
    times = _over_time(step, rows, chips) if context else []
    if times and rows % chips:
        return times
    base = [Strategy("explicit" if typed else "data")]
    if chips > 1 and not typed:
        base += [Strategy("zero1"), Strategy("fsdp"), Strategy("fsdp", pins=True)]
    rungs = [base, [option._replace(remat=True) for option in base]]
    if experts:
        rungs += [[Strategy("expert")], [Strategy("expert", remat=True)]]
    if takes_slices(step):
        n = 2
        while n <= MOST and rows % (n * chips) == 0:
            rungs.append([option._replace(remat=True, microbatches=n) for option in base])
            n *= 2
    return rungs + times


def _over_time(step: Callable, rows: int, chips: int) -> list[list[Strategy]]:
    """Returns the strategies that split time, where this gives a chip fewer tokens at a time: if the
    chips cannot share the rows, or if microbatches have too few rows to share."""
    option = Strategy("context")
    rungs = [[option], [option._replace(remat=True)]] if rows % chips else []
    n = 2
    while takes_slices(step) and n <= MOST and rows % n == 0:
        if rows % (n * chips):
            rungs.append([option._replace(remat=True, microbatches=n)])
        n *= 2
    return rungs


def takes_slices(step: Callable) -> bool:
    """Whether a step has a keyword argument `microbatches`."""
    try:
        return "microbatches" in inspect.signature(step).parameters
    except (TypeError, ValueError):
        return False


def slices(step: Callable, n: int, rows: int, chips: int) -> None:
    """Raises an error if a step cannot be split into microbatches."""
    if not takes_slices(step):
        raise ValueError(
            f"plan: for microbatches={n} the step needs a keyword: def step(state, batch, *, "
            "microbatches=1), which it passes to ft.microbatch"
        )
    if rows % (n * chips):
        raise ValueError(
            f"plan: {rows} rows are not a multiple of {n} microbatches x {chips} devices"
        )
