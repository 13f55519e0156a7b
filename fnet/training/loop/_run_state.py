"""RunState: where a run stands, which is what a checkpoint holds."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.parallel._gather import gather
from fnet.training.checkpoints._checkpoint import Checkpoints
from fnet.training.checkpoints._reading import CheckpointError
from fnet.training.loop import _best_values, _nonfinite, _positions, _provenance
from fnet.training.loop._feed import Feed
from fnet.training.loop._fingerprint import ResumeWarning
from fnet.training.loop._options import Options
from fnet.training.loop._reports import Reports, finite, scalars
from fnet.training.loop._spread import Spread


class RunState:
    """Where a run stands. A checkpoint holds all of it, so that a resumed run continues as if it
    had never been interrupted.

    Args:
      state: the state before the first step, on the devices of the run.
      zeros: the sums of the metrics before the first step.
      checkpoints: the checkpoints of the run, or None if nothing is saved.

    Attributes:
      at: the number of steps so far.
      begun: the step at which this process began.
      saved: the step of the newest checkpoint, or None.
      unlogged: whether the log of step `at` is still to be written.
      loop: the values of the training loop: the sums of the metrics since the last log, the best
        values, and counters.
      watch: the record of non-finite steps on the device, see `_nonfinite.start`.
      rollbacks: the step of the last rollback, and how often the run was rolled back to it.
      checked: the last step at which `watch` was read, and the number of skipped steps until then.
      facts: what each checkpoint notes about the run, such as its chip.
      rules: the rewrite rules of `tune` with which the run was started, or None if they are still
        to be chosen.
    """

    saved: int | None = None
    unlogged: bool = False
    rules: dict[str, bool] | None = None

    def __init__(
        self,
        state: Any,
        zeros: Any,
        *,
        options: Options,
        spread: Spread,
        feed: Feed,
        reports: Reports,
        checkpoints: Checkpoints | None,
    ):
        self.options = options
        self.spread = spread
        self.feed = feed
        self.reports = reports
        self.checkpoints = checkpoints
        self.state = state
        self.at = self.begun = int(state.step)
        # With several processes, the sums of the metrics start on the host.
        self.zeros = zeros if spread.alone else jax.tree.map(np.asarray, zeros)
        self.loop = {
            "metrics": spread.whole(self.zeros),
            **_best_values.start(),
            "due": np.array(False),  # whether the evaluation at this step is pending
            "offset": np.array(0),  # step i uses batch i + offset
            "skipped": np.array(0, np.int32),
        }
        self.watch = spread.whole(_nonfinite.start(0))
        self.rollbacks = (-1, 0)
        self.checked = (self.at, 0)
        self.facts = _provenance.facts(state) | {"plan": str(spread)} | dict(options.notes)

    @property
    def offset(self) -> int:
        return int(self.loop["offset"])

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.at >= self.options.steps or bool(self.loop["stopped"])

    def left(self) -> tuple[bool, bool]:
        """Returns two bools: whether the current step must be logged, and whether it must be
        evaluated."""
        last = self.at == self.options.steps or bool(self.loop["stopped"])
        logs = last or self.at % self.options.log_every == 0
        measures = last or self.at % self.options.every == 0
        return logs, measures

    def stop(self) -> None:
        """Makes the current step the last one."""
        self.loop["stopped"] = np.array(True)

    def reset_metrics(self) -> None:
        """Begins new sums of the metrics, after they have been logged."""
        self.loop["metrics"] = self.fresh_metrics()
        self.unlogged = False

    def fresh_metrics(self) -> Any:
        """Returns the initial sums of the metrics, which are zero. The step donates them."""
        zeros_of = jnp.zeros_like if self.spread.alone else np.copy
        return self.spread.whole(jax.tree.map(zeros_of, self.zeros))

    def restart_watch(self, skipped: Any) -> None:
        """Begins a new record of non-finite steps, after `skipped` steps were skipped."""
        self.watch = self.spread.whole(_nonfinite.start(skipped))

    def check_counter(self) -> None:
        """Raises ValueError if the user's step does not count the steps."""
        counted = int(self.state.step)
        if counted != self.at:
            raise ValueError(
                f"fit: step {self.at - 1} must return a state whose `step` is {self.at}; it is "
                f"{counted}. Use state.apply(tx, grads), or state.replace(step=state.step + 1)"
            )

    # Evaluations.

    def judge(self, values: Mapping[str, Any]) -> bool:
        """Returns whether the monitored metric has its best value so far, and stops the run if it
        has not improved for too long."""
        improved = _best_values.update(self.loop, values, self.options)
        reason = _best_values.stop_early(self.loop, values, self.options)
        if reason is not None:
            self.reports.say(self.at, reason)
        return improved

    def evaluated(self, values: Mapping[str, Any]) -> None:
        """Judges the results of the evaluation at this step, and saves them: to the checkpoint of
        this step if there is one, otherwise with a new checkpoint if the state is the best or the
        last."""
        self.loop["due"] = np.array(False)
        improved = self.judge(values)
        if self.saved == self.at and self.checkpoints is not None:
            numbers = scalars(values)
            self.checkpoints.amend(
                self.at,
                metrics=numbers,
                notes={"evaluated": finite(numbers), "regular": self._regular(improved)},
            )
        elif improved or self.loop["stopped"]:
            self.save(values, improved=improved)

    # Saving.

    def saves(self) -> bool:
        """Whether the current step must be saved and has not been saved yet."""
        regular = self.at % self.options.save_every == 0 or self.at == self.options.steps
        return regular and self.saved != self.at

    def save(self, values: Mapping[str, Any] | None = None, *, improved: bool = False) -> None:
        """Saves the current step, with the results of its evaluation if there are any."""
        if self.checkpoints is None or self.saved == self.at:
            return
        regular = self._regular(improved)
        if regular and self.options.nonfinite == "rollback":
            self.checkpoints.anchor = self.at
        self.loop["skipped"] = self.watch["skipped"]
        if hasattr(self.feed.batches, "position"):  # of `from_iterator`
            position = self.feed.batches.position(self.at + self.offset)
            self.facts["position"] = _positions.gathered(position)
        notes = {
            "unlogged": self.unlogged,
            "regular": regular,
            "rollbacks": self.rollbacks,
            "checked": self.checked,
        }
        self.checkpoints.save(
            self.at,
            {"state": self.state, "loop": self.loop},
            metrics=scalars(values or {}),
            notes=self.facts | notes,
            sound=_nonfinite.sound(self.watch, self.options.skips),
        )
        self.saved = self.at

    def _regular(self, improved: bool) -> bool:
        """Whether an uninterrupted run has a checkpoint of this step, too."""
        return improved or self.at % self.options.save_every == 0

    def put_off(self) -> None:
        """Records whether a resumed run must first log and evaluate the last complete step."""
        logs, measures = self.left()
        self.unlogged = logs
        self.loop["due"] = np.array(measures and bool(self.options.evaluate))

    def rescue(self) -> None:
        """Saves the last complete step before an error ends the run. If the next step has already
        started, nothing is saved, because the state was donated to it."""
        if not self.spread.alone or self.at <= self.begun or self._donated():
            return
        with contextlib.suppress(CheckpointError, OSError, jax.errors.JaxRuntimeError):
            self.save()
            self.wait()

    def _donated(self) -> bool:
        arrays = [x for x in jax.tree.leaves((self.state, self.loop)) if isinstance(x, jax.Array)]
        return any(x.is_deleted() for x in arrays)

    def wait(self) -> None:
        """Waits until all checkpoints are written."""
        if self.checkpoints is not None:
            self.checkpoints.wait()

    # Restoring.

    def restore(self) -> None:
        """Restores the newest complete checkpoint, if there is one."""
        exists = self.checkpoints.latest() is not None or bool(self.checkpoints.damaged())
        if not self.spread.alone:  # waits until the first process has cleared the folder
            exists = bool(gather(exists)[0])
        if not exists:
            return
        self.load()
        self.begun = self.at
        notes = self.checkpoints.notes(self.at)
        self.rollbacks = tuple(notes.get("rollbacks", self.rollbacks))
        self.checked = tuple(notes.get("checked", (self.at, int(self.loop["skipped"]))))
        self.checkpoints.anchor = self.rollback_target(self.at)
        if hasattr(self.feed.batches, "seek"):  # of `from_iterator`
            position = _positions.own(notes.get("position"), self.at)
            self.feed.batches.seek(self.at + self.offset, position)
        if self.options.tune:
            self.rules = _provenance.rules(notes, self.facts) or None
        if notes.get("kind") == self.facts["kind"] and "members" in notes:
            self.facts["members"] = notes["members"]
        changed = _provenance.differences(notes, self.facts)
        if changed:
            warnings.warn(
                f"{self.checkpoints.folder / str(self.at)}: {changed}; from this step on, the "
                "results agree with those of an uninterrupted run to rounding, not bit for bit",
                ResumeWarning,
                stacklevel=3,
            )

    def load(self, step: int | None = None) -> None:
        """Restores the state and the loop of a checkpoint: that of `step`, or the newest one."""
        saved = self.checkpoints.restore({"state": self.state, "loop": self.loop}, step)
        self.state, self.loop = saved["state"], saved["loop"]
        self.at = self.saved = int(self.state.step)
        self.restart_watch(self.loop["skipped"])
        notes = self.checkpoints.notes(self.at)
        self.unlogged = notes.get("unlogged", False)
        _best_values.forget_others(self.loop, notes.get("fit", {}), self.options)
        evaluated = notes.get("evaluated")  # amended after the evaluation of this step
        if not self.loop["due"] or evaluated is None:
            return
        if self.options.watched() <= evaluated.keys():
            self.loop["due"] = np.array(False)
            self.judge({k: math.nan if value is None else value for k, value in evaluated.items()})

    def rollback_target(self, most: int) -> int | None:
        """Returns the step of the checkpoint to roll back to: the last one up to step `most` that
        an uninterrupted run would have saved, too. From a checkpoint that exists only because the
        run was interrupted there, a resumed run would continue with other batches than an
        uninterrupted run."""
        if self.checkpoints is None or self.options.nonfinite != "rollback":
            return None
        for step in self.sound_steps(most):
            with contextlib.suppress(CheckpointError):  # damaged
                if self.checkpoints.notes(step).get("regular", True):
                    return step
        return None

    def sound_steps(self, most: int) -> list[int]:
        """Returns the steps of the checkpoints up to step `most`, the newest first."""
        if self.checkpoints is None:
            return []
        self.checkpoints.wait()
        return [step for step in reversed(self.checkpoints.steps()) if step <= most]

    def latest(self) -> int | None:
        """Returns the step of the last checkpoint, or None if there is no checkpoint."""
        if self.checkpoints is None:
            return None
        self.checkpoints.wait()
        return self.checkpoints.latest()
