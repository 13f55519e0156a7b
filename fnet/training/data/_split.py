"""Parts of a data set, for training and validation."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fnet.training.data._arrays import is_leaf, take


def split(
    data: Any, sizes: float | Sequence[float], *, seed: int = 0, stratify: Any = None
) -> tuple[Any, ...]:
    """Divides the examples of a data set at random into disjoint parts.

    The parts depend only on the number of examples, `sizes`, `seed` and the classes in `stratify`.
    Each keeps the order of `data`.

    Args:
      data: a tree of arrays or a pandas DataFrame, as in `Batches`. Columns may also be text.
      sizes: for two parts, the size of the second (the validation set), a fraction such as 0.2 or a
        number of examples; or a sequence of the sizes of all parts, fractions with the sum 1 or
        numbers of examples.
      seed: the seed of the random assignment. Default 0.
      stratify: the class of each example, integers [n]. Every part then has the proportions of the
        classes in `data`: for each class, the exact number, rounded up or down. Default None:
        classes are ignored.

    Returns:
      A tuple of the parts, each with the structure of `data`.

    Raises:
      ValueError: `sizes` are not positive or have a wrong sum, a part would have no examples, or
        `stratify` does not have one label for each example.

    Example:
      >>> data = {"x": np.arange(10), "y": np.arange(10) % 2}
      >>> train, validation = split(data, 0.2, stratify=data["y"])
      >>> len(train["x"]), sorted(validation["y"].tolist())
      (8, [0, 1])
    """
    leaves = jax.tree.leaves(data, is_leaf=is_leaf)
    lengths = sorted({len(leaf) for leaf in leaves})
    if len(lengths) != 1:
        raise ValueError(f"split needs arrays of one length, got lengths {lengths}")
    n = lengths[0]
    counts = _counts(sizes, n)
    rng = np.random.Generator(np.random.PCG64([seed, n]))
    order = rng.permutation(n)
    if stratify is not None:
        labels = np.asarray(stratify)
        if labels.shape != (n,):
            raise ValueError(
                f"split: stratify= expects one label for each of {n} examples, got shape "
                f"{labels.shape}"
            )
        numbers = np.unique(labels, return_inverse=True)[1]
        order = order[np.argsort(numbers[order], kind="stable")]
        if len(counts) > 2:
            return tuple(
                take(data, np.sort(rows))
                for rows in _stratified(order, np.bincount(numbers), counts, rng)
            )
    parts = []
    for count in counts[:0:-1]:  # evenly spaced in the order of the classes
        position = np.arange(len(order)) * count
        chosen = (position + count) // len(order) > position // len(order)
        parts.append(order[chosen])
        order = order[~chosen]
    return tuple(take(data, np.sort(rows)) for rows in (order, *parts[::-1]))


def _stratified(
    order: np.ndarray, classes: np.ndarray, counts: list[int], rng: np.random.Generator
) -> list[np.ndarray]:
    """Divides examples into more than two parts with the same proportions of the classes.

    Args:
      order: the examples, sorted by class, and in random order within a class.
      classes, counts: the number of examples of each class, and of each part.
    """
    table, parts, start = _rounded(classes.tolist(), counts, rng), [[] for _ in counts], 0
    for row in table:
        for part, count in zip(parts, row):
            part.append(order[start : start + count])
            start += count
    return [np.concatenate(part) for part in parts]


def _rounded(classes: list[int], counts: list[int], rng: np.random.Generator) -> list[list[int]]:
    """Rounds the table classes[c] * counts[p] / n to integers with the same sums of rows and
    columns. Each entry is rounded up or down, with the probability that keeps its expected value.

    As long as entries are fractions, some of them form a cycle of steps along rows and columns.
    Adding and subtracting the same number along a cycle keeps all sums, and makes at least one
    entry of the cycle an integer.

    Source: Cox (1987), A Constructive Procedure for Unbiased Controlled Rounding.
    """
    n = sum(counts)
    table = [[one * count // n for count in counts] for one in classes]
    # The fractions, in units of 1 / n.
    rest = [[one * count % n for count in counts] for one in classes]
    open_rows: list[int] = []
    for row in range(len(classes)):
        open_rows.append(row)
        while cycle := _cycle(
            {each: [p for p, part in enumerate(rest[each]) if part] for each in open_rows}
        ):
            plus, minus = cycle[::2], cycle[1::2]
            up = min([n - rest[r][p] for r, p in plus] + [rest[r][p] for r, p in minus])
            down = min([rest[r][p] for r, p in plus] + [n - rest[r][p] for r, p in minus])
            change = up if rng.random() * (up + down) < down else -down
            for entries, sign in ((plus, 1), (minus, -1)):
                for r, p in entries:
                    more, rest[r][p] = divmod(rest[r][p] + sign * change, n)
                    table[r][p] += more
        open_rows = [each for each in open_rows if any(rest[each])]
    return table


def _cycle(rows: dict[int, list[int]]) -> list[tuple[int, int]]:
    """Returns the entries (row, column) of a cycle, which alternately share a row and a column, or
    [] if there is none. `rows` contains the columns of the entries of each row."""
    columns: dict[int, list[int]] = {}
    for row, inside in rows.items():
        for column in inside:
            columns.setdefault(column, []).append(row)
    done = set()
    for start in rows:
        path = [(True, start)]  # nodes: (whether it is a row, its number)
        ways = [iter(rows[start])] if (True, start) not in done else []
        while ways:
            is_row, _ = path[-1]
            before = path[-2][1] if len(path) > 1 else None
            following = next((each for each in ways[-1] if each != before), None)
            if following is None:
                ways.pop()
                done.add(path.pop())
                continue
            node = (not is_row, following)
            if node in path:
                nodes = [*path[path.index(node) :], node]
                return [
                    (a[1], b[1]) if a[0] else (b[1], a[1]) for a, b in itertools.pairwise(nodes)
                ]
            if node not in done:
                path.append(node)
                ways.append(iter(columns[following] if is_row else rows[following]))
    return []


def _counts(sizes: float | Sequence[float], n: int) -> list[int]:
    """Returns the number of examples in each part of the data set."""
    wanted = [sizes] if isinstance(sizes, numbers.Real) else list(sizes)
    whole = all(
        isinstance(size, numbers.Integral) and not isinstance(size, bool) for size in wanted
    )
    total = n if whole else 1.0
    if isinstance(sizes, numbers.Real):
        wanted = [total - sizes, sizes]
    if (
        len(wanted) < 2
        or not all(size > 0 for size in wanted)
        or abs(sum(wanted) - total) > 1e-6 * total
    ):
        expected = f"numbers of examples with the sum {n}" if whole else "fractions with the sum 1"
        raise ValueError(
            f"split: sizes={sizes!r}: expected a fraction such as 0.2, a number of examples below "
            f"{n}, or {expected} for two parts or more"
        )
    ends = (
        np.array(wanted).cumsum()
        if whole
        else np.round(np.array(wanted, np.float64).cumsum() * n).astype(int)
    )
    counts = np.diff(ends, prepend=0).tolist()
    if not all(counts):
        raise ValueError(
            f"split: sizes={sizes!r} of {n} examples leave a part without any: it has {counts}"
        )
    return counts
