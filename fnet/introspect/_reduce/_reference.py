"""Computes a program a second time by other means: with NumPy, in float64, on one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import _jax
from fnet.export._stable import Unsupported, stable
from fnet.export.standalone import _interpret
from fnet.introspect._reduce._program import Program, is_spread
from fnet.jaxpr import Evaluator

_WIDE = {
    "float16": "float64",
    "bfloat16": "float64",
    "float32": "float64",
    "complex64": "complex128",
}


def by_numpy(program: Program, *, wide: bool = False) -> list | None:
    """Returns the outputs of a program, computed with NumPy, or None if it contains an operation
    for which there is no NumPy form. `wide` replaces all floating-point dtypes by float64."""
    try:
        data, constants = stable(_jax.close(program.jaxpr))
    except Unsupported:
        return None
    arrays = [np.asarray(x) for x in program.arrays]
    if wide:
        data = _widened(data)
        arrays, constants = (list(map(_wide, each)) for each in (arrays, constants))
    return _interpret.run(data, constants, arrays, {})


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(_WIDE.get(x.dtype.name, x.dtype))


def _widened(data: Any) -> Any:
    """Replaces the dtypes in the stable form of a program. A dtype is a string of its own there."""
    if isinstance(data, dict):
        return {name: _widened(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_widened(value) for value in data]
    return _WIDE.get(data, data) if isinstance(data, str) else data


def on_one_device(program: Program, device: Any = None) -> list:
    """Returns the outputs of a program whose arrays all lie on one device, by default the first."""

    def unconstrained(eqn: Any, arrays: list) -> Any:
        return arrays if eqn.primitive.name == "sharding_constraint" else NotImplemented

    whole = [np.asarray(x) if is_spread(x) else x for x in program.arrays]
    whole = whole if device is None else [jax.device_put(x, device) for x in whole]
    evaluate = Evaluator(unconstrained)
    closed = _jax.close(program.jaxpr)
    outputs = jax.jit(lambda *arrays: evaluate(closed, *arrays))(*whole)
    return jax.block_until_ready(list(outputs))


def error(got: list, expected: list) -> float:
    """Returns the largest max |a - b| / max |b| of the outputs. It is infinite if an element is
    finite, or NaN, in one of them alone."""
    return max((_error(np.asarray(a), np.asarray(b)) for a, b in zip(got, expected)), default=0.0)


def _error(a: np.ndarray, b: np.ndarray) -> float:
    wide = np.complex128 if "complex" in f"{a.dtype}{b.dtype}" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    if a.shape != b.shape:
        return np.inf
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite):
        return np.inf
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return np.inf
    apart = np.abs(a[finite] - b[finite]).max(initial=0.0)
    return float(apart / max(np.abs(b[finite]).max(initial=0.0), 1e-30)) if apart else 0.0


def tolerance(outputs: list) -> float:
    """The largest error that counts as equal: the root of the machine epsilon of the least precise
    output, 3e-4 for float32."""
    dtypes = [x.dtype for x in outputs if jnp.issubdtype(x.dtype, jnp.inexact)]
    return max((float(jnp.finfo(dtype).eps) ** 0.5 for dtype in dtypes), default=0.0)
