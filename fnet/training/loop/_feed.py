"""Feed: the batches of a run, prepared ahead of the steps that use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fnet.training.data._arrays import checked_integers
from fnet.training.loop._prefetch import Prefetch
from fnet.training.loop._signals import Signals
from fnet.training.loop._spread import Spread


class Feed:
    """The batches of a run, on its devices and in the order of its steps.

    Step i uses batch `i + offset`. The offset is 0 until a rollback, after which the batches that
    led to a non-finite step are left out.

    Args:
      batches: the user's function, as in `fit`.
      steps: the step at which the run ends.
      spread: transfers the batches to the devices.
      signals: a signal ends a wait for a batch, except in a run with several processes, which must
        agree on the step at which they end.

    Attributes:
      example: the first batch, until the step is compiled. Each process of a run with a plan may
        have rows of its own, so there is no example, and the plan knows the shapes.
    """

    example: Any = None
    _prefetch: Prefetch | None = None

    def __init__(
        self, batches: Callable[[int], Any], *, steps: int, spread: Spread, signals: Signals
    ):
        self.batches = batches
        self._steps = steps
        self._spread = spread
        self._signals = signals
        self._waited = 0.0  # the value of `Prefetch.waited` at the last lap
        self._lap_at = 0

    @property
    def started(self) -> bool:
        return self._prefetch is not None

    def read_example(self, at: int) -> None:
        """Reads the first batch, whose shapes and digest describe the data of the run.

        Raises:
          Stopping: a signal arrived before the batch was ready.
        """
        if not self._spread.alone and self._spread.plan is not None:
            return
        prefetch = Prefetch(self.batches, at, at + 1, seen=self._interrupting(), move=False)
        try:
            self.example = prefetch()
        finally:
            prefetch.close()

    def shapes(self) -> Any:
        """Returns a tree with the shapes and dtypes of a batch, as long as there is an example."""
        return self._spread.shapes(lambda: self.example)

    def start(self, at: int, offset: int) -> None:
        """Starts to prepare the batches of the steps from `at` on."""
        self._prefetch = Prefetch(self._placed(offset), at, self._steps, seen=self._interrupting())
        self._waited, self._lap_at = 0.0, at

    def __call__(self) -> Any:
        """Returns the batch of the next step.

        Raises:
          Stopping: a signal arrived before the batch was ready.
          BaseException: the error that the user's function raised.
        """
        return self._prefetch()

    def close(self, *, wait: bool = False) -> None:
        self._prefetch.close(wait=wait)

    def replay(self, start: int, stop: int, offset: int) -> Prefetch:
        """Returns the batches of the steps from `start` to `stop` once more."""
        return Prefetch(self._placed(offset), start, stop, seen=self._signals)

    def restart_lap(self) -> None:
        """Forgets the waits so far, which the compilation of the step caused."""
        self._waited = self._prefetch.waited

    def lap(self, at: int) -> tuple[float, int]:
        """Returns the seconds for which the loop waited for batches since the last call of `lap`,
        and the number of steps since then."""
        seconds = self._prefetch.waited - self._waited
        steps = at - self._lap_at
        self._waited, self._lap_at = self._prefetch.waited, at
        return seconds, steps

    def _placed(self, offset: int) -> Callable[[int], Any]:
        def batch(step):
            at = step + offset
            return self._spread.batch(checked_integers(self.batches(at), f"batch {at}"), at)

        return batch

    def _interrupting(self) -> Signals | None:
        return self._signals if self._spread.alone else None
