"""Random numbers: keys of every kind, inside loops and branches."""

import jax
import jax.numpy as jnp
from jax import lax

from .program import Topic, key, normal

topic = Topic("random_keys", wrt=())
x3 = normal(3)


@topic(key(), x3, wrt=(1,))
def dropout(k, x):
    return jnp.where(jax.random.bernoulli(k, 0.5, (3,)), x / 0.5, 0.0)


@topic(key())
def keys_are_results(k):
    a, b = jax.random.split(k)
    return {"key": a, "draw": jax.random.normal(b, (3,))}


@topic(
    key(impl="rbg"),
    excluded={("*", "vmap"): "vmap of rbg draws other numbers, by its documentation"},
)
def rbg(k):
    return jax.random.normal(k, (4,)), jax.random.bits(jax.random.fold_in(k, 3), (2,))


@topic(
    key(impl="unsafe_rbg"),
    excluded={("*", "vmap"): "vmap of rbg draws other numbers, by its documentation"},
)
def unsafe_rbg(k):
    return jax.random.uniform(jax.random.split(k)[0], (4,))


@topic(normal(3), wrt=(0,))
def raw_keys(x):
    k = jax.random.PRNGKey(3)
    return x * jax.random.normal(jax.random.split(k)[1], (3,))


@topic(key())
def key_data_and_back(k):
    data = jax.random.key_data(k)
    return jax.random.uniform(jax.random.wrap_key_data(data), (2,)), data


@topic(key(), x3, wrt=(1,), core=True)
def keys_in_scan(k, x):
    def body(c, k):
        return c + jax.random.normal(k, (3,)) * x, jax.random.uniform(k)

    return lax.scan(body, x, jax.random.split(k, 4))


@topic(key(), x3, wrt=(1,))
def key_in_carry(k, x):
    def body(c, _):
        k, sub = jax.random.split(c[0])
        return (k, c[1] * jax.random.uniform(sub, (3,))), None

    return lax.scan(body, (k, x), None, length=3)[0]


@topic(key())
def key_in_while_and_cond(k):
    k, n = lax.while_loop(
        lambda s: s[1] < 3, lambda s: (jax.random.split(s[0])[0], s[1] + 1), (k, 0)
    )
    return jax.random.normal(
        lax.cond(n > 2, lambda k: jax.random.fold_in(k, 1), lambda k: k, k), (2,)
    )


@topic(key(), x3)
def permutation_and_choice(k, x):
    return (
        jax.random.permutation(k, x),
        jax.random.choice(k, 5, (3,), replace=False),
        jax.random.permutation(k, 6),
    )


@topic(key(), x3)
def categorical_and_gumbel(k, x):
    return (
        jax.random.categorical(k, x, shape=(4,)),
        jax.random.gumbel(k, (2,)),
        jax.random.randint(k, (3,), 0, 9),
    )


@topic(key(), normal(2), wrt=(1,), tolerance=1e-4)
def gamma_and_its_implicit_gradient(k, x):
    return jax.random.gamma(k, jnp.exp(x)), jax.random.dirichlet(k, jnp.exp(x))


@topic(key())
def distributions(k):
    return (
        jax.random.poisson(k, 3.0, (3,)),
        jax.random.truncated_normal(k, -1.0, 1.0, (2,)),
        jax.random.exponential(k, (2,)),
        jax.random.laplace(k, (2,)),
        jax.random.beta(k, 2.0, 3.0, (2,)),
    )


@topic(key())
def array_of_keys_indexed_and_stacked(k):
    ks = jax.random.split(k, (2, 3))
    return ks[1], ks.T.shape, jnp.concatenate([ks, ks])[3], jax.vmap(jax.random.uniform)(ks[0])


@topic(key(), normal(4, 3), wrt=(1,))
def vmap_over_keys(k, x):
    return jax.vmap(lambda k, x: x * jax.random.bernoulli(k, 0.7, (3,)).astype(x.dtype))(
        jax.random.split(k, 4), x
    )


@topic(key(), normal(4, 4), wrt=(1,))
def dropout_in_checkpoint(k, w):
    @jax.checkpoint
    def layer(w, k):
        h = jnp.tanh(w @ w)
        return jnp.where(jax.random.bernoulli(k, 0.5, h.shape), h, 0.0)

    return layer(layer(w, k), jax.random.fold_in(k, 1)).sum()


@topic(key(), normal(2, 2), wrt=(1,))
def reparametrized_multivariate_normal(k, a):
    return jax.random.multivariate_normal(k, a[0], a @ a.T + jnp.eye(2))


@topic(key(), float32=False)
def rng_bit_generator(k):
    return lax.rng_bit_generator(jnp.array([1, 2, 3, 4], jnp.uint32), (3,))


@topic(key(), normal(8, 3), wrt=(1,), batched=(1,))
def microbatched_with_a_key_that_is_not_split(k, x):
    return jnp.mean((x * jax.random.normal(k, (1, 3))) ** 2)
