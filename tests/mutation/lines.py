"""A pytest plugin that records which lines of fnet each test runs: `pytest -p tests.mutation.lines`
(Python 3.12).

Each process writes one file of JSON lines into the folder FNET_LINES when it ends: [test, seconds
of processor time, exhaustive, {module: [line, ...]}]. Processes that a test starts also record
their lines (processes/sitecustomize.py).
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FNET = f"{ROOT / 'fnet'}{os.sep}"
TOOL = sys.monitoring.COVERAGE_ID
_seen: set = set()
_file = None


def _line(code, number):
    if code.co_filename.startswith(FNET):
        _seen.add((code.co_filename, number))
    return sys.monitoring.DISABLE  # until the next test


def pytest_configure(config):
    global _file
    folder = Path(os.environ["FNET_LINES"])
    folder.mkdir(parents=True, exist_ok=True)
    _file = open(folder / f"{os.getpid()}.jsonl", "a")
    sys.monitoring.use_tool_id(TOOL, "fnet lines")
    sys.monitoring.register_callback(TOOL, sys.monitoring.events.LINE, _line)
    sys.monitoring.set_events(TOOL, sys.monitoring.events.LINE)


def _used():
    return sum(os.times()[:4])  # of this process and of those that ended


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    _seen.clear()
    sys.monitoring.restart_events()
    before = _used()
    yield
    modules = defaultdict(list)
    for path, number in sorted(_seen):
        modules[path[len(FNET) :]].append(number)
    row = [
        item.nodeid,
        round(_used() - before, 3),
        bool(item.get_closest_marker("exhaustive")),
        modules,
    ]
    print(json.dumps(row, separators=(",", ":")), file=_file, flush=True)


def pytest_unconfigure():
    sys.monitoring.set_events(TOOL, 0)
    _file.close()
