"""Leaves of a tree that are no arrays, such as the functions in an Equinox model, in what JAX takes arrays alone in."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A leaf that JAX sees as a part of the tree's structure: a function of it is traced for each value."""

    value: Any


def boxed(tree: Any) -> Any:
    """The tree with leaves that are neither arrays nor numbers as `Static`s.

    Raises:
        TypeError: for a leaf without a hash.
    """
    return jax.tree.map_with_path(lambda path, x: x if _numeric(x) else _box(path, x), tree)


def unboxed(tree: Any) -> Any:
    """The tree with the leaves that `boxed` had put away."""
    return jax.tree.map(lambda x: x.value if _static(x) else x, tree, is_leaf=_static)


def holds_statics(tree: Any) -> bool:
    return any(map(_static, jax.tree.leaves(tree, is_leaf=_static)))


def _static(x) -> bool:
    return isinstance(x, Static)


def _numeric(x) -> bool:
    return (hasattr(x, "shape") and hasattr(x, "dtype")) or isinstance(x, (bool, int, float, complex, np.generic))


def _box(path, x):
    try:
        hash(x)
    except TypeError:
        raise TypeError(f"{jax.tree_util.keystr(path)} is a {type(x).__name__}, which is neither an array nor has a "
                        "hash") from None
    return Static(x)
