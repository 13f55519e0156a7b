"""Compares every program of the table under every transform with plain JAX: `python -m
tests.programs`.

Prints one row for each program with one column for each transform, and below it what differs or is
excluded. Each topic runs in a process of its own. The exit status is 1 if anything differs.
"""

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )
if importlib.metadata.version("jaxlib").startswith(
    "0.10."
):  # later versions lack the flag, and compile faster
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("FNET_PROBE", "0")

import jax

from . import table
from .check import Comparison
from .forms import PlainFails
from .program import CHECKS, TRANSFORMS


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="programs whose topic/name contains this"
    )
    parser.add_argument(
        "--transform", default=",".join(TRANSFORMS), metavar="NAMES", help="default: %(default)s"
    )
    parser.add_argument(
        "--check", default=",".join(CHECKS), metavar="NAMES", help="default: %(default)s"
    )
    parser.add_argument("--core", action="store_true", help="the programs of the test suite only")
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, (os.cpu_count() or 2) // 2),
        metavar="N",
        help="how many topics run at the same time; default: half of the processors",
    )
    parser.add_argument("--topic", help=argparse.SUPPRESS)  # of a process started by this one
    options = parser.parse_args()
    programs = [
        p
        for p in table.programs()
        if re.search(options.only, p.name)
        and (p.core or not options.core)
        and options.topic in (None, p.topic)
    ]
    if options.topic:
        return run(programs, options.transform.split(","), options.check.split(","))
    if not programs:
        parser.error(f"no program's name contains {options.only!r}")
    return start([*dict.fromkeys(p.topic for p in programs)], options.jobs)


def start(topics, jobs) -> int:
    """Runs every topic in a process of its own."""
    begin, totals, broken = time.time(), {}, []

    def one(topic):
        command = [sys.executable, "-m", __package__, *sys.argv[1:], f"--topic={topic}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            row, counts = [], []
            for line in process.stdout:
                if row and not line.startswith(" "):  # a program is complete
                    print(*row, sep="", end="", flush=True)
                    row = []
                counts = re.findall(r"(\d+) (\w+)", line) if line.startswith("checks:") else []
                row += [] if counts else [line]
        print(*row, sep="", end="", flush=True)
        for count, kind in counts:
            totals[kind] = totals.get(kind, 0) + int(count)
        if not counts or process.returncode:
            broken.append(topic if counts else f"{topic} (ended with status {process.returncode})")

    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(jobs) as pool:
        # What a transform leaves as it was is compiled once.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        list(pool.map(one, topics))
    print(
        f"\n{time.time() - begin:.0f} s. Checks: "
        f"{', '.join(f'{n} {kind}' for kind, n in totals.items())}.",
        f"Failures in: {', '.join(broken)}." if broken else "No failures.",
    )
    return 1 if broken else 0


def run(programs, transforms, checks) -> int:
    jax.config.update("jax_disable_most_optimizations", True)  # programs that run a few times
    counts = {"programs": len(programs), "ok": 0, "excluded": 0, "FAIL": 0, "skipped": 0}
    for program in programs:
        row, notes, failures = [], [], set()
        comparison = None if program.missing() else Comparison(program)
        for transform in transforms:
            cell, messages = examine(
                program, comparison, transform, transforms, checks, counts, failures
            )
            if cell:
                row.append(f"{transform} {cell}")
            notes += messages
        print(
            f"{program.name:56} {'   '.join(row)}",
            *(f"    {note}" for note in notes),
            sep="\n",
            flush=True,
        )
    print("checks: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if counts["FAIL"] else 0


def examine(
    program, comparison, transform, transforms, checks, counts, failures
) -> tuple[str, list[str]]:
    """The column of a transform ("ok", "excluded", "FAIL" or "skipped"), and the messages below.

    Args:
        failures: texts of plain JAX's failures. Each is reported once.
    """
    if comparison is None:
        counts["skipped"] += 1
        return "skipped", [f"skipped: {program.needs} is not installed"] if transform == transforms[
            0
        ] else []
    kinds, messages = set(), []
    for name in checks:
        if not comparison.applies(transform, name):
            continue
        try:
            result = comparison.verify(transform, name)
        except PlainFails as e:
            if str(e) in failures:
                continue
            failures.add(str(e))
            result = f"FAIL: plain JAX: {e}"
        except Exception as e:
            result = f"FAIL: {type(e).__name__}: {e}"
        kind = result.partition(":")[0]
        counts[kind] += 1
        kinds.add(kind)
        everywhere = kind == "excluded" and any(("*", c) in program.excluded for c in (name, "*"))
        if kind != "ok" and not (everywhere and transform != transforms[0]):
            messages.append(
                short(f"{'every transform' if everywhere else transform}, {name}: {result}")
            )
    return next((kind for kind in ("FAIL", "ok", "excluded") if kind in kinds), ""), messages


def short(text, length=300):
    text = " ".join(text.split())
    return text if len(text) <= length else text[:length] + "..."


if __name__ == "__main__":
    sys.exit(main())
