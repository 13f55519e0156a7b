"""The forward pass of a 24-layer MLP without jit, as in debugging, compared with flax.linen and
handwritten JAX.

Run it with:

    python -m benchmarks.eager
"""

import jax
import jax.numpy as jnp

from benchmarks._harness import main, seconds

DEPTH, WIDTH = 24, 64
X = jnp.ones((32, WIDTH))


def fnet():
    from fnet import layers as nn

    model = nn.Sequential(*[part for _ in range(DEPTH) for part in (nn.Dense(WIDTH), jnp.tanh)])
    params, _ = model.init(jax.random.key(0), X)
    return seconds(lambda: jax.block_until_ready(model(params, X)))


def linen():
    from flax import linen

    model = linen.Sequential(
        [part for _ in range(DEPTH) for part in (linen.Dense(WIDTH), jnp.tanh)]
    )
    params = model.init(jax.random.key(0), X)
    return seconds(lambda: jax.block_until_ready(model.apply(params, X)))


def handwritten():
    layers = [(jnp.ones((WIDTH, WIDTH)), jnp.ones(WIDTH))] * DEPTH

    def model(layers, x):
        for kernel, bias in layers:
            x = jnp.tanh(x @ kernel + bias)
        return x

    return seconds(lambda: jax.block_until_ready(model(layers, X)))


if __name__ == "__main__":
    main(
        "benchmarks.eager",
        {"fnet": fnet, "flax.linen": linen, "hand-written": handwritten},
        unit="ms",
        scale=1e3,
        base="fnet",
    )
