"""A run of `fit` with all of its options, to be killed, interrupted, starved of resources and
resumed.

    python tests/torture/victim.py WORKDIR [--steps=N] [--slow=evaluation|save] [--process=I --of=N --port=P]
        [--workers=N] [--hang=STEP] [--raise=evaluation|source:STEP] [--infinite=STEP:LEAF] [--config=NAME]
        [--on-step=none|tell|wait|retry|raise|exit:STEP] [--log=NUMBER]

It prints what it is at, one word a line ("compile", "step", "evaluation", "save"), for whoever
means it harm, and ends as the experiments do: 0 when finished or told to stop, 2 with one sentence
where something is wrong.
"""

import argparse
import errno
import itertools
import multiprocessing
import os
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fnet import training as tr
from fnet.training.checkpoints import _manifest
from fnet.training.loop import _program
from fnet.training.record import _logs

RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(200, 16)).astype(np.float32),
    "y": RNG.integers(0, 4, 200).astype(np.int32),
}
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01))
EVERY = {"every": 20, "log_every": 10, "save_every": 5}


def step(state, batch):
    key, noise = jax.random.split(state.state["key"])
    x = batch["x"] + 0.1 * jax.random.normal(noise, batch["x"].shape)

    def loss(params):
        logits = jnp.tanh(x @ params["hidden"]) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply(TX, grads, state={"key": key}), {"loss": value}


def start():
    params = {
        "hidden": jax.random.normal(jax.random.key(0), (16, 64)) / 4,
        "head": jnp.zeros((64, 4)),
    }
    return tr.TrainState.create(params, TX, state={"key": jax.random.key(1)}, ema=0.99)


def measure(state, batch):
    logits = jnp.tanh(batch["x"] @ state.averaged["hidden"]) @ state.averaged["head"]
    return {"accuracy": tr.mean(logits.argmax(-1) == batch["y"], batch["weight"])}


def announce(word, seconds=0.0):
    os.write(1, f"{word}\n".encode())
    time.sleep(seconds)


def forked(inner, count):
    """The same batches from forked workers, made when first needed, as a DataLoader's are."""
    workers = []

    def serve(connection):
        while True:
            try:
                connection.send(inner(connection.recv()))
            except KeyboardInterrupt:  # to the whole group; the run decides when to end
                pass
            except EOFError:
                os._exit(0)

    def batches(i):
        context = multiprocessing.get_context("fork")
        while len(workers) < count:
            here, there = context.Pipe()
            with warnings.catch_warnings(action="ignore"):
                context.Process(target=serve, args=(there,), daemon=True).start()
            workers.append(here)
        workers[i % count].send(i)
        return workers[i % count].recv()

    return batches


def infinite(path):
    """The step, except that from the step in `path` on one leaf of the state is infinite."""
    at, _, leaf = path.partition(":")

    def harmed(state, batch):
        new, metrics = step(state, batch)
        named = lambda where, x: (
            jnp.where(state.step == int(at) - 1, jnp.inf, x)
            if (jax.tree_util.keystr(where, simple=True, separator="/") == leaf)
            else x
        )
        return jax.tree_util.tree_map_with_path(named, new), metrics

    return harmed


def on_step(kind):
    """A function that logs each step, and at one of them never returns or raises; "tell" only names
    each step."""
    kind, _, at = kind.partition(":")

    def call(end):
        if kind == "tell":
            return announce(f"done {end.step}")
        end.log({"own/step": end.step})
        if end.step != int(at or 0):
            return
        announce(f"on_step {end.step}")
        if kind == "raise":
            raise OSError(f"on_step: step {end.step} cannot be shown")
        if kind == "exit":
            sys.exit("error: on_step: the end")
        while kind == "retry":  # retrying on errors does not swallow a signal
            try:
                time.sleep(600)
            except Exception:
                pass
        threading.Event().wait()

    return call


