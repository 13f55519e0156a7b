"""The strategies for running a step on many devices, simplest first."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from fnet.parallel._pins import pin, rightly_divided
from fnet.transforms._rematerialize import rematerialize

# name -> description, simplest first
STRATEGIES = {
    "data": "every chip holds the whole state",
    "zero1": "parameters replicated, the optimizer's state split",
    "fsdp": "parameters and optimizer's state split",
    "fsdp+pins": "parameters and optimizer's state split, activations pinned to the batch",
    "explicit": "state and activations split as their types on the explicit mesh say",
}
MOST = 64  # maximum number of microbatches


class Strategy(NamedTuple):
    """A way to run a step on many devices. `str()` is its name; docs/parallel.md explains them.

    Attributes:
        state: what of the state is split: "data" (nothing), "zero1" (the optimizer's state), "fsdp"
            (everything) or "explicit" (what init and the step state themselves).
        pins: whether sharding constraints keep the activations split along the batch axis.
        remat: whether the backward pass recomputes activations instead of reading stored ones.
        microbatches: the number of slices of a batch that are processed one after another.

    >>> str(parallel.Strategy("fsdp", pins=True, remat=True))
    'fsdp+pins+remat'
    """

    state: str
    pins: bool = False
    remat: bool = False
    microbatches: int = 1

    def __str__(self):
        slices = f"microbatches={self.microbatches}" if self.microbatches > 1 else ""
        return "+".join(
            filter(None, (self.state, "pins" * self.pins, "remat" * self.remat, slices))
        )

    @property
    def words(self) -> str:
        """The description of the strategy, a text."""
        more = [", activations recomputed in the backward pass"] * self.remat
        more += [f", {self.microbatches} microbatches one after another"] * (self.microbatches > 1)
        return STRATEGIES[f"{self.state}{'+pins' * self.pins}"] + "".join(more)

    def applied(
        self, step: Callable, mesh: Mesh | None = None, axes: Sequence[str] = ()
    ) -> Callable:
        """Returns `step`, rewritten for the strategy. Without a mesh, or with a single device,
        there are neither pins nor sums that move out of loops. `axes` are the mesh axes over which
        the batch is split. Only for "explicit" may the axes of `mesh` be explicit.
        """
        if self.microbatches > 1:
            step = functools.partial(step, microbatches=self.microbatches)
        step = rematerialize(step) if self.remat else step
        if mesh is None or mesh.size == 1:
            return step
        if self.state == "explicit":
            return rightly_divided(step, mesh)
        return pin(step, mesh, axes[0] if len(axes) == 1 else axes, activations=self.pins)


def parse(strategy: str) -> Strategy | None:
    """Parses the name of a strategy. Returns None for "auto".

    Raises:
        ValueError: no strategy has the given name.
    """
    if strategy == "auto":
        return None
    state, *more = strategy.split("+")
    slices = [
        int(found[1]) for part in more if (found := re.fullmatch(r"microbatches=(\d+)", part))
    ]
    option = Strategy(state, "pins" in more, "remat" in more, slices[0] if slices else 1)
    if (
        state not in ("data", "zero1", "fsdp", "explicit")
        or str(option) != strategy
        or (option.pins and state != "fsdp")
    ):
        raise ValueError(
            f"plan: unknown strategy {strategy!r}; there are auto, {', '.join(STRATEGIES)}, each "
            "also with +remat and +microbatches=N, in this order"
        )
    return option


def ladder(
    strategy: str, step: Callable, rows: int, chips: int, *, typed: bool = False
) -> list[list[Strategy]]:
    """Returns the strategies to try, as a list of lists of strategies. The strategies of a list are
    tried only if no strategy of the preceding lists fits into memory. `typed` states whether the
    step states its own shardings."""
    option = parse(strategy)
    if option is not None and option.microbatches > 1:
        slices(step, option.microbatches, rows, chips)
    if option is not None:
        return [
            [option, option._replace(pins=True)]
            if option.state == "fsdp" and not option.pins
            else [option]
        ]
    base = [Strategy("explicit" if typed else "data")]
    if chips > 1 and not typed:
        base += [Strategy("zero1"), Strategy("fsdp"), Strategy("fsdp", pins=True)]
    rungs = [base, [option._replace(remat=True) for option in base]]
    if takes_slices(step):
        n = 2
        while n <= MOST and rows % (n * chips) == 0:
            rungs.append([option._replace(remat=True, microbatches=n) for option in base])
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
