"""Several LoRA adapters of the same parameters in one batch: each row takes its own by its number."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.compress import LowRank
from fnet.jaxpr import ImplicitArray, implicit_dot, is_implicit


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["base", "a", "b", "scale", "rows"],
    meta_fields=["inputs"],
)
@dataclasses.dataclass(frozen=True)
class Adapted(ImplicitArray):
    """A parameter with a low-rank change of its own for each row of the batch:
    `base + scale[rows[i]] * a[rows[i]] @ b[rows[i]]` for row i.

    Attributes:
        base: the parameter [*lead, *in, out] without a change, an array or an implicit array.
        a, b: [*lead, changes, *in, rank] and [*lead, changes, rank, out]. Change 0 is none.
        scale: [*lead, changes].
        rows: [batch], the number of the change of each row, or None before the batch is known.
        inputs: the number of input axes of `base`.
    """

    base: Any
    a: Any
    b: Any
    scale: Any
    rows: Any
    inputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    def materialize(self) -> jax.Array:
        raise ValueError(
            f"Engine: a parameter {self.shape} with several adapters can be read in products and "
            "lookups with one row of the batch along the first axis alone, but the model reads it in "
            "another way. Serve each adapter with an engine of its own, with compress.merge(params)"
        )

    def dot(self, x: jax.Array, axes: tuple[int, ...], dot: Callable) -> Any:
        kernel, out = tuple(range(self.inputs)), (self.inputs,)
        by_rows = x.ndim > len(axes) + 1 and x.shape[0] == len(self.rows)
        if self.ndim != self.inputs + 1 or axes not in (kernel, out) or not by_rows:
            return NotImplemented
        y = implicit_dot(self.base, x, axes, dot)
        if y is NotImplemented:
            return y
        a, b, scale = self._chosen(x.dtype)
        first, second = (a, b) if axes == kernel else (b, a)
        last = (0,) if axes == kernel else (self.inputs,)
        inner = axes if axes == kernel else (1,)

        def change(x: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
            return dot(dot(x, first, inner), second, last)

        return y + _column(scale, y.ndim) * jax.vmap(change)(x, first, second)

    def lookup(self, take: Callable) -> Any:
        if self.ndim != 2:
            return NotImplemented
        base = self.base.lookup(take) if is_implicit(self.base) else take(self.base)
        if base is NotImplemented or base.ndim < 3 or base.shape[0] != len(self.rows):
            return NotImplemented
        changes, size, rank = self.a.shape
        wide = take(self.a.swapaxes(0, 1).reshape(size, changes * rank))
        wide = wide.reshape(*wide.shape[:-1], changes, rank)
        _, b, scale = self._chosen(base.dtype)
        inner = jax.vmap(lambda x, row: jnp.take(x, row, -2))(wide, self.rows)
        change = jax.vmap(jnp.matmul)(inner.astype(base.dtype), b)
        return base + _column(scale, base.ndim) * change

    def _chosen(self, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The change of each row."""
        a, b, scale = (
            jnp.take(x, self.rows, 0).astype(dtype) for x in (self.a, self.b, self.scale)
        )
        return a, b, scale


def _column(x: jax.Array, ndim: int) -> jax.Array:
    return x.reshape(-1, *(1,) * (ndim - 1))


def together(params: Any, adapters: Mapping[str, Any]) -> Any:
    """Returns the parameters with an `Adapted` wherever an adapter changes one. Change i + 1 is that
    of the i-th adapter.

    Raises:
        ValueError: an adapter is of another structure, changes a parameter otherwise than by
            `compress.lora`, or belongs to other base parameters.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_implicit)
    columns = [_leaves(name, tree, structure) for name, tree in adapters.items()]
    leaves = []
    for (path, leaf), *given in zip(flat, *columns):
        place = jax.tree_util.keystr(path, simple=True, separator="/")
        changes = [
            _change(f"Engine: adapter {name!r}: {place}", leaf, each)
            for name, each in zip(adapters, given)
        ]
        leaves.append(_adapted(leaf, changes) if any(changes) else leaf)
    return jax.tree.unflatten(structure, leaves)


def _leaves(name: str, tree: Any, structure: Any) -> list:
    leaves, found = jax.tree.flatten(tree, is_leaf=is_implicit)
    if found != structure:
        raise ValueError(
            f"Engine: adapter {name!r} needs the structure of params, with LowRank leaves, as "
            "compress.lora and pretrained.load_adapter return it"
        )
    return leaves


def _change(what: str, leaf: Any, given: Any) -> LowRank | None:
    if isinstance(given, LowRank) and not isinstance(leaf, LowRank):
        if not _equal(given.base, leaf):
            raise ValueError(
                f"{what} has another base than params; adapt the params that are served"
            )
        return given
    if not _equal(given, leaf):
        raise ValueError(
            f"{what} differs from params, and is no LowRank; an adapter may change parameters by "
            "compress.lora alone. Serve fully trained parameters with an engine of their own"
        )
    return None


def _equal(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if jax.tree.structure(x) != jax.tree.structure(y):
        return False
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y))
    return all(
        a is b or (a.shape == b.shape and a.dtype == b.dtype and bool(jnp.array_equal(a, b)))
        for a, b in pairs
    )


def _adapted(base: Any, changes: list[LowRank | None]) -> Adapted:
    """Stacks the changes of one parameter, padded with zeros to the largest rank."""
    [first, *_] = given = [change for change in changes if change is not None]
    rank, lead = max(change.a.shape[-1] for change in given), first.ndim - first.inputs - 1
    wide = [None, *changes]

    def padded(change: LowRank | None) -> tuple[np.ndarray, np.ndarray]:
        a, b = (first.a, first.b) if change is None else (change.a, change.b)
        if (missing := rank - a.shape[-1]) > 0:
            a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, missing)])
            b = jnp.pad(b, [(0, 0)] * (b.ndim - 2) + [(0, missing), (0, 0)])
        return (jnp.zeros_like(a), jnp.zeros_like(b)) if change is None else (a, b)

    a, b = (jnp.stack(each, lead) for each in zip(*map(padded, wide)))
    scales = jnp.asarray([0.0 if change is None else change.scale for change in wide], jnp.float32)
    scale = jnp.broadcast_to(scales, (*first.shape[:lead], len(wide)))
    return Adapted(base, a, b, scale, None, first.inputs)


def for_rows(params: Any, rows: jax.Array) -> Any:
    """Returns the parameters for a batch in which row i has the change `rows[i]`."""

    def chosen(leaf: Any) -> Any:
        return dataclasses.replace(leaf, rows=rows) if isinstance(leaf, Adapted) else leaf

    return jax.tree.map(chosen, params, is_leaf=is_implicit)
