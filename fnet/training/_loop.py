"""fit: the loop around a step that the user wrote."""

from __future__ import annotations

import contextlib
import numbers
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.parallel import Plan
from fnet.training._callbacks import StepEnd
from fnet.training._checkpoint import Checkpoints
from fnet.training._config import save_config
from fnet.training._early_stop import EarlyStop
from fnet.training._fingerprint import as_dict, compare, identity
from fnet.training._logs import Logger
from fnet.training._progress import Progress
from fnet.training._recovery import NONFINITE
from fnet.training._run import Interrupted, Run
from fnet.training._signals import Stopping, signals
from fnet.training._storage import StorePath, location
from fnet.training._workdir import CHECKPOINTS, remove_logs


def fit(
    step: Callable[[Any, Any], tuple[Any, Mapping[str, Any]]],
    state: Any,
    batches: Callable[[int], Any],
    *,
    steps: int,
    workdir: str | os.PathLike | None = None,
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
    config: Any = None,
    restart: bool = False,
    restore_best: bool = False,
    notes: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    on_step: Callable[[StepEnd], Any] | Sequence[Callable[[StepEnd], Any]] = (),
    tensorboard: bool = True,
    jit: bool = True,
    tune: bool = True,
    plan: Plan | None = None,
) -> Any:
    """Trains until step `steps`, from the last checkpoint in `workdir` if there is one.

    Resuming is exact: a run that was stopped and started again ends with the same bits as one that was not, in
    parameters, optimizer, average, metrics and order of the data. Metrics are added up on the device and fetched every
    `log_every` steps; between those the host never waits for it, except to keep no more than two steps in flight.

    A run begins from the last whole checkpoint in its own `workdir`, else from `state` as given. Where there are
    checkpoints and none can be read it is an error, never a fresh start.

    Args:
      step: pure, `step(state, batch) -> (state, metrics)`; it increases `state.step` by 1 and keeps the state's
        structure, shapes and dtypes. Metrics are scalars (averaged over the steps between two logs) and what
        `mean(values, weight)` returns (averaged over examples).
      state: a `TrainState`, or any pytree with an integer array `step`. It is copied, then donated.
      batches: `batches(i)` is the batch of step i, such as `Batches`. A thread calls it, for the next steps while one
        runs; the log says how much of the time the loop still waited ("time/data").
      steps: how many there will be in all, those of earlier calls on this workdir included.
      workdir: the run's folder: config.json, metrics.jsonl, tensorboard/ and checkpoints/. A path, or a URL of an
        object store (s3://bucket/run, gs://, az://; `pip install 'fnet[cloud]'`). None keeps nothing.
      evaluate: functions of the state by name; they return what `evaluator(...)` returns.
      evaluate: functions of the state by name; they return what `evaluator(...)` returns, and may add `Histogram`,
        `Image` and `Text`.
      every: evaluate after every so many steps and after the last; None: after the last alone.
      log_every: steps between two fetches of the training metrics.
      save_every: steps between two checkpoints; None: as `every`. The last step is always saved.
      keep: how many of the latest checkpoints to keep.
      keep_every: keep each checkpoint whose step is a multiple of this as well.
      best: a metric such as "validation/accuracy". The state with the best value is saved when it occurs, and kept.
      best_mode: "max" or "min".
      early_stop: when to stop before `steps`; it decides about `best` too unless that is given.
      nonfinite: what happens at a step after which a metric or the state is NaN or infinite: "stop" raises
        `Diverged`; "skip" leaves the state as it was before the step, its counter apart; "rollback" goes back to the
        last checkpoint and continues from there with the batches after the bad one.
      debug: when the run breaks, replay up to the step that broke it and name the first layer that did.
      config: the hyperparameters, a dataclass or a dict of JSON types. They are written to config.json and into each
        checkpoint, with the number of steps and the identity of the data, and a run is resumed only with the same ones.
        A larger `steps` is always allowed. Fields called steps or epochs are not compared, and neither are fields
        of a dataclass declared with `compare=False`. Without a config a `ResumeWarning` says what cannot be
        compared.
      restart: remove the run in `workdir` first, once the arguments have been checked and no other run has the folder.
      restore_best: return the state that was best by `best` or `early_stop` instead of the last one.
      notes: what else of the run each checkpoint is to remember, JSON's types, such as {"policy": str(policy)}.
      progress: a `Progress` that shows the run, or None for silence.
      on_step: a function, or several, called with a `StepEnd` after each step, for logs of your own. If one raises, the
        state is saved and `fit` raises the same.
      tensorboard: write TensorBoard's event files as well.
      jit: False runs everything op by op, for a debugger.
      tune: rewrite the step into what this chip's compiler runs fast (`transforms.tune`), same numbers up to rounding.
        A resumed run keeps the rules that it began with.
      plan: of `parallel.plan(step, ...)`: runs the step on the plan's chips, with the numbers of one up to rounding.
        The state goes where the plan says if it is not there, batches go straight to their chips, and a resumed run
        may have another plan. A short batch is filled up with rows of weight 0, as `parallel.feed` does. Where the
        chips are of several processes, `batches(i)` are all rows, the same in each process, or each one's own.

    Returns:
      The state after the last step; with `restore_best`, the best one. `load` and `restore` read both from `workdir`.

    Raises:
      Interrupted: on SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1, once the last finished step is on the disk. A signal
        that comes more than a second later ends the process at once. (Signals are only seen where `fit` runs in the
        main thread.)
      Diverged: the state or a metric is NaN or infinite, naming the step and the leaf.
      CheckpointError: no checkpoint can be read, or they are of another model or optimizer; one cannot be written;
        another run is using the workdir, or has replaced it.
      ConfigError: the run in `workdir` was begun with another config, other data or more steps.
      OutOfMemory: the device has too little memory, naming the largest arrays and an estimate of the largest batch.
      PeerLost: another process of the run is gone.
      TypeError: a step or batches that are no functions, a state without `step`, or a step that changes the structure,
        a shape or a dtype of the state.
      ValueError: an interval that is no whole number from 1 up, a metric to watch that no evaluation returns, a step
        that does not increase `state.step` by 1, or a plan of another state or for chips that are not here.

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
    _check_functions(step, batches, state, {} if evaluate is None else evaluate)
    on_step = tuple(on_step) if isinstance(on_step, Sequence) else (on_step,)
    if not all(map(callable, on_step)):
        raise TypeError(f"fit(..., on_step=): expected a function of a StepEnd, or several; got {on_step!r}")
    steps, every, log_every, save_every, keep_every = _counts(
        state, steps=steps, every=every, log_every=log_every, save_every=save_every, keep_every=keep_every)
    if early_stop is not None and best is None:
        best, best_mode = early_stop.metric, early_stop.mode
    if restore_best and (best is None or workdir is None):
        raise ValueError("restore_best=True: name the metric (best='validation/accuracy', or early_stop=) and a "
                         "workdir, where the best state is kept")
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite='{nonfinite}': use {', '.join(NONFINITE)}")
    configured = as_dict(config)
    notes = as_dict({} if notes is None else notes)
    with contextlib.ExitStack() as stack:
        if not jit:
            stack.enter_context(jax.disable_jit())
        if progress is not None:
            stack.callback(progress.close)
        seen = stack.enter_context(signals())
        checkpoints = None
        if workdir is not None:
            checkpoints = Checkpoints(location(workdir) / CHECKPOINTS, keep=keep, keep_every=keep_every, best=best,
                                      mode=best_mode)
        run = Run(step, state, batches, seen=seen, steps=steps, evaluate=evaluate or {}, every=every or steps,
                  save_every=save_every or every or steps, log_every=log_every, best=best and (best, best_mode),
                  early_stop=early_stop, progress=progress, on_step=on_step, nonfinite=nonfinite, debug=debug,
                  notes=notes, tune=tune, plan=plan)
        if checkpoints is not None:
            run.checkpoints = stack.enter_context(checkpoints)
            sample = run.example if run.alone else None    # each process may have rows of its own
            begun_with = {"config": configured, "steps": steps, "data": identity(batches, run.at, sample)}
            _begin(run, workdir, begun_with, config, restart=restart)
            if jax.process_index() == 0:
                def logs():
                    logger = Logger(workdir, step=run.at, tensorboard=tensorboard,
                                    again=run.evaluate if run.loop["due"] else ())
                    logger.hyperparameters, logger.compared = configured, sorted(run.watched())
                    return logger

                run.logs, run.logger = logs, logs()
                stack.callback(lambda: run.logger.close())
        run.train()
        return _best(run) if restore_best else run.state


def _check_functions(step, batches, state, evaluate):
    for name, value in {"step": step, "batches": batches}.items():
        if not callable(value):
            raise TypeError(f"fit(step, state, batches): {name} is a function; got a {type(value).__name__}")
    if not isinstance(evaluate, Mapping) or not all(map(callable, evaluate.values())):
        raise TypeError("fit(..., evaluate=): expected functions by name, such as {'validation': function}; got "
                        f"{evaluate!r}")
    if not hasattr(state, "step"):
        raise TypeError("fit: a state has an integer array `step`, as a TrainState has; "
                        f"got a {type(state).__name__} without one")
    if np.ndim(state.step) or not jnp.issubdtype(jnp.result_type(state.step), jnp.integer):
        raise TypeError(f"fit: state.step counts the steps made, an integer; got {jnp.result_type(state.step)}"
                        f"{list(np.shape(state.step))}")


def _counts(state, **counts):
    """The numbers of steps as int, in the order given."""
    most = jnp.iinfo(jnp.result_type(state.step)).max
    checked = []
    for name, value in counts.items():
        if value is not None or name == "steps":
            whole = isinstance(value, numbers.Real) and not isinstance(value, bool) and value % 1 == 0
            if not whole or not 1 <= value <= most:
                raise ValueError(f"{name}={value!r}: it counts steps, a whole number from 1 to {most}")
            value = int(value)
        checked.append(value)
    return checked


def _begin(run: Run, workdir, begun_with: Mapping[str, Any], config: Any, *, restart: bool) -> None:
    """Takes the folder and goes to where the run is; everything that can be wrong with the arguments has been seen."""
    try:                                                   # a store's lock may have to expire first
        with run.seen.interrupting(run.alone and isinstance(run.checkpoints.folder, StorePath)):
            run.checkpoints.lock()
    except Stopping:
        raise Interrupted(f"{run.seen.received}: stopped while waiting for the lock of {run.checkpoints.folder}; "
                          "nothing was trained or changed") from None
    if restart and jax.process_index() == 0:
        run.checkpoints.clear()
        remove_logs(workdir)
    run.restore()
    if run.saved is not None:
        compare(run.checkpoints.notes(run.saved).get("fit", {}), begun_with, config, workdir)
        run.say(f"resumed at step {run.at} from {run.checkpoints.folder / str(run.at)}")
    if begun_with["config"] is not None and jax.process_index() == 0:
        save_config(begun_with["config"], workdir)
    run.facts["fit"] = begun_with | run.criteria()


def _best(run: Run) -> Any:
    step = run.checkpoints.best()
    if step is None:
        warnings.warn(f"restore_best: '{run.best[0]}' was never finite, so the last state is returned", stacklevel=3)
        return run.state
    run.say(f"returning the state of step {step}, the best by {run.best[0]}")
    return run.checkpoints.restore(run.state, step, part="state")
