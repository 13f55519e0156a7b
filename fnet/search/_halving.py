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
      scores: their scores, an array [m].
      indices: their indices in the argument `hyper` of `halving`, an array [m].
      rungs: for each rung (number of members, step at its end, best score).
      member_steps: the number of steps of all members in all rungs together.

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
    """Successive halving: starts many members, and repeatedly stops all but the best.

    The search has several rungs. The first trains all n members of a population for `first` steps.
    Each further rung keeps the best 1 / eta of them and trains these to a step eta times as large,
    until the last ends at step `steps`.

    Args:
      init_n, step_n: the results of `population`.
      hyper: the hyperparameters, a tree whose leaves have a leading axis [n].
      batches: the batches, as for `tr.fit`.
      score: a function `score(state)` of a population that returns an array [members]. Larger is
        better; NaN is the worst.
      steps: the steps of a member that is not stopped early.
      first: the steps of the first rung.
      eta: from one rung to the next, the members are divided by eta, and the steps multiplied by
        it. Default 3.
      key: the PRNG key for `init_n`.
      workdir: a folder for the checkpoints of each rung, with which an interrupted search can be
        continued with the same arguments. It records in search.json what the search was made with.
        Default None.
      **options: options of `tr.fit`, such as progress and log_every.

    Returns:
      A `Halving`.

    Raises:
      ValueError: `first`, `steps` or `eta` is out of range.
      ConfigError: `workdir` has a search with other hyperparameters, other data, another key, or
        other values of steps, first, eta or nonfinite, or in which `init_n`, `step_n` or `score`
        computed something else, as far as the version of JAX is the same.

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
            f"steps={steps}, eta={eta}"
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
    """Hyperband: runs `halving` several times, with different numbers of members.

    Each time is a bracket. The first bracket starts many members and stops most of them after a few
    steps; the last starts a few and trains all of them to the end.

    Args:
      init_n, step_n, batches, score, steps, eta, options: as for `halving`.
      space: the space of the hyperparameters, all of them numbers. Each bracket has its own random
        points of it.
      seed: the seed of these points and of the PRNG keys. Default 0.
      most: the largest number of brackets. Default None: as many as leave each first rung at least
        one step.
      fixed: more hyperparameters by name, with one value for all members. Default None.
      workdir: a folder for the checkpoints, with a subfolder for each bracket. Default None.

    Raises:
      ValueError, ConfigError: as for `halving`.

    Returns:
      A list with a `Halving` for each bracket. Its members are sorted, so compare the first of the
      `scores` of each to find the best of all.

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
