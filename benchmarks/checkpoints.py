"""The overhead of saving: 100 training steps with one checkpoint, compared with 100 steps without a
checkpoint.

    python -m benchmarks.checkpoints                 # the CNN for digits, and an MLP whose steps are short for its size
    python -m benchmarks.checkpoints --rounds=20 mlp

Rounds with and without a checkpoint alternate. A round with a checkpoint ends when the checkpoint
is on the disk. "wall" is the median increase of the wall-clock time. "processor" is the median
increase of the time that the cores spent on this process, which other programs on the machine
affect less. "call" is the time for which `save` blocks the loop.
"""

import argparse
import statistics
import tempfile
import time

import jax
import numpy as np
import optax

from fnet import models
from fnet import training as tr
from fnet import transforms as ft

STEPS = 100


def cnn():
    model, x = models.CNN(10, (32, 64), 2), np.zeros((64, 8, 8, 1), np.float32)
    return model, x, np.arange(64) % 10


def mlp():
    return (
        models.MLP((1024, 1024, 1024, 10), 0.0),
        np.zeros((256, 784), np.float32),
        np.arange(256) % 10,
    )


TASKS = {"cnn": cnn, "mlp": mlp}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", help="cnn, mlp (default: both)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--folder", default=None, help="folder of the checkpoints (default: a temporary folder)"
    )
    options = parser.parse_args()
    print(
        f"{jax.devices()[0].device_kind}, {options.rounds} rounds of {STEPS} steps\n"
        f"{'task':5} {'state':>9} {'step':>9} {'call':>9} {'wall':>7} {'processor':>10}"
    )
    for name in options.tasks or TASKS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            measure(name, *TASKS[name](), options.rounds, folder)


def measure(name, model, x, labels, rounds, folder):
    tx = optax.adamw(1e-3)
    params, variables = model.init(jax.random.key(0), x)
    state = tr.TrainState.create(params, tx, state=variables)

    def step(state):
        def loss(params):
            logits, new = model(params, x, state=state.state, key=jax.random.key(0), train=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

        (_, new), grads = ft.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply(tx, grads, state=new)

    step = ft.tune(jax.jit(step, donate_argnums=0))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    walls, cores, calls, plain = [], [], [], []
    with tr.Checkpoints(folder, keep=1) as checkpoints:
        for number in range(rounds + 1):
            taken = []
            for saves in (False, True):
                jax.block_until_ready(state)
                wall, core = time.perf_counter(), time.process_time()
                if saves:
                    checkpoints.save(number, state)
                    calls.append(time.perf_counter() - wall)
                for i in range(STEPS):
                    state = step(state)
                    if i % 2:  # as in `fit`, at most two steps are queued
                        jax.block_until_ready(state.step)
                checkpoints.wait()
                jax.block_until_ready(state)
                taken.append((time.perf_counter() - wall, time.process_time() - core))
            if number:  # the first round compiles
                plain.append(taken[0][0])
                walls.append(taken[1][0] / taken[0][0] - 1)
                cores.append(taken[1][1] / taken[0][1] - 1)
    median = statistics.median
    print(
        f"{name:5} {size / 1e6:6.1f} MB {median(plain) / STEPS * 1e3:6.2f} ms "
        f"{median(calls[1:]) * 1e3:6.2f} ms {median(walls):+7.1%} {median(cores):+10.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
