"""Ending: ends a run early, after a signal or an error, and saves its last complete step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NoReturn

from fnet.parallel._gather import gather
from fnet.training.loop._options import Options
from fnet.training.loop._recovery import Recovery
from fnet.training.loop._run_state import RunState
from fnet.training.loop._signals import Signals, Stopping


class Interrupted(Exception):
    """A signal interrupted the run. With a workdir, its last complete step is saved.

    >>> import signal
    >>> step = lambda state, batch: (state.apply(optax.sgd(0.1), {"w": batch}), {})
    >>> state = tr.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
    >>> try:
    ...     tr.fit(step, state, lambda i: jnp.ones(3), steps=9, on_step=lambda end: signal.raise_signal(signal.SIGINT))
    ... except tr.Interrupted as error:
    ...     print(error)
    SIGINT: stopped at step 1; without a workdir, the state is not saved
    """


class PeerLost(RuntimeError):
    """Another process of the run has ended or cannot be reached.

    A script can then end with an exit code that tells the scheduler to restart the job:

    >>> step = lambda state, batch: (state.apply(optax.sgd(0.1), {"w": batch}), {})
    >>> state = tr.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
    >>> try:
    ...     state = tr.fit(step, state, lambda i: jnp.ones(3), steps=2)
    ... except tr.PeerLost:
    ...     raise SystemExit(75)
    >>> int(state.step)
    2
    """


class Ending:
    """Ends a run early, with its last complete step saved."""

    def __init__(self, *, options: Options, signals: Signals, run: RunState, recovery: Recovery):
        self.options = options
        self.signals = signals
        self.run = run
        self.recovery = recovery

    @contextlib.contextmanager
    def rescuing(self) -> Iterator[None]:
        """Saves the last complete step if user code raises an error, or if a signal arrives while
        user code runs."""
        try:
            yield
        except Stopping:
            self.obey(boundary=False)
            raise
        except BaseException:
            self.run.rescue()
            raise

    def obey(self, *, boundary: bool) -> None:
        """Saves and ends the run if a signal has arrived. After a signal, a run with several
        processes ends only at a step with a log, an evaluation or a save, because the processes
        exchange their signals only at such steps."""
        if not self.run.spread.alone:
            if not boundary:
                return
            self._exchange()
        pending = not self.run.finished or self.run.loop["due"]
        if self.signals.received and pending:
            self.run.save()
            self._interrupt()

    def _exchange(self) -> None:
        """Receives the signals that were sent to the other processes."""
        if gather(self.signals.received is not None).any():
            self.signals.received = self.signals.received or "a signal to another process"

    def _interrupt(self) -> NoReturn:
        run, name = self.run, self.signals.received
        if run.checkpoints is None:
            raise Interrupted(
                f"{name}: stopped at step {run.at}; without a workdir, the state is not saved"
            )
        run.wait()
        saved = "it"
        bad = -1 if self.options.skips else int(run.watch["bad"])
        if bad >= 0:  # such a state was not saved
            latest = run.checkpoints.latest()
            if self.options.nonfinite == "stop" or latest is None:
                raise self.recovery.diverged(bad)
            saved = f"step {latest}, the last that was finite,"
        raise Interrupted(
            f"{name}: stopped at step {run.at} of {self.options.steps} and saved {saved} in "
            f"{run.checkpoints.folder}; the same command resumes the run"
        )
