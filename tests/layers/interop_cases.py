"""One network in flax.linen, flax.nnx and fnet, and comparisons of trees."""

import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from fnet import layers as nn

KEY = jax.random.key(3)
X = jax.random.normal(jax.random.key(0), (4, 6, 6, 2))


def close(got, want, tolerance=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def differ(one, other):
    return any(
        (a != b).any() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def raises(error, text):
    return pytest.raises(error, match=re.escape(text))


class LinenCNN(linen.Module):
    features: int = 3
    rate: float = 0.5

    @linen.compact
    def __call__(self, x, *, train=False):
        x = linen.relu(
            linen.BatchNorm(use_running_average=not train)(linen.Conv(self.features, (3, 3))(x))
        )
        return linen.Dropout(self.rate, deterministic=not train)(linen.Dense(5)(x.mean((1, 2))))


class NnxCNN(nnx.Module):
    def __init__(self, features=3, *, rngs):
        self.layers = nnx.List(
            [nnx.Conv(2, features, (3, 3), rngs=rngs), nnx.Linear(features, 5, rngs=rngs)]
        )
        self.norm = nnx.BatchNorm(features, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.norm(self.layers[0](x)))
        return self.dropout(self.layers[1](x.mean((1, 2))))


CNN = nn.Sequential(
    conv=nn.Conv(3, 3),
    norm=nn.BatchNorm(),
    relu=jax.nn.relu,
    pool=nn.GlobalAvgPool(),
    drop=nn.Dropout(0.5),
    head=nn.Dense(5),
)


def loss_of(y):
    return jnp.square(y - 1).sum()


def training_step(layer, params, state):
    """(output, new state, gradients), compiled."""

    def loss(params):
        y, new = layer(params, X, state=state, key=KEY, train=True)
        return loss_of(y), (y, new)

    gradients, (y, new) = jax.jit(jax.grad(loss, has_aux=True))(params)
    return y, new, gradients


def first_draw(key):
    """The first key that the layer at a model's root draws."""
    return jax.random.fold_in(jax.random.fold_in(key, jnp.uint32(zlib.crc32(b"draws"))), 1)
