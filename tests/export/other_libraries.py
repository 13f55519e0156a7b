"""Small models of other libraries: (function of parameters and one input, parameters, input).
Imported when built."""

import jax
import numpy as np

IMAGE = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype(np.float32)


def flax_model():
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.max_pool(linen.relu(linen.Conv(4, (3, 3))(x)), (2, 2), (2, 2))
            x = linen.LayerNorm()(x.reshape(x.shape[0], -1))
            return linen.Dense(10)(linen.gelu(x))

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return Net().apply, Net().init(jax.random.key(0), IMAGE), IMAGE


def equinox_model():
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 2)
    net = eqx.nn.Sequential(
        [
            eqx.nn.Linear(6, 8, key=keys[0]),
            eqx.nn.Lambda(jax.nn.gelu),
            eqx.nn.LayerNorm(8),
            eqx.nn.Linear(8, 3, key=keys[1]),
        ]
    )
    params, static = eqx.partition(net, eqx.is_array)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    return lambda params, x: jax.vmap(eqx.combine(params, static))(x), params, x


def haiku_model():
    import haiku as hk

    def net(x):
        x = hk.Embed(11, 8)(x)
        y, _ = hk.dynamic_unroll(
            hk.LSTM(6), x, hk.LSTM(6).initial_state(x.shape[0]), time_major=False
        )
        return hk.Linear(3)(y)

    f = hk.without_apply_rng(hk.transform(net))
    tokens = np.random.default_rng(0).integers(0, 11, (2, 5)).astype(np.int32)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return f.apply, f.init(jax.random.key(0), tokens), tokens
