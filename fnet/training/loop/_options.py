"""Options: what the caller of `fit` asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fnet.training.loop._early_stop import EarlyStop


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `fit` that stay the same during a run, checked and without None where `fit`
    has a default. See `fit` for their meaning.

    Fields:
      best: (metric, mode), where `fit` has `best` and `best_mode`.
      collects: whether Python's garbage collector is to be enabled after the first step.
    """

    steps: int
    evaluate: Mapping[str, Callable[[Any], Mapping[str, Any]]]
    every: int
    save_every: int
    log_every: int
    best: tuple[str, str] | None
    early_stop: EarlyStop | None
    on_step: Sequence[Callable]
    nonfinite: str
    debug: bool
    tune: bool
    notes: Mapping[str, Any]
    collects: bool

    @property
    def skips(self) -> bool:
        """Whether the update of a non-finite step is discarded on the device."""
        return self.nonfinite == "skip"

    def watched(self) -> set[str]:
        """Returns the names of the metrics that decide on the best state and on early stopping."""
        names = set()
        if self.best is not None:
            names.add(self.best[0])
        if self.early_stop is not None:
            names.add(self.early_stop.metric)
        return names

    def criteria(self) -> dict[str, list[str | None] | None]:
        """Returns the metric and mode of `best` and of `early_stop`, as a dict to be stored in each
        checkpoint."""
        rule = self.early_stop
        return {
            "best": self.best and list(self.best),
            "early_stop": rule and [rule.metric, rule.mode],
        }
