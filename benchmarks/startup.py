"""Seconds to the first training step, with and without programs that an earlier process compiled.

    python -m benchmarks.startup gpt resnet18
    python -m benchmarks.startup mlp --size=small --peers=fnet,jax

For fnet, two processes run `fit` with the same cache of compiled programs, which is empty for the
first process. For JAX, the same step is handwritten and compiled without a cache. The time begins
when the weights and batches exist. One column ends when the first step can be executed, which is
when its program is compiled or loaded, and the other column when the first step has been executed.
torch-compile, if PyTorch is installed, also begins with an empty cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import statistics
import sys
import tempfile
import time
from typing import Any

from benchmarks._harness import header
from benchmarks._live import Live, PeerError, serve
from benchmarks.peers import _workloads as spec
from benchmarks.peers._worker import PEERS

FIRST, SECOND = "fnet, first start", "fnet, second start"


def start(peer: str, workload: str, size: str) -> tuple[float, float]:
    """Returns the seconds from the creation of the weights to the beginning and to the end of the
    first step. The beginning is not known for PyTorch."""
    w = spec.workload(workload, size)
    module, how = PEERS[peer]
    run = importlib.import_module(f"benchmarks.peers.{module}").build(
        w, spec.weights(w), spec.batches(w, 1), train=True, mixed=False, **how
    )
    if peer == "torch-compile":
        begun = time.perf_counter()
        run.wait(run.step(0))
        return math.nan, time.perf_counter() - begun

    import jax
    import jax.numpy as jnp

    from fnet import training as tr

    ready = []

    def listen(event, _, fun_name="", **__):
        if event.endswith("backend_compile_duration"):  # also if the program was loaded
            ready.append((fun_name, time.perf_counter()))

    jax.monitoring.register_event_duration_secs_listener(listen)
    if peer != "fnet":
        begun = time.perf_counter()
        run.wait(run.step(0))
        return ready[-1][1] - begun, time.perf_counter() - begun

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class State:
        step: Any
        rest: Any

    def step(state, batch):
        rest, loss = run.f(state.rest, *batch)
        return State(state.step + 1, rest), {"loss": loss}

    state = jax.block_until_ready(State(jnp.int32(0), run.state))
    begun = time.perf_counter()
    # The devices are checked once on a machine, not once for each program.
    options = {"progress": None, "check_devices": False}
    jax.block_until_ready(tr.fit(step, state, lambda i: run.batches[0], steps=1, **options))
    end = time.perf_counter()
    return next(at for name, at in ready[::-1] if "advance" in name) - begun, end - begun


def measured(peer: str, workload: str, size: str, cache: str) -> tuple[float, float]:
    environment = {
        "JAX_PLATFORMS": "cpu",
        "FNET_CACHE": cache,
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torch",
        "JAX_ENABLE_COMPILATION_CACHE": str(peer == "fnet").lower(),
    }
    with Live(peer, [sys.executable, "-m", "benchmarks.startup", "serve"], environment) as process:
        return process.ask("start", limit=900, peer=peer, workload=workload, size=size)


def compared(
    workload: str, size: str, peers: list[str], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Returns {name of the start: seconds to the beginning and to the end of the first step, in
    each round}."""
    times: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for peer in peers:
            with tempfile.TemporaryDirectory() as cache:
                names = [FIRST, SECOND] if peer == "fnet" else [peer]
                for name in names:
                    times.setdefault(name, []).append(measured(peer, workload, size, cache))
    return times


def main(arguments=None) -> None:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.startup", description=__doc__.split("\n\n")[0]
    )
    made.add_argument(
        "workloads",
        nargs="+",
        choices=list(spec.WORKLOADS),
        metavar="WORKLOAD",
        help=f"of {', '.join(spec.WORKLOADS)}",
    )
    made.add_argument(
        "--size", choices=("full", "small"), default="full", help="small: to test this benchmark"
    )
    made.add_argument("--peers", default="fnet,jax,torch-compile", help=f"of {', '.join(PEERS)}")
    made.add_argument("--rounds", type=int, default=3)
    options = made.parse_args(arguments)
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    print(header(f"python -m benchmarks.startup {command}", options.rounds, allocator="default"))
    print(
        "| workload | start | seconds to the beginning of the first step | ratio to fnet's first "
        "start | seconds to its end | ratio |\n|---|---|---|---|---|---|"
    )
    for workload in options.workloads:
        try:
            times = compared(workload, options.size, options.peers.split(","), options.rounds)
        except PeerError as error:
            sys.exit(str(error))
        for name, seconds in times.items():
            cells = []
            for column, first in zip(zip(*seconds), zip(*times.get(FIRST, seconds))):
                cells += [
                    statistics.median(column),
                    statistics.median(a / b for a, b in zip(column, first)),
                ]
            text = " | ".join("" if math.isnan(x) else f"{x:.2f}" for x in cells)
            print(f"| {workload} | {name} | {text} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve({"start": start})
    else:
        main()
