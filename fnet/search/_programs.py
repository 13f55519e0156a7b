"""Searches over hyperparameters that change the program, such as the depth of a network.

`cost` measures or estimates the cost of a program, `feasible` selects the points whose programs
stay within limits, and `Bayesian` selects points by Bayesian optimization."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fnet._util import _missing
from fnet.cost import count, roofline
from fnet.search._space import Choice, Integer, LogUniform, Space


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a program: operations, memory and time. `str()` returns one line.

    Attributes:
      flops: the exact number of floating-point operations.
      bytes: the memory for arguments, results and temporaries of the compiled program, in bytes, or
        None if it was not compiled.
      seconds: the time in seconds, or None if unknown: on this device the median of the measured
        times, for another chip an estimated lower bound (see `cost.roofline`).
      basis: how `seconds` is known, "measured" or "estimated".

    >>> print(search.Cost(2e6, 4e6, 0.005, "measured"))
    2 MFLOP, 4 MB, 5 ms (measured)
    """

    flops: float
    bytes: float | None
    seconds: float | None
    basis: str

    def __str__(self):
        memory = "" if self.bytes is None else f"{self.bytes / 1e6:.4g} MB, "
        time_ = (
            "time unknown"
            if self.seconds is None
            else f"{1e3 * self.seconds:.4g} ms ({self.basis})"
        )
        return f"{self.flops / 1e6:.4g} MFLOP, {memory}{time_}"


def cost(f: Callable, *args: Any, chip: str = "auto", calls: int = 7) -> Cost:
    """Returns the cost of a function, measured on this device or estimated for a chip that is not
    attached.

    Args:
      f: a JAX function.
      *args: the arguments of f, arrays or `jax.ShapeDtypeStruct`s.
      chip: "auto" for this device, or a name in `hardware.chips`. Default "auto".
      calls: the number of timed calls, after a first one that is not timed. Default 7.

    >>> search.cost(lambda x: x @ x, jnp.ones((8, 8))).flops
    1024
    """
    flops = count(f, *args).flops
    if chip != "auto":
        return Cost(
            flops,
            None,
            roofline(f, *args, chip=chip, measure=False).total.seconds,
            "estimated",
        )
    arrays = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, args
    )
    compiled = jax.jit(f).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    size = (
        None
        if memory is None
        else (
            memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        )
    )
    times = []
    for _ in range(calls + 1):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        times.append(time.perf_counter() - began)
    return Cost(flops, size, statistics.median(times[1:]), "measured")


def feasible(
    points: Sequence[Mapping[str, Any]],
    program: Callable,
    *,
    flops: float | None = None,
    memory: float | None = None,
    seconds: float | None = None,
    chip: str = "auto",
) -> list[tuple[Mapping[str, Any], Cost]]:
    """Returns the points whose programs stay within limits, for example all networks that need at
    most 5 ms on this CPU.

    Args:
      points: a list of points, each a dict of hyperparameters, such as `space.sobol(16)`.
      program: a function `program(point) -> (f, args)`. The limits apply to the cost of `f(*args)`.
      flops: the largest number of floating-point operations. Default None: no limit.
      memory: the largest memory in bytes. Default None: no limit.
      seconds: the largest time in seconds. Default None: no limit.
      chip: the chip, as for `cost`. With `memory`, it must be "auto". Default "auto".

    Returns:
      A list of (point, cost) for the points within the limits, in the order of `points`. Programs
      with too many FLOPs are not even compiled.

    Raises:
      ValueError: no limit is set, or `memory` is set for a chip other than "auto".

    >>> space = search.Space(width=search.Integer(1, 64))
    >>> program = lambda point: (lambda x: x @ x, (jnp.ones((point["width"], point["width"])),))
    >>> found = search.feasible(space.sobol(8), program, flops=2 * 16**3)
    >>> all(point["width"] <= 16 for point, _ in found)
    True
    """
    if flops is None and memory is None and seconds is None:
        raise ValueError("feasible: give at least one of flops=, memory= and seconds=")
    if memory is not None and chip != "auto":
        raise ValueError(
            f"feasible(memory=, chip={chip!r}): memory is known on this device only; use "
            "flops= or seconds="
        )
    found = []
    for point in points:
        f, args = program(point)
        if flops is not None and count(f, *args).flops > flops:
            continue
        spent = cost(f, *args, chip=chip)
        within = (memory is None or spent.bytes is None or spent.bytes <= memory) and (
            seconds is None or (spent.seconds is not None and spent.seconds <= seconds)
        )
        if within:
            found.append((point, spent))
    return found


