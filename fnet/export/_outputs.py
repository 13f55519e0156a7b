"""Compares the outputs of another runtime, such as onnxruntime, with those of the program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def compare(where: str, names: Iterable[str], results: Iterable[Any], wanted: Iterable[Any], tolerance: float) -> float:
    """Compares the outputs `results` with the expected outputs `wanted`. Returns the largest difference, where each
    difference is divided by the largest expected element of the output.

    Raises:
        ValueError: the difference is larger than the tolerance.
    """
    worst = 0.0
    for name, got, want in zip(names, results, wanted):
        got, want = np.asarray(got, np.float64), np.asarray(want).astype(np.float64)
        if got.shape != want.shape:
            raise ValueError(f"{where}, the output {name!r} has shape {got.shape}, and the program's {want.shape}")
        largest = max(np.abs(want[np.isfinite(want)]).max(initial=0.0), 1e-30)
        apart = 0.0 if np.array_equal(got, want, equal_nan=True) else float(np.abs(got - want).max() / largest)
        if not apart <= tolerance:
            raise ValueError(f"{where}, the output {name!r} differs from the program's by {apart:.1e} of its largest "
                             f"element, more than {tolerance:.0e}")
        worst = max(worst, apart)
    return worst
