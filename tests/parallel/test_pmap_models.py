"""pmap: the gradient of a model on eight devices, averaged by name, is that of one, also with
slices and remat."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import sampled
from jax import lax

from fnet import layers as nn
from fnet import models
from fnet import transforms as ft

RNG = np.random.default_rng(0)


def gpt(axis_name):
    model = models.GPT(64, 32, 2, 2, context=16)
    tokens = RNG.integers(0, 64, (16, 17)).astype(np.int32)
    params, _ = model.init(jax.random.key(0), tokens[:1, :-1])
    return lambda params, t: model.cross_entropy(params, t[:, :-1], t[:, 1:]).mean(), params, tokens


def cnn(axis_name):
    """BatchNorm's statistics are over all devices."""
    model = nn.Sequential(
        nn.Conv(8, 3), nn.BatchNorm(axis_name=axis_name), jnp.tanh, nn.GlobalAvgPool(), nn.Dense(4)
    )
    x = RNG.normal(3, 1, (16, 8, 8, 3)).astype(np.float32)
    params, state = model.init(jax.random.key(0), x[:1])
    return (
        lambda params, x: jnp.square(model(params, x, state=state, train=True)[0] - 1).mean(),
        params,
        x,
    )


def flax(axis_name):
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = x + linen.MultiHeadDotProductAttention(num_heads=2)(linen.LayerNorm()(x))
            return x + linen.Dense(16)(linen.gelu(linen.Dense(32)(x)))

    x = RNG.normal(size=(16, 8, 16)).astype(np.float32)
    return (
        lambda params, x: jnp.square(Block().apply(params, x)).mean(),
        Block().init(jax.random.key(0), x[:1]),
        x,
    )


CASES = {
    "gpt": (gpt, lambda f: f),
    "gpt, microbatch": (gpt, lambda f: ft.microbatch(f, 2)),
    "gpt, rematerialize": (gpt, ft.rematerialize),
    "cnn": (cnn, lambda f: f),
    "cnn, rematerialize": (cnn, ft.rematerialize),
    "flax, both": (flax, lambda f: ft.rematerialize(ft.microbatch(f, 2))),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sampled(CASES, ["cnn", "flax, both"]))
def test_the_gradient_of_one_device(name):
    make, change = CASES[name]
    loss, params, batch = make("chips")
    step = ft.pmap(
        lambda params, batch: lax.pmean(change(ft.value_and_grad(loss))(params, batch), "chips"),
        axis_name="chips",
        in_axes=(None, 0),
        out_axes=None,
    )
    value, grads = step(params, ft.shard(batch))
    alone, params, _ = make(None)
    want_value, want = jax.jit(ft.value_and_grad(alone))(params, batch)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    least = 1e-2 * max(np.abs(x).max() for x in jax.tree.leaves(want))
    for got, x in zip(jax.tree.leaves(grads), jax.tree.leaves(want)):
        assert np.abs(np.asarray(got) - x).max() <= 1e-5 * max(np.abs(x).max(), least)
