"""Numbers with decimal prefixes."""

from __future__ import annotations


def si(value: float, *, digits: int = 4) -> str:
    """Formats a number with a decimal prefix and a space: 197e12 becomes "197 T"."""
    for factor, prefix in (
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
    ):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.{digits}g} {prefix}"
    return f"{value:.{digits}g} "
