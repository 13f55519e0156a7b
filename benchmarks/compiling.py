"""The time that `ft.tune` adds before the first step. Plain and tuned training steps are traced and
compiled alternately in one process.

    python -m benchmarks.compiling gpt cnn mlp
    python -m benchmarks.compiling gpt --peer=linen --dtype=mixed --rounds=3
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time

from benchmarks._harness import header, table
from benchmarks.peers import _workloads as spec
from benchmarks.peers._compare import PACKAGES, TOLERANCE, several

PLAIN, TUNED = "plain", "tuned"


def seconds(peer: str, workload, dtype: str, rules) -> tuple[float, float]:
    """Returns the seconds to trace a new step, and the seconds to compile it."""
    module = importlib.import_module(f"benchmarks.peers._{peer}")
    run = module.build(
        workload,
        spec.weights(workload),
        spec.batches(workload, 1),
        train=True,
        mixed=dtype == "mixed",
        rules=rules,
    )
    begun = time.perf_counter()
    traced = run.f.trace(run.state, *run.batches[0])
    between = time.perf_counter()
    traced.lower().compile()
    return between - begun, time.perf_counter() - between


def main(arguments=None) -> None:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.compiling", description=__doc__.split("\n\n")[0]
    )
    made.add_argument(
        "workloads",
        nargs="+",
        choices=list(spec.WORKLOADS),
        metavar="WORKLOAD",
        help=f"of {', '.join(spec.WORKLOADS)}",
    )
    made.add_argument(
        "--peer",
        choices=("fnet", "handwritten", "linen", "equinox"),
        default="fnet",
        help="the library of the step",
    )
    made.add_argument(
        "--dtype",
        type=several(TOLERANCE),
        default=["float32"],
        help="float32, mixed or float32,mixed",
    )
    made.add_argument(
        "--size", choices=("full", "small"), default="full", help="small: to test this benchmark"
    )
    made.add_argument("--rounds", type=int, default=5)
    options = made.parse_args(arguments)
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    print(
        header(
            f"python -m benchmarks.compiling {command}",
            options.rounds,
            PACKAGES,
            allocator="default",
        )
    )
    for name in options.workloads:
        for dtype in options.dtype:
            print(f"**{name}**, train, {dtype}, {options.size} size, {options.peer}\n")
            print(
                compared(options.peer, spec.workload(name, options.size), dtype, options.rounds),
                flush=True,
            )


def compared(peer, workload, dtype, rounds) -> str:
    """Returns the table of a workload."""
    parts = {PLAIN: [], TUNED: []}
    seconds(peer, workload, dtype, None)  # not measured, because later steps reuse some results
    for _ in range(rounds):
        for name, rules in ((PLAIN, None), (TUNED, {})):
            parts[name].append(seconds(peer, workload, dtype, rules))
    more = {
        f"{what} s": {
            name: f"{statistics.median(pair[i] for pair in pairs):.3g}"
            for name, pairs in parts.items()
        }
        for i, what in enumerate(("trace", "compile"))
    }
    both = {name: [sum(pair) for pair in pairs] for name, pairs in parts.items()}
    return table(both, unit="s", scale=1, bases=[PLAIN], more=more) + "\n"


if __name__ == "__main__":
    main()
