"""Parts of a data set, for training and validation."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fnet.training.data._arrays import is_leaf, take


def split(data: Any, sizes: float | Sequence[float], *, seed: int = 0, stratify: Any = None) -> tuple[Any, ...]:
    """Divides the examples of a data set at random into disjoint parts.

    The division into parts depends only on the number of examples, `sizes`, `seed` and the classes in `stratify`. In
    each part, the examples have the same order as in `data`.

    Args:
      data: a tree of arrays or a pandas DataFrame, as in `Batches`. Columns may also be text.
      sizes: for two parts, the size of the second part (the validation set), either as a fraction such as 0.2 or as a
        number of examples. For two or more parts, `sizes` is a sequence of the sizes of all parts, either as fractions
        with the sum 1 or as numbers of examples.
      seed: the seed of the random assignment of examples to parts. Default 0.
      stratify: the class of each example, integers [n]. If `stratify` is given, the classes have nearly the same
        proportions in every part as in `data`. For each class and each part, the number of examples differs
        by at most one from the exact proportional number. If `stratify` is None, the classes are ignored. Default None.

    Returns:
      A tuple of the parts of the data set, each with the structure of `data`.

    Raises:
      ValueError: `sizes` are not positive or have a wrong sum, a part would have no examples, or `stratify` does not
        have one label for each example.

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
            raise ValueError(f"split: stratify= expects one label for each of {n} examples, got shape {labels.shape}")
        order = order[np.argsort(np.unique(labels, return_inverse=True)[1][order], kind="stable")]
    parts = []
    for count in counts[:0:-1]:                            # evenly spaced in the order of the classes
        position = np.arange(len(order)) * count
        chosen = (position + count) // len(order) > position // len(order)
        parts.append(order[chosen])
        order = order[~chosen]
    return tuple(take(data, np.sort(rows)) for rows in (order, *parts[::-1]))


def _counts(sizes: float | Sequence[float], n: int) -> list[int]:
    """Returns the number of examples in each part of the data set."""
    wanted = [sizes] if isinstance(sizes, numbers.Real) else list(sizes)
    whole = all(isinstance(size, numbers.Integral) and not isinstance(size, bool) for size in wanted)
    total = n if whole else 1.0
    if isinstance(sizes, numbers.Real):
        wanted = [total - sizes, sizes]
    if len(wanted) < 2 or not all(size > 0 for size in wanted) or abs(sum(wanted) - total) > 1e-6 * total:
        expected = f"numbers of examples with the sum {n}" if whole else "fractions with the sum 1"
        raise ValueError(f"split: sizes={sizes!r}: expected a fraction such as 0.2, a number of examples below {n}, or "
                         f"{expected} for two parts or more")
    ends = np.array(wanted).cumsum() if whole else np.round(np.array(wanted, np.float64).cumsum() * n).astype(int)
    counts = np.diff(ends, prepend=0).tolist()
    if not all(counts):
        raise ValueError(f"split: sizes={sizes!r} of {n} examples leave a part without any: it has {counts}")
    return counts
