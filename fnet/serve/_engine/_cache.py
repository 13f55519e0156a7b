"""The cache of a model as a tree of arrays. Which axis is that of the rows and which that of the
time is read off the shapes, so any model whose `cache` follows the batch and the length will do.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fnet.models.generation import _generate


class Leaf(NamedTuple):
    """An array of the cache.

    Attributes:
        rows: the axis of the rows.
        time: the axis of the tokens, or None.
        counts: whether it is the number of cached tokens of each row. An array without time that is
            no count is the carry of a recurrent layer: it is known only where a piece of the prompt
            ends.
    """

    rows: int
    time: int | None
    counts: bool


class Layout(NamedTuple):
    """The arrays of a cache, in the order of the leaves.

    Attributes:
        leaves: a `Leaf` for each.
        fixed_bytes: the bytes of a row that do not depend on its length.
        token_bytes: the bytes of each token of a row.
    """

    leaves: tuple[Leaf, ...]
    fixed_bytes: int
    token_bytes: int

    @property
    def recurrent(self) -> bool:
        """Whether some layer has a carry."""
        return any(leaf.time is None and not leaf.counts for leaf in self.leaves)

    def row_bytes(self, length: int) -> int:
        return self.fixed_bytes + length * self.token_bytes


def layout(model: Any, params: Any) -> Layout:
    """Returns the layout of a model's cache.

    Raises:
        TypeError: the model is no layer with a cache, or an array of the cache does not have one
            axis for the rows.
        ValueError: no layer of the model has a cache.
    """
    if not hasattr(model, "cache"):
        raise TypeError(
            f"Engine: expected a model with a cache, such as GPT or Decoder; got {model!r}"
        )
    few, more, longer = (_shapes(model, params, *size) for size in ((2, 1), (3, 1), (2, 2)))
    leaves, fixed, token = [], 0, 0
    for (path, x), (_, wide), (_, long) in zip(few, more, longer):
        rows = [axis for axis, (a, b) in enumerate(zip(x.shape, wide.shape)) if a != b]
        time = [axis for axis, (a, b) in enumerate(zip(x.shape, long.shape)) if a != b]
        if len(rows) != 1 or len(time) > 1:
            raise TypeError(
                f"Engine: the cached array {jax.tree_util.keystr(path)} {x.shape} needs one axis "
                "for the rows, and at most one for the tokens"
            )
        whole = jnp.issubdtype(x.dtype, jnp.integer)
        counts = not time and whole and jax.tree_util.keystr(path[-1:], simple=True) == "index"
        leaves.append(Leaf(rows[0], time[0] if time else None, counts))
        size = math.prod(x.shape) // x.shape[rows[0]] * x.dtype.itemsize
        if time:
            token += size // x.shape[time[0]]
        else:
            fixed += size
    return Layout(tuple(leaves), fixed, token)


def _shapes(model: Any, params: Any, rows: int, length: int) -> list:
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    cache = jax.eval_shape(lambda params: _generate.empty_cache(model, params, tokens), params)
    return jax.tree_util.tree_leaves_with_path(cache)


@functools.partial(jax.jit, static_argnames=("model", "rows", "length"))
def empty(params: Any, *, model: Any, rows: int, length: int) -> Any:
    """Returns an empty cache."""
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return _generate.empty_cache(model, params, tokens)


@functools.partial(jax.jit, static_argnames="layout", donate_argnums=0)
def put(table: Any, row: Any, slot: jax.Array, *, layout: Layout) -> Any:
    """Writes a cache of one row into a slot of the table. Every element of the slot is overwritten,
    so nothing that was there before can be read, not even a NaN behind a weight of 0."""

    def write(x: jax.Array, y: jax.Array, leaf: Leaf) -> jax.Array:
        if leaf.time is not None:
            y = _lengthened(y, leaf.time, x.shape[leaf.time])
        start = [jnp.zeros_like(slot)] * x.ndim
        start[leaf.rows] = slot
        return lax.dynamic_update_slice(x, y, start)

    return _map(write, layout, table, row)


@functools.partial(jax.jit, static_argnames=("layout", "length"))
def taken(table: Any, slots: jax.Array, *, length: int, layout: Layout) -> Any:
    """Returns a table of the rows in `slots`, with room for `length` tokens."""

    def take(x: jax.Array, leaf: Leaf) -> jax.Array:
        x = jnp.take(x, slots, leaf.rows)
        if leaf.time is None:
            return x
        kept = min(length, x.shape[leaf.time])
        return _lengthened(lax.slice_in_dim(x, 0, kept, axis=leaf.time), leaf.time, length)

    return _map(take, layout, table)


@functools.partial(jax.jit, static_argnames=("layout", "size"))
def block(row: Any, start: jax.Array, *, size: int, layout: Layout) -> tuple[list, list]:
    """Returns (the arrays of `size` tokens from `start` on, the carries at the end of the row)."""
    leaves = jax.tree.leaves(row)
    tokens = [
        lax.dynamic_slice_in_dim(x, start, size, leaf.time)
        for x, leaf in zip(leaves, layout.leaves)
        if leaf.time is not None
    ]
    return tokens, [
        x for x, leaf in zip(leaves, layout.leaves) if leaf.time is None and not leaf.counts
    ]


@functools.partial(jax.jit, static_argnames="layout", donate_argnums=0)
def restored(row: Any, tokens: list, start: jax.Array, *, layout: Layout) -> Any:
    """Writes the arrays of a block into a row, from the token `start` on."""
    rest = iter(tokens)

    def write(x: jax.Array, leaf: Leaf) -> jax.Array:
        if leaf.time is None:
            return x
        return lax.dynamic_update_slice_in_dim(x, next(rest), start, leaf.time)

    return _map(write, layout, row)


@functools.partial(jax.jit, static_argnames="layout", donate_argnums=0)
def resumed(row: Any, carries: list, count: jax.Array, *, layout: Layout) -> Any:
    """Sets the counts of a row to `count` tokens, and the carries to those at that point."""
    rest = iter(carries)

    def write(x: jax.Array, leaf: Leaf) -> jax.Array:
        if leaf.counts:
            return jnp.full_like(x, count)
        return x if leaf.time is not None else next(rest)

    return _map(write, layout, row)


def _map(function: Any, layout: Layout, *trees: Any) -> Any:
    structure = jax.tree.structure(trees[0])
    leaves = zip(*map(jax.tree.leaves, trees), layout.leaves)
    return jax.tree.unflatten(structure, [function(*each) for each in leaves])


def _lengthened(x: jax.Array, axis: int, length: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)
