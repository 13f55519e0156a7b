"""Saves the last complete step of a run that ends early, and records whether the resumed run must
first log or evaluate this step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import numpy as np

from fnet.training.checkpoints._reading import CheckpointError
from fnet.training.loop import _recovery
from fnet.training.loop._signals import Stopping

if TYPE_CHECKING:
    from fnet.training.loop._run import Run


class Interrupted(Exception):
    """The run was interrupted by a signal. If the run has a workdir, its last complete step has
    been saved.

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
    """Raised by `fit` if another process of the same run has ended or cannot be reached.

    After a `PeerLost` error, a script can end with an exit code that tells the scheduler to restart
    the job:

    >>> step = lambda state, batch: (state.apply(optax.sgd(0.1), {"w": batch}), {})
    >>> state = tr.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
    >>> try:
    ...     state = tr.fit(step, state, lambda i: jnp.ones(3), steps=2)
    ... except tr.PeerLost:
    ...     raise SystemExit(75)
    >>> int(state.step)
    2
    """


def put_off(run: Run) -> None:
    """Records whether a resumed run must first log and evaluate the last complete step."""
    logs, measures = run.left()
    run.unlogged = logs
    run.loop["due"] = np.array(measures and bool(run.evaluate))


def rescue(run: Run) -> None:
    """Saves the last complete step before an error ends the run. If the next step has already
    started, nothing is saved, because the state was donated to it."""
    if (
        run.alone
        and run.at > run.begun
        and not any(
            x.is_deleted()
            for x in jax.tree.leaves((run.state, run.loop))
            if isinstance(x, jax.Array)
        )
    ):
        with contextlib.suppress(CheckpointError, OSError, jax.errors.JaxRuntimeError):
            run.save()
            run.checkpoints and run.checkpoints.wait()


@contextlib.contextmanager
def rescuing(run: Run) -> Iterator[None]:
    """Saves the last complete step if user code raises an error, or if a signal arrives while user
    code runs."""
    try:
        yield
    except Stopping:
        interruption(run, boundary=False)
        raise
    except BaseException:
        rescue(run)
        raise


def interruption(run: Run, *, boundary: bool) -> None:
    """Saves and ends the run if a signal has arrived. After a signal, a run with several processes
    ends only at a step with a log, an evaluation or a save, because the processes exchange their
    signals only at such steps."""
    if not run.alone:
        if not boundary:
            return
        from jax.experimental import multihost_utils

        flags = multihost_utils.process_allgather(np.int32(run.seen.received is not None))
        if flags.any():
            run.seen.received = run.seen.received or "a signal to another process"
    unfinished = run.at < run.steps and not run.loop["stopped"]
    if run.seen.received and (unfinished or run.loop["due"]):
        run.save()
        _interrupted(run)


def _interrupted(run):
    name = run.seen.received
    if run.checkpoints is None:
        raise Interrupted(
            f"{name}: stopped at step {run.at}; without a workdir, the state is not saved"
        )
    run.checkpoints.wait()
    saved = "it"
    if (
        run.nonfinite != "skip" and (bad := int(run.watch["bad"])) >= 0
    ):  # such a state was not saved
        if run.nonfinite == "stop" or run.checkpoints.latest() is None:
            raise _recovery.diverged(run, bad)
        saved = f"step {run.checkpoints.latest()}, the last that was finite,"
    raise Interrupted(
        f"{name}: stopped at step {run.at} of {run.steps} and saved {saved} in "
        f"{run.checkpoints.folder}; the same command resumes the run"
    )
