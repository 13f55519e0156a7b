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
from fnet.training._carried import Carried
from fnet.training._config import save_config
from fnet.training._direction import direction
from fnet.training.checkpoints._checkpoint import Checkpoints
from fnet.training.checkpoints._storage import StorePath, location, write_whole
from fnet.training.checkpoints._workdir import CHECKPOINTS, PLAN, remove_logs
from fnet.training.loop import _devices, _profiling, _reducing
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
from fnet.transforms._invariant._invariant import is_invariant


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
    """Trains to step `steps`, from the last checkpoint in `workdir` if there is one.

        state = fit(step, state, Batches(data, 128), steps=1000)                   # the shortest
        state = fit(step, state, Batches(data, 128), steps=1000, workdir="runs/a",  # can be resumed
                    evaluate={"test": evaluator(metrics, data)}, every=100, best="test/loss")

    Resuming is exact: an interrupted run that is started again reads the same batches and ends with
    the same parameters, optimizer state, moving average and metrics as one that never stopped, bit
    for bit. Metrics are summed on the device; the host runs at most two steps ahead of it. A whole
    program is in docs/training.md; what happens when something fails, in docs/reliability.md.

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
      step: a pure function `(state, batch) -> (state, metrics)`. It adds 1 to `state.step`, and
        keeps structure, shapes and dtypes of the state. Since the last log, scalars in the dict
        `metrics` are averaged over the steps, and results of `mean(values, weight)` over examples;
        a scalar in place of the dict is the loss. For a tuple as the state, the step may also be
        `(model, opt_state, batch) -> (model, opt_state, metrics)`, and for modules of flax.nnx
        `(model, optimizer, batch) -> metrics`, which changes them in place (docs/interop.md).
      state: a `TrainState`, or a pytree of arrays and modules. An integer array `state.step`
        counts the steps; without one, `fit` counts them. `fit` donates a copy of the state.
      batches: a function from the number of a step to its batch, such as `Batches`. A thread calls
        it ahead of time; "time/data" in the log is the fraction of time that `fit` waited for it.
      steps: the total number of steps, those before an interruption included.
      workdir: the folder of the run, or a URL s3://, gs:// or az:// (`pip install obstore`), for
        config.json, metrics.jsonl, events.jsonl, tensorboard/, checkpoints/ and, with a plan,
        plan.txt. Default None: nothing is written.
      plan: the result of `parallel.plan(step, ...)`, for several devices; results equal those of
        one up to rounding. Short batches get rows of weight 0, as by `parallel.feed`. Each of
        several processes returns all rows of a batch, or only its own. A resumed run may have
        another plan. Default None: the arrays stay where they are.
      evaluate: functions of the state by name. Each returns a dict of metrics, which may include
        `Histogram`, `Image` and `Text`. Default None.
      every: steps between evaluations; the last state always has one. Default None: only the last.
      best: the metric, such as "test/loss", whose best state is kept. Default None: `early_stop`'s.
      best_mode: "max" or "min". Default None: known for losses, accuracies and other usual ones.
      early_stop: an `EarlyStop`, which may end the run before `steps`. Default None.
      restore_best: return the best state instead of the last one. Default False.
      save_every: steps between checkpoints; the last state is always saved. Default None: `every`.
      keep: how many of the latest checkpoints stay. Default 3.
      keep_every: keep each checkpoint whose step is a multiple of it, too. Default None.
      restart: delete the earlier run, once arguments and lock are checked. Default False.
      config: the hyperparameters, a dataclass or a dict of JSON types. A run is resumed only with
        the same config and data and no fewer `steps`. Fields named steps or epochs, or declared
        with `compare=False`, may differ. Default None: resume uncompared, with a `ResumeWarning`.
      notes: a dict of JSON types to store in each checkpoint. Default None.
      nonfinite: after a step with a NaN or infinite metric or state, "stop" raises `Diverged`,
        "skip" discards its update but counts it, and "rollback" goes back to the last regular
        checkpoint and skips the batches up to and including that of the step. Default "stop".
      debug: replay the step of a `Diverged` to name the first layer at fault. Default False.
      log_every: steps between fetches of the training metrics from the device. Default 100.
      progress: a `Progress` that displays the run. Default None: nothing is printed.
      tensorboard: write TensorBoard's files. Default True.
      on_step: a function of a `StepEnd`, or several, called after each step. Default ().
      jit: compile the step. False runs each operation separately, for a debugger. Default True.
      tune: rewrite the step with `transforms.tune`, for speed; results are equal up to rounding. On
        a CPU, a run of ten minutes or more at the peak FLOP rate chooses the rules by timing, and
        a resumed run keeps them. Default True.
      profile_steps: consecutive steps to profile, such as range(100, 105), without the first of a
        process, which compiles. workdir/profile/100-105 gets profile.txt, .html, .json (see
        `introspect.profile`) and trace.json.gz (for ui.perfetto.dev). Default None.
      check_devices: first compare twenty operations with NumPy, once for each kind of device,
        driver and jaxlib (see `hardware.check_devices`). Default True.

    Returns:
      The last state, or the best. Modules of flax.nnx in it are the given ones, which `fit` updates
      when it is done. `load` and `restore` read it from `workdir`.

    Raises:
      Interrupted: SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1, if `fit` runs in the main thread.
        The last step is saved in `workdir`. A second one, a second or more later, ends the process.
      Diverged: a NaN or infinite value that `nonfinite` could not handle. Names step and leaf.
      ConfigError: the run in `workdir` has another `config`, other data or a larger `steps`.
      CheckpointError: no checkpoint can be read, one cannot be written, they belong to another
        model or optimizer, or another run uses or has replaced `workdir`.
      OutOfMemory: names the largest arrays, and estimates the largest batch that fits.
      FaultyDevice: a device computes wrong values. Nothing in `workdir` has changed.
      PeerLost: another process of the run has ended.
      TypeError: `step` or `batches` is not a function, `state.step` is not an integer, or the step
        changes the structure, a shape, a dtype or an option of the state.
      ValueError: an interval is not an integer >= 1, the step does not add 1 to `state.step`, no
        evaluation returns the metric of `best` or `early_stop`, `best_mode` is missing, or the plan
        is for another state or for devices that are not attached.

    Example:
      >>> tx, x = optax.sgd(0.1), np.linspace(0, 1, 16, dtype=np.float32)
      >>> def step(state, batch):
      ...     loss = lambda params: jnp.mean((params["w"] * batch["x"] - batch["y"]) ** 2)
      ...     value, grads = jax.value_and_grad(loss)(state.params)
      ...     return state.apply(tx, grads), {"loss": value}
      >>> batches = tr.Batches({"x": x, "y": 3 * x}, batch_size=8)
      >>> state = tr.fit(step, tr.TrainState.create({"w": jnp.zeros(())}, tx), batches, steps=200)
      >>> round(float(state.params["w"]), 2)
      3.0
    """
    evaluate = {} if evaluate is None else evaluate
    _check_functions(step, batches, evaluate)
    on_step = tuple(on_step) if isinstance(on_step, Sequence) else (on_step,)
    if not all(map(callable, on_step)):
        raise TypeError(
            f"fit(..., on_step=): expected a function of a StepEnd, or several; got {on_step!r}"
        )
    _check_types(progress=progress, early_stop=early_stop, best=best, plan=plan)
    invariant = is_invariant(step)
    carried = Carried(step, state, plan)
    step, state, plan = carried.step, carried.state, carried.plan
    _check_counter(state)
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
    reducing = _reducing.requested(workdir)
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
            evaluate=carried.evaluations(evaluate),
            every=every or steps,
            save_every=save_every or every or steps,
            log_every=log_every,
            best=best and (best, best_mode),
            early_stop=early_stop,
            on_step=tuple(map(carried.on_step, on_step)),
            nonfinite=nonfinite,
            debug=debug or reducing is not None,
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
        run.facts["invariant"] = invariant
        if reducing is not None:
            run.restore()
            _reducing.reduce(reducing, loop.recovery)
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
        return carried.result(state)


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


def _check_functions(step, batches, evaluate):
    for name, value in {"step": step, "batches": batches}.items():
        if not callable(value):
            raise TypeError(
                f"fit(step, state, batches): {name} is a function; got a {type(value).__name__}"
            )
    if not isinstance(evaluate, Mapping) or not all(map(callable, evaluate.values())):
        raise TypeError(
            "fit(..., evaluate=): expected functions by name, such as {'validation': function}; "
            f"got {evaluate!r}"
        )


def _check_counter(state):
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
