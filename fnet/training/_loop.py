"""fit: the loop around a step that the user wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from fnet.parallel import Plan
from fnet.training._checkpoint import Checkpoints
from fnet.training._early_stop import EarlyStop
from fnet.training._logs import Logger
from fnet.training._progress import Progress
from fnet.training._run import NONFINITE, Run
from fnet.training._signals import signals
from fnet.training._workdir import CHECKPOINTS


def fit(
    step: Callable[[Any, Any], tuple[Any, Mapping[str, Any]]],
    state: Any,
    batches: Callable[[int], Any],
    *,
    steps: int,
    workdir: str | Path | None = None,
    evaluate: Mapping[str, Callable[[Any], Mapping[str, Any]]] | None = None,
    every: int | None = None,
    log_every: int = 100,
    save_every: int | None = None,
    keep: int = 3,
    keep_every: int | None = None,
    best: str | None = None,
    best_mode: str = "max",
    early_stop: EarlyStop | None = None,
    nonfinite: str = "stop",
    debug: bool = False,
    notes: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    tensorboard: bool = True,
    jit: bool = True,
    tune: bool = True,
    plan: Plan | None = None,
) -> Any:
    """Trains until step `steps`, going on from the last checkpoint in `workdir` if there is one.

    Resuming is exact: a run that was stopped and started again ends with the same bits as one that was not, in
    parameters, optimiser, average, metrics and order of the data. Metrics are added up on the device and fetched every
    `log_every` steps; between those the host never waits for it, except to keep no more than two steps in flight.

    The order in which a run looks for its beginning: the last whole checkpoint in its own `workdir`, else `state` as
    given. Where there are checkpoints and none can be read it is an error, never a fresh start.

    Args:
      step: pure, `step(state, batch) -> (state, metrics)`; metrics are scalars (averaged over the
        steps between two logs) and what `mean(values, weight)` returns (averaged over examples).
      state: a `TrainState`, or any pytree with an integer array `step`. It is copied, then donated.
      batches: `batches(i)` is the batch of step i, such as `Batches`. A thread calls it, for the next steps while one
        runs; the log says how much of the time the loop still waited ("time/data").
      steps: how many there will be in all, those of earlier calls on this workdir included.
      workdir: the run's folder: metrics.jsonl, tensorboard/ and checkpoints/. None keeps nothing.
      evaluate: functions of the state by name; they return what `evaluator(...)` returns.
      every: evaluate after every so many steps and after the last; None: after the last alone.
      log_every: steps between two fetches of the training metrics.
      save_every: steps between two checkpoints; None: as `every`. The last step is always saved.
      keep: how many of the latest checkpoints to keep.
      keep_every: keep each checkpoint whose step is a multiple of this as well.
      best: a metric such as "validation/accuracy": the checkpoint where it was best is kept too.
      best_mode: "max" or "min".
      early_stop: when to stop before `steps`; it decides about `best` too unless that is given.
      nonfinite: what happens at a step after which the loss or a parameter is NaN or infinite: "stop" raises
        `Diverged`; "skip" leaves the state as it was before the step, its counter apart; "rollback" goes back to the
        last checkpoint and on from there with the batches after the bad one.
      debug: when the run breaks, replay up to the step that broke it and name the first layer that did.
      notes: what else of the run each checkpoint is to remember, JSON's types, such as {"policy": str(policy)}.
      progress: a `Progress` that shows the run, or None for silence.
      tensorboard: write TensorBoard's event files as well.
      jit: False runs everything op by op, for a debugger.
      tune: rewrite the step into what this chip's compiler runs fast (`transforms.tune`), same numbers up to rounding.
        A run that goes on keeps the rules that it began with.
      plan: of `parallel.plan(step, ...)`: runs the step on the plan's chips, with the numbers of one up to rounding.
        The state goes where the plan says if it is not there, batches go straight to their chips, and a run that goes
        on may have another plan. A short batch is filled up with rows of weight 0, as `parallel.feed` does. Where the
        chips are of several processes, `batches(i)` are all rows, the same in each process, or each one's own.

    Returns:
      The state after the last step.

    Raises:
      Interrupted: on SIGINT (Ctrl-C) or SIGTERM, once a checkpoint is on the disk. A second signal
        ends the process at once. (Signals are only seen where `fit` runs in the main thread.)
      Diverged: the loss or a parameter is NaN or infinite, naming the step.
      CheckpointError: no checkpoint can be read, or they are of another model or optimiser; one cannot be written; or
        another run is using the workdir.
      PeerLost: another process of the run is gone.
      TypeError: a step or batches that are no functions, or a state without `step`.
      ValueError: an interval below 1, a metric to watch that no evaluation returns, or a plan of another state or
        for chips that are not here.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, optax
      >>> from fnet.training import Batches, TrainState
      >>> tx = optax.sgd(0.1)
      >>> def step(state, batch):
      ...     loss = lambda params: jnp.mean((params["w"] * batch["x"] - batch["y"]) ** 2)
      ...     value, grads = jax.value_and_grad(loss)(state.params)
      ...     return state.apply(tx, grads), {"loss": value}
      >>> x = np.linspace(0, 1, 16, dtype=np.float32)
      >>> batches = Batches({"x": x, "y": 3 * x}, batch_size=8)
      >>> state = fit(step, TrainState.create({"w": jnp.zeros(())}, tx), batches, steps=200)
      >>> round(float(state.params["w"]), 2)
      3.0
    """
    for name, value in {"step": step, "batches": batches}.items():
        if not callable(value):
            raise TypeError(f"fit(step, state, batches): {name} is a function; got a {type(value).__name__}")
    if not hasattr(state, "step"):
        raise TypeError("fit: a state has an integer array `step`, as a TrainState has; "
                        f"got a {type(state).__name__} without one")
    intervals = {"steps": steps, "every": every, "log_every": log_every, "save_every": save_every,
                 "keep_every": keep_every}
    for name, value in intervals.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: it counts steps, at least 1")
    if early_stop is not None and best is None:
        best, best_mode = early_stop.metric, early_stop.mode
    watched = {best, early_stop.metric if early_stop else None} - {None}
    for metric in watched:
        if metric.partition("/")[0] not in (evaluate or {}):
            raise ValueError(
                f"'{metric}' is to be watched, but evaluate= has {sorted(evaluate or {})}: "
                "a metric is called 'evaluation/metric', as in 'validation/accuracy'"
            )
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite='{nonfinite}': use {', '.join(NONFINITE)}")
    with contextlib.ExitStack() as stack:
        if not jit:
            stack.enter_context(jax.disable_jit())
        if progress is not None:
            stack.callback(progress.close)
        seen = stack.enter_context(signals())
        run = Run(step, state, batches, steps=steps, evaluate=evaluate or {}, every=every or steps,
                  save_every=save_every or every or steps, log_every=log_every, early_stop=early_stop,
                  progress=progress, nonfinite=nonfinite, debug=debug, notes=notes or {}, tune=tune, plan=plan)
        if workdir is not None:
            folder = Path(workdir) / CHECKPOINTS
            run.checkpoints = stack.enter_context(
                Checkpoints(folder, keep=keep, keep_every=keep_every, best=best, mode=best_mode))
            run.checkpoints.lock()
            run.restore()
            if jax.process_index() == 0:
                run.logs = lambda: Logger(workdir, step=run.at, tensorboard=tensorboard)
                run.logger = run.logs()
                stack.callback(lambda: run.logger.close())
        run.train(seen)
        return run.state
