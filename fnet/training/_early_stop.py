"""Early stopping: a rule, and a counter that lives in the checkpoint."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Stop when a metric has not improved for `patience` evaluations in a row.

    Args:
      metric: its name as logged, such as "validation/accuracy". Watch data that is neither trained
        on nor reported.
      patience: evaluations without improvement that are put up with.
      mode: "max" if larger is better, "min" if smaller is.
      min_delta: how much better counts as better.
    """

    metric: str
    patience: int
    mode: str = "max"
    min_delta: float = 0.0

    def __post_init__(self):
        if self.mode not in ("max", "min"):
            raise ValueError(f"mode='{self.mode}': the best value is the 'max' or the 'min'")
        if self.patience < 1:
            raise ValueError(f"patience={self.patience}: wait for at least one evaluation")

    def update(self, best: float, stale: int, value: float) -> tuple[float, int]:
        """The best value and the count of evaluations since, after one more; NaN is no best."""
        gain = value - best if self.mode == "max" else best - value
        if math.isnan(best) or gain > self.min_delta:
            return value, 0
        return best, stale + 1
