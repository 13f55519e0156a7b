"""Child processes that run cases. A child that aborts, hangs or takes too much memory is a result
of the case that it ran; another child runs the rest."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax

import fnet
from fnet.parallel._sanitizer import _cases

_MODULE = "fnet.parallel._sanitizer._child"
_TOGETHER = 24
# Machine code that is compiled sooner. XLA divides the program before.
_QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


class Limits:
    """What a child may take.

    Attributes:
        seconds: for one batch of cases.
        gib: of address space. XLA reserves several GiB that it does not use.
    """

    def __init__(self, seconds: float = 120.0, gib: float = 32.0):
        self.seconds, self.gib = seconds, gib


class Ended(Exception):
    """A child that ended without a result, and why."""


def shardings(
    program: _cases.Program, inputs: Sequence[_cases.Spec], mesh: _cases.Axes, limits: Limits
) -> list[_cases.Spec]:
    """Returns the sharding of each output of a program, as XLA chooses it.

    Raises:
        Ended: the child ended without a result.
    """
    job = {"program": program, "inputs": list(inputs), "mesh": mesh}
    lines, ended = _child(job, _cases.size(mesh), limits)
    if not lines:
        raise Ended(ended)
    return [_cases.tuples(spec) for spec in lines[0]["specs"]]


def run(
    programs: dict[str, _cases.Program], cases: Sequence[_cases.Case], limits: Limits
) -> list[dict]:
    """Runs cases, and returns for each a dict with its "status": "right", "wrong", "raises",
    "aborts", "hangs", or "not run" if it raises an error on one device, too."""
    results: dict[int, dict] = {}
    alone: set[int] = set()
    devices = max((_cases.size(case.mesh) for case in cases), default=1)
    while len(results) < len(cases):
        left = [i for i in range(len(cases)) if i not in results]
        single = [i for i in left if i in alone]
        chosen = single or left
        job = {
            "programs": {cases[i].program: programs[cases[i].program] for i in chosen},
            "cases": {i: cases[i] for i in chosen},
            "size": 1 if single else _TOGETHER,
        }
        lines, ended = _child(job, devices, limits)
        results |= {line["id"]: line for line in lines if "id" in line}
        if ended:
            begun = next((line["begin"] for line in reversed(lines) if "begin" in line), chosen)
            missing = [i for i in begun if i not in results]
            if len(missing) == 1 and (len(begun) == 1 or begun[0] in alone):
                status = "hangs" if ended.startswith("no result") else "aborts"
                results[missing[0]] = {"id": missing[0], "status": status, "text": ended}
            alone.update(missing)
    return [results[i] for i in range(len(cases))]


def _child(job: dict, devices: int, limits: Limits) -> tuple[list[dict], str]:
    """Runs one child. Returns the lines that it wrote, and why it ended early, or ""."""
    with tempfile.TemporaryDirectory(prefix="fnet-check-") as folder:
        files = [pathlib.Path(folder) / name for name in ("job.json", "results.jsonl", "errors")]
        files[0].write_text(json.dumps({**job, "gib": limits.gib}))
        files[1].touch()
        with files[2].open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(files[0]), str(files[1])],
                env=_environment(devices),
                stdout=errors,
                stderr=errors,
                stdin=subprocess.DEVNULL,
            )
            ended = _waited(process, files[1], limits.seconds)
        lines = [json.loads(line) for line in files[1].read_text().splitlines() if line[-1:] == "}"]
        if ended or process.returncode:
            return lines, ended or _why(process.returncode, files[2].read_text(errors="replace"))
        return lines, ""


def _waited(process: Any, results: pathlib.Path, seconds: float) -> str:
    """Waits for a child as long as it writes results."""
    size, since = -1, time.monotonic()
    try:
        while True:
            try:
                process.wait(0.2)
                return ""
            except subprocess.TimeoutExpired:
                pass
            if results.stat().st_size != size:
                size, since = results.stat().st_size, time.monotonic()
            if time.monotonic() - since > seconds:
                return f"no result after {seconds:g} s"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _environment(devices: int) -> dict[str, str]:
    flags = re.sub(
        r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
    )
    path = str(pathlib.Path(fnet.__file__).parents[1])
    return os.environ | {
        "XLA_FLAGS": f"{flags} {_QUICKLY} --xla_force_host_platform_device_count={devices}".strip(),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": str(bool(jax.config.jax_enable_x64)).lower(),
        "JAX_DISABLE_JIT": "false",
        "FNET_PROBE": "0",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH", "")))),
    }


def _why(code: int, errors: str) -> str:
    """Describes how a child ended, with the check of XLA that failed."""
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    checks = [line for line in lines if "Check failed" in line] or lines[-1:]
    said = re.sub(r"^.*?(?=Check failed)", "", checks[0]) if checks else ""
    return f"{how}: {said}"[:400].rstrip(": ")
