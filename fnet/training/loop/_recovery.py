"""Handles a state or a metric that is not finite: skips the step, rolls back, or stops with an
explanation."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from fnet.training.checkpoints._reading import CheckpointError
from fnet.training.loop import _nonfinite
from fnet.training.loop._nonfinite import Diverged
from fnet.training.loop._prefetch import Prefetch
from fnet.training.loop._signals import Stopping

if TYPE_CHECKING:
    from fnet.training.loop._run import Run

NONFINITE = ("stop", "skip", "rollback")
_ROLLBACKS = 3  # largest number of rollbacks to the same checkpoint


def broken(run: Run) -> bool:
    """Handles a step whose state or metrics are not finite. Returns whether the run was rolled back
    to a checkpoint. Waits for the device."""
    if run.nonfinite == "skip":
        _skipped(run)
        return False
    bad = int(run.watch["bad"])
    if bad < 0:
        return False
    kept = None if run.nonfinite == "stop" else target(run, bad)
    if kept is None:
        raise diverged(run, bad)
    run.rollbacks = (kept, run.rollbacks[1] + 1 if run.rollbacks[0] == kept else 1)
    if run.rollbacks[1] > _ROLLBACKS:
        raise diverged(run, bad, f", after {_ROLLBACKS} rollbacks to step {kept}")
    batch = bad + int(run.loop["offset"])
    run.prefetch.close(wait=True)
    if run.logger is not None:
        run.logger.close()
    run.load(kept)
    run.loop["offset"] = np.array(batch + 1 - run.at)
    if run.logger is not None:
        run.logger = run.logs()
    run.say(
        f"step {bad + 1} was not finite: rolled back to step {run.at}, continuing with batch "
        f"{batch + 1}"
    )
    run.feed()
    run.clock.lap(run.at)
    return True


def target(run: Run, most: int) -> int | None:
    """Returns the step of the checkpoint to roll back to: the last one up to step `most` that an
    uninterrupted run would have saved, too. From a checkpoint that exists only because the run was
    interrupted there, a resumed run would continue with other batches than an uninterrupted run."""
    if run.checkpoints is None or run.nonfinite != "rollback":
        return None
    run.checkpoints.wait()
    for step in reversed(run.checkpoints.steps()):
        with contextlib.suppress(CheckpointError):  # damaged
            if step <= most and run.checkpoints.notes(step).get("regular", True):
                return step
    return None


def _skipped(run):
    """Reports the steps that were skipped since the last check, which may have been in an earlier
    process."""
    bad, total = int(run.watch["bad"]), int(run.watch["skipped"])
    (since, before), run.checked = run.checked, (run.at, total)
    count, steps = total - before, run.at - since
    if not count:
        return
    what = _called(run) if bad >= 0 else "the state or a metric"
    run.loop["skipped"] = np.array(total, np.int32)
    run.watch = run.spread.whole(_nonfinite.start(total))
    if count >= steps > 1:
        bad = bad if bad >= 0 else since
        raise diverged(run, bad, f", and so was every step up to {run.at}", what=what)
    first = f", the first of them {bad + 1}" if bad >= 0 else ""
    run.say(f"skipped {count} of the last {steps} steps, which were not finite{first}")


def latest(run: Run) -> int | None:
    """Returns the step of the last checkpoint, or None if there is no checkpoint."""
    if run.checkpoints is None:
        return None
    run.checkpoints.wait()
    return run.checkpoints.latest()


def _called(run):
    return _nonfinite.watched(run.zeros, run.state, run.exempt)[int(run.watch["leaf"])][0]


def diverged(run: Run, bad: int, more: str = "", *, what: str | None = None) -> Diverged:
    batch, kept = bad + int(run.loop["offset"]), latest(run)
    text = f"{what or _called(run)} was not finite at step {bad + 1} of {run.steps} (batch {batch}){more}"
    text += "" if kept is None else f"; the checkpoint of step {kept} is sound"
    if run.debug:
        text += f". {_blame(run, bad, kept)}"
    return Diverged(f"{text}. Lower the learning rate, clip the gradient, or look at the data")


def _blame(run, bad, kept):
    """Replays the run up to the step that produced NaN or infinity, and names the layer of the
    first such value."""
    if kept is not None and kept <= bad:
        run.load()
        state, at = run.state, run.at
    elif run.given is not None and int(run.given.step) <= bad:
        state, at = run.spread.state(run.given), int(run.given.step)
    else:
        return "No checkpoint before it is left to replay it from"
    watch, before = run.spread.whole(_nonfinite.start(0)), None
    feed = Prefetch(run.batch, at, bad + 1, seen=run.seen)
    with contextlib.closing(feed), contextlib.suppress(Stopping):
        for i in range(at, bad):
            batch = feed()
            if i == bad - 1:
                before = jax.tree.map(jnp.copy, state), batch
            state, _, watch, _ = run.advance(state, run.fresh(), watch, batch)
        return _nonfinite.first_layer(run.step, (state, feed()), before)
    return "A signal ended the replay"
