"""Run: the data that `fit` keeps between steps, and one iteration of the training loop."""

from __future__ import annotations

import collections
import gc
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.parallel import Plan
from fnet.training.checkpoints import _leaves
from fnet.training.checkpoints._checkpoint import Checkpoints
from fnet.training.data._arrays import checked_integers
from fnet.training.data._iterators import GUARANTEES
from fnet.training.loop import (
    _advance,
    _callbacks,
    _compilation_cache,
    _contract,
    _ending,
    _memory,
    _nonfinite,
    _positions,
    _provenance,
    _recompile,
    _recovery,
    _tuning,
)
from fnet.training.loop._clock import Clock
from fnet.training.loop._early_stop import EarlyStop, better
from fnet.training.loop._ending import Interrupted, PeerLost
from fnet.training.loop._fingerprint import ResumeWarning
from fnet.training.loop._prefetch import Prefetch
from fnet.training.loop._progress import Progress, duration
from fnet.training.loop._signals import Signals, Stopping
from fnet.training.loop._spread import Spread
from fnet.training.loop._utilization import utilization
from fnet.training.record import _metrics
from fnet.training.record._logs import Logger
from fnet.training.record._media import MEDIA

_IN_FLIGHT = 2  # steps that the device may be behind the host, which limits the time to stop


