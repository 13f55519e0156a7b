"""Round-robin timing: each peer in its own process, several rounds, medians and ratios.

A benchmark module has a dict PEERS of name -> function that returns one figure, and ends with `main(PEERS, ...)`.
The machines are shared and noisy, so peers take turns and only ratios within one run are compared.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
import timeit


def seconds(run, *, budget=1.0, repeats=5) -> float:
    """The best of several means, each over enough calls to fill a share of the budget (seconds)."""
    run()
    once = max(timeit.timeit(run, number=3) / 3, 1e-7)
    number = max(1, int(budget / repeats / once))
    return min(timeit.repeat(run, number=number, repeat=repeats)) / number


def main(module: str, peers: dict, *, unit: str, scale: float, rounds: int = 5, base: str | None = None) -> dict:
    """Runs every peer once a round in a process of its own; prints a table and returns {name: median}.

    Args:
        module: the module to run (`python -m module name` prints one figure in seconds).
        peers: name -> function returning seconds.
        unit, scale: how figures are printed: seconds * scale in that unit.
        base: the peer that ratios are taken to; None: the last.
    """
    if len(sys.argv) > 1 and sys.argv[1] in peers:
        print(repr(peers[sys.argv[1]]()))
        return {}
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    figures = {name: [] for name in peers}
    for _ in range(rounds):
        for name in peers:
            out = subprocess.run([sys.executable, "-m", module, name], check=True, capture_output=True, text=True,
                                 env=environment)
            figures[name].append(float(out.stdout.split()[-1]))
    base = base or list(peers)[-1]
    print(header(module, rounds))
    print(f"| peer | median {unit} | min | max | ratio to {base} |\n|---|---|---|---|---|")
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, values in figures.items():
        pairs = statistics.median(a / b for a, b in zip(values, figures[base]))
        print(f"| {name} | {medians[name] * scale:.3g} | {min(values) * scale:.3g} | {max(values) * scale:.3g} "
              f"| {pairs:.2f} |")
    return medians


def header(module: str, rounds: int) -> str:
    """The command, the machine and the versions: what a figure needs to be read."""
    from importlib.metadata import version

    return (f"`python -m {module}`, {datetime.date.today()}, {rounds} rounds, {len(os.sched_getaffinity(0))} cores of "
            f"{_cpu()}, Python {platform.python_version()}, jax {version('jax')}, flax {version('flax')}\n")


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "an unknown CPU"
