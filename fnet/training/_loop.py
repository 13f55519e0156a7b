"""fit: the loop around a step that the user wrote."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import transforms
from fnet.training import _metrics
from fnet.training._checkpoint import Checkpoints
from fnet.training._clock import Clock
from fnet.training._early_stop import EarlyStop
from fnet.training._logs import Logger
from fnet.training._prefetch import Prefetch
from fnet.training._progress import Progress, duration
from fnet.training._signals import Signals, signals
from fnet.training._utilization import utilization
from fnet.training._workdir import CHECKPOINTS


class Interrupted(Exception):
    """The run was asked to stop and has saved what it had."""


class Diverged(ArithmeticError):
    """The loss or the parameters are no longer finite; nothing non-finite was saved."""


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
    best: str | None = None,
    best_mode: str = "max",
    early_stop: EarlyStop | None = None,
    progress: Progress | None = None,
    tensorboard: bool = True,
    jit: bool = True,
    tune: bool = True,
) -> Any:
    """Trains until step `steps`, going on from the last checkpoint in `workdir` if there is one.

    Resuming is exact: a run that was stopped and started again ends with the same bits as one that
    was not, in parameters, optimiser, average, metrics and order of the data. Metrics are added up
    on the device and fetched every `log_every` steps; between those the host never waits for it.

    The order in which a run looks for its beginning: the last checkpoint in its own `workdir`, else
    `state` as given. A checkpoint that cannot be read is an error, never a fresh start.

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
      best: a metric such as "validation/accuracy": the checkpoint where it was best is kept too.
      best_mode: "max" or "min".
      early_stop: when to stop before `steps`; it decides about `best` too unless that is given.
      progress: a `Progress` that shows the run, or None for silence.
      tensorboard: write TensorBoard's event files as well.
      jit: False runs everything op by op, for a debugger.
      tune: rewrite the step into what this chip's compiler runs fast (`transforms.tune`), same numbers up to rounding.

    Returns:
      The state after the last step.

    Raises:
      Interrupted: on SIGINT (Ctrl-C) or SIGTERM, once a checkpoint is on the disk. A second signal
        ends the process at once. (Signals are only seen where `fit` runs in the main thread.)
      Diverged: the loss or a parameter is NaN or infinite.
      CheckpointError: the last checkpoint is damaged, or is one of another model or optimiser.
      ValueError: an interval below 1, or a metric to watch that no evaluation returns.

    Example:
      >>> import optax
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
    intervals = {"steps": steps, "every": every, "log_every": log_every, "save_every": save_every}
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
    run = _Run(step, state, batches, steps, evaluate or {}, early_stop, progress, log_every, tune)
    run.every = every or steps
    run.save_every = save_every or run.every
    with contextlib.ExitStack() as stack:
        if not jit:
            stack.enter_context(jax.disable_jit())
        if progress is not None:
            stack.callback(progress.close)
        if workdir is not None:
            folder = Path(workdir) / CHECKPOINTS
            run.checkpoints = Checkpoints(folder, keep=keep, best=best, mode=best_mode)
            stack.callback(run.checkpoints.close)
            run.restore()
            run.logger = Logger(workdir, step=run.at, tensorboard=tensorboard)
            stack.callback(run.logger.close)
        run.train(stack.enter_context(signals()))
        return run.state


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in floats] or [True]))


