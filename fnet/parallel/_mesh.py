"""The mesh of a plan: its axes, their lengths, and the position of each chip."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from fnet.parallel._targets import Target

Asked: TypeAlias = Mapping[str, int] | Mesh | AbstractMesh | None
"""The argument `mesh` of `plan`."""


def devices(asked: Asked, given: str | Sequence[jax.Device]) -> str | Sequence[jax.Device]:
    """Returns the devices of a plan: those of the mesh, if the mesh has devices.

    Raises:
        ValueError: the axes of the mesh are not such that a batch can be split over them, or both
            the mesh and the argument `given` state devices.
    """
    if not isinstance(asked, (Mesh, AbstractMesh)):
        return given
    if "data" not in asked.axis_names:
        raise ValueError(
            "plan: the batch is split over the mesh axis 'data'; name an axis of the mesh so, as "
            f"in jax.make_mesh((8,), ('data',)); got {_axes(asked)}"
        )
    if AxisType.Manual in asked.axis_types:
        raise ValueError(
            "plan: the axes of the mesh must be explicit or automatic; inside of shard_map they "
            f"are manual: {_axes(asked)}. Plan outside of it"
        )
    if isinstance(asked, AbstractMesh):
        return given
    if isinstance(given, str) and given == "local":
        return list(asked.devices.flat)
    if not isinstance(given, str) and list(given) == list(asked.devices.flat):
        return given
    raise ValueError(
        "plan: mesh= already states the devices; leave out devices=, or pass the mesh as a dict "
        f"{{axis: length}} or as a jax.sharding.AbstractMesh; got {_axes(asked)} and "
        f"devices={given!r}"
    )


def _axes(mesh: Mesh | AbstractMesh) -> str:
    kinds = zip(mesh.shape.items(), mesh.axis_types)
    return "a mesh with the axes " + ", ".join(
        f"{name}={size} ({kind.name})" for (name, size), kind in kinds
    )


def explicit(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the shardings over some axis of the mesh are a part of the arrays' types."""
    return AxisType.Explicit in mesh.axis_types


def abstract(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    return mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh


def in_types(place: NamedSharding) -> NamedSharding:
    """Returns the part of a sharding that types state: that over the explicit axes of its mesh."""
    kinds = dict(zip(place.mesh.axis_names, place.mesh.axis_types))

    def stated(part):
        names = part if isinstance(part, tuple) else () if part is None else (part,)
        return tuple(name for name in names if kinds[name] == AxisType.Explicit) or None

    return NamedSharding(place.mesh, PartitionSpec(*map(stated, place.spec)))


def tracing(
    mesh: Mesh | AbstractMesh | None, typed: bool
) -> contextlib.AbstractContextManager[object]:
    """Returns the context in which the functions of a plan are traced. A step that states its own
    shardings is traced on the mesh of the plan. A step for one device must not see explicit axes of
    `jax.set_mesh`, since JAX would then require that it states shardings."""
    if typed and mesh is not None:
        return jax.sharding.use_abstract_mesh(abstract(mesh))
    here = jax.sharding.get_abstract_mesh()
    other = mesh is not None and explicit(mesh) and not here.empty
    if explicit(here) or other:
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    return contextlib.nullcontext()


def sizes(target: Target, asked: Asked) -> dict[str, int]:
    """Returns the mesh axes as {axis: length}: "slice" first, then "data", then the other axes in
    the requested order. If the argument `asked` does not contain the axis "data", the length of
    this axis is the number of devices divided by the product of the lengths of all other axes.

    Raises:
        ValueError: the lengths of the mesh axes do not match the number of devices, or an axis has
            a name that is not allowed.
    """
    if isinstance(asked, (Mesh, AbstractMesh)):
        if asked.size != target.count:
            raise ValueError(
                f"plan: mesh {dict(asked.shape)} needs {asked.size} devices; {target.name!r} has "
                f"{target.count}"
            )
        return dict(asked.shape)
    if asked is not None and not isinstance(asked, Mapping):
        raise TypeError(
            "plan: mesh must be a dict {axis: length}, such as {'data': -1}, or a mesh of JAX, "
            f"such as jax.make_mesh((8,), ('data',)); got {asked!r}"
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
        room = target.count % (fixed * target.groups) == 0
        if (open_axes and room) or fixed * target.groups == target.count:
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


def make(target: Target, axes: Mapping[str, int], asked: Asked = None) -> Mesh | AbstractMesh:
    """Creates the mesh. If `asked` is a mesh, its axes and their types are kept, and its devices if
    it has some; otherwise all axes have the type Auto. The mesh is an `AbstractMesh` if there are
    no devices to compile for."""
    if isinstance(asked, Mesh):
        return asked
    types = dict.fromkeys(axes, AxisType.Auto)
    if isinstance(asked, AbstractMesh):
        types = dict(zip(asked.axis_names, asked.axis_types))
    kinds = tuple(types.values())
    if target.devices is None:
        return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=kinds)
    # The devices of a slice are next to each other if the axis of the slices comes first.
    order = sorted(axes, key=lambda name: name != "slice")
    shape = tuple(axes[name] for name in order)
    if target.chip.kind == "tpu":
        devices = _on_torus(target.devices, shape, axes.get("slice", 1))
    else:
        devices = np.array(target.devices).reshape(shape)
    devices = devices.transpose([order.index(name) for name in axes])
    return Mesh(devices, tuple(axes), axis_types=kinds)


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
