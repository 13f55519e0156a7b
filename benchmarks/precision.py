"""The overhead of autocast: the time to trace the gradient of a 60-layer transformer with and
without autocast, and the time of a compiled step, compared with the same casts written by hand.

    python -m benchmarks.precision            # tracing
    python -m benchmarks.precision step       # a training step of an MLP, float32, autocast, casts by hand
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp

from benchmarks._harness import main, seconds


def _trace(kind):
    from fnet import layers as nn
    from fnet import transforms as ft

    block = nn.Sequential(
        nn.Residual(nn.LayerNorm(), nn.Attention(4, causal=True)),
        nn.Residual(nn.LayerNorm(), nn.Dense(256), jax.nn.gelu, nn.Dense(64)),
    )
    model = nn.Sequential(*[block] * 60)
    x = jax.ShapeDtypeStruct((2, 16, 64), jnp.float32)
    params = jax.eval_shape(lambda key: model.init(key, x)[0], jax.random.key(0))

    def once():
        loss = lambda params, x: jnp.square(
            model(params, x)
        ).mean()  # a new function, because JAX caches traces
        f = {
            "plain": lambda: jax.grad(loss),
            "around": lambda: ft.autocast(jax.grad(loss), "bfloat16"),
            "inside": lambda: jax.grad(ft.autocast(loss, "bfloat16")),
        }[kind]()
        start = time.perf_counter()
        jax.jit(f).trace(params, x)
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(3))


def _step(kind):
    from fnet import transforms as ft

    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(key, (1024, 1024)) / 32 for key in keys]
    x = jax.random.normal(jax.random.key(1), (256, 1024))

    def loss(params, x, dot):
        for w in params:
            x = jnp.tanh(dot(x, w))
        return jnp.square(x).mean()

    full = functools.partial(loss, dot=jnp.dot)
    by_hand = functools.partial(
        loss,
        dot=lambda x, w: jnp.dot(
            x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32
        ).astype(jnp.bfloat16),
    )
    gradient = {
        "float32": jax.grad(full),
        "autocast": ft.autocast(jax.grad(full), "bfloat16"),
        "by hand": jax.grad(lambda params, x: by_hand(params, x).astype(jnp.float32)),
    }[kind]
    step = jax.jit(lambda params, x: [w - 0.1 * g for w, g in zip(params, gradient(params, x))])
    return seconds(lambda: jax.block_until_ready(step(params, x)), budget=2)


TRACE = {
    "autocast around grad": functools.partial(_trace, "around"),
    "autocast inside grad": functools.partial(_trace, "inside"),
    "plain": functools.partial(_trace, "plain"),
}
STEP = {
    "autocast": functools.partial(_step, "autocast"),
    "float32": functools.partial(_step, "float32"),
    "casts by hand": functools.partial(_step, "by hand"),
}

if __name__ == "__main__":
    if sys.argv[1:] == ["step"] or set(sys.argv[1:]) & set(STEP):
        main("benchmarks.precision", STEP, unit="ms", scale=1e3)
    else:
        main("benchmarks.precision", TRACE, unit="ms", scale=1e3)
