"""The time of a local step of federated averaging, compared with a plain loop of jitted steps.

    python -m benchmarks.federated            # 2 clients with 600 images each, batches of 10: 120 steps

The model is the CNN of McMahan et al. (2017) with 1,663,370 parameters. All forms run in one
process and alternate.
"""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._harness import header, table
from fnet import federated
from fnet import layers as nn

ROUNDS, CLIENTS, IMAGES, BATCH = 5, 2, 600, 10
STEPS = CLIENTS * IMAGES // BATCH


class CNN(nn.Layer):
    def forward(self, scope, x):  # [batch, 28, 28, 1]
        for name, channels in (("conv1", 32), ("conv2", 64)):
            x = nn.MaxPool(2)(
                scope[f"{name}_pool"], jax.nn.relu(nn.Conv(channels, 5)(scope[name], x))
            )
        x = jax.nn.relu(nn.Dense(512)(scope["hidden"], nn.Flatten()(scope["flat"], x)))
        return nn.Dense(10)(scope["head"], x)


def peers():
    """Returns {name: function that runs STEPS steps and waits for the results}."""
    random, model = np.random.default_rng(0), CNN()
    images = random.integers(0, 256, (CLIENTS, IMAGES, 28, 28, 1)).astype(np.uint8)
    labels = random.integers(0, 10, (CLIENTS, IMAGES)).astype(np.int32)
    params, _ = model.init(jax.random.key(0), jnp.zeros((1, 28, 28, 1)))

    def loss(params, batch, weight, key):
        logits = model(params, batch["x"].astype(jnp.float32) / 255)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return (losses * weight).sum() / weight.sum()

    def plain(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, {"x": x, "y": y}, jnp.ones(len(y)), None)
        return jax.tree.map(lambda w, g: w - 0.01 * g, params, grads), value

    step = jax.jit(plain, donate_argnums=0)
    scanned = jax.jit(
        lambda params, x, y: jax.lax.scan(lambda w, batch: plain(w, *batch), params, (x, y))
    )

    def loop():
        for x, y in zip(images, labels):
            mine = jax.tree.map(jnp.copy, params)
            for i in range(0, IMAGES, BATCH):
                mine, _ = step(mine, x[i : i + BATCH], y[i : i + BATCH])
            jax.block_until_ready(mine)

    def scan():
        for x, y in zip(images, labels):
            jax.block_until_ready(
                scanned(params, x.reshape(-1, BATCH, 28, 28, 1), y.reshape(-1, BATCH))
            )

    def fedavg(method):
        server = optax.sgd(1.0)
        parts = federated.clients([{"x": x, "y": y} for x, y in zip(images, labels)])
        round = federated.fedavg(
            federated.local(loss, optax.sgd(0.01)),
            parts,
            server=server,
            sampled=CLIENTS,
            batch_size=BATCH,
            method=method,
        )
        state = federated.init(jax.random.key(0), params, server)
        return lambda: jax.block_until_ready(round(state))

    return {
        "a loop of jitted steps": loop,
        "lax.scan over the steps": scan,
        **{f"fedavg(method='{method}')": fedavg(method) for method in ("vmap", "split", "loop")},
    }


def main():
    runs: dict = peers()
    times: dict[str, list[float]] = {}
    for turn in range(ROUNDS + 1):  # the first round compiles
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if turn:
                times.setdefault(name, []).append((time.perf_counter() - began) / STEPS)
    print(header("python -m benchmarks.federated", ROUNDS, allocator="default"))
    print(table(times, unit="ms per step", scale=1e3, bases=["a loop of jitted steps"]))
    fastest = statistics.median(times["fedavg(method='loop')"])
    print(
        f"\na round of 10 clients with 5 epochs, 3,000 steps: {3000 * fastest:.0f} s with "
        f"method='loop'"
    )


if __name__ == "__main__":
    main()
