"""The output of the benchmarks: medians, ranges and ratios, with the command, the machine and the versions.

A small benchmark is a module with a dict of name -> function that returns one figure, and ends with `main(...)`. The
machines are shared and noisy. Therefore the peers alternate (`_live`), and only ratios within one run are compared.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import statistics
import sys
import timeit

from benchmarks._live import Live, serve, turns


def seconds(run, *, budget=1.0, repeats=5) -> float:
    """The best of several means, each over enough calls to fill a part of the budget in seconds."""
    run()
    once = max(timeit.timeit(run, number=3) / 3, 1e-7)
    number = max(1, int(budget / repeats / once))
    return min(timeit.repeat(run, number=number, repeat=repeats)) / number


def main(module: str, peers: dict, *, unit: str, scale: float, rounds: int = 5, base: str | None = None) -> dict:
    """Runs every peer once in each round, each in its own process; prints a table and returns {name: median}.

    Args:
        module: the module to run (`python -m module name` is the process of one peer).
        peers: name -> function returning seconds.
        unit, scale: figures are printed as seconds * scale in this unit.
        base: the peer in the denominator of ratios; None: the last.
    """
    if len(sys.argv) > 1 and sys.argv[1] in peers:
        serve({"time": lambda budget: peers[sys.argv[1]]()})
        return {}
    environment = {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    with contextlib.ExitStack() as alive:
        live = [alive.enter_context(Live(name, [sys.executable, "-m", module, name], environment)) for name in peers]
        figures = turns(live, rounds=rounds, budget=0)
    print(header(" ".join(["python -m", module, *sys.argv[1:]]), rounds, allocator="default"))
    print(table(figures, unit=unit, scale=scale, bases=[base or list(peers)[-1]]))
    return {name: statistics.median(values) for name, values in figures.items()}


def table(figures: dict[str, list[float]], *, unit: str, scale: float, bases: list[str],
          more: dict | None = None) -> str:
    """One line for each peer: median, min and max over the rounds, ratios to the bases, and further columns.

    A ratio is the median of the ratios in the rounds, between peers that ran one after another.
    """
    columns = ["peer", f"median {unit}", "min", "max", *(f"ratio to {base}" for base in bases), *(more or {})]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name, values in figures.items():
        ratios = (statistics.median(a / b for a, b in zip(values, figures[base])) for base in bases)
        cells = [name, *(f"{figure * scale:.3g}" for figure in (statistics.median(values), min(values), max(values))),
                 *(f"{ratio:.2f}" for ratio in ratios), *(column[name] for column in (more or {}).values())]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def header(command: str, rounds: int, packages: tuple[str, ...] = (), allocator: str = "") -> str:
    """The command, the machine and the versions, which are needed to interpret a figure; the allocator if all tables
    use the same."""
    from importlib.metadata import PackageNotFoundError, version

    versions = []
    for package in ("jax", "flax", *packages):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            pass    # a peer that is not installed is not in the table
    return (f"`{command}`, {datetime.date.today()}, {rounds} rounds, {len(os.sched_getaffinity(0))} cores of {_cpu()}, "
            f"Python {platform.python_version()}, {', '.join(versions)}"
            + f", allocator: {allocator}" * bool(allocator) + "\n")


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "an unknown CPU"
