"""Loop: the training loop of `fit`."""

from __future__ import annotations

import collections
import gc
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fnet.parallel import Plan
from fnet.training.checkpoints._checkpoint import Checkpoints
from fnet.training.data._iterators import GUARANTEES
from fnet.training.loop import _contract, _memory, _reducing
from fnet.training.loop._callbacks import StepEnd
from fnet.training.loop._ending import Ending, Interrupted, PeerLost
from fnet.training.loop._feed import Feed
from fnet.training.loop._options import Options
from fnet.training.loop._program import Program
from fnet.training.loop._progress import Progress, duration
from fnet.training.loop._recompile import Recompilations
from fnet.training.loop._recovery import Recovery
from fnet.training.loop._reports import Reports, scalars
from fnet.training.loop._run_state import RunState
from fnet.training.loop._signals import GRACE, Signals, Stopping
from fnet.training.loop._spread import Spread
from fnet.training.record import _metrics

_IN_FLIGHT = 2  # steps that the device may be behind the host, which limits the time to stop


class Loop:
    """The training loop: takes a batch from the feed, runs the compiled step, and calls the user's
    functions. At the steps where it is due, it checks that all values were finite, logs, evaluates
    and saves. A signal or an error ends it early.

    Args:
      step, state, batches, plan, progress: as in `fit`.
      options: the other arguments of `fit`.
      signals: the signals that the run receives.
      checkpoints: the checkpoints of the run, or None if nothing is saved.

    Attributes:
      run: where the run stands, which is what a checkpoint holds.
      feed: the batches.
      program: the compiled step.
      reports: what the run tells its user.
      recovery: handles steps that are not finite.
      ending: ends the run early.
    """

    busy: str | None = None  # the current activity, if it is not a step

    def __init__(
        self,
        step: Callable,
        state: Any,
        batches: Callable[[int], Any],
        *,
        options: Options,
        signals: Signals,
        checkpoints: Checkpoints | None,
        progress: Progress | None,
        plan: Plan | None,
    ):
        self.options = options
        self.signals = signals
        self.spread = Spread(plan)
        self.program = Program(step, state, options=options, spread=self.spread)
        placed = self.spread.state(state)
        self.reports = Reports(progress, options.steps)
        self.feed = Feed(batches, steps=options.steps, spread=self.spread, signals=signals)
        self._read_example(int(placed.step))
        zeros = self.program.zeros(placed, self.feed.shapes())
        _contract.check_watched(options.watched(), options.evaluate, state=placed)
        self.run = RunState(
            placed,
            zeros,
            options=options,
            spread=self.spread,
            feed=self.feed,
            reports=self.reports,
            checkpoints=checkpoints,
        )
        self.recovery = Recovery(
            self.program,
            state if options.debug else None,
            options=options,
            run=self.run,
            feed=self.feed,
            reports=self.reports,
        )
        self.ending = Ending(options=options, signals=signals, run=self.run, recovery=self.recovery)
        self.recompilations = Recompilations()
        self.in_flight: collections.deque = collections.deque()

    def _read_example(self, at: int) -> None:
        try:
            self.feed.read_example(at)
        except Stopping:
            raise Interrupted(
                f"{self.signals.received}: stopped before the first batch was available; nothing "
                "was trained or changed"
            ) from None

    def train(self) -> None:
        """Trains until the last step. Explains errors of the device."""
        try:
            self._finish_interrupted_step()
            if not self.run.finished:
                self._take_steps()
            self.run.wait()
        except jax.errors.JaxRuntimeError as error:
            if _memory.exhausted(error) and self.recompilations.batch.last is not None:
                raise self._out_of_memory(error) from error
            if self.spread.alone:
                raise
            raise self._peer_lost(error) from error

    def _finish_interrupted_step(self) -> None:
        """Starts the display, and does what an earlier process still had to do at the step at which
        it ended: logging and evaluating."""
        run, reports = self.run, self.reports
        reports.start(run.at)
        resume = getattr(self.feed.batches, "resume", None)
        if resume in GUARANTEES:
            reports.say(run.at, f"resume guarantee of the data: {resume} ({GUARANTEES[resume]})")
        trained = {}
        if run.unlogged:
            self.recovery.check()
            trained = self.log()
            run.saved = None
            run.save()  # again, because the metrics were reset
        if run.loop["due"]:
            self.evaluate(trained)
        elif trained:
            self.show(trained)

    def _take_steps(self) -> None:
        run, reports = self.run, self.reports
        self.ending.obey(boundary=True)
        if reports.listened:
            reports.utilization = self.program.utilization(run.state, self.feed.shapes())
        with reports.waiting("preparing to compile"):
            self.program.compile(run, self.feed.example, reports)
        self.feed.example = None
        reports.restart_clock()
        self.feed.start(run.at, run.offset)
        try:
            while not run.finished:
                self.iterate()
        finally:
            self.feed.close()

    def iterate(self) -> None:
        """Makes one step, and does all that is due after it."""
        run = self.run
        if self.reports.clock.compiled is None:
            with self.reports.waiting("compiling"):
                metrics = self._advance_once()
                self._first_step_done()
        else:
            metrics = self._advance_once()
        self._call_user(metrics)
        logs, measures = run.left()
        if (logs or measures) and self.recovery.check():
            self.in_flight.clear()
            return
        trained = self.log() if logs else {}
        if measures and self.options.evaluate:
            self.evaluate(trained)
        elif trained:
            self.show(trained)
        saves = run.at % self.options.save_every == 0
        self.ending.obey(boundary=logs or measures or saves)
        if run.saves() or run.loop["stopped"]:
            run.save()
        self.reports.tick(run.at)

    def _advance_once(self) -> Any:
        """Dispatches one step to the device, and returns its metrics."""
        run = self.run
        with self.ending.rescuing():
            batch = self.feed()
        begins = run.at <= run.begun + 1
        compiles = self.recompilations.notice(run.at, run.state, batch, begins=begins)
        if compiles is not None:
            self.reports.say(run.at, compiles)
        with self.ending.rescuing():  # for example, the step cannot be traced with this batch
            run.state, run.loop["metrics"], run.watch, metrics = self.program.advance(
                run.state, run.loop["metrics"], run.watch, batch
            )
        run.at += 1
        self.in_flight.append(run.watch["bad"])
        if len(self.in_flight) > _IN_FLIGHT:
            jax.block_until_ready(self.in_flight.popleft())
        return metrics

    def _first_step_done(self) -> None:
        """Waits for the first step, and starts to measure the speed after it."""
        run, clock = self.run, self.reports.clock
        jax.block_until_ready(run.state)
        run.check_counter()
        self.program.remember()
        if self.options.collects:  # during tracing, it would take up to a fifth of the time
            gc.enable()
        clock.start(run.at)
        self.feed.restart_lap()
        self.reports.say(run.at, f"compiled in {duration(clock.compiled)}, the first step included")

    def _call_user(self, metrics: Any) -> None:
        """Calls the `on_step` functions. If one of them raises an error or is ended by a signal,
        the
        state is saved, and the resumed run logs and evaluates this step if that is still due."""
        run = self.run
        if not self.options.on_step:
            return
        write = lambda values: self.reports.write(run.at, values)
        try:
            # A function may wait for something, so a signal interrupts it.
            with self.signals.interrupting(self.spread.alone, grace=GRACE):
                for function in self.options.on_step:
                    function(StepEnd(run.at, run.state, metrics, write, run.stop))
        except Stopping:
            run.put_off()
            self.ending.obey(boundary=False)  # raises Interrupted unless the run is complete
        except BaseException:
            run.put_off()
            run.rescue()
            raise

    def log(self) -> dict[str, float]:
        """Writes the metrics since the last log, and returns those that are numbers. Waits for the
        device."""
        run, reports = self.run, self.reports
        run.check_counter()
        values = _metrics.results(run.loop["metrics"])
        times = reports.times(run.at, self.feed) if self.feed.started else {}
        row = {f"train/{name}": value for name, value in values.items()}
        row |= {f"time/{name}": value for name, value in times.items()}
        try:
            reports.write(run.at, row)
        except BaseException:  # a disk that is full, a store that refuses
            run.put_off()
            run.rescue()
            raise
        run.reset_metrics()
        return scalars(values)

    def show(self, values: Mapping[str, float]) -> None:
        with self.ending.rescuing():  # a stream or a subclass of the user's
            self.reports.show(self.run.at, values)

    def evaluate(self, trained: Mapping[str, float]) -> None:
        """Evaluates the state, displays the results together with those of training, and judges
        them.

        The state is saved before the evaluation, so that an interrupted evaluation is repeated by
        the resumed run.
        """
        run = self.run
        run.loop["due"] = np.array(True)
        if run.saves():
            run.save()
        with self.ending.rescuing():
            values = self._measure()
            _contract.check_watched(self.options.watched(), self.options.evaluate, values=values)
        self.show({**trained, **scalars(values)})
        run.evaluated(values)

    def _measure(self) -> dict[str, Any]:
        run = self.run
        jax.block_until_ready(run.state)
        values = {}
        with self.reports.clock.pause(), self.signals.interrupting(self.spread.alone):
            for name, function in self.options.evaluate.items():
                self.busy = f"the evaluation '{name}'"
                measured = _contract.evaluated(name, function(run.state))
                values |= {f"{name}/{metric}": value for metric, value in measured.items()}
        self.busy = None
        self.reports.write(run.at, values)
        return values

    def _out_of_memory(self, error: BaseException) -> _memory.OutOfMemory:
        during = f"the step, near step {self.run.at},"
        if self.reports.clock.compiled is None:
            during = "the first step"
        command = ""
        if self.busy is None:
            command = _reducing.advice(self.run, self.run.at + 1, _memory.failing(self.run.state))
        return _memory.error(
            error,
            self.busy or during,
            evaluating=self.busy is not None,
            step=self.program.step,
            state=self.run.state,
            batch=self.recompilations.batch.shapes(),
            plan=self.spread.plan,
            command=command,
        )

    def _peer_lost(self, error: BaseException) -> PeerLost:
        kept = self.run.checkpoints and self.run.checkpoints.latest()
        then = "begin again at the first step" if kept is None else f"resume from step {kept}"
        reason = str(error).strip().splitlines()[0][:150].strip()
        return PeerLost(
            f"process {jax.process_index()} of {jax.process_count()} lost the others at step "
            f"{self.run.at} ({reason}): start all of them again, they {then}"
        )
