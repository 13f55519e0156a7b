"""Population-based training: copies of good members, with changed hyperparameters, replace bad
members."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fnet.search._identity import program
from fnet.search._population import Population, take
from fnet.search._space import Choice, Integer, LogUniform, Space


def evolve(
    state: Population,
    scores: Any,
    space: Space,
    key: jax.Array,
    *,
    fraction: float = 0.2,
    factors: tuple[float, float] = (0.8, 1.2),
    resample: float = 0.25,
) -> Population:
    """Returns the population after one generation of population-based training (PBT).

    The worst `fraction` of the members, at least one and at most half of them, is replaced by
    copies of as many of the best, drawn at random: parameters, optimizer state and hyperparameters
    (truncation selection). Then each hyperparameter of a copy that is in `space` changes at random.
    With probability `resample` it is drawn anew from `space`; otherwise it is multiplied by one of
    the two `factors`, rounded if it is an integer, and clipped to its range. A diverged member (NaN
    or infinite metrics) counts as the worst, and is copied only if all have diverged.

    Args:
      state: a population, whose `hyper` is a dict.
      scores: the scores of the n members, an array [n]. Larger is better; NaN is the worst.
      space: the ranges of the hyperparameters that change. Others, such as seeds, are copied
        unchanged.
      key: a PRNG key, a different one for each generation.
      fraction: the fraction of the members that are replaced, in (0, 0.5]. Default 0.2.
      factors: the two numbers by which a hyperparameter can be multiplied. Default 0.8 and 1.2.
      resample: the probability of a new value from the space, in [0, 1]. Default 0.25.

    Raises:
      ValueError: `fraction` or `resample` is out of range, there are fewer than two members, or a
        hyperparameter in `space` is a `Choice` or not one of the population.

    Source: Jaderberg et al. (2017), Population Based Training of Neural Networks.

    >>> init_n, step_n = search.population(lambda key, h: {"w": h["rate"]}, lambda s, b, h: (s, {}))
    >>> state = init_n(jax.random.key(0), {"rate": jnp.array([0.1, 0.2, 0.3, 0.4, 0.5])})
    >>> space = search.Space(rate=search.LogUniform(0.01, 1))
    >>> state = search.evolve(state, jnp.array([5, 4, 3, 2, 1]), space, jax.random.key(1))
    >>> [round(float(w), 1) for w in state.members["w"]]         # the last one is a copy of the first
    [0.1, 0.2, 0.3, 0.4, 0.1]
    """
    n = len(state.diverged)
    count = min(max(1, round(fraction * n)), n // 2)  # no member is both a parent and replaced
    if not 0 < fraction <= 0.5 or not 0 <= resample <= 1 or n < 2:
        raise ValueError(
            "evolve: expected at least 2 members, fraction in (0, 0.5] and resample in [0, 1]; got "
            f"{n} members, {fraction} and {resample}"
        )
    for name, kind in space.items():
        if name not in state.hyper or isinstance(kind, Choice):
            raise ValueError(
                f"evolve: '{name}' is not a numeric hyperparameter of the population, which has "
                f"{', '.join(state.hyper)}"
            )
    scores = jnp.asarray(scores).astype(jnp.float32)
    scores = jnp.where(jnp.isnan(scores) | state.diverged, -jnp.inf, scores)
    order = jnp.argsort(-scores)  # best first
    keys = jax.random.split(key, 2 + len(space))
    sound = jnp.isfinite(scores) | (scores > 0)  # a score of infinity is the best one
    parents = order[jax.random.randint(keys[0], (count,), 0, jnp.clip(sound.sum(), 1, count))]
    rows = jnp.arange(n, dtype=order.dtype).at[order[n - count :]].set(parents)
    new = jnp.zeros(n, bool).at[order[n - count :]].set(True)
    state, hyper = take(state, rows), {}
    for (name, kind), each in zip(space.items(), keys[2:]):
        draws = jax.random.uniform(each, (3, n))
        old = state.hyper[name]
        low, high, whole = float(kind.low), float(kind.high), jnp.issubdtype(old.dtype, jnp.integer)
        if whole or isinstance(kind, Integer):
            low, high, whole = math.ceil(low), math.floor(high), True
        if isinstance(kind, LogUniform):
            anew = low * (high / low) ** draws[0]
        elif whole:
            anew = jax.random.randint(each, (n,), low, high + 1).astype(jnp.float32)
        else:
            anew = low + draws[0] * (high - low)
        changed = old.astype(jnp.float32) * jnp.where(draws[1] < 0.5, *factors)
        value = jnp.where(draws[2] < resample, anew, changed)
        value = jnp.clip(jnp.round(value) if whole else value, low, high)
        hyper[name] = jnp.where(new, value.astype(old.dtype), old)
    return state.replace(hyper={**state.hyper, **hyper})


def pbt(
    step_n: Callable, score: Callable, space: Space, *, interval: int, seed: int = 0, **options: Any
) -> Callable:
    """Returns a step for `tr.fit` that trains a population and calls `evolve` every `interval`
    steps.

        step = search.pbt(step_n, lambda state: accuracy(state), space, interval=200)
        state = tr.fit(step, init_n(key, hyper), batches, steps=2000, workdir="runs/pbt")

    The steps between two calls of `evolve` are a generation. Its random choices depend only on
    `seed` and the number of the step, so a run that is interrupted at any step and resumed ends
    with the same bits.

    Args:
      step_n: the step that `population` returns.
      score: a JAX function `score(state)` with the scores of all n members, an array [n], for
        example their accuracies on validation data. Larger is better. It is called at the end of
        each generation.
      space: the ranges of the hyperparameters, as for `evolve`.
      interval: the number of steps between two calls of `evolve`.
      seed: the seed of the random choices. Default 0.
      **options: options of `evolve`.

    Raises:
      ValueError: `interval` is less than 1.

    >>> init_n, step_n = search.population(lambda key, h: {"w": jnp.zeros(())},
    ...     lambda s, b, h: ({"w": s["w"] + h["rate"]}, {}), method="vmap")
    >>> step = search.pbt(step_n, lambda state: state.members["w"], search.Space(rate=search.Uniform(0, 1)), interval=2)
    >>> state = init_n(jax.random.key(0), {"rate": jnp.linspace(0.1, 0.5, 5)})
    >>> for i in range(4):
    ...     state, _ = step(state, 0)
    >>> bool(state.members["w"].min() > 0.4)    # the worst one would have 0.4
    True
    """
    if interval < 1:
        raise ValueError(f"pbt(interval={interval}): expected at least 1 step")
    return PBT(step_n, score, space, interval, seed, options)


class PBT:
    """The step that `pbt` returns, with the same interface as the step that `population` returns."""

    def __init__(self, step_n, score, space, interval, seed, options):
        self._step, self._interval, self._score = step_n, interval, score
        self._choices = {
            "interval": interval,
            "seed": seed,
            "space": space.json(),
            "options": repr(sorted(options.items())),
        }
        self.__name__ = "pbt"

        def generation(state):
            key = jax.random.fold_in(jax.random.key(seed), state.step)
            return evolve(state, score(state), space, key, **options)

        self._generation = jax.jit(generation)
        self._evolve = generation

    @property
    def separate(self) -> bool:
        """Returns True, so that `fit` does not compile a step of population-based training as one
        program.

        A step of population-based training calls several compiled programs.
        """
        return True

    def plain(self, state, batch):
        new, metrics = self._step.plain(state, batch)
        return jax.lax.cond(
            new.step % self._interval == 0, self._evolve, lambda same: same, new
        ), metrics

    def prepare(self, state, batch, known=None):
        """Selects the method (vmap, split or loop) that trains the members of the population."""
        return self._step.prepare(state, batch, known)

    def identity(self, state, batch):
        """Returns a dict that identifies this training, for the comparison with a run that `tr.fit`
        resumes."""
        score = {f"score (jax {jax.__version__})": program(self._score, state)}
        return self._step.identity(state, batch) | self._choices | score

    def explained(self, state, batch):
        """Returns the `Methods`, for `ft.explain`."""
        return self._step.explained(state, batch)

    def __call__(self, state, batch):
        if isinstance(state.step, jax.core.Tracer):
            return self.plain(state, batch)
        ends = (int(state.step) + 1) % self._interval == 0
        state, metrics = self._step(state, batch)
        return self._generation(state) if ends else state, metrics
