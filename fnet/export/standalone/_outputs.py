"""Compares the outputs of another runtime, such as onnxruntime, with those of the program, element
by element.

Every bundle (file of an exported model) contains a copy of this module as outputs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

# The relative error of decompositions, and of functions such as tanh, in units of the dtype.
TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


class Different(ValueError):
    """Raised if an output differs from the program's."""


def tolerance(dtypes: Iterable[str]) -> float:
    """Returns the relative tolerance for a program that computes in these dtypes: that of the least
    precise one."""
    return max((TOLERANCES.get(str(dtype), 0.0) for dtype in dtypes), default=1e-5) or 1e-5


def compare(
    where: str,
    names: Iterable[str],
    results: Iterable[Any],
    wanted: Iterable[Any],
    tolerance: float,
    spreads: Sequence[Callable[[], Sequence[Any]]] = (),
    largest: bool = False,
) -> float:
    """Compares each element of the outputs `results` with the element of `wanted`.

    Two elements are equal if they are the same bits, both NaN, or differ by at most `tolerance` of
    the wanted one plus what rounding may change. Integers and bools are equal only if they are the
    same.

    Args:
        where: the beginning of the error message.
        spreads: functions that return, for each output, by how much rounding may change each
            element. Each is called only if elements differ without it, so the fastest is the first.
            Default (): not at all.
        largest: whether the differences may be relative to the largest element of an output, for
            runtimes whose weights are rounded.

    Returns:
        The largest relative difference of an element.

    Raises:
        Different: an element differs by more. The message names the output, the element and both
            values.
    """
    worst, measured, left = 0.0, None, list(spreads)
    for i, (name, got, want) in enumerate(zip(names, results, wanted)):
        got, want = np.asarray(got), np.asarray(want)
        if got.shape != want.shape:
            raise Different(
                f"{where}, the output {name!r} has shape {got.shape}, and the program's "
                f"{want.shape}"
            )
        floor = _below_largest(_wide(want)) if largest else 0.0
        known = floor if measured is None else measured[i] / tolerance + floor
        error = _errors(got, want, tolerance, np.asarray(known))
        while not (error <= tolerance).all() and left:
            found = left.pop(0)()
            measured = found if measured is None else list(map(np.maximum, measured, found))
            error = _errors(got, want, tolerance, measured[i] / tolerance + floor)
        if not (error <= tolerance).all():
            at = np.unravel_index(np.argmax(error), error.shape)
            raise Different(
                f"{where}, the output {name!r} differs from the program's{_by(got[at], want[at])}, "
                f"more than {tolerance:.2g}{' and what rounding explains' if spreads else ''}: "
                f"{name}{list(map(int, at)) if at else ''} is {got[at]}, expected {want[at]} "
                f"({int((error > tolerance).sum())} of {error.size} elements differ)"
            )
        worst = max(worst, float(error.max(initial=0.0)))
    return worst


def _by(got, want) -> str:
    apart = abs(complex(got) - complex(want)) / abs(complex(want)) if want else np.inf
    return f" by {apart:.1e} of its value" if np.isfinite(apart) else ""


def _below_largest(x):
    """Returns by how much the absolute value of each element is below the largest one."""
    size = np.where(np.isfinite(x), np.abs(x), 0.0)
    return size.max(initial=0.0) - size


def _wide(x):
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def _errors(got, want, tolerance, floor) -> np.ndarray:
    """Returns the relative difference of each element. A difference of `floor` counts as 1."""
    if want.dtype.kind in "iub":
        return np.where((got == want) | np.isinf(floor), 0.0, np.inf)
    smallest = (
        float(np.finfo(want.dtype).tiny)
        if want.dtype.kind == "f"
        else float(np.finfo(np.float32).tiny)
    )
    a, b = _wide(got), _wide(want)
    same = (a == b) | (np.isnan(a) & np.isnan(b)) | np.isinf(floor)
    with np.errstate(all="ignore"):
        # XLA replaces subnormal numbers by 0 on CPUs, so the smallest normal number is the unit
        # near 0.
        error = np.abs(a - b) / (
            np.abs(b) + np.where(np.isfinite(floor), floor, 0) + smallest / tolerance
        )
    return np.where(same, 0.0, np.where(np.isnan(error) | ~np.isfinite(b), np.inf, error))