class Bayesian:
    """Bayesian optimization by Optuna's tree-structured Parzen estimator: each point is proposed
    from the scores of the earlier ones.

        search_ = search.Bayesian(space, seed=0)
        for _ in range(20):
            points = search_.ask(8)                        # for a population, or for separate programs
            search_.tell(points, scores)                   # larger is better; NaN is a failure

    It needs `pip install optuna`.

    Args:
      space: the space of the hyperparameters.
      seed: the seed of the sampler. With the same seed and scores, `ask` returns the same points,
        in Optuna 4.9 and in Optuna 5, whose own defaults differ. Default 0.

    Raises:
      ModuleNotFoundError: Optuna is not installed.

    >>> bayesian = search.Bayesian(search.Space(x=search.Uniform(-1, 1)), seed=0)    # doctest: +SKIP
    """

    def __init__(self, space: Space, *, seed: int = 0):
        try:
            import optuna
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                _missing.message("Bayesian optimization needs", "optuna")
            ) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        # The defaults of `multivariate` and `constant_liar` changed in Optuna 5. These are the defaults of
        # Optuna 4, with which 4.9 and 5.0 propose the same points. With multivariate=True they do
        # not, because the two versions compute other bandwidths.
        sampler = optuna.samplers.TPESampler(
            seed=seed,
            n_startup_trials=10,
            n_ei_candidates=24,
            multivariate=False,
            constant_liar=False,
        )
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._space = {name: self._distribution(kind) for name, kind in space.items()}
        self._open: dict[tuple, list] = {}

    def _distribution(self, kind):
        distributions = self._optuna.distributions
        if isinstance(kind, Choice):
            return distributions.CategoricalDistribution(kind.values)
        if isinstance(kind, Integer):
            return distributions.IntDistribution(kind.low, kind.high)
        return distributions.FloatDistribution(
            kind.low, kind.high, log=isinstance(kind, LogUniform)
        )

    def ask(self, n: int = 1) -> list[dict[str, Any]]:
        """Returns the next n points to evaluate."""
        points = []
        for _ in range(n):
            trial = self._study.ask(self._space)
            points.append(dict(trial.params))
            self._open.setdefault(_identity(trial.params), []).append(trial)
        return points

    def tell(self, points: Sequence[Mapping[str, Any]], scores: Sequence[float]) -> None:
        """Reports the scores of points, also of points that `ask` did not return, such as those of
        an earlier run."""
        for point, score in zip(points, scores, strict=True):
            failed = score != score
            state = (
                self._optuna.trial.TrialState.FAIL
                if failed
                else self._optuna.trial.TrialState.COMPLETE
            )
            waiting = self._open.get(_identity(point))
            if waiting:
                self._study.tell(waiting.pop(), None if failed else float(score), state=state)
            elif not failed:
                self._study.add_trial(
                    self._optuna.trial.create_trial(
                        params=dict(point), distributions=self._space, value=float(score)
                    )
                )

    @property
    def best(self) -> tuple[dict[str, Any], float]:
        """The point with the best score, and this score."""
        return dict(self._study.best_params), float(self._study.best_value)


def _identity(point):
    return tuple(sorted((name, repr(value)) for name, value in point.items()))
