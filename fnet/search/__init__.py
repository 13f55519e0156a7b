"""Many trainings at once: populations on one device.

    init_n, step_n = search.population(init, step)
    state = init_n(jax.random.key(0), {"learning_rate": jnp.logspace(-3, 0, 16)})
    state = tr.fit(step_n, state, batches, steps=1000)
"""

from fnet.search import federated
from fnet.search._memory import Fits, fits
from fnet.search._methods import Methods
from fnet.search._population import Population, each_member, member, population, take

__all__ = ["Fits", "Methods", "Population", "each_member", "federated", "fits", "member", "population", "take"]
