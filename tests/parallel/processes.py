"""One of several processes of a run: what test_two_processes.py starts. Prints what came of it as
JSON.

Run it with:

    python tests/parallel/processes.py CASE PORT PROCESS COUNT [FOLDER]
"""

import functools
import json
import os
import sys
import threading
import time
import warnings

CASE, PORT, ME, COUNT = sys.argv[1], *map(int, sys.argv[2:5])
warnings.simplefilter("error")
os.environ["JAX_PLATFORMS"] = "cpu"
EACH = (
    1 if CASE == "killed" else 4
)  # devices; of more, gloo ends the process itself when another dies
os.environ["XLA_FLAGS"] = (
    os.environ.get("FNET_TEST_XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={EACH}"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from fnet import layers as nn  # noqa: E402
from fnet import parallel  # noqa: E402
from fnet import training as tr  # noqa: E402

X = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
ROWS = 8 * COUNT  # of a batch, 8 of each process
HANG = 2.0
TX = optax.adam(0.02)


def init(key):
    return {"params": jax.random.normal(key, (5, 64)) * 0.3}


def begin(key):
    return tr.TrainState.create(init(key)["params"], TX)


def loss(w, batch):
    each = jnp.square(jnp.tanh(batch["x"] @ w).sum(-1) - 1)
    return (each * batch["weight"]).sum() / batch["weight"].sum()


def step(state, batch):
    if isinstance(state, tr.TrainState):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        return state.apply(TX, grads), {"loss": value}
    value, grads = jax.value_and_grad(loss)(state["params"], batch)
    return {"params": state["params"] - 0.1 * grads}, {
        "loss": value,
        "grads": grads,
        "rows": batch["weight"].sum(),
    }


def careless(state, batch):
    return step(state, {**batch, "weight": jnp.ones(batch["x"].shape[0])})


def batches(sizes, begin=0):
    """Rows of X from `begin`, so many at a time; a number below 0 is a harm."""
    for size in sizes:
        if size == -1:
            time.sleep(60)
        elif size == -2:
            raise OSError("the disk is gone")
        else:
            yield {"x": X[begin : begin + size]}
            begin += size


SIZES = {  # of each process
    "ragged": [[8, 8, 8, 4], [5, 8]],
    "dropped": [[8, 8, 8], [8, 8, 3]],
    "unweighted": [[8, 8, 8], [8, 8]],
    "late": [[8, 8, 8, 8], [8, 8, -1], [8, 8, 8, 8]],
    "late-first": [[8, 8, -1], [8, 8, 8, 8]],
    "stuck": [[8] * 8, [8] * 8],
    "broken": [[8, 8, 8], [8, -2]],
    "failed": [[8] * 6, [8] * 6],
    "killed": [[8] * 6, [8] * 6],
}


def run(case):
    """Trains on what feed gives, and returns the metrics of each step and the parameters."""
    weighted = case in ("ragged", "stuck")
    shapes = {"x": np.zeros((ROWS, 5), np.float32)} | (
        {"weight": np.zeros(ROWS, np.float32)} if weighted else {}
    )
    written = step if weighted else careless
    plan = parallel.plan(
        written, init, shapes, devices=jax.devices(), strategy="zero1" if weighted else "data"
    )
    state, spread = plan.init(jax.random.key(0)), plan.jit(written)
    seen, limit = [], HANG if case in ("late", "late-first", "stuck", "failed", "killed") else 60
    given = batches(SIZES[case][ME], 32 * ME % 64)
    for batch in parallel.feed(given, plan, timeout=limit, drop_remainder=case == "dropped"):
        assert jax.tree.map(lambda x: x.sharding, batch) == plan.batch
        state, metrics = spread(state, batch)
        if case == "stuck" and ME == 1 and len(seen) == 1:
            time.sleep(60)  # outside of what makes batches
        if case == "failed" and ME == 1 and len(seen) == 1:
            raise ArithmeticError("this process's own")
        if case == "killed" and ME == 1 and len(seen) == 1:
            os.kill(os.getpid(), 9)
        seen.append(
            jax.tree.map(lambda x: np.asarray(x).tolist(), metrics)
        )  # stands here where a step hangs
    return {"seen": seen, "params": np.asarray(state["params"]).tolist()}


def trained():
    """fit on both processes, each of which has all rows or its own; it dies after a checkpoint and
    goes on."""
    folder = sys.argv[5]
    plan = parallel.plan(
        step,
        begin,
        {"x": X[:ROWS], "weight": np.ones(ROWS, np.float32)},
        devices=jax.devices(),
        strategy="zero1",
    )
    everything = lambda i: {"x": X[ROWS * (i % 4) :][:ROWS]}
    own = lambda i: {"x": everything(i)["x"][8 * ME :][:8]}
    measure = lambda state, batch: {
        "loss": tr.mean(jnp.square(batch["x"] @ state.params).sum(-1), batch["weight"])
    }
    evaluate = {"all": tr.evaluator(measure, {"x": X[:21]}, batch_size=10)}
    warnings.simplefilter("ignore", tr.ResumeWarning)  # the second call has other data on purpose
    for steps, given in ((3, everything), (6, own)):
        state = tr.fit(
            step,
            begin(jax.random.key(0)),
            given,
            steps=steps,
            workdir=folder,
            plan=plan,
            evaluate=evaluate,
            every=3,
            tensorboard=False,
        )
    return {"params": np.asarray(state.params).tolist(), "loss": evaluate["all"](state)["loss"]}


def staged():
    """Two steps of layers on stages that lie on both processes."""

    def init(key):
        return {"params": jax.random.normal(key, (8, 16, 16)) / 4}

    def step(state, x):
        def loss(w):
            y, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, w)
            return jnp.square(y - 1).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {"params": state["params"] - 0.1 * grads}, {"loss": value}

    x = np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32)
    plan = parallel.plan(step, init, x, devices=jax.devices(), mesh={"stage": len(jax.devices())})
    state, spread, alone = plan.init(jax.random.key(0)), plan.jit(step), init(jax.random.key(0))
    own = np.split(x, COUNT)[ME]
    seen = []
    for batch in parallel.feed(iter([own] * 2), plan):
        state, metrics = spread(state, batch)
        alone, wanted = jax.jit(step)(alone, x)
        seen.append([float(metrics["loss"]), float(wanted["loss"])])
    mine = [(shard.index[0].start, shard.data) for shard in state["params"].addressable_shards]
    errors = [float(jnp.abs(y - alone["params"][i : i + 1]).max()) for i, y in mine]
    return {"losses": seen, "layers": [i for i, _ in mine], "errors": errors}


