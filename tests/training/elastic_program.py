"""The program of the elastic drill: trains a small model on all devices of the run.

    fnet run --elastic=HOSTS -- python tests/training/elastic_program.py MODEL WORKDIR STEPS [--invariant]

At the end it prints "END", the number of steps and a digest of the state, and writes the state to
WORKDIR/final.npz.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fnet import layers as nn
from fnet import models, parallel
from fnet import training as tr
from fnet import transforms as ft

ROWS, EXAMPLES = 24, 240
RNG = np.random.default_rng(0)
TX = optax.adamw(1e-3)


def gpt():
    model = models.GPT(vocab_size=64, width=32, depth=2, heads=2, context=16)
    data = {"tokens": RNG.integers(0, 64, (EXAMPLES, 17)).astype(np.int32)}

    def init(key):
        return tr.TrainState.create(model.init(key, data["tokens"][:1, :-1])[0], TX)

    def step(state, batch):
        def loss(params):
            text = batch["tokens"]
            return model.cross_entropy(params, text[:, :-1], text[:, 1:]).mean()

        value, grads = ft.value_and_grad(loss)(state.params)
        return state.apply(TX, grads), {"loss": value}

    return init, step, data


def images():
    return {
        "x": RNG.normal(size=(EXAMPLES, 8, 8, 3)).astype(np.float32),
        "y": RNG.integers(0, 10, EXAMPLES).astype(np.int32),
    }


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def cnn():
    layers = nn.Conv(8, 3), nn.BatchNorm(), jax.nn.relu, nn.MaxPool(2), nn.Dropout(0.2)
    model, data = nn.Sequential(*layers, nn.Flatten(), nn.Dense(10)), images()

    def init(key):
        params, stats = model.init(key, data["x"][:1])
        return tr.TrainState.create(params, TX, state=stats)

    def step(state, batch):
        key = jax.random.fold_in(jax.random.key(7), state.step)

        def loss(params):
            logits, stats = model(params, batch["x"], state=state.state, key=key, train=True)
            return cross_entropy(logits, batch["y"]).mean(), stats

        (value, stats), grads = ft.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply(TX, grads, state=stats), {"loss": value}

    return init, step, data


class Module(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.drop(jax.nn.gelu(self.norm(self.conv(x)))).mean((1, 2)))


def module():
    graph = nnx.graphdef(parts(jax.random.key(0)))

    def init(key):
        return {"params": nnx.state(parts(key))}

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state["params"])
        loss = lambda model: cross_entropy(model(batch["x"]), batch["y"]).mean()
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return {"params": nnx.state((model, optimizer))}, {"loss": value}

    return init, step, images()


def parts(key):
    model = Module(nnx.Rngs(key))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


MODELS = {"gpt": gpt, "cnn": cnn, "nnx": module}


def arrays(state):
    raw = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(raw(x)) for path, x in leaves}


def main(arguments):
    made = argparse.ArgumentParser()
    made.add_argument("model", choices=MODELS)
    made.add_argument("workdir", type=Path)
    made.add_argument("steps", type=int)
    made.add_argument("--invariant", action="store_true")
    made.add_argument("--pause", type=float, default=0.0, help="seconds between two steps")
    options = made.parse_args(arguments)
    parallel.initialize()
    init, step, data = MODELS[options.model]()
    batches = tr.Batches(data, ROWS)
    plan = parallel.plan(step, init, batches(0), devices="dividing", strategy="data")
    if options.invariant:
        step = ft.invariant(step, argnums=1, mesh=plan.mesh)
    begin = plan.init(jax.random.key(0))
    pause = lambda end: time.sleep(options.pause)
    run = {"plan": plan, "workdir": options.workdir, "save_every": 5, "log_every": 1}
    state = tr.fit(step, begin, batches, steps=options.steps, on_step=pause, **run)
    final = arrays(state)
    if jax.process_index() == 0:
        np.savez(options.workdir / "final.npz", **final)
    digest = hashlib.sha256(b"".join(x.tobytes() for x in final.values())).hexdigest()[:12]
    print("END", options.steps, jax.device_count(), digest, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
