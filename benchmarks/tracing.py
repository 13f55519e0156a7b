"""The time to trace a transformer's training step, by depth: Stack(block, 2), Stack(block, 48), and
48 unrolled blocks.

Run it with:

    python -m benchmarks.tracing
"""

import functools
import time

import jax
import jax.numpy as jnp

from benchmarks._harness import main


def _time(depth, stacked):
    from fnet import layers as nn

    block = nn.Sequential(
        nn.Residual(nn.LayerNorm(), nn.Attention(4, causal=True)),
        nn.Residual(nn.LayerNorm(), nn.Dense(256), jax.nn.gelu, nn.Dense(64)),
    )
    model = nn.Stack(block, depth) if stacked else nn.Sequential(*[block] * depth)
    x = jax.ShapeDtypeStruct((2, 16, 64), jnp.float32)
    params = jax.eval_shape(lambda key: model.init(key, x)[0], jax.random.key(0))

    def once():
        # A new function for each call, because JAX caches traces.
        step = jax.jit(
            lambda params, x: jax.grad(lambda params: jnp.square(model(params, x)).sum())(params)
        )
        start = time.perf_counter()
        step.trace(params, x)
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(5))


PEERS = {
    "Stack, 48 layers": functools.partial(_time, 48, True),
    "48 layers unrolled": functools.partial(_time, 48, False),
    "Stack, 2 layers": functools.partial(_time, 2, True),
}

if __name__ == "__main__":
    main("benchmarks.tracing", PEERS, unit="ms", scale=1e3, rounds=5)