class Run:
    """A run of `fit`. A checkpoint contains the attributes `state` and `loop` of the run. The dict
    `loop` contains sums of metrics, best values and counters."""

    checkpoints: Checkpoints | None = None
    logger: Logger | None = None
    logs: Callable[[], Logger] | None = None
    saved: int | None = None  # the step of the newest checkpoint
    unlogged: bool = False  # whether the log of this step is still to be written
    prefetch: Prefetch | None = None
    use: Callable[[float], Any] | None = None
    profiled: Callable[[Callable], Callable] = staticmethod(lambda advance: advance)

    def __init__(
        self,
        step,
        state,
        batches,
        *,
        seen: Signals,
        steps: int,
        evaluate: Mapping[str, Any],
        every: int,
        save_every: int,
        log_every: int,
        best: tuple[str, str] | None,
        early_stop: EarlyStop | None,
        progress: Progress | None,
        on_step: Sequence[Callable],
        nonfinite: str,
        debug: bool,
        notes: Mapping[str, Any],
        tune: bool,
        plan: Plan | None,
        collects: bool,
    ):
        self.seen, self.alone = seen, jax.process_count() == 1
        function = getattr(step, "__qualname__", type(step).__name__)
        self.name = f"{function} with {[jnp.shape(x) for x in jax.tree.leaves(state)]}"
        _compilation_cache.preload(self.name)
        self.collects = collects  # whether garbage is collected after the first step
        self.spread = Spread(plan)
        self.state = self.spread.state(state)
        self.given = state if debug else None
        self.at = self.begun = int(state.step)
        self.step, self.batches, self.steps, self.evaluate = step, batches, steps, evaluate
        self.every, self.save_every, self.log_every = every, save_every, log_every
        self.best, self.early_stop, self.progress, self.on_step = (
            best,
            early_stop,
            progress,
            on_step,
        )
        self.nonfinite, self.debug, self.tune = nonfinite, debug, tune
        self.example = self.first()
        shapes = self.spread.shapes(lambda: self.example)
        self.traced = _contract.traced(getattr(step, "plain", step))  # as one function
        self.zeros = _metrics.zeros(_contract.metrics_of(self.traced, self.state, shapes))
        _contract.check_watched(self.watched(), self.evaluate, state=self.state)
        if not self.alone:  # with several processes, metrics start on the host
            self.zeros = jax.tree.map(np.asarray, self.zeros)
        self.loop = {
            "metrics": self.spread.whole(self.zeros),
            "best": np.array(math.nan),
            "stale": np.array(0),
            "stopped": np.array(False),
            "top": np.array(math.nan),  # the best value of the metric that `best` names
            "due": np.array(False),  # whether the evaluation at this step is pending
            "offset": np.array(0),
            "skipped": np.array(0, np.int32),
        }
        self.watch = self.spread.whole(_nonfinite.start(0))
        self.facts = _provenance.facts(self.state) | {"plan": str(self.spread)} | dict(notes)
        self.rollbacks = (-1, 0)  # the last rollback: to which step, the how manieth to it
        self.checked = (self.at, 0)  # the last check: its step, the steps skipped until then
        self.batch_kinds, self.state_kinds = (
            _recompile.Arguments("batch"),
            _recompile.Arguments("state"),
        )
        self.busy: str | None = None  # the current activity, if it is not a step

    def first(self) -> Any:
        """Returns the first batch, whose shapes and digest describe the data of the run. A signal
        ends the wait for the first batch."""
        if not self.alone and self.spread.plan is not None:
            return None
        feed = Prefetch(
            self.batches, self.at, self.at + 1, seen=self.seen if self.alone else None, move=False
        )
        try:
            return feed()
        except Stopping:
            raise Interrupted(
                f"{self.seen.received}: stopped before the first batch was available; nothing was "
                "trained or changed"
            ) from None
        finally:
            feed.close()

    def restore(self) -> None:
        """Restores the newest complete checkpoint, if there is one."""
        exists = self.checkpoints.latest() is not None or bool(self.checkpoints.damaged())
        if not self.alone:  # waits until the first process has cleared the folder
            from jax.experimental import multihost_utils

            exists = bool(multihost_utils.broadcast_one_to_all(np.array(exists)))
        if not exists:
            return
        self.load()
        self.begun = self.at
        where, notes = self.checkpoints.folder / str(self.at), self.checkpoints.notes(self.at)
        self.rollbacks = tuple(notes.get("rollbacks", self.rollbacks))
        self.checked = tuple(notes.get("checked", (self.at, int(self.loop["skipped"]))))
        self.checkpoints.anchor = _recovery.target(self, self.at)
        if hasattr(self.batches, "seek"):  # of `from_iterator`
            position = _positions.own(notes.get("position"), self.at)
            self.batches.seek(self.at + int(self.loop["offset"]), position)
        if self.tune:
            self.tune = _provenance.rules(notes, self.facts) or True
        if notes.get("kind") == self.facts["kind"] and "members" in notes:
            self.facts["members"] = notes["members"]
        if changed := _provenance.differences(notes, self.facts):
            warnings.warn(
                f"{where}: {changed}; from this step on, the results agree with those of an "
                "uninterrupted run to rounding, not bit for bit",
                ResumeWarning,
                stacklevel=3,
            )

    def load(self, step: int | None = None) -> None:
        """Restores the state and the loop of a checkpoint: that of `step`, or the newest one."""
        saved = self.checkpoints.restore({"state": self.state, "loop": self.loop}, step)
        self.state, self.loop = saved["state"], saved["loop"]
        self.at = self.saved = int(self.state.step)
        self.watch = self.spread.whole(_nonfinite.start(self.loop["skipped"]))
        notes = self.checkpoints.notes(self.at)
        self.unlogged = notes.get("unlogged", False)
        before = notes.get("fit", {})
        if (
            before.get("best", now := self.criteria()["best"]) != now
        ):  # values of two metrics cannot be compared
            self.loop["top"] = np.array(math.nan)
        if before.get("early_stop", now := self.criteria()["early_stop"]) != now:
            self.loop |= {"best": np.array(math.nan), "stale": np.array(0)}
        done = notes.get("evaluated")
        if (
            self.loop["due"] and done is not None and self.watched() <= done.keys()
        ):  # amended after it
            self.loop["due"] = np.array(False)
            self.judge({name: math.nan if value is None else value for name, value in done.items()})

    def say(self, text: str) -> None:
        if self.progress is not None:
            self.progress.line(text)
        if self.logger is not None:
            self.logger.note(self.at, text)

    def train(self) -> None:
        try:
            self.until_done()
        except jax.errors.JaxRuntimeError as error:
            if _memory.exhausted(error) and self.batch_kinds.last is not None:
                raise _memory.error(error, self) from error
            if self.alone:
                raise
            kept = self.checkpoints and self.checkpoints.latest()
            then = "begin again at the first step" if kept is None else f"resume from step {kept}"
            raise PeerLost(
                f"process {jax.process_index()} of {jax.process_count()} lost the others at step "
                f"{self.at} "
                f"({str(error).strip().splitlines()[0][:150].strip()}): start all of them again, "
                f"they {then}"
            ) from error

    def until_done(self) -> None:
        self.clock = Clock()
        if self.progress is not None:
            self.progress.start(self.at, self.steps)
        if (resume := getattr(self.batches, "resume", None)) in GUARANTEES:
            self.say(f"resume guarantee of the data: {resume} ({GUARANTEES[resume]})")
        if self.unlogged:
            _recovery.broken(self)
            trained, self.saved = self.log(), None
            self.save()  # again, because the metrics were reset
        else:
            trained = {}
        if self.loop["due"]:
            self.evaluation(trained)
        elif trained:
            self.show(trained)
        if self.at < self.steps and not self.loop["stopped"]:
            _ending.interruption(self, boundary=True)
            if self.progress is not None or self.logger is not None:
                self.use = utilization(
                    self.traced, self.state, self.spread.shapes(lambda: self.example)
                )
            if hasattr(self.step, "prepare"):  # of a population: it measures how its members run
                self.facts["members"] = self.step.prepare(
                    self.state, self.example, self.facts.get("members")
                )
            self.compile()
            self.example = None
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
        return self.spread.batch(checked_integers(self.batches(at), f"batch {at}"), at)

    def fresh(self) -> Any:
        """Returns the initial sums of the metrics, which are zero."""
        return self.spread.whole(
            jax.tree.map(jnp.zeros_like if self.alone else np.copy, self.zeros)
        )

    def feed(self) -> None:
        self.prefetch = Prefetch(
            self.batch, self.at, self.steps, seen=self.seen if self.alone else None
        )
        self.waited, self.logged = 0.0, self.at
        self.flying: collections.deque = collections.deque()

    def compile(self) -> None:
        self.exempt = _nonfinite.exempt(self.state)
        if hasattr(self.step, "prepare"):  # a population handles members that diverge
            self.exempt |= {
                path for path in _leaves.paths(self.state) if path.startswith("members/")
            }
        plain = self.spread.plan is None and not hasattr(self.step, "plain")
        advance = _advance.function(
            self.traced if plain else self.spread.step(self.step),
            self.state,
            keeps=self.nonfinite == "skip",
            exempt=self.exempt,
            metrics=bool(self.on_step),
        )
        if self.tune and not getattr(self.step, "separate", False):  # whose programs are tuned
            advance = _tuning.tuned(self, advance)
        self.advance = self.profiled(advance)

    def advance_once(self) -> None:
        batch = self.next_batch()
        _recompile.notice(self, batch)
        with _ending.rescuing(self):  # for example, the step cannot be traced with this batch
            self.state, self.loop["metrics"], self.watch, metrics = self.advance(
                self.state, self.loop["metrics"], self.watch, batch
            )
        self.at += 1
        self.flying.append(self.watch["bad"])
        if len(self.flying) > _IN_FLIGHT:
            jax.block_until_ready(self.flying.popleft())
        clock = self.clock
        if clock.compiled is None:
            jax.block_until_ready(self.state)
            self.check_counter()
            _compilation_cache.remember(self.name)
            if self.collects:  # during tracing, collections would take up to a fifth of the time
                gc.enable()
            clock.start(self.at)
            self.waited = self.prefetch.waited
            self.say(f"compiled in {duration(clock.compiled)}, the first step included")
        _callbacks.call(self, metrics)
        logs, measures = self.left()
        if (logs or measures) and _recovery.broken(self):
            return
        trained = self.log() if logs else {}
        if measures and self.evaluate:
            self.evaluation(trained)
        elif trained:
            self.show(trained)
        _ending.interruption(self, boundary=logs or measures or self.at % self.save_every == 0)
        if self.saves() or self.loop["stopped"]:
            self.save()
        if self.progress is not None:
            self.progress.tick(self.at, clock.rate, clock.left(self.at, self.steps))

    def left(self) -> tuple[bool, bool]:
        """Returns two bools: whether the current step must be logged, and whether it must be
        evaluated."""
        last = self.at == self.steps or bool(self.loop["stopped"])
        return self.at % self.log_every == 0 or last, self.at % self.every == 0 or last

    def next_batch(self) -> Any:
        with _ending.rescuing(self):
            return self.prefetch()

    def check_counter(self) -> None:
        if (counted := int(self.state.step)) != self.at:
            raise ValueError(
                f"fit: step {self.at - 1} must return a state whose `step` is {self.at}; it is "
                f"{counted}. "
                "Use state.apply(tx, grads), or state.replace(step=state.step + 1)"
            )

    def show(self, values: Mapping[str, float]) -> None:
        if self.progress is not None:
            values = {
                name: value
                for name, value in values.items()
                if not name.rpartition("/")[2].isdigit()
            }
            rate = self.clock.rate
            left, mfu = (
                rate and self.clock.left(self.at, self.steps),
                self.use(rate) if rate and self.use else None,
            )
            with _ending.rescuing(self):  # a stream or a subclass of the user's
                self.progress.log(self.at, values, rate, left, mfu)

    def log(self) -> dict[str, float]:
        self.check_counter()
        values = _metrics.results(self.loop["metrics"])
        times = {}
        if self.prefetch is not None:  # it has begun
            rate, lap, self.logged = self.clock.lap(self.at), self.at - self.logged, self.at
            waited, self.waited = self.prefetch.waited - self.waited, self.prefetch.waited
            times = {
                "steps_per_second": rate,
                "mfu": rate and self.use and self.use(rate).value,
                "compile_seconds": self.clock.compiled,
                "data": rate and waited * rate / lap,
            }
        if self.logger is not None:
            row = {f"train/{k}": v for k, v in values.items()}
            row |= {f"time/{k}": v for k, v in times.items() if v is not None}
            try:
                self.logger.write(self.at, row)
            except BaseException:  # a disk that is full, a store that refuses
                _ending.put_off(self)
                _ending.rescue(self)
                raise
        self.loop["metrics"], self.unlogged = self.fresh(), False
        return _scalars(values)

    # Evaluating.

    def evaluation(self, trained: Mapping[str, float]) -> None:
        """Evaluates the state, updates the best value and early stopping, and saves the state if
        necessary.

        The state is saved before the evaluation, so that an interrupted evaluation is repeated by
        the resumed run.
        """
        self.loop["due"] = np.array(True)
        if self.saves():
            self.save()
        with _ending.rescuing(self):
            values = self.measure()
            _contract.check_watched(self.watched(), self.evaluate, values=values)
        self.show({**trained, **_scalars(values)})
        self.loop["due"] = np.array(False)
        improved = self.judge(values)
        if self.saved == self.at and self.checkpoints is not None:
            scalars = _scalars(values)
            evaluated = {
                name: value if math.isfinite(value) else None for name, value in scalars.items()
            }
            self.checkpoints.amend(
                self.at,
                metrics=scalars,
                notes={
                    "evaluated": evaluated,
                    "regular": improved or self.at % self.save_every == 0,
                },
            )
        elif improved or self.loop["stopped"]:
            self.save(values, improved=improved)

    def measure(self) -> dict[str, Any]:
        jax.block_until_ready(self.state)
        values = {}
        with self.clock.pause(), self.seen.interrupting(self.alone):
            for name, function in self.evaluate.items():
                self.busy = f"the evaluation '{name}'"
                measured = _contract.evaluated(name, function(self.state))
                values |= {f"{name}/{metric}": value for metric, value in measured.items()}
        self.busy = None
        if self.logger is not None:
            self.logger.write(self.at, values)
        return values

    def judge(self, values: Mapping[str, Any]) -> bool:
        """Returns whether the monitored metric has its best value so far, and updates the counter
        of early stopping."""
        improved = False
        if self.best is not None:
            name, mode = self.best
            value = float(values[name])
            if improved := better(value, float(self.loop["top"]), mode):
                self.loop["top"] = np.array(value)
        if (rule := self.early_stop) is not None:
            best, stale = rule.update(
                float(self.loop["best"]), int(self.loop["stale"]), float(values[rule.metric])
            )
            self.loop |= {"best": np.array(best), "stale": np.array(stale)}
            if stale >= rule.patience:
                self.loop["stopped"] = np.array(True)
                self.say(
                    f"stopped early: {rule.metric} has not been better than {best:.4g} for {stale} "
                    f"evaluations"
                )
        return improved

    def criteria(self) -> dict[str, list[str | None] | None]:
        """Returns the metric and mode of `best` and of `early_stop`, as a dict to be stored in each
        checkpoint."""
        rule = self.early_stop
        return {
            "best": self.best and list(self.best),
            "early_stop": rule and [rule.metric, rule.mode],
        }

    def watched(self) -> set[str]:
        return {self.best and self.best[0], self.early_stop and self.early_stop.metric} - {None}

    # Saving and stopping.

    def saves(self) -> bool:
        """Whether the current step must be saved and has not been saved yet."""
        return self.saved != self.at and (self.at % self.save_every == 0 or self.at == self.steps)

    def save(self, values: Mapping[str, Any] | None = None, *, improved: bool = False) -> None:
        if self.checkpoints is None or self.saved == self.at:
            return
        regular = (
            improved or self.at % self.save_every == 0
        )  # an uninterrupted run has this checkpoint, too
        if regular and self.nonfinite == "rollback":
            self.checkpoints.anchor = self.at
        self.loop["skipped"] = self.watch["skipped"]
        if hasattr(self.batches, "position"):
            at = self.at + int(self.loop["offset"])
            self.facts["position"] = _positions.gathered(self.batches.position(at))
        sound = _nonfinite.sound(self.watch, self.nonfinite == "skip")
        self.checkpoints.save(
            self.at,
            {"state": self.state, "loop": self.loop},
            metrics=_scalars(values or {}),
            notes=self.facts
            | {
                "unlogged": self.unlogged,
                "regular": regular,
                "rollbacks": self.rollbacks,
                "checked": self.checked,
            },
            sound=sound,
        )
        self.saved = self.at


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(x) for name, x in values.items() if np.ndim(x) == 0 and not isinstance(x, MEDIA)
    }
