"""One of two processes that read data of their own from an iterator: what test_iterators.py starts.

    python tests/training/reading.py PORT PROCESS COUNT WHERE

It trains once without and once with a pause, and prints as JSON what both runs come to, and how
many batches the second part of the second run has read.
"""

import itertools
import json
import os
import sys
import warnings

if __name__ == "__main__":
    PORT, ME, COUNT, WHERE = *map(int, sys.argv[1:4]), sys.argv[4]
    warnings.simplefilter("error")
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fnet import parallel
from fnet import training as tr


class Source:
    """Epochs of a length and an order of the process's own. Its state is where it is."""

    def __init__(self):
        self.epoch, self.loaded, self.at, self.read = 0, 0, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"at": self.at, "padding": "x" * 100 * ME}

    def load_state_dict(self, state):
        self.loaded = state["at"]

    def __iter__(self):
        self.at, self.loaded = self.loaded, 0
        order = np.random.default_rng(self.epoch).permutation(5 - 2 * ME)
        for i in itertools.islice(order, self.at, None):
            self.at += 1
            self.read += 1
            yield {"x": np.full(2, 1000 * ME + 100 * self.epoch + i, np.float32)}


def step(state, batch):
    seen = state.params["seen"] * 1.01 + batch["x"] @ jnp.arange(1.0, 5.0)
    return state.replace(step=state.step + 1, params={"seen": seen}), {"x": batch["x"].sum()}


def start(key=None):
    return tr.TrainState.create({"seen": jnp.zeros(())}, optax.sgd(0.1))


def main():
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    parallel.initialize(f"127.0.0.1:{PORT}", COUNT, ME, initialization_timeout=60)
    plan = parallel.plan(
        step, start, {"x": np.zeros(4, np.float32)}, strategy="data", compile=False
    )
    options = {"plan": plan, "config": {}, "tensorboard": False, "tune": False, "log_every": 1}

    def run(name, steps):
        source = Source()
        batches = tr.from_iterator(source)
        assert batches.resume == "exact"
        state = tr.fit(step, start(), batches, steps=steps, workdir=f"{WHERE}/{name}", **options)
        return np.asarray(state.params["seen"].addressable_data(0)).tobytes().hex(), source.read

    whole, _ = run("whole", 9)
    for steps in (4, 9):  # inside an epoch of each
        parts, read = run("parts", steps)
    return {"same": parts == whole, "read": read}


if __name__ == "__main__":
    print(json.dumps(main()))
