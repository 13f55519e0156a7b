"""The ways in which a step can be spread, simplest first."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import NamedTuple

from fnet.parallel._pins import pin
from fnet.transforms._rematerialize import rematerialize

# name -> in words; the simplest first
STRATEGIES = {
    "data": "every chip holds the whole state",
    "zero1": "parameters whole, the optimizer's state split",
    "fsdp": "parameters and optimizer's state split",
    "fsdp+pins": "parameters and optimizer's state split, activations pinned to the batch",
}
MOST = 64    # microbatches


class Way(NamedTuple):
    """One way: how the state lies ("data", "zero1", "fsdp"), whether activations are pinned to the batch and computed
    again in the backward pass, and in how many microbatches."""

    state: str
    pins: bool = False
    remat: bool = False
    microbatches: int = 1

    def __str__(self):
        slices = f"microbatches={self.microbatches}" if self.microbatches > 1 else ""
        return "+".join(filter(None, (self.state, "pins" * self.pins, "remat" * self.remat, slices)))

    @property
    def words(self) -> str:
        more = [", activations computed again in the backward pass"] * self.remat
        more += [f", {self.microbatches} microbatches one after the other"] * (self.microbatches > 1)
        return STRATEGIES[f"{self.state}{'+pins' * self.pins}"] + "".join(more)

    def applied(self, step: Callable, mesh=None, axes=()) -> Callable:
        """The step, rewritten; without a mesh it is not pinned, and loops' sums over the batch stay as they are."""
        if self.microbatches > 1:
            step = functools.partial(step, microbatches=self.microbatches)
        step = rematerialize(step) if self.remat else step
        if mesh is None or mesh.size == 1:
            return step
        return pin(step, mesh, axes[0] if len(axes) == 1 else axes, activations=self.pins)


def asked(strategy: str) -> Way | None:
    """What the user asks for by name, None for "auto".

    Raises:
        ValueError: for what is no strategy.
    """
    if strategy == "auto":
        return None
    state, *more = strategy.split("+")
    slices = [int(found[1]) for part in more if (found := re.fullmatch(r"microbatches=(\d+)", part))]
    way = Way(state, "pins" in more, "remat" in more, slices[0] if slices else 1)
    if state not in ("data", "zero1", "fsdp") or str(way) != strategy or (way.pins and state != "fsdp"):
        raise ValueError(f"plan: no strategy is called {strategy!r}; there are auto, {', '.join(STRATEGIES)}, each "
                         "also with +remat and +microbatches=N, in this order")
    return way


def ladder(strategy: str, step: Callable, rows: int, chips: int) -> list[list[Way]]:
    """Ways to try, in rungs: a rung is for where nothing on those before it fits."""
    way = asked(strategy)
    if way is not None and way.microbatches > 1:
        slices(step, way.microbatches, rows, chips)
    if way is not None:
        return [[way, way._replace(pins=True)] if way.state == "fsdp" and not way.pins else [way]]
    base = [Way("data")] if chips == 1 else [Way("data"), Way("zero1"), Way("fsdp"), Way("fsdp", pins=True)]
    rungs = [base, [way._replace(remat=True) for way in base]]
    if takes_slices(step):
        n = 2
        while n <= MOST and rows % (n * chips) == 0:
            rungs.append([way._replace(remat=True, microbatches=n) for way in base])
            n *= 2
    return rungs


def takes_slices(step: Callable) -> bool:
    """Whether a step takes a keyword `microbatches`."""
    try:
        return "microbatches" in inspect.signature(step).parameters
    except (TypeError, ValueError):
        return False


def slices(step: Callable, n: int, rows: int, chips: int) -> None:
    """Checks that a step can be cut."""
    if not takes_slices(step):
        raise ValueError(f"plan: for microbatches={n} the step has to take them: def step(state, batch, *, "
                         "microbatches=1), and hand them to ft.microbatch")
    if rows % (n * chips):
        raise ValueError(f"plan: {n} microbatches on {chips} devices do not divide {rows} rows")
