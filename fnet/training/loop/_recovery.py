"""Recovery: handles a state or a metric that is not finite. It skips the step, rolls back, or stops
with an explanation."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.training.checkpoints._reading import CheckpointError
from fnet.training.loop import _nonfinite, _reducing
from fnet.training.loop._feed import Feed
from fnet.training.loop._nonfinite import Diverged
from fnet.training.loop._options import Options
from fnet.training.loop._program import Program
from fnet.training.loop._reports import Reports
from fnet.training.loop._run_state import RunState
from fnet.training.loop._signals import Stopping

NONFINITE = ("stop", "skip", "rollback")
_ROLLBACKS = 3  # largest number of rollbacks to the same checkpoint


class Recovery:
    """Handles steps whose state or metrics are not finite.

    Args:
      program: the step, in which `debug` looks for the layer at fault.
      given: the state that was passed to `fit`, from which `debug` may replay the run. None without
        `debug`.
    """

    def __init__(
        self,
        program: Program,
        given: Any,
        *,
        options: Options,
        run: RunState,
        feed: Feed,
        reports: Reports,
    ):
        self.program = program
        self.given = given
        self.options = options
        self.run = run
        self.feed = feed
        self.reports = reports

    def check(self) -> bool:
        """Handles a non-finite step since the last check, if there is one. Returns whether the run
        was rolled back to a checkpoint. Waits for the device."""
        if self.options.skips:
            self._report_skipped()
            return False
        bad = int(self.run.watch["bad"])
        if bad < 0:
            return False
        if self.options.nonfinite == "stop":
            raise self.diverged(bad)
        target = self.run.rollback_target(bad)
        if target is None:
            raise self.diverged(bad)
        self._roll_back(bad, target)
        return True

    def _roll_back(self, bad: int, target: int) -> None:
        """Continues from the checkpoint of step `target` with the batch after that of step `bad`."""
        run = self.run
        last, count = run.rollbacks
        run.rollbacks = (target, count + 1 if last == target else 1)
        if run.rollbacks[1] > _ROLLBACKS:
            raise self.diverged(bad, f", after {_ROLLBACKS} rollbacks to step {target}")
        batch = bad + run.offset
        self.feed.close(wait=True)
        self.reports.close_logger()
        run.load(target)
        run.loop["offset"] = np.array(batch + 1 - run.at)
        self.reports.reopen_logger()
        self.reports.say(
            run.at,
            f"step {bad + 1} was not finite: rolled back to step {run.at}, continuing with batch "
            f"{batch + 1}",
        )
        self.feed.start(run.at, run.offset)
        self.reports.clock.lap(run.at)

    def _report_skipped(self) -> None:
        """Reports the steps that were skipped since the last check, which may have been in an
        earlier process."""
        run = self.run
        bad, total = int(run.watch["bad"]), int(run.watch["skipped"])
        since, before = run.checked
        run.checked = (run.at, total)
        count, steps = total - before, run.at - since
        if not count:
            return
        known = bad >= 0  # otherwise, an earlier process saw the first of them
        what = self._called() if known else "the state or a metric"
        run.loop["skipped"] = np.array(total, np.int32)
        run.restart_watch(total)
        if count >= steps > 1:
            more = f", and so was every step up to {run.at}"
            raise self.diverged(bad if known else since, more, what=what)
        first = f", the first of them {bad + 1}" if known else ""
        self.reports.say(
            run.at, f"skipped {count} of the last {steps} steps, which were not finite{first}"
        )

    def _called(self) -> str:
        """Returns the name of the first leaf that was not finite."""
        leaves = _nonfinite.watched(self.run.zeros, self.run.state, self.program.exempt)
        name, _ = leaves[int(self.run.watch["leaf"])]
        return name

    def diverged(self, bad: int, more: str = "", *, what: str | None = None) -> Diverged:
        """Returns the error that explains which value was not finite after `bad` sound steps."""
        batch, kept = bad + self.run.offset, self.run.latest()
        text = (
            f"{what or self._called()} was not finite at step {bad + 1} of {self.options.steps} "
            f"(batch {batch}){more}"
        )
        if kept is not None:
            text += f"; the checkpoint of step {kept} is sound"
        if self.options.debug:
            text += f". {self._blame(bad)}"
        text += ". Lower the learning rate, clip the gradient, or look at the data"
        command = _reducing.advice(self.run, bad + 1, "not finite")
        return Diverged(f"{text}. {command}" if command else text)

    def _blame(self, bad: int) -> str:
        """Replays the run up to the step that produced NaN or infinity, and names the layer of the
        first such value."""
        inputs = self.replayed(bad)
        if isinstance(inputs, str):
            return inputs
        state, batch, before = inputs
        return _nonfinite.first_layer(self.program.step, (state, batch), before)

    def replayed(self, bad: int) -> tuple[Any, Any, tuple[Any, Any] | None] | str:
        """Replays the run up to step `bad`, and returns the state and batch of this step, and those
        of the step before it, or None if the replay begins at the step. Returns why that is not
        possible as text."""
        run, offset = self.run, self.run.offset
        start = self._start_of_replay(bad)
        if start is None:
            return "No checkpoint before it is left to replay it from"
        state, at = start
        if not self.program.compiled:  # the run ends before its first step
            self.program.compile(run, self.feed.example, self.reports)
        watch, before = run.spread.whole(_nonfinite.start(0)), None
        batches = self.feed.replay(at, bad + 1, offset)
        with contextlib.closing(batches), contextlib.suppress(Stopping):
            for i in range(at, bad):
                batch = batches()
                if i == bad - 1:
                    before = jax.tree.map(jnp.copy, state), batch
                state, _, watch, _ = self.program.advance(state, run.fresh_metrics(), watch, batch)
            return state, batches(), before
        return "A signal ended the replay"

    def _start_of_replay(self, bad: int) -> tuple[Any, int] | None:
        """Returns a state of this run from which step `bad` was reached with the current offset of
        the batches, and its step. Returns None if there is none."""
        run, offset = self.run, self.run.offset
        for step in run.sound_steps(bad):
            with contextlib.suppress(CheckpointError):  # damaged
                run.load(step)
                # Other checkpoints from before a rollback do not belong to this run any more.
                if run.offset == offset or step == run.rollbacks[0]:
                    return run.state, run.at
        if self.given is None or int(self.given.step) > bad or offset:
            return None
        return run.spread.state(self.given), int(self.given.step)
