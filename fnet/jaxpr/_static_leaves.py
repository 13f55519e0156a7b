"""Leaves of a tree that are not arrays, such as the functions in an Equinox model, where JAX accepts arrays alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """A leaf that JAX treats as a part of the tree's structure: a function of it is traced for each value."""

    value: Any


def boxed(tree: Any) -> Any:
    """The tree with leaves that must not be traced as `Static`s: what is neither an array nor a number, bools, and
    Python's numbers inside objects, such as the options of an Equinox module.

    Raises:
        TypeError: for a leaf without a hash.
    """
    return jax.tree.map_with_path(lambda path, x: x if _traced(path, x) else _box(path, x), tree)


def results_boxed(tree: Any) -> Any:
    """The tree with all leaves that are neither arrays nor numbers as `Static`s."""
    numeric = lambda x: is_array(x) or isinstance(x, (int, float, complex))
    return jax.tree.map_with_path(lambda path, x: x if numeric(x) else _box(path, x), tree)


def unboxed(tree: Any) -> Any:
    """The tree with the leaves in place of their `Static`s."""
    return jax.tree.map(lambda x: x.value if _static(x) else x, tree, is_leaf=_static)


def statics(tree: Any) -> list:
    """(path, value) of the `Static`s in a tree."""
    return [(jax.tree_util.keystr(path), x.value) for path, x in jax.tree.leaves_with_path(tree, is_leaf=_static)
            if _static(x)]


def is_array(x: Any) -> bool:
    """Whether a leaf is an array of JAX or NumPy, or a type of one."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _static(x) -> bool:
    return isinstance(x, Static)


def _traced(path, x) -> bool:
    if is_array(x):
        return True
    inside = any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)
    return isinstance(x, (int, float, complex)) and not isinstance(x, bool) and not inside


def _box(path, x):
    try:
        hash(x)
    except TypeError:
        raise TypeError(f"{jax.tree_util.keystr(path)} is a {type(x).__name__}, which is neither an array nor has a "
                        "hash") from None
    return Static(x)
