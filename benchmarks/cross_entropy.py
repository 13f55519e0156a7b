"""The loss of a tied output layer over GPT-2's vocabulary and its gradient: complete logits
compared with chunks.

    python -m benchmarks.cross_entropy

Prints the time, and the temporary memory that XLA allocates in addition to arguments and results.
"""

import jax
import jax.numpy as jnp
import optax

from benchmarks._harness import main, seconds
from fnet import layers as nn

BATCH, TIME, WIDTH, VOCAB = 4, 512, 256, 50257


def _whole(x, table, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x @ table.T, labels).mean()


def _chunked(x, table, labels):
    return nn.linear_cross_entropy(x, table.T, labels).mean()


def _compiled(loss):
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((BATCH, TIME, WIDTH), jnp.float32),
            ((VOCAB, WIDTH), jnp.float32),
            ((BATCH, TIME), jnp.int32),
        )
    ]
    return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile()


def _time(loss):
    keys = jax.random.split(jax.random.key(0), 3)
    args = (
        jax.random.normal(keys[0], (BATCH, TIME, WIDTH)),
        jax.random.normal(keys[1], (VOCAB, WIDTH)) * 0.02,
        jax.random.randint(keys[2], (BATCH, TIME), 0, VOCAB),
    )
    step = _compiled(loss)
    return seconds(lambda: jax.block_until_ready(step(*args)), budget=1, repeats=2)


PEERS = {"linear_cross_entropy": lambda: _time(_chunked), "whole logits": lambda: _time(_whole)}

if __name__ == "__main__" and main(
    "benchmarks.cross_entropy", PEERS, unit="ms", scale=1e3, rounds=3
):
    for name, loss in (("linear_cross_entropy", _chunked), ("whole logits", _whole)):
        print(
            f"{name}: {_compiled(loss).memory_analysis().temp_size_in_bytes / 2**20:,.0f} MiB of "
            f"temporary memory"
        )
