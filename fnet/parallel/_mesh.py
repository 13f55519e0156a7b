"""The mesh of a plan: its axes, their lengths, and the position of each chip."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from fnet.parallel._targets import Target


def sizes(target: Target, asked: Mapping[str, int] | None) -> dict[str, int]:
    """Returns the mesh axes as {axis: length}: "slice" first, then "data", then the other axes in
    the requested order. If the argument `asked` does not contain the axis "data", the length of
    this axis is the number of devices divided by the product of the lengths of all other axes.

    Raises:
        ValueError: the lengths of the mesh axes do not match the number of devices, or an axis has
            a name that is not allowed.
    """
    if asked is not None and not isinstance(asked, Mapping):
        raise TypeError(
            f"plan: mesh must be a dict {{axis: length}}, such as {{'data': -1}}; got {asked!r}"
        )
    lengths = {name: int(n) for name, n in (asked or {"data": -1}).items()}
    open_axes = [name for name, n in lengths.items() if n == -1]
    if len(open_axes) > 1 or any(n < 1 and n != -1 for n in lengths.values()):
        raise ValueError(
            "plan: the mesh's axes must have lengths >= 1, or -1 for the remaining length of one "
            f"axis; got {lengths}"
        )
    if "data" not in lengths:
        lengths["data"] = 1 if open_axes else -1
        open_axes = open_axes or ["data"]

    fixed = math.prod(n for n in lengths.values() if n != -1)
    if "slice" not in lengths and target.groups > 1:
        # An axis for the slices, if the lengths leave room for it.
        if open_axes or fixed * target.groups == target.count:
            lengths["slice"] = target.groups
            fixed *= target.groups
    if open_axes:
        lengths[open_axes[0]] = max(1, target.count // fixed)
    needed = math.prod(lengths.values())
    if needed != target.count:
        raise ValueError(
            f"plan: mesh {lengths} needs {needed} devices; {target.name!r} has {target.count}"
        )
    first = [name for name in ("slice", "data") if name in lengths]
    rest = [name for name in lengths if name not in first]
    return {name: lengths[name] for name in (*first, *rest)}


def make(target: Target, axes: Mapping[str, int]) -> Mesh | AbstractMesh:
    """Creates the mesh, with axes of type Auto. The mesh is an `AbstractMesh` if there are no
    devices to compile
    for."""
    names, shape, types = tuple(axes), tuple(axes.values()), (AxisType.Auto,) * len(axes)
    if target.devices is None:
        return AbstractMesh(shape, names, axis_types=types)
    if target.chip.kind != "tpu":
        return Mesh(np.array(target.devices).reshape(shape), names, axis_types=types)
    return Mesh(_on_torus(target.devices, shape, axes.get("slice", 1)), names, axis_types=types)


def _on_torus(devices, shape, slices):
    """Returns the devices in an order in which neighbors in the mesh are neighbors in the torus of
    each slice."""
    from jax.experimental import mesh_utils

    by_slice: dict[int, list] = {}
    for device in devices:
        by_slice.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    if len(by_slice) != slices:
        return np.array(devices).reshape(shape)
    inner = shape[1:] if slices > 1 else shape
    placed = [
        mesh_utils.create_device_mesh(inner, each, allow_split_physical_axes=True)
        for _, each in sorted(by_slice.items())
    ]
    return np.stack(placed).reshape(shape)
