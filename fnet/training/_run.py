"""What `fit` keeps between steps, and one pass of its loop."""

from __future__ import annotations

import collections
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from fnet import transforms
from fnet.parallel import Plan
from fnet.training import _metrics, _nonfinite, _provenance
from fnet.training._checkpoint import Checkpoints
from fnet.training._clock import Clock
from fnet.training._early_stop import EarlyStop
from fnet.training._logs import Logger
from fnet.training._nonfinite import Diverged
from fnet.training._prefetch import Prefetch
from fnet.training._progress import Progress, duration
from fnet.training._signals import Signals, Stopping
from fnet.training._spread import Spread
from fnet.training._utilization import utilization

NONFINITE = ("stop", "skip", "rollback")
_IN_FLIGHT = 2         # steps that the device may be behind, so that stopping takes no longer than those
_ROLLBACKS = 3         # from one and the same checkpoint


class Interrupted(Exception):
    """The run was asked to stop and has saved what it had."""


class PeerLost(RuntimeError):
    """Another process of the run is gone."""


class ResumeWarning(UserWarning):
    """The run goes on under other conditions than it began with, so that numbers agree to rounding only."""


class Run:
    """A run of `fit`. `loop` is what of it goes into the checkpoint beside the state."""

    checkpoints: Checkpoints | None = None
    logger: Logger | None = None
    logs: Callable[[], Logger] | None = None

    def __init__(self, step, state, batches, *, steps: int, evaluate: Mapping[str, Any], every: int, save_every: int,
                 log_every: int, early_stop: EarlyStop | None, progress: Progress | None, nonfinite: str, debug: bool,
                 notes: Mapping[str, Any], tune: bool, plan: Plan | None):
        self.spread = Spread(plan)
        self.state = self.spread.state(state)
        self.given = state if debug else None
        self.at = int(state.step)
        self.step, self.batches, self.steps, self.evaluate = step, batches, steps, evaluate
        self.every, self.save_every, self.log_every = every, save_every, log_every
        self.early_stop, self.progress, self.nonfinite, self.debug = early_stop, progress, nonfinite, debug
        measured = lambda state, batch: _metrics.as_metrics(step(state, batch)[1])
        self.zeros = _metrics.zeros(measured, self.state, self.spread.shapes(lambda: batches(self.at)))
        if jax.process_count() > 1:                        # where an array of this process alone would not fit in
            self.zeros = jax.tree.map(np.asarray, self.zeros)
        self.loop = {
            "metrics": self.spread.whole(self.zeros),
            "best": np.array(math.nan), "stale": np.array(0), "stopped": np.array(False),
            "due": np.array(False),                        # an evaluation that was interrupted
            "offset": np.array(0), "skipped": np.array(0, np.int32),
        }
        self.watch = self.spread.whole(_nonfinite.start(0))
        self.facts = _provenance.facts(self.state) | {"plan": str(self.spread)} | dict(notes)
        self.tune = tune
        self.saved: int | None = None
        self.rollbacks: collections.Counter[int] = collections.Counter()

    def restore(self) -> None:
        """Goes to the newest whole checkpoint, if there is one."""
        there = self.checkpoints.latest() is not None or bool(self.checkpoints.damaged())
        if jax.process_count() > 1:                        # once the first process has cleared the folder
            from jax.experimental import multihost_utils

            there = bool(multihost_utils.broadcast_one_to_all(np.array(there)))
        if not there:
            return
        self.load()
        where = self.checkpoints.folder / str(self.at)
        self.say(f"resumed at step {self.at} from {where}")
        notes = self.checkpoints.notes(self.at)
        if self.tune:
            self.tune = _provenance.rules(notes, self.facts) or True
        if changed := _provenance.differences(notes, self.facts):
            warnings.warn(f"{where}: {changed}; from here on the numbers agree with an unbroken run's to rounding, not "
                          "bit for bit", ResumeWarning, stacklevel=3)

    def load(self) -> None:
        saved = self.checkpoints.restore({"state": self.state, "loop": self.loop})
        self.state, self.loop = saved["state"], saved["loop"]
        self.at = self.saved = int(self.state.step)
        self.watch = self.spread.whole(_nonfinite.start(self.loop["skipped"]))

    def say(self, text: str) -> None:
        if self.progress is not None:
            self.progress.line(text)

    def train(self, seen: Signals) -> None:
        try:
            self.until_done(seen)
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1:
                raise
            kept = self.checkpoints and self.checkpoints.latest()
            then = "begin anew" if kept is None else f"go on from step {kept}"
            raise PeerLost(f"process {jax.process_index()} of {jax.process_count()} lost the others at step {self.at} "
                           f"({str(error).strip().splitlines()[0][:150].strip()}): start all of them again, they {then}"
                           ) from error

    def until_done(self, seen: Signals) -> None:
        self.seen = seen
        self.clock = Clock()
        if self.loop["due"]:
            self.measured_at(self.at, {})
        if self.at >= self.steps or self.loop["stopped"]:
            return
        self.interruption(boundary=True)
        if self.progress is not None:
            self.progress.start(self.at, self.steps)
        shown = self.progress is not None or self.logger is not None
        example = lambda: self.batch(self.at)
        self.use = utilization(self.step, self.state, self.spread.shapes(example)) if shown else None
        self.compile()
        self.clock = Clock()
        self.feed()
        try:
            while self.at < self.steps and not self.loop["stopped"]:
                self.advance_once()
        finally:
            self.prefetch.close()
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def batch(self, at: int) -> Any:
        at += int(self.loop["offset"])
        return self.spread.batch(self.batches(at), at)

    def fresh(self) -> Any:
        """Metrics of no step."""
        return self.spread.whole(jax.tree.map(np.copy if jax.process_count() > 1 else jnp.zeros_like, self.zeros))

    def feed(self) -> None:
        self.prefetch = Prefetch(self.batch, self.at, self.steps)
        self.waited, self.logged = 0.0, self.at
        self.flying: collections.deque = collections.deque()

    def compile(self) -> None:
        keeps, places = self.nonfinite == "skip", jax.tree.map(_place, self.state)
        step = self.spread.step(self.step)

        def advance(state, total, watch, batch):
            new, metrics = step(state, batch)
            # Where it was: XLA would spread it otherwise, and a run that goes on begins from where it was.
            new = jax.tree.map(lambda x, place: x if place is None else jax.lax.with_sharding_constraint(x, place),
                               new, places)
            metrics = _metrics.as_metrics(metrics)
            sound, watch = _nonfinite.look(watch, state, new, metrics, skip=keeps)
            more = _metrics.add(total, metrics)
            if keeps:
                new, more = _nonfinite.kept(sound, new, state), _nonfinite.kept(sound, more, total)
            return new, more, watch

        advance = jax.jit(advance, donate_argnums=(0, 1))
        if self.tune:
            advance = transforms.tune(advance, rules=self.tune if isinstance(self.tune, dict) else None)
            self.facts["tune"] = _provenance.chosen(advance)
        self.advance = advance

    def advance_once(self) -> None:
        batch, total = self.prefetch(), self.loop.pop("metrics")
        self.state, self.loop["metrics"], self.watch = self.advance(self.state, total, self.watch, batch)
        self.at += 1
        self.flying.append(self.watch["bad"])
        if len(self.flying) > _IN_FLIGHT:
            jax.block_until_ready(self.flying.popleft())
        clock = self.clock
        if clock.compiled is None:
            jax.block_until_ready(self.state)
            clock.start(self.at)
            self.waited = self.prefetch.waited
            self.say(f"compiled in {duration(clock.compiled)}, the first step included")
        last = self.at == self.steps
        logs, measures = (self.at % often == 0 or last for often in (self.log_every, self.every))
        if (logs or measures) and self.broken():
            return
        trained = self.log() if logs else {}
        if measures:
            self.measured_at(self.at, trained)
        elif trained:
            self.show(trained)
        self.interruption(boundary=logs or measures or self.at % self.save_every == 0)
        if self.saved != self.at and (self.at % self.save_every == 0 or last or self.loop["stopped"]):
            self.save({})
        if self.progress is not None:
            self.progress.tick(self.at, clock.rate, clock.left(self.at, self.steps))

    def measured_at(self, at: int, trained: Mapping[str, float]) -> None:
        """Evaluates, stops early, and saves what is to be saved with these values. If a signal ends the evaluation, it
        is due when the run goes on."""
        self.loop["due"] = np.array(bool(self.evaluate))
        try:
            values = self.measure()
        except Stopping:
            if self.checkpoints is not None:
                self.save({})
            self.interrupted()
        self.loop["due"] = np.array(False)
        if trained or values:
            self.show({**trained, **_scalars(values)})
        self.stop_early(values)
        if at % self.save_every == 0 or at == self.steps or self.loop["stopped"] or self.saved == at:
            self.save(values)

    def show(self, values: Mapping[str, float]) -> None:
        if self.progress is not None:
            rate = self.clock.rate
            self.progress.log(self.at, values, rate, rate and self.clock.left(self.at, self.steps),
                              self.use(rate) if rate else None)

    def log(self) -> dict[str, float]:
        values = _metrics.results(self.loop["metrics"])
        self.loop["metrics"] = self.fresh()
        rate, lap = self.clock.lap(self.at), self.at - self.logged
        waited, self.waited = self.prefetch.waited - self.waited, self.prefetch.waited
        self.logged = self.at
        if self.logger is not None:
            mfu = self.use(rate).value if rate is not None else None
            times = {"steps_per_second": rate, "mfu": mfu, "compile_seconds": self.clock.compiled,
                     "data": rate and waited * rate / lap}
            row = {f"train/{k}": v for k, v in values.items()}
            row |= {f"time/{k}": v for k, v in times.items() if v is not None}
            self.logger.write(self.at, row)
        return _scalars(values)

    def measure(self) -> dict[str, Any]:
        if not self.evaluate:
            return {}
        jax.block_until_ready(self.state)
        with self.clock.pause():
            self.seen.evaluating = jax.process_count() == 1
            try:
                values = {
                    f"{name}/{metric}": value
                    for name, function in self.evaluate.items()
                    for metric, value in function(self.state).items()
                }
            finally:
                self.seen.evaluating = False
        if self.logger is not None:
            self.logger.write(self.at, values)
        return values

    def stop_early(self, values: Mapping[str, Any]) -> None:
        rule = self.early_stop
        if rule is None or not values:
            return
        if rule.metric not in values:
            raise ValueError(
                f"early stopping watches '{rule.metric}'; evaluations give {sorted(values)}"
            )
        best, stale = float(self.loop["best"]), int(self.loop["stale"])
        best, stale = rule.update(best, stale, float(values[rule.metric]))
        self.loop |= {"best": np.array(best), "stale": np.array(stale)}
        if stale >= rule.patience:
            self.loop["stopped"] = np.array(True)
            self.say(
                f"stopped early: {rule.metric} has not been better than {best:.4g} "
                f"for {stale} evaluations"
            )

    def save(self, values: Mapping[str, Any]) -> None:
        if self.checkpoints is None:
            return
        self.loop["skipped"] = self.watch["skipped"]
        self.checkpoints.save(self.at, {"state": self.state, "loop": self.loop}, metrics=_scalars(values),
                              notes=self.facts, sound=_nonfinite.sound(self.watch, self.nonfinite == "skip"))
        self.saved = self.at

    # What goes wrong.

    def broken(self) -> bool:
        """Whether a step was not sound and the run has gone back before it. The host has waited for the device."""
        bad = int(self.watch["bad"])
        if bad < 0:
            return False
        if self.nonfinite == "skip":
            count = int(self.watch["skipped"]) - int(self.loop["skipped"])
            self.loop["skipped"] = np.array(self.watch["skipped"])
            self.watch = self.spread.whole(_nonfinite.start(self.watch["skipped"]))
            if count >= self.at - self.logged > 1:
                raise self.diverged(bad, f", and so was every step up to {self.at}")
            self.say(f"skipped {count} of the last {self.at - self.logged} steps, which were not finite, the first of "
                     f"them {bad + 1}")
            return False
        kept = self.kept()
        if self.nonfinite == "stop" or kept is None:
            raise self.diverged(bad)
        self.rollbacks[kept] += 1
        if self.rollbacks[kept] > _ROLLBACKS:
            raise self.diverged(bad, f", after {_ROLLBACKS} rollbacks to step {kept}")
        batch = bad + int(self.loop["offset"])
        self.prefetch.close()
        if self.logger is not None:
            self.logger.close()
        self.load()
        self.loop["offset"] = np.array(batch + 1 - self.at)
        if self.logger is not None:
            self.logger = self.logs()
        self.say(f"step {bad + 1} was not finite: rolled back to step {self.at}, going on with batch {batch + 1}")
        self.feed()
        self.clock.lap(self.at)
        return True

    def kept(self) -> int | None:
        """The last sound checkpoint."""
        if self.checkpoints is None:
            return None
        self.checkpoints.wait()
        return self.checkpoints.latest()

    def diverged(self, bad: int, more: str = "") -> Diverged:
        what = "the loss" if bool(self.watch["loss"]) else "a gradient or parameter"
        batch, kept = bad + int(self.loop["offset"]), self.kept()
        text = f"{what} was not finite at step {bad + 1} of {self.steps} (batch {batch}){more}"
        text += "" if kept is None else f"; the checkpoint of step {kept} is sound"
        if self.debug:
            text += f". {self.blame(bad, kept)}"
        return Diverged(f"{text}. Lower the learning rate, clip the gradient, or look at the data")

    def blame(self, bad: int, kept: int | None) -> str:
        """Replays the run up to the step that broke it, and looks for the layer in that step."""
        if kept is not None and kept <= bad:
            self.load()
            state, at = self.state, self.at
        elif self.given is not None and int(self.given.step) <= bad:
            state, at = self.spread.state(self.given), int(self.given.step)
        else:
            return "No checkpoint before it is left to replay it from"
        watch, before = self.spread.whole(_nonfinite.start(0)), None
        for i in range(at, bad):
            if i == bad - 1:
                before = jax.tree.map(jnp.copy, state), self.batch(i)
            state, _, watch = self.advance(state, self.fresh(), watch, self.batch(i))
        return _nonfinite.first_layer(self.step, (state, self.batch(bad)), before)

    def interruption(self, *, boundary: bool) -> None:
        """Saves and ends the run if a signal has come; several processes agree on it at boundaries."""
        if jax.process_count() > 1:
            if not boundary:
                return
            from jax.experimental import multihost_utils

            flags = multihost_utils.process_allgather(np.int32(self.seen.received is not None))
            if flags.any():
                self.seen.received = self.seen.received or "a signal to another process"
        if self.seen.received and self.at < self.steps and not self.loop["stopped"]:
            if self.checkpoints is not None and self.saved != self.at:
                self.save({})
            self.interrupted()

    def interrupted(self) -> None:
        name = self.seen.received
        if self.checkpoints is None:
            raise Interrupted(f"{name}: stopped at step {self.at}; without a workdir nothing is kept")
        self.checkpoints.wait()
        saved = "it"
        if self.nonfinite != "skip" and (bad := int(self.watch["bad"])) >= 0:      # so that it was not saved
            if self.nonfinite == "stop" or self.checkpoints.latest() is None:
                raise self.diverged(bad)
            saved = f"step {self.checkpoints.latest()}, the last that was finite,"
        raise Interrupted(
            f"{name}: stopped at step {self.at} of {self.steps} and saved {saved} in "
            f"{self.checkpoints.folder}; the same command goes on from there"
        )


def _place(x: jax.Array) -> NamedSharding | None:
    """Where an array is to stay, if it is spread over devices and JAX does not see to it already."""
    place = x.sharding
    if not isinstance(place, NamedSharding) or place.num_devices == 1 or AxisType.Explicit in place.mesh.axis_types:
        return None
    return place


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if np.ndim(value) == 0}
