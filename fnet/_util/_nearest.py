"""The names nearest to one that does not exist, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: str, known: Iterable[str], count: int = 1, *, similar: float = 0.6) -> list[str]:
    """Returns at most `count` of the known names, the most similar first; [] if no name has a
    similarity of at least `similar` (0 to 1)."""
    return difflib.get_close_matches(name, list(known), count, similar)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "did you mean 'relu'?", or "" if no known name is similar.

    >>> did_you_mean("rellu", ["relu", "gelu"]), did_you_mean("conv", ["relu", "gelu"])
    ("did you mean 'relu'?", '')
    """
    near = nearest(name, known)
    return f"did you mean {near[0]!r}?" if near else ""


def nearest_to_pattern(pattern: str, paths: Sequence[str], count: int = 3) -> str:
    """Returns the paths nearest to a pattern that matches none of them, quoted and separated by
    commas; the first paths if none is similar, and "" if there are no paths.

    A pattern resembles the paths that it should match less than a misspelled name resembles the
    right one, so the bound is low.
    """
    near = nearest(pattern, paths, count, similar=0.3) or paths[:count]
    return ", ".join(map(repr, near))


def similarity(a: str, b: str) -> float:
    """Returns how similar two names are, from 0 to 1 if they are equal."""
    return difflib.SequenceMatcher(None, a, b).ratio()
