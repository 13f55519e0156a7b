"""Trees as names and as JSON data, so that a reader needs no class of the writer."""

from __future__ import annotations

from typing import Any

import jax

from fnet.jaxpr import stable_size


def named_leaves(root: str, tree: Any) -> list[tuple[str, Any]]:
    """[(path, leaf)], such as "params/block1/conv2/kernel"."""
    return [("/".join([root, *map(_name, path)]), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def described(tree: Any) -> Any:
    """A tree of arrays as {"dtype", "shape"}, {"dict": {...}}, {"list": [...]}, {"tuple": [...]} or None.

    Named tuples and other registered classes are described as dicts of their fields.
    """
    if tree is None:
        return None
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return {"dtype": str(tree.dtype), "shape": list(map(stable_size, tree.shape))}
    children = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return {"list" if isinstance(tree, list) else "tuple": [described(child) for child in tree]}
    return {"dict": {_name(path[0]): described(child) for path, child in children}}


def _name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
