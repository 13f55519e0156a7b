"""Plants faults in fnet, one at a time, and reports which ones the quick and the complete suite
detect.

    python -m tests.mutation --lines             # once: runs all tests and records which lines each of them runs
    python -m tests.mutation                     # make mutation: all faults
    python -m tests.mutation --only=layers,jaxpr
    python -m tests.mutation --generate=150 --since=COMMIT fnet/export    # generated faults, see generated.py
    python -m tests.mutation --redundant         # slow tests of lines that three quicker ones run as well

For a fault, only the tests run that run the changed line: the quick ones first, those that take the
least time before others, until one fails. If none fails, the other tests of the same modules run,
since a module's tests may share what the first of them has computed. Of each suite run as many
tests as took --seconds when they were recorded. A failure counts only if the test passes without
the fault.
"""

import argparse
import ast
import concurrent.futures
import itertools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from .faults import FAULTS
from .generated import Mutant, drawn
from .redundant import redundant

ROOT = Path(__file__).resolve().parents[2]
BATCHES = 24, 200, None  # how many tests run in one process, for one fault


def modules(root, package):
    return sorted((root / "fnet" / package).rglob("*.py"))


def edited(fault, root=ROOT):
    """(the module of a fault, the numbers of its changed lines, its text with the fault)"""
    if isinstance(fault, Mutant):
        path, start, after = (
            root / fault.path,
            fault.line,
            fault.text((root / fault.path).read_text()),
        )
        return path, range(start, start + fault.before.count("\n") + 1), after
    places = [
        (path, text)
        for path in modules(root, fault.package)
        if fault.before in (text := path.read_text())
    ]
    if len(places) != 1 or places[0][1].count(fault.before) != 1:
        raise ValueError(
            f"expected {fault.before!r} once in fnet/{fault.package}; update "
            f"tests/mutation/faults.py"
        )
    path, text = places[0]
    first = text[: text.index(fault.before)].count("\n") + 1
    return (
        path,
        range(first, first + fault.before.count("\n") + 1),
        text.replace(fault.before, fault.after),
    )


def read(folder):
    """The records of `lines`: [(test, seconds, exhaustive, {module: {line}})]"""
    rows = {}
    for path in sorted(Path(folder).glob("*.jsonl")):
        for text in path.read_text().splitlines():
            test, seconds, exhaustive, lines = json.loads(text)
            modules = {name: set(numbers) for name, numbers in lines.items()}
            rows[test] = test, seconds, exhaustive, defaultdict(set, modules)
    for path in Path(folder).glob("*.lines"):  # of processes that the tests started
        for text in path.read_text().splitlines():
            test, name, number = text.split("\t")
            if test in rows:
                rows[test][3][name].add(int(number))
    return list(rows.values())


def covering(fault, records):
    """Records of the tests that run a changed line, then of the others of their modules: each the
    cheapest first."""
    path, numbers, _ = edited(fault)
    name = str(path.relative_to(ROOT / "fnet"))
    changed = _statement(path, numbers)
    covers = {test for test, _, _, lines in records if lines.get(name, set()) & changed}
    files = {test.partition("::")[0] for test in covers}
    folder = f"tests/{name.partition('/')[0]}/"
    order = lambda row: (not row[0].startswith(folder), row[1])
    mine = sorted((row for row in records if row[0] in covers), key=order)
    rest = sorted(
        (row for row in records if row[0] not in covers and row[0].partition("::")[0] in files),
        key=order,
    )
    return mine + rest


def _statement(path, numbers):
    """The lines of the statements that hold the changed lines: of a long expression, Python may
    count others."""
    found = set(numbers)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            lines = range(node.lineno, node.end_lineno + 1)
            if set(numbers) & set(lines):
                found |= set(lines)
    return found


def batches(records, seconds):
    """Lists of records for one process each, which together took that many seconds at most."""
    totals = itertools.accumulate(row[1] for row in records)
    rest = [row for row, total in zip(records, totals) if total <= seconds]
    for size in BATCHES:
        if rest:
            yield rest[:size]
            rest = rest[size:] if size else []


