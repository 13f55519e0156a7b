"""Ratios of training steps and inference calls of two peers, with their 95 % intervals.

    python -m benchmarks.pairs cnn resnet18 lstm gpt --mode=train,infer      # in .venv-verify, which has PyTorch
    taskset -c 1 python -m benchmarks.pairs cnn --children=12                # with one thread
    python -m benchmarks.pairs cnn --peers=fnet-tuned,jax --size=small --children=2     # a test of the benchmark

A process differs from another one of the same program: its memory is elsewhere. Therefore each pair has two new
processes, one of each peer, in alternating order. The ratio is the geometric mean over the pairs, and the interval
is that of Student's t for the logarithms. The second peer is also compared with itself, which shows how near to 1 a
ratio can be told on this machine. "CPU" is the processor's time of a step, over all threads; OpenMP waits passively,
so that waiting does not count. It hardly depends on other programs, as the time that passes does.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys

from benchmarks._harness import header
from benchmarks._live import PeerError
from benchmarks.peers import _compare
from benchmarks.peers import _workloads as spec
from benchmarks.peers._worker import PEERS


def interval(ratios: list[float]) -> str:
    """Returns "mean (lower to upper)"."""
    from scipy import stats

    logs = [math.log(ratio) for ratio in ratios]
    mean, count = statistics.fmean(logs), len(logs)
    if count < 2:
        return f"{math.exp(mean):.3f}"
    half = stats.t.ppf(0.975, count - 1) * statistics.stdev(logs) / math.sqrt(count)
    low, middle, high = (math.exp(mean + by) for by in (-half, 0, half))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def measured(peer: str, workload: str, mode: str, dtype: str, options) -> tuple:
    """Returns (first losses, seconds per step, processor's seconds per step) of a new process."""
    with _compare._live(peer, {"peer": peer}, workload, mode, dtype, options) as live:
        missing = live.ask("prepare", limit=options.limit).get("missing")
        if missing:
            raise PeerError(f"{peer} needs {missing}, which is not installed")
        started = live.ask("start", limit=options.limit)
        live.ask("clocks", limit=options.limit, budget=options.budget)  # not counted
        wall, used = live.ask("clocks", limit=options.limit, budget=options.budget)
    return started["losses"], wall, used


def compare(workload: str, mode: str, dtype: str, options) -> str:
    """Returns a row of the table."""
    ours, theirs = options.peers
    rounds = []
    for number in range(options.children):
        order = [ours, theirs, theirs]
        if number % 2:
            order.reverse()
        found = [(peer, measured(peer, workload, mode, dtype, options)) for peer in order]
        mine = next(result for peer, result in found if peer == ours)
        first, second = (result for peer, result in found if peer == theirs)
        _compare.agree(ours, mine[0], theirs, first[0], _compare.TOLERANCE[dtype])
        rounds.append((mine, first, second))
    cells = [workload, mode, dtype]
    for clock in (1, 2):
        a, b, c = ([result[clock] for result in each] for each in zip(*rounds))
        cells.append(f"{1e3 * statistics.median(a):.4g} of {1e3 * statistics.median(b):.4g} ms")
        # Each of our processes ran beside two of theirs.
        cells.append(interval([x / math.sqrt(y * z) for x, y, z in zip(a, b, c)]))
        cells.append(interval([y / z for y, z in zip(b, c)]))
    return "| " + " | ".join([*cells, f"{os.getloadavg()[0]:.1f}"]) + " |"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="benchmarks.pairs", description="Ratios of two peers, with their 95 % intervals."
    )
    flags.add_argument("workloads", nargs="+", choices=[*spec.WORKLOADS])
    flags.add_argument("--peers", type=_compare.several(PEERS), default=["fnet-tuned", "torch"])
    modes, dtypes = _compare.several(("train", "infer")), _compare.several(_compare.TOLERANCE)
    flags.add_argument("--mode", type=modes, default=["train"])
    flags.add_argument("--dtype", type=dtypes, default=["float32"])
    flags.add_argument("--children", type=int, default=12, help="processes of the first peer")
    flags.add_argument("--size", choices=("full", "small"), default="full")
    flags.add_argument("--allocator", choices=("default", "tuned", "huge"), default="tuned")
    flags.add_argument("--budget", type=float, default=2, help="seconds that a process is timed")
    flags.add_argument("--limit", type=float, default=900, help="seconds of any answer")
    return flags


def main(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    if len(options.peers) != 2 or options.children < 1:
        parser().error("expected two --peers, and --children of at least 1")
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    command = " ".join(["python -m benchmarks.pairs", *arguments])
    print(header(command, options.children, ("torch",), allocator=options.allocator))
    ours, theirs = options.peers
    print(f"Load before: {os.getloadavg()[0]:.1f}; threads: {len(os.sched_getaffinity(0))}.\n")
    names = ["workload", "mode", "dtype"]
    for clock in ("time", "CPU"):
        names += [f"{clock}: {ours} of {theirs}", f"{clock}: ratio", f"{clock}: {theirs} to itself"]
    print("| " + " | ".join([*names, "load after"]) + " |")
    print("|---" * (len(names) + 1) + "|")
    for workload, mode, dtype in _compare.tables(options):
        print(compare(workload, mode, dtype, options), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except PeerError as error:
        sys.exit(f"benchmarks.pairs: {error}")
