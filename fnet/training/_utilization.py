"""Model FLOP utilisation: the share of the chip's peak that a step makes use of, or why it is unknown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Utilization:
    """FLOPs of one step beside the FLOP/s the chip can do.

    Fields:
      flops: of one step, counted from its jaxpr; None if unknown.
      peak: FLOP/s of the chips it runs on; None if unknown.
      text: both in words, or the reason why one is missing.
    """

    flops: float | None
    peak: float | None
    text: str

    def mfu(self, rate: float) -> float | None:
        """The utilisation at `rate` steps per second, 1.0 being the peak; None if unknown."""
        if self.flops is None or self.peak is None:
            return None
        return self.flops * rate / self.peak


def utilization(step: Callable[..., Any], *inputs: Any) -> Utilization:
    return Utilization(None, None, "MFU unknown")
