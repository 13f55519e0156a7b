"""The structure of a tree as JSON, so that a checkpoint can be read without the code that created
the tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from fnet.layers._spec import put

_LEAF = 1  # None is null; a dict {"dict": {...}}, a list {"list": [...]}, a tuple {"tuple": [...]}


def describe(tree: Any) -> Any:
    """Returns the structure of `tree`. Named tuples, dataclasses and other containers that are not
    a dict, list or tuple become dicts of their fields."""
    if tree is None:
        return None
    if jax.tree_util.all_leaves([tree]):
        return _LEAF
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [describe(child) for child in tree]}
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    return {"dict": {_name(path): describe(child) for path, child in children}}


def _name(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


def build(structure: Any, leaves: Mapping[str, Any], path: str = "") -> Any:
    """Builds the tree that `structure` describes. `leaves` is a dict of the leaves of the tree,
    with their paths as keys.

    Raises:
      ValueError: `structure` does not have the format that `describe` returns.
      KeyError: a leaf is missing.
    """
    if structure is None:
        return None
    if structure == _LEAF:
        return leaves[path]
    if isinstance(structure, dict) and len(structure) == 1:
        ((kind, children),) = structure.items()
        below = lambda name: f"{path}/{name}" if path else str(name)
        if kind == "dict" and isinstance(children, dict):
            return {name: build(child, leaves, below(name)) for name, child in children.items()}
        if kind in ("list", "tuple") and isinstance(children, list):
            made = [build(child, leaves, below(number)) for number, child in enumerate(children)]
            return made if kind == "list" else tuple(made)
    raise ValueError("the structure in the manifest is not one of a tree")


def nested(leaves: Mapping[str, Any]) -> Any:
    """Converts a dict {path: leaf} to nested dicts, for checkpoints whose manifest.json does not
    describe the tree."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if not path:
            return leaf
        put(tree, path.split("/"), leaf)
    return tree
