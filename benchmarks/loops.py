"""What `ft.tune`'s rule `summed_products` does to the gradient of a recurrent layer.

    python -m benchmarks.loops [--rounds=15]

The two programs run in alternation in one process. Processor time of all threads, because it
depends least on what else the machine does.
"""

import statistics
import time

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks._harness import header
from fnet import layers as nn
from fnet import transforms as ft

ROUNDS = flags.DEFINE_integer("rounds", 15, "measurements of each program")
SHAPES = (  # batch, time, features
    (4, 256, 256),
    (8, 64, 512),
    (16, 128, 256),
    (32, 128, 256),
    (32, 64, 512),
    (64, 64, 128),
    (64, 64, 512),
)


def step(layer, params, x):
    def loss(params, x):
        return jnp.square(layer(params, x)).mean()

    return jax.value_and_grad(loss)(params, x)


def seconds(f, *args) -> float:
    start = time.process_time()
    jax.block_until_ready(f(*args))
    return time.process_time() - start


def main(_):
    print(header("python -m benchmarks.loops", ROUNDS.value, ("jax", "jaxlib")))
    print("| layer | batch, time, features | applies | without, ms | with, ms | ratio of medians |")
    print("|---|---|---|---|---|---|")
    for kind in (nn.LSTM, nn.GRU):
        for batch, length, features in SHAPES:
            layer = kind(features)
            x = jax.random.normal(jax.random.key(1), (batch, length, features))
            params, _ = layer.init(jax.random.key(0), x)
            grad = lambda params, x, layer=layer: step(layer, params, x)
            on, off = ft.tune(grad), ft.tune(grad, rules={"summed_products": False})
            rules = {row.rule for row in ft.explain(on, params, x).rows}
            times = {on: [], off: []}
            for round_ in range(ROUNDS.value + 1):
                for f in (on, off):
                    taken = seconds(f, params, x)
                    if round_:  # the first compiles
                        times[f].append(taken)
            fast, slow = (1e3 * statistics.median(times[f]) for f in (on, off))
            applies = "yes" if "summed_products" in rules else "no"
            row = f"| {kind.__name__} | {batch}, {length}, {features} | {applies} | {slow:.1f} "
            print(f"{row}| {fast:.1f} | {fast / slow:.2f} |", flush=True)


if __name__ == "__main__":
    app.run(main)
