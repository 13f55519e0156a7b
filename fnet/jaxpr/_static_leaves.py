"""Wrappers for leaves of a tree that JAX must not trace, such as the functions in an Equinox model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """Stores a leaf, such as a function, in the tree structure (treedef) of a pytree, so that JAX does not trace it.

    A jitted function with a `Static` in its arguments is traced again for each new value of the `Static`.

    `Static(1)`, `Static(1.0)` and `Static(True)` are unequal, and so are `Static(0.0)` and `Static(-0.0)`.
    """

    value: Any

    def __eq__(self, other):
        if not _static(other) or type(self.value) is not type(other.value):
            return False
        return repr(self.value) == repr(other.value) if _number(self.value) else self.value == other.value

    def __hash__(self):
        return hash(repr(self.value) if _number(self.value) else self.value)


def boxed(tree: Any) -> Any:
    """Wraps leaves of a tree, such as functions, in `Static`s, so that JAX does not trace them.

    Three kinds of leaves are wrapped in a `Static`: bools; leaves that are neither arrays nor numbers, such as
    functions; and Python numbers in attributes of objects, such as the options of an Equinox module.

    Raises:
        TypeError: a leaf that must be wrapped in a `Static` is not hashable.
    """
    return jax.tree.map_with_path(lambda path, x: x if _traced(path, x) else _box(path, x), tree)


def results_boxed(tree: Any, arguments: Any = ()) -> Any:
    """Wraps each leaf of a tree of function results in a `Static` if the leaf is neither an array nor a number.

    A Python number is wrapped in a `Static` only if it is an option of a returned object, such as the attribute `rate`
    of an Equinox module, and the function did not change it. The attribute `rate` counts as unchanged if the tree
    `arguments` (the arguments of the function) contains a `Static` with the same number in an attribute `rate`. JAX
    does not convert a number in a `Static` to an array, so an unchanged option stays a Python number.
    """
    given = {(_field(path), x) for path, x in jax.tree.leaves_with_path(arguments, is_leaf=_static) if _static(x)}

    def box(path, x):
        if is_array(x) or (_number(x) and (not _inside(path) or (_field(path), Static(x)) not in given)):
            return x
        return _box(path, x)

    return jax.tree.map_with_path(box, tree)


def unboxed(tree: Any) -> Any:
    """Replaces the `Static`s in a tree by the leaves that they wrap."""
    return jax.tree.map(lambda x: x.value if _static(x) else x, tree, is_leaf=_static)


def statics(tree: Any) -> list:
    """Returns the (path, value) of each `Static` in a tree."""
    return [(jax.tree_util.keystr(path), x.value) for path, x in jax.tree.leaves_with_path(tree, is_leaf=_static)
            if _static(x)]


def is_array(x: Any) -> bool:
    """Whether a leaf has a shape and a dtype, like a JAX array, a NumPy array or a `jax.ShapeDtypeStruct`."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def array_leaves(tree: Any, wanted: Callable[[Any], bool] = is_array) -> tuple[list, Callable[[Iterable], Any]]:
    """Returns a list of the leaves for which `wanted(leaf)` is true, and a function that rebuilds the tree from a list.

    Leaves for which `wanted(leaf)` is false, such as bools, strings and functions, stay Python values, so that a traced
    function can branch on them.
    """
    leaves, structure = jax.tree.flatten(tree)
    where = [i for i, leaf in enumerate(leaves) if wanted(leaf)]

    def rebuild(arrays):
        filled = list(leaves)
        for i, array in zip(where, arrays):
            filled[i] = array
        return jax.tree.unflatten(structure, filled)

    return [leaves[i] for i in where], rebuild


def _static(x) -> bool:
    return isinstance(x, Static)


def _number(x) -> bool:
    return isinstance(x, (int, float, complex))


def _traced(path, x) -> bool:
    return is_array(x) or (_number(x) and not isinstance(x, bool) and not _inside(path))


def _inside(path) -> bool:
    """Whether the key path of a leaf contains an attribute of an object (a `GetAttrKey`), such as `.rate`."""
    return any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)


def _field(path) -> tuple:
    """Returns the part of a key path from its last attribute (`GetAttrKey`) on, such as `.x[0]` of `.a.x[0]`.

    If the key path contains no `GetAttrKey`, the complete key path is returned.
    """
    return path[max((i for i, key in enumerate(path) if isinstance(key, jax.tree_util.GetAttrKey)), default=0):]


def _box(path, x):
    try:
        hash(x)
    except TypeError:
        where = jax.tree_util.keystr(path) or "the result"
        raise TypeError(f"{where} is a {type(x).__name__}, which is neither an array nor hashable") from None
    return Static(x)
