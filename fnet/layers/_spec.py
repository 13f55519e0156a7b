"""Specs of a model's arrays (ParamSpec, Spec), and how arrays are created from a key."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fnet.layers import _draws


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """The description of one array of a model: a leaf of a spec tree.

    It is no pytree node, so `jax.tree.map` over a spec tree treats it as a leaf. Since it has a
    `shape` and a `dtype`, `jax.eval_shape` and similar functions accept it in place of a
    `jax.ShapeDtypeStruct`.

    >>> from fnet import layers as nn
    >>> spec = nn.Dense(3).spec(jax.ShapeDtypeStruct((2, 4), "float32"))
    >>> spec.params["kernel"].shape
    (4, 3)

    Attributes:
        shape: the array's shape.
        dtype: the array's dtype.
        init: the initializer, `init(key, shape, dtype)` as in `jax.nn.initializers`.
        axes: a logical name or None for each axis, as hints for sharding. None: no hints.
        roles: a word for each axis, which says what the axis is to an optimizer. "layers" is an
            axis of separate layers, such as the copies of a `Stack` or the experts of a mixture;
            "in" is summed over; "out" is an output; "4*out" is an axis of outputs in four groups,
            each with inputs of its own; "logits" are the outputs of the last layer. Any other word,
            such as "vocab", is none of these, and the word None is not declared. None instead of a
            tuple: nothing is known, not even whether the array contains several layers.
        layer: the class of the layer that uses the array, or None if it is unknown. Two specs that
            differ only in `layer` are equal.
    """

    shape: tuple[int, ...]
    dtype: Any
    init: Callable[..., jax.Array]
    axes: tuple[str | None, ...] | None = None
    roles: tuple[str | None, ...] | None = dataclasses.field(default=None, kw_only=True)
    layer: type | None = dataclasses.field(default=None, compare=False, repr=False, kw_only=True)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def make(self, keys: Any, path: tuple[str, ...], making: Making) -> jax.Array:
        """Creates the array at `path`. `keys[i]` is the random key of the node at `path[:i]`; the
        last element of `keys` is the random key of the array itself."""
        # A compiled initializer rounds in the same way inside a larger program: init == jit(init),
        # bit for bit.
        if making.staged:
            return jax.jit(self.init, static_argnums=(1, 2))(keys[-1], self.shape, self.dtype)
        return _draws.compiled(self.init, keys[-1], self.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class Copies(ParamSpec):
    """The spec of an array that stacks the arrays of several copies of a layer along the first
    axis.

    `each` is the `ParamSpec` of the unstacked array, that is, of the array in a single copy of the
    layer. `depth` is the number of names in the array's path relative to the copied layer, for
    example 2 for "dense/kernel". A stacked layer with the path "blocks" has the same initial values
    as separate (unrolled) layers with the paths "blocks/0", "blocks/1", .... Therefore stacking the
    parameters of the separate layers gives the parameters of the stacked layer.
    """

    each: ParamSpec = dataclasses.field(kw_only=True)
    depth: int = 0

    def make(self, keys: Any, path: tuple, making: Any) -> Any:
        at = len(path) - self.depth

        def one(number: int) -> Any:
            inner = [jax.random.fold_in(keys[at], number)]
            for name in path[at:]:
                inner.append(fold(inner[-1], name))
            return self.each.make(inner, path[at:], making._replace(wholes={}))

        return jax.vmap(one)(numbers(self.shape[0]))


@dataclasses.dataclass(frozen=True)
class Part(ParamSpec):
    """The spec of one array of a tree. The function `whole(key)` creates all arrays of the tree in
    a single call.

    `depth` is the number of names in the array's path relative to the root of the tree that `whole`
    returns, for example 2 for "dense/kernel".
    """

    whole: Callable = dataclasses.field(kw_only=True)
    depth: int = 0

    def make(self, keys: Any, path: tuple, making: Any) -> Any:
        at, wholes = len(path) - self.depth, making.wholes
        place = (self.whole, path[:at])
        if place not in wholes:
            wholes[place] = self.whole(keys[at])
        return get(wholes[place], path[at:])


class Making(NamedTuple):
    """The data that is passed to `ParamSpec.make` for every array of a tree.

    Attributes:
        staged: whether the arrays are created while JAX traces a larger program, for example inside
            `jax.jit`.
        wholes: {(function `Part.whole`, path of the tree in the model): tree}, a cache of the trees
            that `Part.whole` has created. Each tree is created only once.
    """

    staged: bool
    wholes: dict


class Spec(NamedTuple):
    """The result of `Layer.spec`: `params` and `state`, two nested dicts of `ParamSpec`.

    >>> nn.Dense(3).spec(jnp.ones((1, 2))).params["kernel"].shape
    (2, 3)
    """

    params: dict
    state: dict


def count_parameters(tree: Any) -> int:
    """Counts the elements of all arrays of a tree.

    >>> from fnet import layers as nn
    >>> nn.count_parameters(nn.Dense(3).spec(jax.ShapeDtypeStruct((2, 4), "float32")).params)
    15

    Args:
        tree: parameters, specs (`model.spec(x).params`), or any tree whose leaves have a shape.

    Returns:
        The sum of the sizes of all leaves; an array that occurs several times counts each time.
    """
    return sum(math.prod(np.shape(leaf)) for leaf in jax.tree.leaves(tree))


def digest(name: str) -> np.uint32:
    """Returns a 32-bit hash of a name that is equal in every process (unlike Python's `hash`)."""
    return np.uint32(zlib.crc32(name.encode()))


def numbers(count: int) -> np.ndarray:
    """Returns `digest("0")`, `digest("1")`, ... as an array [count], to derive a random key for
    each layer copy."""
    return np.array([digest(str(i)) for i in range(count)], np.uint32)


def fold(key: Any, name: str) -> Any:
    """Returns the random key of the child `name` of the node whose random key is `key`."""
    return jax.random.fold_in(key, digest(name))


def make(tree: Mapping, key: Any) -> dict:
    """Creates the arrays of a tree of `ParamSpec`s. The random key of each array is derived from
    `key` and from the path of the array."""
    making = Making(isinstance(key, jax.core.Tracer), {})

    def walk(node: Any, keys: Any, path: tuple) -> Any:
        if isinstance(node, Mapping):
            return {
                name: walk(child, [*keys, fold(keys[-1], name)], (*path, name))
                for name, child in node.items()
            }
        return node.make(keys, path, making)

    return walk(tree, [key], ())


def copies(tree: Mapping, count: int) -> dict:
    """Returns the spec tree of `count` stacked copies of `tree`."""

    def walk(node: Any, depth: int) -> Any:
        if isinstance(node, Mapping):
            return {name: walk(child, depth + 1) for name, child in node.items()}
        axes = None if node.axes is None else ("layers", *node.axes)
        roles = None if node.roles is None else ("layers", *node.roles)
        return Copies(
            (count, *node.shape),
            node.dtype,
            node.init,
            axes,
            each=node,
            depth=depth,
            roles=roles,
            layer=node.layer,
        )

    return walk(tree, 0)


def get(tree: Any, path: tuple) -> Any:
    """Returns the node at `path`, or None if there is no such node."""
    for name in path:
        if not isinstance(tree, Mapping) or name not in tree:
            return None
        tree = tree[name]
    return tree


def put(tree: dict, path: tuple, value: Any) -> None:
    """Sets the leaf at a path of nested dicts, and creates the dicts above it."""
    *above, name = path
    for part in above:
        tree = tree.setdefault(part, {})
    tree[name] = value


def leaves(tree: Any, path: tuple = ()) -> Iterator:
    """Yields (path, leaf) for every leaf of a tree of mappings, depth first."""
    if isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from leaves(child, (*path, str(name)))
    else:
        yield path, tree
