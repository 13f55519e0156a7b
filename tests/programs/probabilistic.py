"""numpyro: models, densities, variational inference and Monte Carlo."""

import jax
import jax.numpy as jnp
import numpy as np

from .program import Made, Package, Topic, key, normal

numpyro, dist, handlers = (
    Package("numpyro"),
    Package("numpyro.distributions"),
    Package("numpyro.handlers"),
)
infer, util = Package("numpyro.infer"), Package("numpyro.infer.util")
optim = Package("numpyro.optim")
topic = Topic("numpyro", needs="numpyro", promotion="standard", tolerance=1e-3)
x, y = normal(6, 2), normal(6)


def _model(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, s), obs=y)


@topic(np.float32([0.5, -1]), np.float32(0.7), x, y, wrt=(0, 1))
def log_density(w, s, x, y):
    return util.log_density(_model, (x, y), {}, {"w": w, "s": s})[0]


@topic(key(), x, wrt=())
def prior_samples(k, x):
    return handlers.trace(handlers.seed(_model, k)).get_trace(x)["y"]["value"]


@topic(
    key(),
    x,
    wrt=(),
    inner=True,
    excluded={
        ("*", "leaks"): "numpyro's handler keeps the key that was split inside, as under jax.jit"
    },
)
def seeded_transformed_model(transform, k, x):
    def draw(x):
        w = numpyro.sample("w", dist.Normal(jnp.zeros(2), 1.0))
        return numpyro.sample("y", dist.Normal(x @ w, 1.0))

    return handlers.seed(transform(draw), k)(x)


@topic(key(), x, y, wrt=())
def svi_step(k, x, y):
    def guide(x, y=None):
        m = numpyro.param("m", jnp.zeros(2))
        numpyro.sample("w", dist.Normal(m, 0.1).to_event(1))
        numpyro.sample("s", dist.LogNormal(0.0, 0.1))

    svi = infer.SVI(_model, guide, optim.Adam(1e-2), infer.Trace_ELBO())
    state, loss = svi.update(svi.init(k, x, y), x, y)
    return svi.get_params(state), loss


@topic(key(), x, y, wrt=())
def hmc_kernel(k, x, y):
    kernel = infer.HMC(
        _model, step_size=0.05, num_steps=2, adapt_step_size=False, adapt_mass_matrix=False
    )
    state = kernel.init(k, 0, None, (x, y), {})
    return kernel.sample(state, (x, y), {}).z


@topic(normal(3), wrt=(0,))
def distributions(v):
    return (
        dist.StudentT(3.0).log_prob(v),
        dist.Categorical(logits=v).log_prob(1),
        dist.Beta(2.0, 3.0).log_prob(jax.nn.sigmoid(v)),
        dist.MultivariateNormal(v, jnp.eye(3)).log_prob(jnp.zeros(3)),
    )


@topic(normal(3))
def transformed_distribution_and_divergence(v):
    d = dist.TransformedDistribution(dist.Normal(v, 1.0), dist.transforms.ExpTransform())
    return d.log_prob(jnp.ones(3)), dist.kl_divergence(dist.Normal(v, 1.0), dist.Normal(0.0, 2.0))


@topic(Made(lambda: jax.random.key(1)), normal(2), wrt=(1,))
def reparametrized_sample(k, v):
    return (
        dist.Gamma(jnp.exp(v), 1.0).rsample(k)
        if hasattr(dist.Gamma, "rsample")
        else dist.Normal(v, 1.0).rsample(k)
    )
