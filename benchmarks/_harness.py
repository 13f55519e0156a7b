"""The output of the benchmarks: tables of medians, ranges and ratios, with the command, the machine
and the versions.

A small benchmark is a module with a dict {name of a peer: function that returns seconds}, and ends
with `main(...)`. A peer is one of the libraries or variants that a benchmark compares. Other
programs run on the machines, so times vary. Therefore, the peers alternate (`_live`), and only
ratios within one run are compared.
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
    """Returns the seconds of a call: the minimum of `repeats` means. Each mean is over several
    calls. All calls together take about `budget` seconds."""
    run()
    once = max(timeit.timeit(run, number=3) / 3, 1e-7)
    number = max(1, int(budget / repeats / once))
    return min(timeit.repeat(run, number=number, repeat=repeats)) / number


def main(
    module: str, peers: dict, *, unit: str, scale: float, rounds: int = 5, base: str | None = None
) -> dict:
    """Runs every peer once in each round, each peer in its own process. Prints a table and returns
    {name: median}.

    Args:
        module: the name of the benchmark's module. `python -m module name` starts the process of
            one peer.
        peers: {name: function that returns seconds}.
        unit, scale: figures are printed as seconds x scale, in this unit.
        base: the name of the peer to whose time ratios are computed. Default None: the last peer.
    """
    if len(sys.argv) > 1 and sys.argv[1] in peers:
        serve({"time": lambda budget: peers[sys.argv[1]]()})
        return {}
    environment = {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    with contextlib.ExitStack() as alive:
        live = [
            alive.enter_context(Live(name, [sys.executable, "-m", module, name], environment))
            for name in peers
        ]
        figures = turns(live, rounds=rounds, budget=0)
    print(header(" ".join(["python -m", module, *sys.argv[1:]]), rounds, allocator="default"))
    print(table(figures, unit=unit, scale=scale, bases=[base or list(peers)[-1]]))
    return {name: statistics.median(values) for name, values in figures.items()}


def table(
    figures: dict[str, list[float]],
    *,
    unit: str,
    scale: float,
    bases: list[str],
    more: dict | None = None,
) -> str:
    """Returns a table with a line for each peer: median, min and max over the rounds, ratios to the
    peers in `bases`, and the columns in `more`.

    A ratio is the median, over the rounds, of the ratio of two peers' times in the same round.
    """
    columns = [
        "peer",
        f"median {unit}",
        "min",
        "max",
        *(f"ratio to {base}" for base in bases),
        *(more or {}),
    ]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name, values in figures.items():
        ratios = (statistics.median(a / b for a, b in zip(values, figures[base])) for base in bases)
        cells = [
            name,
            *(
                f"{figure * scale:.3g}"
                for figure in (statistics.median(values), min(values), max(values))
            ),
            *(f"{ratio:.2f}" for ratio in ratios),
            *(column[name] for column in (more or {}).values()),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def header(command: str, rounds: int, packages: tuple[str, ...] = (), allocator: str = "") -> str:
    """Returns a line with the command, the machine and the versions, which are needed to interpret
    figures. `allocator` is included if it is not "", that is, if all tables use the same
    allocator."""
    from importlib.metadata import PackageNotFoundError, version

    versions = []
    for package in ("jax", "flax", *packages):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            pass  # a library that is not installed is not in the table
    return (
        f"`{command}`, {datetime.date.today()}, {rounds} rounds, {len(os.sched_getaffinity(0))} "
        f"cores of {_cpu()}, Python {platform.python_version()}, {', '.join(versions)}"
        + f", allocator: {allocator}" * bool(allocator)
        + "\n"
    )


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                line.split(":")[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or "an unknown CPU"
