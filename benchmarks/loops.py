"""LSTM and GRU on a CPU: JAX's derivative of the loop, fnet's operation without a kernel and with
one, and PyTorch.

    python -m benchmarks.loops [--rounds=12] [--peers=loop,scan,native,torch] [--dtype=float32]

Each peer is a process of its own on one core, with `hw.cpu_allocator()`, and the peers alternate.
Processor time, because it depends least on what else the machine does. All start from the same
numbers, and their losses must agree. Ratios are geometric means of the rounds' quotients, with their
95 % intervals.
"""

import contextlib
import math
import os
import statistics
import sys
import time

import numpy as np
from absl import app, flags

from benchmarks._harness import header
from benchmarks._live import Live, serve

ROUNDS = flags.DEFINE_integer("rounds", 12, "measurements of each peer")
PEERS = flags.DEFINE_list("peers", ["loop", "scan", "native", "torch"], "the peers")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "dtype of the inputs")
SHAPES = (  # batch, time, features
    (1, 128, 64),
    (4, 256, 256),
    (32, 128, 256),
    (32, 64, 512),
    (64, 64, 128),
)
NARROW = 2e-2  # relative difference of two losses in bfloat16, and in float32:
WIDE = 1e-4


def numbers(kind: str, shape: tuple) -> tuple:
    """Returns (parameters with fnet's names, inputs)."""
    batch, length, features = shape
    draw, gates = np.random.default_rng(0), {"LSTM": 4, "GRU": 3}[kind]
    array = lambda *sizes: draw.normal(0, features**-0.5, sizes).astype(np.float32)
    params = {
        "kernel": array(features, gates * features),
        "recurrent_kernel": array(features, gates * features),
        "bias": array(gates * features),
    }
    if kind == "GRU":
        params["recurrent_bias"] = array(features)
    return params, draw.normal(0, 1, (batch, length, features)).astype(np.float32)


def of_jax(peer: str, kind: str, shape: tuple, train: bool, dtype: str):
    import jax
    import jax.numpy as jnp

    from fnet import layers as nn
    from fnet import transforms as ft
    from fnet.layers import _recurrence

    layer = getattr(nn, kind)(shape[2])
    params, x = jax.tree.map(jnp.asarray, numbers(kind, shape))
    x = x.astype(dtype)

    def loop(params, x):
        states = jax.tree.leaves(layer.zero_carry(shape[0]))
        operands = {"x": x, **params, **{f"state{i}": state for i, state in enumerate(states)}}
        form = _recurrence.Form(layer.cell, tuple(operands), False, 1)
        return _recurrence._forward(*operands.values(), form=form, keeps=False)[0]

    apply = loop if peer == "loop" else layer

    def loss(params, x):
        return jnp.square(apply(params, x).astype(jnp.float32)).mean()

    rules = {"native_recurrence": peer == "native"}
    if peer == "loop":
        rules["summed_products"] = False
    step = ft.tune(jax.value_and_grad(loss, (0, 1)) if train else loss, "cpu", rules=rules)

    def run():
        result = jax.block_until_ready(step(params, x))
        return float(result[0] if train else result)

    return run


def of_torch(kind: str, shape: tuple, train: bool, dtype: str):
    import torch

    torch.set_num_threads(1)
    params, x = numbers(kind, shape)
    layer = getattr(torch.nn, kind)(shape[2], shape[2], batch_first=True)
    n = 2 * shape[2]
    biases = params["bias"], 0 * params["bias"]
    if kind == "GRU":  # the new gate's biases stay apart
        biases[1][n:] = params["recurrent_bias"]
    transposed = params["kernel"].T, params["recurrent_kernel"].T
    with torch.no_grad():
        for parameter, array in zip(layer.parameters(), (*transposed, *biases), strict=True):
            parameter.copy_(torch.tensor(np.ascontiguousarray(array)))
    layer = layer.to(getattr(torch, dtype))
    x = torch.tensor(x, dtype=getattr(torch, dtype), requires_grad=train)

    def run():
        if not train:
            with torch.inference_mode():
                return layer(x)[0].float().square().mean().item()
        layer.zero_grad(set_to_none=True)
        x.grad = None
        loss = layer(x)[0].float().square().mean()
        loss.backward()
        return loss.item()

    return run


def child(peer: str, core: int) -> None:
    from fnet import hardware as hw

    os.sched_setaffinity(0, {core})
    hw.cpu_allocator()
    made = {}

    def answer(budget, row):
        kind, shape, train, dtype = key = row[0], tuple(row[1]), row[2], row[3]
        first = key not in made
        if first:
            made.clear()  # the memory of earlier rows
            how = of_torch if peer == "torch" else lambda *row: of_jax(peer, *row)
            made[key] = how(kind, shape, train, dtype)
            made[key]()
        start, calls = time.process_time(), 0
        while not calls or time.process_time() - start < budget:
            loss, calls = made[key](), calls + 1
        return {"seconds": (time.process_time() - start) / calls, "loss": loss}

    serve({"time": lambda budget, row: answer(budget, row)})


def interval(logs: list[float]) -> str:
    mean, t = statistics.mean(logs), 2.2  # of 11 degrees of freedom
    half = t * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    return f"{math.exp(mean):.2f} ({math.exp(mean - half):.2f} to {math.exp(mean + half):.2f})"


def main(_):
    peers = PEERS.value
    packages = ("jaxlib", *(["torch"] if "torch" in peers else []))
    command = f"python -m benchmarks.loops --dtype={DTYPE.value}"
    print(header(command, ROUNDS.value, packages, allocator="tuned"))
    ratios = [f"{peer} / {peers[-1]}" for peer in peers[:-1]]
    print(f"| layer | batch, time, features | | {peers[-1]}, ms | {' | '.join(ratios)} |")
    print("|" + "---|" * (4 + len(ratios)))
    environment = {
        "JAX_PLATFORMS": "cpu",
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": "1",
    }
    core = max(os.sched_getaffinity(0))
    with contextlib.ExitStack() as alive:
        commands = {p: [sys.executable, "-m", "benchmarks.loops", p, str(core)] for p in peers}
        live = [alive.enter_context(Live(p, commands[p], environment)) for p in peers]
        rows = ((k, s, t) for k in ("LSTM", "GRU") for s in SHAPES for t in (True, False))
        for kind, shape, train in rows:
            times, losses = {each.name: [] for each in live}, {}
            for turn in range(ROUNDS.value + 1):
                for each in live[turn % len(live) :] + live[: turn % len(live)]:
                    row = [kind, shape, train, DTYPE.value]
                    answer = each.ask("time", limit=300, budget=0.1, row=row)
                    losses[each.name] = answer["loss"]
                    if turn:  # the first compiles
                        times[each.name].append(answer["seconds"])
            near = WIDE if DTYPE.value == "float32" else NARROW
            assert all(math.isclose(a, losses[peers[-1]], rel_tol=near) for a in losses.values())
            base = times[peers[-1]]
            cells = [
                interval([math.log(a / b) for a, b in zip(times[p], base)]) for p in peers[:-1]
            ]
            what = "training" if train else "inference"
            sizes = ", ".join(map(str, shape))
            milliseconds = 1e3 * statistics.median(base)
            print(
                f"| {kind} | {sizes} | {what} | {milliseconds:.1f} | {' | '.join(cells)} |",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("loop", "scan", "native", "torch"):
        child(sys.argv[1], int(sys.argv[2]))
    else:
        app.run(main)
