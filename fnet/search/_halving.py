"""Successive halving and Hyperband, which stop the training of bad members (training runs) early.

Optuna's pruners would not do: they judge each run when it reports, by the runs that have reported
before it, and not a population at the end of a rung. Of nine members in three rungs, how many
they train to the end depends on the order in which members report.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fnet import training as tr
from fnet.search._identity import digest, program, same_search
from fnet.search._population import Population, members_of, take
from fnet.search._space import Space
from fnet.training.loop._fingerprint import as_dict


@dataclasses.dataclass(frozen=True)
class Halving:
    """The result of `halving`. `str()` returns a table.

    Attributes:
      state: the population of the m members that were trained to the end, best first.
      scores: the scores of the members (training runs) in `state`, an array [m].
      indices: an array [m], which contains for each member (training run) in `state` the index of
        its hyperparameters in the argument `hyper` of `halving`.
      rungs: for each rung (stage of the search), a tuple (number of training runs, number of steps,
        best score). The number of steps is counted from the start of a training run to the end of
        the rung.
      member_steps: the total number of training steps of all training runs in all stages of the
          search.

    >>> print(search.Halving(None, np.array([0.9]), np.array([3]), ((4, 10, 0.8), (1, 40, 0.9)), 70))
    members  steps  best score
          4     10         0.8
          1     40         0.9
    """

    state: Population
    scores: np.ndarray
    indices: np.ndarray
    rungs: tuple[tuple[int, int, float], ...]
    member_steps: int

    def __str__(self):
        rows = [f"{n:7}  {steps:5}  {score:10.4g}" for n, steps, score in self.rungs]
        return "\n".join(["members  steps  best score", *rows])


def halving(
    init_n: Callable,
    step_n: Callable,
    hyper: Any,
    batches: Callable,
    score: Callable,
    *,
    steps: int,
    first: int,
    eta: int = 3,
    key: jax.Array,
    workdir: str | os.PathLike | None = None,
    **options: Any,
) -> Halving:
    """Successive halving: starts many training runs, and repeatedly stops all but the best of them.

    A member is a training run of a population, see `population`. The search consists of several
    stages, which are also called rungs. The first stage of the search trains all n members
    (training runs) of the population for `first` steps. Each further stage keeps the best 1 / eta
    of the training runs, and continues these runs up to a step that is eta times the last step of
    the previous stage. The last stage of the search ends at step `steps`.

    Args:
      init_n, step_n: the results of `population`.
      hyper: the hyperparameters of the n members of the population, a tree whose leaves have a
          leading axis [n].
      batches: the batches, as for `tr.fit`.
      score: a function `score(state)` that returns the scores of the members of a population, an
        array [members]. A larger score is better; NaN is the worst score.
      steps: the total number of steps of a training run that is not stopped early.
      first: the number of steps of the first stage.
      eta: the reduction factor of successive halving. From one stage (rung) of the search to the
        next, the number of training runs is divided by eta, and the number of steps is multiplied
        by eta.
      key: the PRNG key for `init_n`.
      workdir: a folder for the checkpoints of each stage, or None. If `workdir` is a folder, an
        interrupted search can be continued with the same arguments. The folder records what the
        search was made with, in search.json.
      **options: options of `tr.fit`, such as progress and log_every.

    Returns:
      A `Halving`.

    Raises:
      ValueError: `first`, `steps` or `eta` is out of range.
      ConfigError: `workdir` contains a search with other hyperparameters, other data, another key,
        or other values of steps, first, eta or nonfinite. A ConfigError is also raised if `init_n`,
        `step_n` or `score` computes something else than before, as far as the version of JAX is the
        same.

    Source: Jamieson and Talwalkar (2016), Non-stochastic Best Arm Identification and Hyperparameter
    Optimization.

    >>> init_n, step_n = search.population(lambda key, h: {"w": h["w"]},
    ...     lambda s, b, h: ({"w": s["w"] * 0.5}, {}), method="vmap")
    >>> found = search.halving(init_n, step_n, {"w": jnp.arange(9.0)}, lambda i: jnp.zeros(()),
    ...     lambda state: -state.members["w"], steps=9, first=1, key=jax.random.key(0))
    >>> found.indices.tolist(), found.member_steps
    ([0], 21)
    """
    if not 1 <= first <= steps or eta < 2:
        raise ValueError(
            f"halving: expected 1 <= first <= steps and eta >= 2; got first={first}, "
            f"steps={steps}, "
            f"eta={eta}"
        )
    n, at, used = members_of(hyper), 0, 0
    state, indices, rungs = init_n(key, hyper), np.arange(n), []
    lengths = [first]
    while lengths[-1] < steps:
        lengths.append(min(lengths[-1] * eta, steps))
    if workdir is not None:
        same_search(
            workdir,
            {
                "members": n,
                "steps": steps,
                "first": first,
                "eta": eta,
                "nonfinite": options.get("nonfinite", "stop"),
                "key": digest(key),
                f"score (jax {jax.__version__})": program(score, state),
                **step_n.identity(state, batches(0)),
            },
            "rung0",
        )
    config = as_dict(options.pop("config", None)) or {}
    for rung, length in enumerate(lengths):
        folder = None if workdir is None else f"{os.fspath(workdir)}/rung{rung}"
        extra = {} if folder is None else {"config": {**config, "members": indices.tolist()}}
        state = tr.fit(step_n, state, batches, steps=length, workdir=folder, **extra, **options)
        used, at = used + len(indices) * (length - at), length
        scores = np.asarray(score(state), np.float64)
        scores = np.where(np.isnan(scores) | np.asarray(state.diverged), -np.inf, scores)
        order = np.argsort(-scores, kind="stable")
        rungs.append((len(indices), length, float(scores[order[0]])))
        kept = order if rung == len(lengths) - 1 else order[: max(1, len(order) // eta)]
        state, indices, scores = take(state, kept), indices[kept], scores[kept]
    return Halving(state, scores, indices, tuple(rungs), used)


def hyperband(
    init_n: Callable,
    step_n: Callable,
    space: Space,
    batches: Callable,
    score: Callable,
    *,
    steps: int,
    eta: int = 3,
    seed: int = 0,
    most: int | None = None,
    fixed: Mapping[str, Any] | None = None,
    workdir: str | os.PathLike | None = None,
    **options: Any,
) -> list[Halving]:
    """Hyperband: runs successive halving (see `halving`) several times, with different numbers of
    training runs.

    Each run of successive halving is called a bracket. The first bracket starts many training runs,
    and stops most of them after a few steps. The last bracket starts only a few training runs, and
    trains all of them for all steps.

    Args:
      init_n, step_n, batches, score, steps, eta, options: as for `halving`.
      space: the space of the hyperparameters, all of which must be numbers. Each bracket (run of
        successive halving) uses different random points of `space`.
      seed: the seed of the random points of `space` and of the PRNG keys of the training runs.
      most: the largest number of brackets (runs of successive halving). Default None: as many as
        possible. The number of brackets is limited, because the first stage of each bracket must
        have at least one step.
      fixed: a dict of further hyperparameters that have the same value for all training runs, or
          None.
      workdir: a folder for the checkpoints, with one subfolder for each bracket, or None.

    Raises:
      ValueError, ConfigError: as for `halving`.

    Returns:
      A list that contains a `Halving` for each bracket. In each `Halving`, the training runs are
      sorted by score, best first. To find the best training run of all brackets, compare the first
      element of `scores` of each `Halving`.

    Source: Li et al. (2018), Hyperband: A Novel Bandit-Based Approach to Hyperparameter
    Optimization.

    >>> init_n, step_n = search.population(lambda key, h: {"w": h["w"]},
    ...     lambda s, b, h: ({"w": s["w"] * 0.5}, {}), method="vmap")
    >>> found = search.hyperband(init_n, step_n, search.Space(w=search.Uniform(0, 1)), lambda i: jnp.zeros(()),
    ...     lambda state: -state.members["w"], steps=9)
    >>> [bracket.rungs[0][:2] for bracket in found]
    [(9, 1), (5, 3), (3, 9)]
    """
    top = int(math.log(steps, eta) + 1e-9) if steps >= 1 and eta >= 2 else -1
    if top < 0:
        raise ValueError(f"hyperband: expected steps >= 1 and eta >= 2; got {steps} and {eta}")
    top = top if most is None else min(top, most - 1)
    results = []
    for bracket in range(top, -1, -1):
        n = math.ceil((top + 1) / (bracket + 1) * eta**bracket)
        points = space.arrays(space.random(n, seed=seed * 1000 + bracket))
        points |= {name: np.full(n, value) for name, value in (fixed or {}).items()}
        folder = None if workdir is None else f"{os.fspath(workdir)}/bracket{bracket}"
        key = jax.random.fold_in(jax.random.key(seed), bracket)
        results.append(
            halving(
                init_n,
                step_n,
                points,
                batches,
                score,
                steps=steps,
                first=max(1, steps // eta**bracket),
                eta=eta,
                key=key,
                workdir=folder,
                **options,
            )
        )
    return results
