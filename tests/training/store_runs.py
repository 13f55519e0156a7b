"""A small run and small checkpoints in an object store."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fnet import training as tr
from fnet.training.checkpoints._checkpoint import Checkpoints

TX = optax.adam(0.1)
TREE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "n": 7}
DATA = {"x": np.linspace(0, 1, 32, dtype=np.float32)}


def step(state, batch):
    value, grads = jax.value_and_grad(
        lambda params: jnp.square(params["w"] * batch["x"] - 1).mean()
    )(state.params)
    return state.apply(TX, grads), {"loss": value}


def start():
    return tr.TrainState.create({"w": jnp.zeros(())}, TX)


def fit(workdir, steps=6, **options):
    measure = lambda state, batch: {
        "loss": tr.mean(jnp.square(state.params["w"] * batch["x"] - 1), batch["weight"])
    }
    options = {
        "config": {"rate": 0.1},
        "best": "v/loss",
        "best_mode": "min",
        "tune": False,
        "every": 2,
        "log_every": 1,
        "evaluate": {"v": tr.evaluator(measure, DATA, batch_size=8)},
    } | options
    return tr.fit(
        step,
        start(),
        tr.Batches(DATA, batch_size=8, seed=0),
        steps=steps,
        workdir=workdir,
        **options,
    )


def rows(workdir):
    return [
        {k: v for k, v in row.items() if not k.startswith("time/")}
        for row in tr.read_metrics(workdir)
    ]


def saved(where, steps=(1, 2), **options):
    with Checkpoints(where, **options) as checkpoints:
        for number in steps:
            checkpoints.save(number, TREE | {"n": number}, metrics={"loss": number})
    return checkpoints
