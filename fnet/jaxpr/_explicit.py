"""The shardings in the types of arrays on a mesh with explicit axes
(`jax.sharding.AxisType.Explicit`).

There, JAX infers the sharding of each result, and asks for an `out_sharding` where it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def typed(aval: Any) -> Any:
    """Returns the sharding that an array's type states, also if the array is replicated. Returns
    None if the array is not on a mesh with explicit axes; JAX accepts None as an `out_sharding`."""
    sharding = getattr(aval, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    return sharding if mesh is not None and AxisType.Explicit in mesh.axis_types else None


def split_over(aval: Any) -> tuple:
    """Returns for each axis of an array the mesh axes over which its type splits it, or None."""
    # A PartitionSpec with unreduced axes cannot be iterated.
    return tuple(getattr(getattr(aval, "sharding", None), "spec", P()).partitions)


def explicit(aval: Any) -> bool:
    """Whether the type of an array splits it, or states that a sum over devices is to be done."""
    spec = getattr(getattr(aval, "sharding", None), "spec", P())
    return bool(spec.unreduced or spec.reduced) or any(axis is not None for axis in spec.partitions)


def without_shardings(eqn: Any) -> dict[str, None]:
    """Returns None for each parameter of an equation that states the sharding of its result, which
    automatic axes do not accept."""
    return dict.fromkeys(eqn.params.keys() & {"sharding", "out_sharding"})


def automatic(f: Callable, shardings: Any) -> Callable:
    """Returns a function that computes `f` with automatic axes: XLA selects the shardings inside of
    `f`.

    Args:
        f: a function of arrays. Arrays that are placed on the mesh must be arguments of `f`, not
            captured in its closure.
        shardings: the sharding of each result, as returned by `typed`, or one for all of them. If
            the shardings are None, `f` is returned.
    """
    meshes = [sharding.mesh for sharding in jax.tree.leaves(shardings)]
    if not meshes:
        return f
    return jax.jit(jax.sharding.auto_axes(f, axes=meshes[0].explicit_axes, out_sharding=shardings))