class _Run:
    """What `fit` keeps between steps. `loop` is the part of it that goes into the checkpoint."""

    checkpoints: Checkpoints | None = None
    logger: Logger | None = None
    every: int
    save_every: int

    def __init__(self, step, state, batches, steps, evaluate, early_stop, progress, log_every, tune):
        self.state = jax.tree.map(jnp.copy, state)         # a copy, because each step donates it
        self.at = int(state.step)
        self.batches, self.steps, self.evaluate = batches, steps, evaluate
        self.early_stop, self.progress, self.log_every = early_stop, progress, log_every
        measured = lambda state, batch: _metrics.as_metrics(step(state, batch)[1])
        self.zeros = _metrics.zeros(measured, self.state, batches(self.at))
        self.loop = {
            "metrics": self.zeros,
            "best": np.array(math.nan),
            "stale": np.array(0),
            "stopped": np.array(False),
        }
        self.step = step
        self.saved = self.logged = self.at

        def advance(state, total, batch):
            state, metrics = step(state, batch)
            return state, _metrics.add(total, _metrics.as_metrics(metrics))

        advance = jax.jit(advance, donate_argnums=(0, 1))
        self.advance = transforms.tune(advance) if tune else advance

    def restore(self) -> None:
        if self.checkpoints.latest() is None:
            return
        saved = self.checkpoints.restore({"state": self.state, "loop": self.loop})
        self.state, self.loop = saved["state"], saved["loop"]
        self.at = self.saved = int(self.state.step)
        self.say(f"resumed at step {self.at} from {self.checkpoints.folder / str(self.at)}")

    def say(self, text: str) -> None:
        if self.progress is not None:
            self.progress.line(text)

    def train(self, seen: Signals) -> None:
        if self.at >= self.steps or self.loop["stopped"]:
            return
        if self.progress is not None:
            self.progress.start(self.at, self.steps)
        shown = self.progress is not None or self.logger is not None
        use = utilization(self.step, self.state, self.batches(self.at)) if shown else None
        self.clock = Clock()
        with contextlib.closing(Prefetch(self.batches, self.at, self.steps)) as self.prefetch:
            self.steps_with(use, seen)
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def steps_with(self, use: Callable[[float], Any] | None, seen: Signals) -> None:
        clock = self.clock
        while self.at < self.steps and not self.loop["stopped"]:
            batch, total = self.prefetch(), self.loop.pop("metrics")
            self.state, self.loop["metrics"] = self.advance(self.state, total, batch)
            self.at += 1
            if clock.compiled is None:
                jax.block_until_ready(self.state)
                clock.start(self.at)
                self.waited = self.prefetch.waited
                self.say(f"compiled in {duration(clock.compiled)}, the first step included")
            last = self.at == self.steps
            trained = self.log(use) if self.at % self.log_every == 0 or last else {}
            values = self.measure() if self.at % self.every == 0 or last else {}
            if self.progress is not None and (trained or values):
                left = clock.left(self.at, self.steps)
                mfu = use(clock.rate) if clock.rate else None
                self.progress.log(self.at, trained | _scalars(values), clock.rate, left, mfu)
            self.stop_early(values)
            stop = bool(self.loop["stopped"])
            if self.at % self.save_every == 0 or last or stop or seen.received:
                self.save(values)
            if self.progress is not None:
                self.progress.tick(self.at, clock.rate, clock.left(self.at, self.steps))
            if seen.received and not last and not stop:
                self.interrupted(seen.received)

    def log(self, use: Callable[[float], Any] | None) -> dict[str, float]:
        values = _metrics.results(self.loop["metrics"])
        self.loop["metrics"] = jax.tree.map(jnp.zeros_like, self.zeros)
        if not math.isfinite(values.get("loss", 0.0)):
            raise Diverged(self.diverged(f"the loss is {values['loss']}"))
        rate, lap = self.clock.lap(self.at), self.at - self.logged
        waited, self.waited = self.prefetch.waited - self.waited, self.prefetch.waited
        self.logged = self.at
        mfu = use(rate).value if use is not None and rate is not None else None
        if self.logger is not None:
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
            values = {
                f"{name}/{metric}": value
                for name, function in self.evaluate.items()
                for metric, value in function(self.state).items()
            }
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
        jax.block_until_ready(self.state)
        with self.clock.pause():
            params = getattr(self.state, "params", self.state)
            if not _all_finite((params, self.loop["metrics"].get("loss"))):
                raise Diverged(self.diverged("the parameters or the loss are not finite"))
            tree = {"state": self.state, "loop": self.loop}
            self.checkpoints.save(self.at, tree, metrics=_scalars(values))
        self.saved = self.at

    def diverged(self, what: str) -> str:
        kept = f"; the checkpoint of step {self.saved} is sound" if self.checkpoints else ""
        return (
            f"{what} somewhere in steps {self.logged + 1} to {self.at}{kept}. "
            "Lower the learning rate, clip the gradient, or look at the data"
        )

    def interrupted(self, name: str) -> None:
        if self.checkpoints is None:
            raise Interrupted(f"{name}: stopped at step {self.at}; without a workdir nothing is kept")
        self.checkpoints.wait()
        raise Interrupted(
            f"{name}: stopped at step {self.at} of {self.steps} and saved it in "
            f"{self.checkpoints.folder}; the same command goes on from there"
        )


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if np.ndim(value) == 0}
