"""Wrappers for leaves of a tree that JAX must not trace, such as the functions in an Equinox model."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
    """Stores a leaf, such as a function, in the tree structure (treedef) of a pytree, so that JAX
    does not trace it.

    A jitted function with a `Static` in its arguments is traced again for each new value of the
    `Static`.

    Two `Static`s are equal if their values are `alike`: `Static(1)`, `Static(1.0)` and
    `Static(True)` are unequal, and so are `Static((0.0,))` and `Static((-0.0,))`.
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and alike(self.value, other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value) if isinstance(self.value, numbers.Number) else self.value)


def alike(a: Any, b: Any) -> bool:
    """Whether a program that was traced for the Python value `a` is also the program for `b`.

    Python's `==` is too coarse for that: 1, True and 1.0 are equal, and so are 0.0 and -0.0, also
    inside containers and dataclasses, but a function may branch on the type, divide by -0.0, or
    return another dtype. Values that are alike have equal types, and their numbers are written
    alike. A class with a method `_alike(other)` decides for itself.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if hasattr(type(a), "_alike"):
        return a._alike(b)
    if isinstance(a, numbers.Number):
        return repr(a) == repr(b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, (set, frozenset)):
        return a == b and all(any(alike(x, y) for y in b) for x in a)
    if isinstance(a, Mapping):
        return alike(tuple(a.items()), tuple(b.items()))
    if isinstance(a, (slice, range)):
        return alike((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return bool(a == b) and alike_fields(a, b)


def alike_fields(a: Any, b: Any) -> bool:
    """Whether the fields of two dataclasses of one type that `==` compares are `alike`. True for
    other objects."""
    if not dataclasses.is_dataclass(a):
        return True
    names = [field.name for field in dataclasses.fields(a) if field.compare]
    return all(alike(getattr(a, name), getattr(b, name)) for name in names)


class Structure:
    """The structure of a tree whose leaves that are not arrays are part of it, as the key of a
    traced program.

    Two structures are equal if their static leaves, keys and auxiliary data are `alike`. JAX
    compares structures with `==`, so {1: x} and {True: x} have equal structures for JAX.

    Raises:
        TypeError: a leaf is neither an array nor hashable.
    """

    def __init__(self, tree: Any):
        boxes = jax.tree.map_with_path(lambda path, x: 0 if is_array(x) else _box(path, x), tree)
        self._structure = jax.tree.structure(boxes)
        self._nodes = _nodes(self._structure)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Structure)
            and self._structure == other._structure
            and alike(self._nodes, other._nodes)
        )

    def __hash__(self) -> int:
        return hash(self._structure)


def _nodes(structure: Any) -> tuple:
    return structure.node_data(), tuple(map(_nodes, structure.children()))


def boxed(tree: Any) -> Any:
    """Wraps leaves of a tree, such as functions, in `Static`s, so that JAX does not trace them.

    Three kinds of leaves are wrapped in a `Static`: bools; leaves that are neither arrays nor
    numbers, such as functions; and Python numbers in attributes of objects, such as the options of
    an Equinox module.

    Raises:
        TypeError: a leaf that must be wrapped in a `Static` is not hashable.
    """
    return jax.tree.map_with_path(lambda path, x: x if _traced(path, x) else _box(path, x), tree)


def results_boxed(tree: Any, arguments: Any = ()) -> Any:
    """Wraps each leaf of a tree of function results in a `Static` if the leaf is neither an array
    nor a number.

    A Python number is wrapped in a `Static` only if it is an option of a returned object, such as
    the attribute `rate` of an Equinox module, and the function did not change it. The attribute
    `rate` counts as unchanged if the tree `arguments` (the arguments of the function) contains a
    `Static` with the same number in an attribute `rate`. JAX does not convert a number in a
    `Static` to an array, so an unchanged option stays a Python number.
    """
    given = {
        (_field(path), x)
        for path, x in jax.tree.leaves_with_path(arguments, is_leaf=_static)
        if _static(x)
    }

    def box(path: tuple, x: Any) -> Any:
        if is_array(x) or (
            _number(x) and (not _inside(path) or (_field(path), Static(x)) not in given)
        ):
            return x
        return _box(path, x)

    return jax.tree.map_with_path(box, tree)


def unboxed(tree: Any) -> Any:
    """Replaces the `Static`s in a tree by the leaves that they wrap."""
    return jax.tree.map(lambda x: x.value if _static(x) else x, tree, is_leaf=_static)


def statics(tree: Any) -> list:
    """Returns the (path, value) of each `Static` in a tree."""
    return [
        (jax.tree_util.keystr(path), x.value)
        for path, x in jax.tree.leaves_with_path(tree, is_leaf=_static)
        if _static(x)
    ]


def is_array(x: Any) -> bool:
    """Whether a leaf has a shape and a dtype, like a JAX array, a NumPy array or a
    `jax.ShapeDtypeStruct`."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def array_leaves(
    tree: Any, wanted: Callable[[Any], bool] = is_array
) -> tuple[list, Callable[[Iterable], Any]]:
    """Returns a list of the leaves for which `wanted(leaf)` is true, and a function that rebuilds
    the tree from a list.

    Leaves for which `wanted(leaf)` is false, such as bools, strings and functions, stay Python
    values, so that a traced function can branch on them.
    """
    leaves, structure = jax.tree.flatten(tree)
    where = [i for i, leaf in enumerate(leaves) if wanted(leaf)]

    def rebuild(arrays: Iterable) -> Any:
        filled = list(leaves)
        for i, array in zip(where, arrays):
            filled[i] = array
        return jax.tree.unflatten(structure, filled)

    return [leaves[i] for i in where], rebuild


def _static(x: Any) -> bool:
    return isinstance(x, Static)


def _number(x: Any) -> bool:
    return isinstance(x, (int, float, complex))


def _traced(path: tuple, x: Any) -> bool:
    return is_array(x) or (_number(x) and not isinstance(x, bool) and not _inside(path))


def _inside(path: tuple) -> bool:
    """Whether the key path of a leaf contains an attribute of an object (a `GetAttrKey`), such as
    `.rate`."""
    return any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)


def _field(path: tuple) -> tuple:
    """Returns the part of a key path from its last attribute (`GetAttrKey`) on, such as `.x[0]` of
    `.a.x[0]`.

    If the key path contains no `GetAttrKey`, the complete key path is returned.
    """
    return path[
        max(
            (i for i, key in enumerate(path) if isinstance(key, jax.tree_util.GetAttrKey)),
            default=0,
        ) :
    ]


def _box(path: tuple, x: Any) -> Static:
    return static(x, jax.tree_util.keystr(path) or "the result")


def static(x: Any, name: str) -> Static:
    """Wraps the value called `name` in a `Static`. Raises a TypeError if the value is not hashable."""
    try:
        hash(x)
    except TypeError:
        raise TypeError(
            f"{name} is a {type(x).__name__}, which is neither an array nor hashable"
        ) from None
    return Static(x)
