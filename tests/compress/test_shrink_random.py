"""Random numbers in a shrunk function are those of the original function, without the removed
channels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import compress

KEY = jax.random.key(7)
X = jax.random.normal(jax.random.key(2), (5, 6))
PARAMS = {
    "up": jax.random.normal(jax.random.key(0), (6, 8)),
    "down": jax.random.normal(jax.random.key(1), (8, 3)),
}
SHRUNK = {
    "mask": lambda h: jax.nn.relu(h) * jax.random.bernoulli(KEY, 0.5, (5, 8)).astype(h.dtype),
    "mask in a jit": lambda h: (
        h * jax.jit(lambda key: jax.random.bernoulli(key, 0.5, (5, 8)).astype(h.dtype))(KEY)
    ),
    "mask of channels": lambda h: h * jax.random.bernoulli(KEY, 0.5, (1, 8)).astype(h.dtype),
    "noise": lambda h: h + jax.random.normal(KEY, (5, 8)),
    "16 bits": lambda h: h * jax.random.uniform(KEY, (5, 8), jnp.bfloat16).astype(h.dtype),
    "integers": lambda h: h * jax.random.randint(KEY, (5, 8), -9, 9).astype(h.dtype),
    "a key for each row": lambda h: jax.vmap(lambda row, key: row * jax.random.normal(key, (8,)))(
        h, jax.random.split(KEY, 5)
    ),
    "another generator": lambda h: h * jax.random.normal(jax.random.key(0, impl="rbg"), (5, 8)),
    "in a scan": lambda h: jax.lax.scan(
        lambda h, key: (h * jax.random.normal(key, h.shape), None), h, jax.random.split(KEY, 2)
    )[0],
    "permuted rows": lambda h: jax.random.permutation(KEY, h, axis=0),
    "numbers of channels": lambda h: h * jnp.arange(8.0)[None] + jnp.arange(8.0)[None],
}
REFUSED = {
    "permuted channels": lambda h: jax.random.permutation(KEY, h, axis=1),
    "sorted": lambda h: jnp.sort(h, 1),
    "gamma": lambda h: h * jax.random.gamma(KEY, 2.0, (5, 8)),
    "summed up": lambda h: jnp.cumsum(h, 1),
    "drawn by the channels": lambda h: h * jax.random.categorical(KEY, h)[:, None].astype(h.dtype),
    "largest": lambda h: h * jnp.argmax(h, 1)[:, None].astype(h.dtype),
    "softmax": jax.nn.softmax,
    "a key for each channel": lambda h: jax.vmap(
        lambda col, key: col * jax.random.normal(key, (5,)), (1, 0), 1
    )(h, jax.random.split(KEY, 8)),
    "top": lambda h: jnp.pad(jax.lax.top_k(h, 3)[0], ((0, 0), (0, 5))),
}


@pytest.mark.quick_cases("mask in a jit", "integers", "in a scan")
@pytest.mark.parametrize("name", SHRUNK)
def test_equals_the_function_with_zeroed_channels(name):
    f = lambda params, x: SHRUNK[name](x @ params["up"]) @ params["down"]
    shrunk = compress.shrink(f, PARAMS, X, fraction=0.5)
    assert shrunk.params["up"].shape == (6, 4) and shrunk.params["down"].shape == (4, 3)
    zeroed = jax.tree.map(
        lambda old, new: jnp.where(jnp.isin(old, new), old, 0), PARAMS, shrunk.params
    )
    np.testing.assert_allclose(shrunk.f(shrunk.params, X), f(zeroed, X), rtol=1e-4, atol=1e-4)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", REFUSED)
def test_channels_that_depend_on_each_other_stay(name):
    f = lambda params, x: REFUSED[name](x @ params["up"]) @ params["down"]
    with pytest.raises(ValueError, match="shrink: no axis can be cut"):
        compress.shrink(f, PARAMS, X, fraction=0.5)