def pytest(root, tests, *options, limit):
    """The first test that fails, or None."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
        names.write("\n".join(tests))
        names.flush()
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--tb=no",
            "-rfE",
            *options,
            f"@{names.name}",
        ]
        try:
            done = subprocess.run(
                command,
                cwd=root,
                capture_output=True,
                text=True,
                timeout=limit,
                env={**os.environ, "PYTHONPATH": str(root)},
            )
        except subprocess.TimeoutExpired:
            return "(no end)"
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", done.stdout, re.M)
    return failed[1] if failed else f"(pytest exits with {done.returncode})"


def detect(fault, records, root, budget):
    """(the test that detects a fault or None, whether it is exhaustive, seconds)"""
    began = time.monotonic()
    path, _, text = edited(fault, root)
    whole = path.read_text()
    path.write_text(text)
    try:
        rows = covering(fault, records)
        for exhaustive in (False, True):
            for batch in batches([row for row in rows if row[2] == exhaustive], budget):
                limit = 120 + 5 * sum(row[1] for row in batch)  # a fault may make a loop endless
                if (failed := pytest(root, [row[0] for row in batch], limit=limit)) is not None:
                    return failed, exhaustive, time.monotonic() - began
    finally:
        path.write_text(whole)
    return None, False, time.monotonic() - began


def copied(number, folder):
    root = Path(folder) / str(number)
    without = shutil.ignore_patterns(
        ".git", ".venv*", ".libtpu", ".mutation", "__pycache__", "runs", ".*_cache"
    )
    shutil.copytree(ROOT, root, ignore=without)
    return root


def record(folder, only_quick):
    path = os.pathsep.join([str(ROOT / "tests/mutation/processes"), str(ROOT)])
    env = {**os.environ, "FNET_LINES": str(folder), "PYTHONPATH": path}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "auto",
            "-p",
            "tests.mutation.lines",
            *(["-m", "not exhaustive"] if only_quick else []),
        ],
        cwd=ROOT,
        env=env,
    ).returncode


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--lines", action="store_true", help="record which lines each test runs; needs Python 3.12"
    )
    parser.add_argument(
        "--redundant", action="store_true", help="list tests that make test-all could run alone"
    )
    parser.add_argument("--folder", default=str(ROOT / ".mutation"), help="of these records")
    parser.add_argument("--only", default="", help="packages, separated by commas")
    parser.add_argument(
        "--quick", action="store_true", help="with --lines: record the tests of make test alone"
    )
    parser.add_argument(
        "--generate", type=int, default=0, metavar="N", help="draw N mutants in place of the table"
    )
    parser.add_argument(
        "--since", default="HEAD", metavar="COMMIT", help="of lines that changed since this commit"
    )
    parser.add_argument("modules", nargs="*", help="and of these modules and folders")
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="of the tests for one fault, in each suite"
    )
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.lines:
        shutil.rmtree(options.folder, ignore_errors=True)
        return record(options.folder, options.quick)
    records = read(options.folder)
    if not records:
        sys.exit(f"no records in {options.folder}; run python3.12 -m tests.mutation --lines first")
    if options.redundant:
        for seconds, name, necessary, cases in redundant(records):
            print(f"{seconds:6.1f} s, {necessary} of {cases} cases necessary: {name}")
        return 0
    if options.generate:
        faults = drawn(ROOT, options.generate, options.since, options.modules)
    else:
        faults = [
            fault
            for fault in FAULTS
            if not options.only or fault.package in options.only.split(",")
        ]
    counts = {"quick": 0, "complete": 0}
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(options.jobs) as pool,
    ):
        roots: queue.Queue = queue.Queue()
        for number in range(options.jobs):
            roots.put(copied(number, folder))

        def tried(fault):
            root = roots.get()
            try:
                failed, exhaustive, seconds = detect(fault, records, root, options.seconds)
                if failed and "::" in failed and pytest(root, [failed], limit=300):
                    failed = f"(fails without the fault as well: {failed})"
                return fault, failed, exhaustive, seconds
            finally:
                roots.put(root)

        for fault, failed, exhaustive, seconds in pool.map(tried, faults):
            sound = failed is not None and not failed.startswith("(fails")
            counts["quick"] += sound and not exhaustive
            counts["complete"] += sound
            print(
                f"{'quick' if sound and not exhaustive else 'complete' if sound else 'MISSED':8} "
                f"{seconds:5.0f} s  {fault.package:10} {fault.what}: {failed or 'no test fails'}",
                flush=True,
            )
    print(
        f"of {len(faults)} faults the quick tests detect {counts['quick']}, all tests "
        f"{counts['complete']}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
