"""fit: the training loop, which calls a step function written by the user."""

from __future__ import annotations

import contextlib
import gc
import numbers
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.parallel import Plan
from fnet.training._config import save_config
from fnet.training._direction import direction
from fnet.training.checkpoints._checkpoint import Checkpoints
from fnet.training.checkpoints._storage import StorePath, location, write_whole
from fnet.training.checkpoints._workdir import CHECKPOINTS, PLAN, remove_logs
from fnet.training.loop import _devices, _profiling
from fnet.training.loop._callbacks import StepEnd
from fnet.training.loop._compilation_cache import compilation_cache
from fnet.training.loop._early_stop import EarlyStop
from fnet.training.loop._ending import Interrupted
from fnet.training.loop._fingerprint import as_dict, compare, identity
from fnet.training.loop._loop import Loop
from fnet.training.loop._options import Options
from fnet.training.loop._progress import Progress
from fnet.training.loop._recovery import NONFINITE
from fnet.training.loop._run_state import RunState
from fnet.training.loop._signals import Signals, Stopping, signals
from fnet.training.record._logs import Logger


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
    best_mode: str | None = None,
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
    profile_steps: range | None = None,
    check_devices: bool = True,
) -> Any:
    """Trains until step `steps`, starting from the last checkpoint in `workdir` if there is one.

        state = fit(step, state, Batches(data, 128), steps=1000)                                  # the shortest form
        state = fit(step, state, Batches(data, 128), steps=1000, workdir="runs/digits",           # can be resumed
                    evaluate={"validation": evaluator(metrics, data)}, every=100, best="validation/accuracy")

    Resuming is exact. A run that is interrupted and resumed reads the data in the same order as an
    uninterrupted run, and has the same parameters, optimizer state, moving average and metrics, bit
    for bit. `fit` sums the metrics on the device, and fetches the sums every `log_every` steps. The
    host runs at most two steps ahead of the device.

    A run starts from the last complete checkpoint in `workdir`. If `workdir` contains no
    checkpoints, `fit` starts from `state`. If `workdir` contains checkpoints, but none of them can
    be read, `fit` raises an error.

    The arguments, by purpose:

        what to train     step, state, batches, steps
        where             workdir, plan
        evaluation        evaluate, every, best, best_mode, early_stop, restore_best
        checkpoints       save_every, keep, keep_every, restart
        reproducibility   config, notes
        errors            nonfinite, debug, check_devices
        output            log_every, progress, tensorboard, on_step, profile_steps
        compilation       jit, tune

    Args:
      step: a pure function, `step(state, batch) -> (state, metrics)`. The step must increase
        `state.step` by 1 and keep the structure, shapes and dtypes of the state. `metrics` is a
        dict. If a metric is a scalar, the log contains the mean of the scalar over the steps since
        the last log. If a metric is a result of `mean(values, weight)`, the log contains the mean
        over the examples of all steps since the last log.
      state: a `TrainState`, or any pytree with an integer array as the attribute `step`. `fit`
        donates a copy of the state to the step, so `state` itself stays valid.
      batches: a function, such as an instance of `Batches`: `batches(i)` returns the batch of step
        i. A background thread prepares the batches of the next steps while a step runs. The log
        reports the fraction of time that the loop waited for batches ("time/data").
      steps: the total number of steps, including the steps of earlier calls with this workdir.
      workdir: the folder of the run, as a path or as a URL of an object store (s3://bucket/run,
        gs://bucket/run or az://container/run). Object stores need `pip install obstore`.
        `fit` writes config.json, metrics.jsonl, events.jsonl, tensorboard/, checkpoints/ and, with
        `plan`, plan.txt to `workdir`. Default None: nothing is written.
      plan: the result of `parallel.plan(step, ...)`, which states how to divide the step among
        several devices. With a `plan`, the results equal those on one device up to rounding. `fit`
        transfers the state and the batches to the shardings in `plan`. A run may be resumed with
        another `plan`. Short batches are padded with rows of weight 0, as by `parallel.feed`. With
        several processes, `batches(i)` returns either all rows of the batch, equal in all
        processes, or only the rows of this process. If `plan` is None, the arrays stay on their
        devices. Default None.
      evaluate: a dict of evaluation functions, such as {"validation": evaluator(metrics, data)}.
        Each evaluation function takes the state and returns a dict of metrics, which may include
        `Histogram`, `Image` and `Text`. Default None: no evaluation.
      every: the number of steps between two evaluations. The state after the last step is always
        evaluated. Default None: only the state after the last step is evaluated.
      best: the name of a metric, such as "validation/accuracy". The state in which the metric has
        its best value is saved and kept. If `best` is None, the metric of `early_stop` is used, if
        there is one. Default None.
      best_mode: "max" if the largest value is the best, "min" if the smallest value is the best.
        Default None: "max" for accuracies, "min" for losses and errors, and other well-known
        metrics accordingly. For any other metric, `best_mode` must be given.
      early_stop: an `EarlyStop`, which states the condition for ending the run before `steps`. If
        the argument `best` is None, the metric and the mode of `early_stop` determine the best
        state. Default None: no early stopping.
      restore_best: whether to return the best state (by `best` or `early_stop`) instead of the last
        state. Default False.
      save_every: the number of steps between two checkpoints. The state after the last step is
        always saved. Default None: the value of `every`.
      keep: how many of the latest checkpoints are kept. Default 3.
      keep_every: a number of steps. Every checkpoint whose step is a multiple of `keep_every` is
        also kept. Default None: only the latest and the best checkpoints are kept.
      restart: whether to delete the earlier run in `workdir` first. With `restart=True`, nothing is
        deleted if an argument is invalid or if another run uses the folder. Default False.
      config: the hyperparameters, a dataclass or a dict of JSON types. `fit` writes `config` to
        config.json and to each checkpoint. Each checkpoint also contains `steps` and a description
        of the data, such as a digest of one batch. A run is resumed only if `config` and the data
        are the same as before, and `steps` is not smaller than before. Fields named steps or
        epochs, and dataclass fields declared with `compare=False`, are not compared. Default None:
        a run is resumed without comparing configurations, and a `ResumeWarning` says so.
      notes: a dict of additional data to store in each checkpoint, such as {"policy": str(policy)}.
        The values have JSON types. Default None: no other data.
      nonfinite: what to do after a step with a NaN or infinite metric or state. With "stop", `fit`
        raises `Diverged`. With "skip", `fit` discards the update of the non-finite step, so that
        only the counter `step` increases. With "rollback", `fit` restores the state of the last
        checkpoint that an uninterrupted run has, too. After that, the batches between the
        checkpoint and the non-finite step are skipped, including the batch of the non-finite step.
        Default "stop".
      debug: whether to replay the step for which `Diverged` is raised, so that the message names
        the first layer with a NaN or infinite value. Default False.
      log_every: the number of steps between two fetches of the training metrics. Default 100.
      progress: a `Progress` that displays the run. Default None: nothing is printed.
      tensorboard: whether to write TensorBoard's event files. Default True.
      on_step: a function, or a sequence of functions. `fit` calls each function of `on_step` with a
        `StepEnd` after each step. If an `on_step` function raises an exception, `fit` saves the
        state and raises the same exception. Default (): no functions.
      jit: whether to compile the step. With `jit=False`, each operation runs separately, so that
        you can use a debugger. Default True.
      tune: whether to rewrite the step with `transforms.tune` into faster code for this chip. The
        rewritten step returns the same results up to rounding. If a run on a CPU would take at
        least ten minutes at the CPU's peak FLOP rate, `fit` selects the rewrite rules by timing:
        `fit` runs the step with and without each rule, on copies of the state. A resumed run uses
        the rewrite rules that were selected when the run was started. Default True.
      profile_steps: a range of consecutive steps to profile, such as range(100, 105). `fit` writes
        the time of the profiled steps by layer path and phase (see `introspect.profile`) to
        profile.txt, profile.html and profile.json in the folder workdir/profile/100-105. The file
        trace.json.gz in the same folder contains a trace of the profiled steps. The website
        ui.perfetto.dev displays the trace. The first step of a process is not profiled, because its
        time includes compilation. Default None: no steps are profiled.
      check_devices: whether to compare twenty operations on the devices with NumPy first, once for
        each device kind, driver and jaxlib (see `hardware.check_devices`). Default True.

    Returns:
      The state after the last step, or the best state if `restore_best` is True. With a `workdir`,
      the returned state is also saved, and can be read with `load` or `restore`.

    Raises:
      Interrupted: a process of the run received SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1. With a
        `workdir`, `fit` saves the last complete step before it raises `Interrupted`. If a second
        signal arrives more than one second after the first signal, the process ends immediately.
        `fit` handles signals only if it runs in the main thread.
      Diverged: the state or a metric is NaN or infinite. The error message names the step and the
        leaf with the NaN or infinite value. With `nonfinite="skip"` or `nonfinite="rollback"`,
        `Diverged` is raised only if the run cannot recover.
      CheckpointError: no checkpoint in `workdir` can be read, or a checkpoint cannot be written. A
        CheckpointError is also raised if the checkpoints belong to another model or optimizer, or
        if another run uses or has replaced `workdir`.
      FaultyDevice: a device computes wrong values. Nothing in `workdir` has changed.
      ConfigError: `config` is given, and the run in `workdir` has another `config`, other data or a
          larger `steps`.
      OutOfMemory: the device does not have enough memory. The error message lists the largest
        arrays and, for a training step, estimates the largest batch that fits.
      PeerLost: in a run with several processes, another process has ended.
      TypeError: `step` or `batches` is not a function, the state has no attribute `step`, or the
        step changes the structure, a shape or a dtype of the state.
      ValueError: an interval such as `every` is not an integer >= 1, or the step does not increase
        `state.step` by 1. A ValueError is also raised if `best` or `early_stop` names a metric that
        no evaluation returns, or if `best_mode` is missing for a metric whose direction fnet does
        not know. With a `plan`, a
        ValueError is also raised if the state does not have the structure for which `plan` was
        made, or if the devices of `plan` are not attached.

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
        raise TypeError(
            f"fit(..., on_step=): expected a function of a StepEnd, or several; got {on_step!r}"
        )
    _check_types(progress=progress, early_stop=early_stop, best=best, plan=plan)
    steps, every, log_every, save_every, keep_every = _counts(
        state,
        steps=steps,
        every=every,
        log_every=log_every,
        save_every=save_every,
        keep_every=keep_every,
    )
    if early_stop is not None and best is None:
        best, best_mode = early_stop.metric, early_stop.mode
    if best is not None:
        best_mode = direction(best, best_mode, "best_mode=")
    if restore_best and (best is None or workdir is None):
        raise ValueError(
            "restore_best=True: name the metric (best='validation/accuracy', or early_stop=) and a "
            "workdir, where the best state is kept"
        )
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite='{nonfinite}': use {', '.join(NONFINITE)}")
    configured = as_dict(config)
    notes = as_dict({} if notes is None else notes, "notes")
    if profile_steps is not None:
        _profiling.check(profile_steps, total=steps, workdir=workdir, jit=jit)

    with contextlib.ExitStack() as stack:
        if not jit:
            stack.enter_context(jax.disable_jit())
        if progress is not None:
            stack.callback(progress.close)
        seen = stack.enter_context(signals())
        collects = gc.isenabled()
        if collects:  # until the end of the first step; see `Loop.iterate`
            gc.disable()
            stack.callback(gc.enable)
        checked = None
        if check_devices:
            say = (lambda text: None) if progress is None else progress.line
            checked = _devices.check(state, plan, say)
        if profile_steps is None:  # a loaded program may have other names of scopes
            stack.enter_context(compilation_cache())
        checkpoints = None
        if workdir is not None:
            checkpoints = Checkpoints(
                location(workdir) / CHECKPOINTS,
                keep=keep,
                keep_every=keep_every,
                best=best,
                mode=best_mode,
            )
        options = Options(
            steps=steps,
            evaluate=evaluate or {},
            every=every or steps,
            save_every=save_every or every or steps,
            log_every=log_every,
            best=best and (best, best_mode),
            early_stop=early_stop,
            on_step=on_step,
            nonfinite=nonfinite,
            debug=debug,
            tune=tune,
            notes=notes,
            collects=collects,
        )
        loop = Loop(
            step,
            state,
            batches,
            options=options,
            signals=seen,
            checkpoints=checkpoints,
            progress=progress,
            plan=plan,
        )
        run, reports = loop.run, loop.reports
        if checkpoints is not None:
            stack.enter_context(checkpoints)
            begun_with = {"config": configured, "steps": steps, **_identities(loop, step, batches)}
            _begin(run, seen, workdir, begun_with, config, restart=restart)
            if jax.process_index() == 0:
                if profile_steps is not None:
                    loop.program.profiled = _profiling.Profiling(
                        profile_steps, location(workdir), run=run, reports=reports
                    )
                    stack.callback(loop.program.profiled.close)
                reports.open = lambda: _logger(loop, workdir, configured, tensorboard=tensorboard)
                reports.logger = reports.open()
                reports.note(run.at, f"began at step {run.at} of {steps}")
                stack.callback(reports.close_logger)
        if checked is not None:
            reports.note(run.at, _devices.summary(checked))
        try:
            loop.train()
        except BaseException as error:
            first_line = str(error).partition("\n")[0]
            reports.note(run.at, f"ended by {type(error).__name__}: {first_line}")
            raise
        state = _best(run) if restore_best else run.state
        reports.note(run.at, f"finished at step {run.at}")
        return state


def _identities(loop: Loop, step: Callable, batches: Any) -> dict[str, Any]:
    """Returns what identifies the data of a run and, for a population, its step. A run is resumed
    only with the same."""
    # With several processes, each one may have rows of its own.
    sample = loop.feed.example if loop.spread.alone else None
    identities = {"data": identity(batches, loop.run.at, sample)}
    if loop.spread.alone and hasattr(step, "identity"):
        # A population, whose hyperparameters are in the state.
        identities["step"] = step.identity(loop.run.state, loop.feed.shapes())
    return identities


def _logger(loop: Loop, workdir: Any, config: Any, *, tensorboard: bool) -> Logger:
    """Opens the logs of a run at its step."""
    run, options = loop.run, loop.options
    again = []  # what a resumed run writes once more
    if run.loop["due"]:
        again += options.evaluate
    if run.unlogged:
        again += [f"train/{name}" for name in run.zeros]
    logger = Logger(workdir, step=run.at, tensorboard=tensorboard, again=again)
    logger.hyperparameters = config
    logger.compared = sorted(options.watched())
    return logger


def _check_types(**values: Any) -> None:
    kinds = {"progress": Progress, "early_stop": EarlyStop, "best": str, "plan": Plan}
    for name, value in values.items():
        if value is not None and not isinstance(value, kinds[name]):
            raise TypeError(f"fit(..., {name}=): expected {kinds[name].__name__}, got {value!r}")


def _check_functions(step, batches, state, evaluate):
    for name, value in {"step": step, "batches": batches}.items():
        if not callable(value):
            raise TypeError(
                f"fit(step, state, batches): {name} is a function; got a {type(value).__name__}"
            )
    if not isinstance(evaluate, Mapping) or not all(map(callable, evaluate.values())):
        raise TypeError(
            "fit(..., evaluate=): expected functions by name, such as {'validation': function}; "
            "got "
            f"{evaluate!r}"
        )
    if not hasattr(state, "step"):
        raise TypeError(
            "fit: a state has an integer array `step`, as a TrainState has; "
            f"got a {type(state).__name__} without one"
        )
    if np.ndim(state.step) or not jnp.issubdtype(jnp.result_type(state.step), jnp.integer):
        raise TypeError(
            f"fit: state.step counts the steps made, an integer; got {jnp.result_type(state.step)}"
            f"{list(np.shape(state.step))}"
        )


def _counts(state, **counts):
    """Returns the values of `counts` as a list of int, in the order of the arguments. Raises
    ValueError if a value is not an integer of at least 1."""
    most = jnp.iinfo(jnp.result_type(state.step)).max
    checked = []
    for name, value in counts.items():
        if value is not None or name in ("steps", "log_every"):
            whole = (
                isinstance(value, numbers.Real) and not isinstance(value, bool) and value % 1 == 0
            )
            if not whole or not 1 <= value <= most:
                raise ValueError(
                    f"{name}={value!r}: expected a number of steps, an integer from 1 to {most}"
                )
            value = int(value)
        checked.append(value)
    return checked


def _begin(
    run: RunState,
    seen: Signals,
    workdir: Any,
    begun_with: dict[str, Any],
    config: Any,
    *,
    restart: bool,
) -> None:
    """Locks the run's folder and restores the newest checkpoint. The caller must have checked all
    arguments of `fit`."""
    folder = run.checkpoints.folder
    waits = run.spread.alone and isinstance(folder, StorePath)  # a store's lock may have to expire
    try:
        with seen.interrupting(waits):
            run.checkpoints.lock()
    except Stopping:
        raise Interrupted(
            f"{seen.received}: stopped while waiting for the lock of {folder}; "
            "nothing was trained or changed"
        ) from None
    if restart and jax.process_index() == 0:
        run.checkpoints.clear()
        remove_logs(workdir)
    run.restore()
    if run.saved is not None:
        before = run.checkpoints.notes(run.saved).get("fit", {})
        compare(before, begun_with, config, workdir)
        begun_with["step"] = before.get("step", {}) | begun_with.get("step", {})
        run.reports.say(run.at, f"resumed at step {run.at} from {folder / str(run.at)}")
    if begun_with["config"] is not None and jax.process_index() == 0:
        save_config(begun_with["config"], workdir)
    if run.spread.plan is not None and jax.process_index() == 0:
        write_whole(location(workdir) / PLAN, f"{run.spread.plan}\n".encode())
    run.facts["fit"] = begun_with | run.options.criteria()


def _best(run: RunState) -> Any:
    step = run.checkpoints.best()
    metric, _ = run.options.best
    if step is None:
        warnings.warn(
            f"restore_best: '{metric}' was never finite, so the last state is returned",
            stacklevel=3,
        )
        return run.state
    run.reports.say(run.at, f"returning the state of step {step}, the best by {metric}")
    return run.checkpoints.restore(run.state, step, part="state")
