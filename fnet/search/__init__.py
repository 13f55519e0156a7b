"""Trains many models at the same time (populations), and searches for hyperparameters.

A population trains like one model:

    init_n, step_n = search.population(init, step)
    state = init_n(jax.random.key(0), {"learning_rate": jnp.logspace(-3, 0, 16)})
    state = tr.fit(step_n, state, batches, steps=1000)

See docs/search.md.
"""

from fnet._moved import moved_from
from fnet.search._halving import Halving, halving, hyperband
from fnet.search._memory import Fits, fits
from fnet.search._methods import Methods
from fnet.search._pbt import evolve, pbt
from fnet.search._population import Population, each_member, member, population, take
from fnet.search._programs import Bayesian, Cost, cost, feasible
from fnet.search._space import Choice, Integer, LogUniform, Space, Uniform, sobol

__all__ = [
    "Bayesian",
    "Choice",
    "Cost",
    "Fits",
    "Halving",
    "Integer",
    "LogUniform",
    "Methods",
    "Population",
    "Space",
    "Uniform",
    "cost",
    "each_member",
    "evolve",
    "feasible",
    "fits",
    "halving",
    "hyperband",
    "member",
    "pbt",
    "population",
    "sobol",
    "take",
]

__getattr__ = moved_from(__name__)
