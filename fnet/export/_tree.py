"""Describes trees of arrays by names and JSON data, so that a program can read them without the
classes of the
trees."""

from __future__ import annotations

import re
from typing import Any

import jax

from fnet.export._stable import size as stable_size

_FUNCTIONS = "floordiv", "mod", "max", "min"  # in expressions of sizes


def named_leaves(root: str, tree: Any) -> list[tuple[str, Any]]:
    """Returns [(path, leaf)] of a tree, with paths such as "params/block1/conv2/kernel". `root` is
    the first part of each path."""
    return [
        ("/".join([root, *map(_name, path)]), leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    ]


def described(tree: Any) -> Any:
    """Describes a tree of arrays as JSON data.

    The description of an array is {"dtype": ..., "shape": [...]}. The description of a container is
    {"dict": {...}}, {"list": [...]} or {"tuple": [...]}. The description of None is None. Named
    tuples and other registered classes are described as dicts of their fields.
    """
    if tree is None:
        return None
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return {"dtype": str(tree.dtype), "shape": list(map(stable_size, tree.shape))}
    children = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return {"list" if isinstance(tree, list) else "tuple": [described(child) for child in tree]}
    return {"dict": {_name(path[0]): described(child) for path, child in children}}


def described_leaves(trees: list[tuple[str, Any]]) -> list[tuple[str, dict]]:
    """Returns a list [(path, leaf)] of the leaves of trees that `described` returned. `trees` is a
    list [(name, tree)]. The paths are strings such as "cache/keys"."""
    leaves: list = []

    def collect(name, tree):
        if tree is None:
            return
        if "dtype" in tree and "shape" in tree:
            leaves.append((name, tree))
            return
        ((kind, children),) = tree.items()
        for key, child in children.items() if kind == "dict" else enumerate(children):
            collect(f"{name}/{key}", child)

    for name, tree in trees:
        collect(name, tree)
    return leaves


def size_variables(trees: list[tuple[str, Any]]) -> list[str]:
    """Returns the names of the symbolic sizes in descriptions of trees, in the order of their first
    occurrence. `trees` is a list [(name, description)] with descriptions from the function
    `described`."""
    text = " ".join(str(n) for _, leaf in described_leaves(trees) for n in leaf["shape"])
    return [
        name for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text)) if name not in _FUNCTIONS
    ]


def _name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
