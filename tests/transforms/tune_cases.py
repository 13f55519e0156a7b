"""Training steps for tests of tune, and what its rules do to them."""

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

from fnet import layers as nn
from fnet import transforms as ft
from fnet.transforms._tune import _cpu

NAMES = [rule.name for rule in _cpu.RULES]
EVERY = dict.fromkeys(NAMES, True)  # on whatever XLA is installed


def normal(seed, *shape, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, shape), jnp.float32)


def jittered(params):
    """Parameters moved off their initial zeros, where gradients vanish by symmetry."""
    return jax.tree.map(lambda x: x + normal(x.size, *x.shape, scale=0.05), params)


def only(*names):
    return {name: name in names for name in NAMES}


def fired(step, *args, **options):
    tuning = ft.explain(ft.tune(step, "cpu", **options), *args)
    chosen = {
        rule.name
        for rule in tuning.rules
        if rule.options and rule.options.items() <= tuning.options.items()
    }
    return {row.rule for row in tuning.rows} | chosen


def cross_entropy(logits, classes=4):
    labels = jnp.arange(len(logits)) % classes
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def of_layer(model, x):
    params, state = model.init(jax.random.key(0), x)

    def loss(params, x):
        y, _ = model(params, x, state=state, train=True)
        return cross_entropy(y.reshape(len(y), -1)[:, :4])

    return jax.value_and_grad(loss), (jittered(params), x)


def mlp():
    return of_layer(nn.Sequential(nn.Dense(24), jax.nn.gelu, nn.Dense(4)), normal(1, 16, 12))


def cnn():
    return of_layer(
        nn.Sequential(
            nn.Conv(6, 3),
            jax.nn.relu,
            nn.MaxPool(2),
            nn.Conv(8, 3, 2),
            jax.nn.relu,
            nn.MaxPool((2, 1)),
            nn.Flatten(),
            nn.Dense(4),
        ),
        normal(1, 4, 8, 12, 3),
    )


def transformer():
    block = nn.Sequential(
        nn.Residual(nn.LayerNorm(), nn.Attention(2, causal=True)),
        nn.Residual(nn.LayerNorm(), nn.Dense(32), jax.nn.gelu, nn.Dense(16)),
    )
    return of_layer(nn.Sequential(nn.Stack(nn.Remat(block), 2), nn.Dense(4)), normal(1, 3, 6, 16))


def recurrent():
    return of_layer(nn.Sequential(nn.LSTM(8), nn.Dense(4)), normal(1, 3, 5, 6))


def linen_cnn():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.max_pool(linen.relu(linen.Conv(6, (3, 3))(x)), (2, 2), (2, 2))
            return linen.Dense(4)(x.reshape(len(x), -1))

    x = normal(1, 4, 8, 8, 3)
    params = jittered(Net().init(jax.random.key(0), x))
    return jax.value_and_grad(lambda params, x: cross_entropy(Net().apply(params, x))), (params, x)


def equinox_mlp():
    params, static = eqx.partition(eqx.nn.MLP(12, 4, 24, 2, key=jax.random.key(0)), eqx.is_array)
    loss = lambda params, x: cross_entropy(jax.vmap(eqx.combine(params, static))(x))
    return jax.value_and_grad(loss), (params, normal(1, 8, 12))


STEPS = {f.__name__: f for f in (mlp, cnn, transformer, recurrent, linen_cnn, equinox_mlp)}


def near(got, want, limit=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.abs(a - b).max() <= limit * np.abs(b).max() + 1e-9
