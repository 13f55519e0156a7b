"""Contains functions with which layers support meshes with explicit axes
(`jax.sharding.AxisType.Explicit`).

On a mesh with explicit axes, the sharding of an array is a part of the array's type. JAX derives
the sharding of most results from the operands. Where JAX requires an `out_sharding` (gathers,
reshapes, random numbers, constants), layers state that the result is sharded like the input of the
layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fnet.jaxpr import typed


def like(x: Any, *axes: int | None) -> NamedSharding | None:
    """Returns a sharding in which axis i is sharded like axis `axes[i]` of `x`, or not sharded if
    `axes[i]` is None.

    If an array with this sharding has more than `len(axes)` axes, its other axes are not sharded.
    If `x` is not on a mesh with explicit axes, the result is None, which JAX accepts as an
    unspecified sharding.
    """
    sharding = typed(jax.typeof(x))
    if sharding is None:
        return None
    return NamedSharding(
        sharding.mesh, P(*(None if axis is None else sharding.spec[axis] for axis in axes))
    )


def resharded(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Reshards `x` to `sharding`. Returns `x` unchanged if `sharding` is None."""
    return x if sharding is None else jax.sharding.reshard(x, sharding)


def by_rows(f: Callable, x: jax.Array, *shared: jax.Array) -> jax.Array:
    """Computes `f(x, *shared)`, whose row i depends only on row i of `x`. If the first axis of `x`
    is sharded over explicit axes, each device computes its own rows."""
    rows = like(x, 0)
    if rows is None or rows.spec[0] is None:
        return f(x, *shared)
    whole = NamedSharding(rows.mesh, P())
    mapped = jax.shard_map(
        f, mesh=rows.mesh, in_specs=(rows.spec, *(P(),) * len(shared)), out_specs=rows.spec
    )
    return jax.jit(mapped)(resharded(x, rows), *(resharded(array, whole) for array in shared))
