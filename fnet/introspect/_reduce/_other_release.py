"""Computes a program with another release of JAX, in a child process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fnet.introspect._reduce import _child
from fnet.introspect._reduce._environments import interpreter
from fnet.introspect._reduce._program import Program
from fnet.introspect._reduce._script import evaluation

_RESULTS = "results.npz"


def results(program: Program, version: str) -> list[Any] | None:
    """Returns the outputs of a program as a release of JAX computes them, or None if it raises an
    error there.

    Args:
        program: the program.
        version: the release, or the path of a Python interpreter that has one.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "evaluate.py"
        evaluation(program, _RESULTS).write(script)
        outcome = _child.run(script, _child.Limits(), python=interpreter(version))
        if outcome.status != 0:
            return None
        with np.load(Path(folder) / _RESULTS) as file:
            stored = [file[f"arr_{i}"] for i in range(len(program.jaxpr.outvars))]
    dtypes = [v.aval.dtype for v in program.jaxpr.outvars]
    return [x.view(dtype) if x.dtype.kind == "V" else x for x, dtype in zip(stored, dtypes)]