def break_log(number):
    """From the writing number `number` on, lines of the logs are written half and then an error is
    raised."""
    writing, logging, count, at = _logs._written, _logs.Logger.write, itertools.count(), 0

    def log(self, step, values):
        nonlocal at
        at = step
        logging(self, step, values)

    def write(file, data):
        if next(count) >= number:
            writing(file, data[: len(data) // 2])
            announce(f"broken {at}")
            raise OSError(errno.EIO, "Input/output error", str(file.name))
        writing(file, data)

    _logs._written, _logs.Logger.write = write, log


def run(
    workdir,
    *,
    steps,
    slow="",
    mesh=None,
    workers=0,
    hang=None,
    raises="",
    harmed="",
    config=None,
    called="",
    log=None,
):
    """The run; where `slow` is, it takes its time, so that harm done then meets it there."""
    inner, state = tr.Batches(DATA, batch_size=16, seed=1), start()
    inner = forked(inner, workers) if workers else inner
    what, _, at = raises.partition(":")

    def batches(i):
        announce("step", 0.002)
        if i == hang:
            announce("hanging", 600)
        if what == "source" and i == int(at):
            raise OSError(f"batch {i} cannot be read")
        return place(inner(i))

    place = lambda batch: batch
    if mesh is not None:
        rows = jax.NamedSharding(mesh, jax.P("data"))
        place = lambda batch: jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, rows, lambda index: x[index]), batch
        )
        state = spread(state, mesh)
    evaluate = tr.evaluator(measure, DATA, batch_size=20)
    writing, compiling = _manifest.write_arrays, _program.Program.compile

    def evaluating(state):
        announce("evaluation")
        if what == "evaluation" and int(state.step) == int(at):
            raise OSError("the evaluation cannot be read")
        for _ in range(10 if slow == "evaluation" else 0):
            evaluate(state)
            time.sleep(0.02)
        return evaluate(state)

    def write(path, arrays):
        announce("save", 0.1 if slow == "save" else 0)
        return writing(path, arrays)

    def compile_(self, *args):
        announce("compile")
        return compiling(self, *args)

    watched = {
        "evaluate": {"test": evaluating},
        "early_stop": tr.EarlyStop(metric="test/accuracy", patience=10**6),
    }
    _manifest.write_arrays, _program.Program.compile = write, compile_
    if log is not None:
        break_log(log)
    if called:
        watched["on_step"] = on_step(called)
    return tr.fit(
        infinite(harmed) if harmed else step,
        state,
        batches,
        steps=steps,
        workdir=workdir,
        tensorboard=log is not None,
        notes={"victim": True},
        config={} if config is None else {"name": config},
        **({} if mesh is not None else watched),
        **EVERY,
    )


def spread(state, mesh):
    """The state over two processes: the hidden layer cut, the rest the same on both."""

    def put(x):
        cut = jax.P(None, "data") if x.shape == (16, 64) else jax.P()
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.jit(lambda: jax.random.key(1), out_shardings=jax.NamedSharding(mesh, cut))()
        host = np.asarray(x)
        return jax.make_array_from_callback(
            x.shape, jax.NamedSharding(mesh, cut), lambda index: host[index]
        )

    return jax.tree.map(put, state)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("workdir")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--slow", default="")
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--hang", type=int)
    parser.add_argument("--raise", dest="raises", default="")
    parser.add_argument("--infinite", default="")
    parser.add_argument("--config")
    parser.add_argument("--on-step", default="")
    parser.add_argument("--log", type=int)
    options = parser.parse_args(argv)
    mesh = None
    if options.of > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"localhost:{options.port}", options.of, options.process, heartbeat_timeout_seconds=10
        )
        mesh = jax.make_mesh((options.of,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    try:
        run(
            options.workdir,
            steps=options.steps,
            slow=options.slow,
            mesh=mesh,
            workers=options.workers,
            hang=options.hang,
            raises=options.raises,
            harmed=options.infinite,
            config=options.config,
            called=options.on_step,
            log=options.log,
        )
    except tr.Interrupted as stopped:
        print(stopped, file=sys.stderr, flush=True)
        return 0
    except (tr.CheckpointError, tr.ConfigError, tr.Diverged, tr.PeerLost, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        if isinstance(error, tr.PeerLost):
            os._exit(2)  # jax.distributed would wait for the dead at the exit
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
