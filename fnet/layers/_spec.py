"""What an array of a model will be, and how it is made from a key: ParamSpec, Spec and the key derivation."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fnet.layers import _draws


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What one array of a model will be: the leaf of a spec tree.

    It is no pytree node, so `jax.tree.map` over a spec tree sees it as a leaf, and it has `shape` and `dtype`, so
    that `jax.eval_shape` and friends take it where they take a `jax.ShapeDtypeStruct`.

    Attributes:
        shape: the array's shape.
        dtype: its dtype.
        init: `init(key, shape, dtype)`, as in `jax.nn.initializers`.
        axes: one logical name (or None) for each axis, a hint for sharding; None: no hints.
    """

    shape: tuple[int, ...]
    dtype: Any
    init: Callable[..., jax.Array]
    axes: tuple[str | None, ...] | None = None

    def make(self, keys, path, making):
        """The array. `keys[i]` is the key folded along `path[:i]`."""
        # Compiled by itself, an initializer rounds as it does inside a larger program: init == jit(init), to the bit.
        if making.staged:
            return jax.jit(self.init, static_argnums=(1, 2))(keys[-1], self.shape, self.dtype)
        return _draws.compiled(self.init, keys[-1], self.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class Copies(ParamSpec):
    """`shape[0]` copies of `each`, made as children "0", "1", ... of the place `depth` names above the array.

    Hence a stacked layer's parameters are its unrolled twin's, stacked.
    """

    each: ParamSpec = None
    depth: int = 0

    def make(self, keys, path, making):
        at = len(path) - self.depth

        def one(number):
            inner = [jax.random.fold_in(keys[at], number)]
            for name in path[at:]:
                inner.append(fold(inner[-1], name))
            return self.each.make(inner, path[at:], making._replace(wholes={}))

        return jax.vmap(one)(numbers(self.shape[0]))


@dataclasses.dataclass(frozen=True)
class Part(ParamSpec):
    """One leaf of a tree that `whole(key)` makes at once, at the place `depth` names above the leaf."""

    whole: Callable = None
    depth: int = 0

    def make(self, keys, path, making):
        at, wholes = len(path) - self.depth, making.wholes
        place = (self.whole, path[:at])
        if place not in wholes:
            wholes[place] = self.whole(keys[at])
        return get(wholes[place], path[at:])


class Making(NamedTuple):
    """What lives for one `init`: whether it is part of a larger program, and what each `Part.whole` made."""

    staged: bool
    wholes: dict


class Spec(NamedTuple):
    """What a model's `init` will make: two trees of `ParamSpec`."""

    params: dict
    state: dict


def digest(name: str) -> np.uint32:
    """32 bits of a name, the same in every process (Python's own hash is not)."""
    return np.uint32(zlib.crc32(name.encode()))


def numbers(count: int) -> np.ndarray:
    """The digests of "0", "1", ..., one for each of `count` copies."""    # [count]
    return np.array([digest(str(i)) for i in range(count)], np.uint32)


def fold(key, name: str):
    """The key of the child `name` of the place that `key` belongs to."""
    return jax.random.fold_in(key, digest(name))


def make(tree: Mapping, key) -> dict:
    """The arrays of a tree of `ParamSpec`s, every one from the key folded along its path."""
    making = Making(isinstance(key, jax.core.Tracer), {})

    def walk(node, keys, path):
        if isinstance(node, Mapping):
            return {
                name: walk(child, [*keys, fold(keys[-1], name)], (*path, name))
                for name, child in node.items()
            }
        return node.make(keys, path, making)

    return walk(tree, [key], ())


def copies(tree: Mapping, count: int) -> dict:
    """The spec tree of `count` stacked copies of what `tree` describes."""

    def walk(node, depth):
        if isinstance(node, Mapping):
            return {name: walk(child, depth + 1) for name, child in node.items()}
        axes = None if node.axes is None else ("layers", *node.axes)
        return Copies((count, *node.shape), node.dtype, node.init, axes, node, depth)

    return walk(tree, 0)


def get(tree, path):
    """The node at `path`, or None where there is none."""
    for name in path:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return tree


def leaves(tree, path=()):
    """(path, leaf) of every leaf of a tree of mappings, depth first."""
    if isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from leaves(child, (*path, str(name)))
    else:
        yield path, tree


def partition(tree):
    """The arrays among a tree's leaves, and the function that puts such arrays back.

    What is no array (None, a bool, a string, a function) stays Python's: layers may branch on it.
    """
    values, structure = jax.tree.flatten(tree)
    where = [i for i, value in enumerate(values) if hasattr(value, "shape") and hasattr(value, "dtype")]
    arrays = [values[i] for i in where]

    def rebuild(arrays):
        full = list(values)
        for i, array in zip(where, arrays):
            full[i] = array
        return jax.tree.unflatten(structure, full)

    return arrays, rebuild
