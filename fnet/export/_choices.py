"""Chooses values of symbolic sizes with which a program is tested."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from fnet.export.standalone._signature import satisfied

# Different sizes for different variables, so that confused axes are seen. The second choice has one
# example, the most frequent batch, and other lengths.
_FIRST = 3, 4, 5, 7, 2, 6, 8, 11, 13, 16, 32, 33, 48, 64, 128, 224, 1
_SECOND = 1, 5, 7, 4, 6, 8, 2, 3, 16, 9, 24, 32, 65, 96, 192, 256
_TRIED = 50_000


def choices(names: Iterable[str], constraints: Iterable[str] = ()) -> list[dict[str, int]]:
    """Returns two choices of sizes that satisfy the constraints, the smaller first: [{name: size}].
    There are fewer if the constraints allow only one choice, or if none is found.

    >>> choices(["b", "t"], ["t <= 4", "mod(t, 2) == 0"])
    [{'b': 3, 't': 4}, {'b': 1, 't': 4}]
    """
    names, constraints = sorted(names), list(constraints)
    numbers = {int(n) for constraint in constraints for n in re.findall(r"\b\d+\b", constraint)}
    near = sorted({m for n in numbers for m in (n, n + 1, n - 1, 2 * n, 3 * n) if m > 0})
    found: list[dict[str, int]] = []
    for preferred in (_FIRST, _SECOND):
        sizes = _first(names, constraints, list(dict.fromkeys([*preferred, *near])))
        if sizes is not None and sizes not in found:
            found.append(sizes)
    return found


def _first(names, constraints, values) -> dict[str, int] | None:
    rotated = [values[i:] + values[:i] for i in range(len(names))]
    for chosen in itertools.islice(itertools.product(*rotated), _TRIED):
        sizes = dict(zip(names, chosen))
        if all(satisfied(constraint, sizes) for constraint in constraints):
            return sizes
    return None