def split_in_time():
    """A step of attention over texts whose parts lie on both processes, in both forms."""

    def init(key):
        return {"params": jax.random.normal(key, (64, 32)) / 2}

    def step(heads, state, batch):
        tokens, segments = batch["tokens"], batch["segments"]

        def loss(table):
            x = table[tokens].reshape(*tokens.shape, heads, -1)
            y = nn.dot_product_attention(x, x, x, causal=True, segments=segments)
            return jnp.square(y.reshape(*tokens.shape, -1) @ table.T - 1).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {"params": state["params"] - grads}, {"loss": value, "grads": grads}

    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 64, (2, 32)).astype(np.int32)
    batch = {"tokens": tokens, "segments": np.sort(rng.integers(1, 4, (2, 32))).astype(np.int32)}
    said = {}
    for form, heads in (("ring", 2), ("ulysses", 8)):
        for data in (1, 2):
            run = functools.partial(step, heads)
            mesh = {"data": data, "context": len(jax.devices()) // data}
            options = {"devices": jax.devices(), "mesh": mesh, "compile": False}
            plan = parallel.plan(run, init, batch, strategy="context", **options)
            assert f": {form} (" in plan.explain(), plan.explain()
            mine = {name: x if data == 1 else x[ME : ME + 1] for name, x in batch.items()}
            state, alone = plan.init(jax.random.key(0)), init(jax.random.key(0))
            spread, whole = plan.jit(run), jax.jit(run)
            for given in parallel.feed(iter([mine] * 2), plan):
                state, metrics = spread(state, given)
                alone, wanted = whole(alone, batch)
            grads, expected = np.asarray(metrics["grads"]), np.asarray(wanted["grads"])
            error = np.abs(grads - expected).max() / np.abs(expected).max()
            said[f"{form} {data}"] = [float(metrics["loss"]), float(wanted["loss"]), float(error)]
    return said


def mixed():
    """Two steps of experts that lie on both processes, with and without a capacity."""
    x = np.random.default_rng(1).normal(size=(16, 12, 16)).astype(np.float32) + 0.5
    said = {}
    for name, capacity in (("dropless", None), ("capacity", 0.8)):
        model = nn.MixtureOfExperts(8, 24, capacity=capacity)
        init = lambda key, model=model: {"params": model.init(key, x[:1])[0]}

        def step(state, x, model=model):
            loss = lambda params: jnp.square(model(params, x) - 1).mean()
            value, grads = jax.value_and_grad(loss)(state["params"])
            new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
            return {"params": new}, {"loss": value, "grads": grads}

        options = {"devices": jax.devices(), "compile": False, "strategy": "expert"}
        plan = parallel.plan(step, init, x, mesh={"expert": len(jax.devices())}, **options)
        state, alone = plan.init(jax.random.key(0)), init(jax.random.key(0))
        spread, whole = plan.jit(step), jax.jit(step)
        for batch in parallel.feed(iter([np.split(x, COUNT)[ME]] * 2), plan):
            state, metrics = spread(state, batch)
            alone, wanted = whole(alone, x)
        pairs = zip(*(jax.tree.leaves(each["grads"]) for each in (metrics, wanted)))
        errors = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs]
        own = [shard.index[0].start for shard in state["params"]["up"].addressable_shards]
        said[name] = {"experts": own, "errors": errors}
    return said


def main():
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)  # programs are small
    for _ in range(2):
        parallel.initialize(f"127.0.0.1:{PORT}", COUNT, ME, initialization_timeout=60)
    assert jax.process_count() == COUNT and len(jax.devices()) == EACH * COUNT
    if CASE == "fit":
        return trained()
    if CASE == "time":
        return split_in_time()
    if CASE == "experts":
        return mixed()
    if CASE == "stages":
        return staged()
    if CASE != "orderly":
        return {CASE: run(CASE)}
    came = {case: run(case) for case in ("ragged", "dropped")}
    try:
        run("unweighted")
    except ValueError as error:
        came["unweighted"] = str(error)
    assert not [thread for thread in threading.enumerate() if thread.name == "feed"]
    return came


if __name__ == "__main__":
    print(json.dumps(main()))
