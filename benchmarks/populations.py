"""The time per member of a population: `search.population` compared with one model alone, vmap and
a loop.

    python -m benchmarks.populations            # 16 members
    python -m benchmarks.populations 4

The methods run in one process and alternate, each for several consecutive steps. A step ends when
the metrics of all members are computed. A ratio to the fastest method is the median of the ratios
in the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._harness import header
from fnet import models, search
from fnet import training as tr
from fnet import transforms as ft

TURN = 0.2  # seconds of consecutive steps, whose data stay in the caches as in training
ROUNDS, SECONDS = (
    9,
    10,
)  # at least ROUNDS rounds, and more if the steps are fast, until SECONDS are over
MODELS = {
    "CNN 16-32, batch 32 of 28x28": (models.CNN(10, (16, 32), 2), 32),
    "MLP 784-256-256-10, batch 64": (models.MLP((256, 256, 10)), 64),
}


def programs(model, rows, n):
    """Returns {name: function that runs one step of n members, or of one member, and returns the
    metrics}, and an explanation of the method that `search.population` selected."""
    random = np.random.default_rng(0)
    batch = {
        "x": jnp.asarray(random.random((rows, 28, 28, 1), np.float32)),
        "y": jnp.asarray(random.integers(0, 10, rows).astype(np.int32)),
    }
    optimizer = lambda hyper: optax.sgd(hyper, momentum=0.9)

    def init(key, hyper):
        params, state = model.init(key, batch["x"])
        return tr.TrainState.create(params, optimizer(hyper), state=state)

    def step(state, batch, hyper):
        def loss(params):
            logits, new = model(params, batch["x"], state=state.state, train=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply(optimizer(hyper), grads, state=new), {"loss": value}

    hyper = jnp.full(n, 1e-3)
    init_n, step_n = search.population(init, step)
    state = init_n(jax.random.key(0), hyper)
    copy = lambda tree: jax.tree.map(jnp.copy, tree)
    single = jax.jit(step, donate_argnums=0)
    plain = jax.jit(jax.vmap(step, (0, None, 0)), donate_argnums=0)
    held = {
        "one alone": [search.member(state, 0)],
        "vmap": copy(state.members),
        "loop": [copy(search.member(state, i)) for i in range(n)],
        "search.population": copy(state),
    }

    def alone():
        held["one alone"][0], loss = single(held["one alone"][0], batch, hyper[0])
        return loss

    def vmapped():
        held["vmap"], loss = plain(held["vmap"], batch, hyper)
        return loss

    def loop():
        losses = []
        for i in range(n):
            held["loop"][i], loss = single(held["loop"][i], batch, rates[i])
            losses.append(loss)
        return losses

    def population():
        held["search.population"], metrics = step_n(held["search.population"], batch)
        return metrics

    rates = list(hyper)
    runs = {"one alone": alone, "vmap": vmapped, "loop": loop, "search.population": population}
    return runs, ft.explain(step_n, state, batch)


def main():
    n = int(sys.argv[1]) if sys.argv[1:] else 16
    print(
        header(
            " ".join(["python -m benchmarks.populations", *sys.argv[1:]]),
            ROUNDS,
            allocator="default",
        )
    )
    print(
        f"| {n} members of | method | step ms | ms per member | to one alone | to the fastest of "
        f"vmap and loop |"
    )
    print("|---|---|---|---|---|---|")
    for name, (model, rows) in MODELS.items():
        runs, chosen = programs(model, rows, n)
        times = {each: [] for each in runs}
        steps = {}
        for each, run in runs.items():
            jax.block_until_ready(run())  # the first call compiles
            began = time.perf_counter()
            jax.block_until_ready(run())
            steps[each] = max(1, round(TURN / (time.perf_counter() - began)))
        end = time.perf_counter() + SECONDS
        while len(times["loop"]) < ROUNDS or time.perf_counter() < end:
            for each, run in runs.items():
                began = time.perf_counter()
                for _ in range(steps[each]):
                    jax.block_until_ready(run())
                times[each].append((time.perf_counter() - began) / steps[each])
        milliseconds = {each: 1e3 * statistics.median(taken) for each, taken in times.items()}
        fastest = times[min("vmap", "loop", key=milliseconds.get)]
        for each, value in milliseconds.items():
            members = 1 if each == "one alone" else n
            method = f"{each} ({chosen.chosen})" if each == "search.population" else each
            ratio = (
                f"{statistics.median(a / b for a, b in zip(times[each], fastest)):.2f}"
                if members > 1
                else ""
            )
            print(
                f"| {name} | {method} | {value:.1f} | {value / members:.2f} | "
                f"{value / members / milliseconds['one alone']:.2f} | {ratio} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
