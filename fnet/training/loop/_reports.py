"""Reports: what a run tells its user, on the display and in the logs of its folder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fnet import cost
from fnet import hardware as hw
from fnet.training.loop._clock import Clock
from fnet.training.loop._feed import Feed
from fnet.training.loop._progress import Progress
from fnet.training.record._logs import Logger
from fnet.training.record._media import MEDIA


class Reports:
    """What a run tells its user, and the clock from which it tells the speed.

    Args:
      progress: displays the run, or None.
      steps: the step at which the run ends.

    Attributes:
      logger: writes the logs of the run's folder. None without a folder, and in all processes but
        the first.
      open: a function that returns such a logger, for the step that the run has reached.
      clock: measures the steps per second.
      utilization: a function of the steps per second that returns the model FLOPs utilization.
      energy: measures the energy of the devices, if their counters can be read.
    """

    logger: Logger | None = None
    open: Callable[[], Logger] | None = None
    utilization: Callable[[float], cost.MFU] | None = None

    def __init__(self, progress: Progress | None, steps: int):
        self.progress = progress
        self.steps = steps
        self.clock = Clock()
        self.energy: hw.EnergyMeter | None = None
        self._metered = (0, 0.0)  # step, joules
        self._per_step: float | None = None

    @property
    def listened(self) -> bool:
        """Whether anyone would read a report."""
        return self.progress is not None or self.logger is not None

    def start(self, at: int) -> None:
        """Starts the display and the clock of a run that begins or resumes at step `at`."""
        self.restart_clock()
        if self.listened:
            self.energy = hw.energy_meter()
            self._metered = at, 0.0
        if self.progress is not None:
            self.progress.start(at, self.steps)

    def restart_clock(self) -> None:
        """Measures the time of the compilation from now on."""
        self.clock = Clock()

    def waiting(self, for_what: str) -> contextlib.AbstractContextManager:
        """Displays that the run waits."""
        if self.progress is None:
            return contextlib.nullcontext()
        return self.progress.waiting(for_what)

    def say(self, at: int, text: str) -> None:
        """Displays a line, and records it as an event."""
        if self.progress is not None:
            self.progress.line(text)
        self.note(at, text)

    def note(self, at: int, text: str) -> None:
        """Records an event, without displaying it."""
        if self.logger is not None:
            self.logger.note(at, text)

    def write(self, at: int, values: Mapping[str, Any]) -> None:
        """Writes the values of a step to the logs."""
        if self.logger is not None:
            self.logger.write(at, values)

    def show(self, at: int, values: Mapping[str, float]) -> None:
        """Displays the metrics of a step, except those of single members of a population, whose
        names end with a number."""
        if self.progress is None:
            return
        values = {
            name: value for name, value in values.items() if not name.rpartition("/")[2].isdigit()
        }
        rate = self.clock.rate
        left = rate and self.clock.left(at, self.steps)
        mfu = self.utilization(rate) if rate and self.utilization else None
        joules = self._joules(at)
        energy = {} if joules is None else {"joules": joules}
        self.progress.log(at, values, rate, left, mfu, **energy)

    def _joules(self, at: int) -> float | None:
        """Returns the joules of a step since the last call at another step, or None."""
        before, joules = self._metered
        if self.energy is None or at == before:
            return self._per_step
        now = self.energy.joules()
        self._metered = at, now
        self._per_step = (now - joules) / (at - before) if at > before else None
        return self._per_step

    def tick(self, at: int) -> None:
        """Moves the progress bar."""
        if self.progress is not None:
            self.progress.tick(at, self.clock.rate, self.clock.left(at, self.steps))

    def times(self, at: int, feed: Feed) -> dict[str, float]:
        """Returns the speed since the last call of `times`. The caller must wait for the device
        before it calls `times`."""
        rate = self.clock.lap(at)
        waited, steps = feed.lap(at)
        times = {
            "steps_per_second": rate,
            "mfu": rate and self.utilization and self.utilization(rate).value,
            "joules_per_step": self._joules(at),
            "compile_seconds": self.clock.compiled,
            "data": rate and waited * rate / steps,
        }
        return {name: value for name, value in times.items() if value is not None}

    def close_logger(self) -> None:
        if self.logger is not None:
            self.logger.close()

    def reopen_logger(self) -> None:
        """Opens the logs again after a rollback, without the lines of the steps after it."""
        if self.logger is not None:
            self.logger = self.open()


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values that are numbers."""
    return {
        name: float(x) for name, x in values.items() if np.ndim(x) == 0 and not isinstance(x, MEDIA)
    }


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Returns the values with None in place of NaN and infinity, which JSON does not have."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
