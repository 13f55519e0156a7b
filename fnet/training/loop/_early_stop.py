"""The condition for early stopping, and the counter of evaluations without improvement."""

from __future__ import annotations

import dataclasses
import math

from fnet.training._direction import direction


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStop:
    """Ends a run when a metric has not improved for `patience` evaluations in a row.

    NaN and infinity are no improvement. `fit` returns the last state, or with `restore_best=True`
    the best.

    Args:
      metric: the logged name, such as "validation/accuracy". Compute it from validation data:
        examples that are used neither for training nor for the final result that you report.
      patience: after how many evaluations in a row without improvement the run stops.
      mode: "max" or "min": which value is better. Default None: known for accuracies, losses,
        errors and other common metrics; required for the rest.
      min_delta: by more than how much an improvement must exceed the best value. Default 0.

    Raises:
      ValueError: `mode` is neither "max" nor "min", or missing for a metric whose direction fnet
        does not know; `patience` is less than 1; or `min_delta` is negative or not finite.

    >>> tr.EarlyStop(metric="validation/loss", mode="min", patience=3).patience
    3
    """

    metric: str
    patience: int
    mode: str | None = None
    min_delta: float = 0.0

    def __post_init__(self):
        object.__setattr__(self, "mode", direction(self.metric, self.mode, "mode="))
        if not self.patience >= 1:
            raise ValueError(f"patience={self.patience}: wait for at least one evaluation")
        if not 0 <= self.min_delta < math.inf:
            raise ValueError(
                f"min_delta={self.min_delta}: the smallest improvement is a number from 0 up"
            )

    def update(self, best: float, stale: int, value: float) -> tuple[float, int]:
        """Returns the best value of the metric so far, and the number of evaluations since.

        Args:
          best: the best value before, or NaN before the first evaluation.
          stale: the number of evaluations since that one.
          value: the value of the latest evaluation.
        """
        if better(value, best, self.mode, self.min_delta):
            return value, 0
        return best, stale + 1


def better(value: float, best: float, mode: str, min_delta: float = 0.0) -> bool:
    """Whether a metric's value is finite and improves on `best`, which is NaN if there is no
    earlier value."""
    gain = value - best if mode == "max" else best - value
    return math.isfinite(value) and (math.isnan(best) or gain > min_delta)
