"""The operations that XLA divides wrongly over several devices, and the smallest replication that
avoids each of them.

Under `jax.jit` with Auto axes, XLA decides how the operations of a program are divided over the
devices. For a few operations and shardings, its results differ from those of one device, without an
error. `TABLE` is the only list of them. `nn.Conv`, `nn.MaxPool` and the like read it for the mesh
on which their input lies, and `parallel.plan` for each equation of a step. Both then state which
axes must not be split, and XLA gathers these axes, if they were split at all. A layer cannot do
better than that: with Auto axes, it sees the mesh of its input, and not how the input is split.
Nor does it see the `in_shardings` of a `jax.jit`: JAX traces a function once for all of them.

Each row has a script in `findings/`, which shows the error in plain JAX.
`tests/parallel/test_misdivided.py` runs these programs, and says when a jaxlib no longer needs a
row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jaxlib
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet._jax import context_mesh
from fnet.jaxpr._equations import CONVOLUTION, Product, product
from fnet.jaxpr._explicit import split_over, typed
from fnet.jaxpr._records import options

_COMBINING_SCATTERS = frozenset(f"scatter-{name}" for name in ("add", "sub", "mul", "min", "max"))
VERSION = tuple(int(part) for part in jaxlib.__version__.split(".")[:3])


class Row(NamedTuple):
    """An operation that XLA divides wrongly.

    Attributes:
        name: the script `findings/<name>.sh` shows the error.
        operation: the operation.
        sharding: the shardings for which its result is wrong.
        axes: the number of mesh axes, each longer than 1, that the error needs.
        repaired: the first jaxlib whose results are right, such as (0, 13, 0). None: no jaxlib yet,
            so the row applies to each version, also to versions that are newer than those that were
            tested.
    """

    name: str
    operation: str
    sharding: str
    axes: int
    repaired: tuple[int, int, int] | None = None

    def applies(self, mesh: Any) -> bool:
        """Whether the results of the operation may be wrong on a mesh. `mesh` is a mesh, or None
        for one device."""
        lengths = [] if mesh is None else [mesh.shape[name] for name in automatic_axes(mesh)]
        many = sum(length > 1 for length in lengths) >= self.axes
        return many and (self.repaired is None or VERSION < self.repaired)


GROUPED = Row(
    "grouped_convolution_gradient",
    "the gradient of a grouped convolution's kernel",
    "the batch is split over some axes of the mesh, and not over the others",
    axes=2,
)
SPLIT_IMAGE = Row(
    "split_image_convolution",
    "a convolution, and the gradients of its input and kernel",
    "an image or time axis is split over some axes of the mesh, and not over the others",
    axes=2,
)
SPLIT_KERNEL = Row(
    "split_kernel_convolution",
    "a convolution",
    "an image axis and the kernel are split over different axes of the mesh",
    axes=2,
)
MAX_POOL = Row(
    "overlapping_max_pool_gradient",
    "the gradient of max pooling with overlapping windows",
    "an image axis is split",
    axes=1,
)
PADDING = Row(
    "interior_padding",
    "padding between elements, as in the gradient of a strided slice",
    "the padded axis is split",
    axes=1,
)
NEGATIVE = Row(
    "negative_padding",
    "padding of negative width, as in the gradient of a cumulative product",
    "the result is split along the padded axis, and the operand is not",
    axes=1,
)
SCATTER = Row(
    "uneven_scatter",
    "additions and the like at indices, as in the gradient of an embedding",
    "an axis of the mesh does not divide the number of indices evenly, and another one is idle",
    axes=2,
)
COLUMNS = Row(
    "gather_columns",
    "elements at indices of another axis than the first, as in `x[:, i]`",
    "the indexed axis is split, and the result over the same mesh axis and another one",
    axes=2,
)
COLUMN = Row(
    "set_column",
    "an update at a single index, as in `x.at[:, 0].set(y)`",
    "a constraint inside of the program splits the indexed axis",
    axes=1,
    repaired=(0, 12, 0),
)
TABLE = (
    GROUPED,
    SPLIT_IMAGE,
    SPLIT_KERNEL,
    MAX_POOL,
    PADDING,
    NEGATIVE,
    SCATTER,
    COLUMNS,
    COLUMN,
)


class Whole(NamedTuple):
    """What avoids the error in one equation.

    Attributes:
        rows: the rows of the table. There may be several, because how XLA will split the arrays is
            not known.
        inputs, outputs: for each array, its axes that must not be split. There are none for
            `NEGATIVE`, for which `cropped` computes the same.
    """

    rows: tuple[Row, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]


def in_equation(eqn: Any, mesh: Any) -> Whole | None:
    """Returns what avoids a wrong result of an equation on a mesh, or None for an equation that XLA
    divides rightly."""
    found = product(eqn)
    if found is not None and found.op is CONVOLUTION:
        return _in_convolution(found, mesh)
    if eqn.primitive.name == "select_and_scatter_add" and MAX_POOL.applies(mesh):
        axes = overlapping(eqn.params["window_dimensions"], eqn.params["window_strides"])
        return Whole((MAX_POOL,), (axes, axes), (axes,)) if axes else None
    if eqn.primitive.name == "pad":
        return _in_pad(eqn.params["padding_config"], mesh)
    if eqn.primitive.name == "scatter" or eqn.primitive.name in _COMBINING_SCATTERS:
        return _in_scatter(eqn, mesh)
    if eqn.primitive.name == "gather" and COLUMNS.applies(mesh):
        return _in_gather(eqn)
    return None


def _in_scatter(eqn: Any, mesh: Any) -> Whole | None:
    _, indices, updates = (v.aval for v in eqn.invars)
    if indices.ndim == 1 and COLUMN.applies(mesh):
        axes = tuple(options(eqn).dimension_numbers.scatter_dims_to_operand_dims)
        return Whole((COLUMN,), (axes, (), ()), (axes,)) if axes else None
    if eqn.primitive.name == "scatter" or not SCATTER.applies(mesh):
        return None
    lengths = [mesh.shape[name] for name in automatic_axes(mesh)]
    uneven = [i for i, n in enumerate(indices.shape[:-1]) if any(n % each for each in lengths)]
    window = options(eqn).dimension_numbers.update_window_dims
    places = [axis for axis in range(updates.ndim) if axis not in window]
    held = tuple(places[i] for i in uneven)
    return Whole((SCATTER,), ((), tuple(uneven), held), ((),)) if uneven else None


def _in_gather(eqn: Any) -> Whole | None:
    operand, _ = (v.aval for v in eqn.invars)
    numbers = options(eqn).dimension_numbers
    apart = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = [axis for axis in range(operand.ndim) if axis not in apart]
    columns = tuple(axis for axis in numbers.start_index_map if kept and axis > kept[0])
    return Whole((COLUMNS,), (columns, ()), ((),)) if columns else None


def _in_convolution(convolution: Product, mesh: Any) -> Whole | None:
    if convolution.groups[1] > 1:  # the gradient of a kernel
        if not GROUPED.applies(mesh):
            return None
        inputs = tuple(tuple(range(v.aval.ndim)) for v in convolution.eqn.invars)
        return Whole((GROUPED,), inputs, ((),))
    numbers = convolution.dimensions
    lhs, rhs, out = (spec[2:] for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    rows = tuple(row for row in (SPLIT_IMAGE, SPLIT_KERNEL) if row.applies(mesh))
    return Whole(rows, (lhs, rhs), (out,)) if rows and out else None


def _in_pad(config: Sequence[tuple[int, int, int]], mesh: Any) -> Whole | None:
    padded_between = tuple(i for i, (_, _, between) in enumerate(config) if between)
    if padded_between and PADDING.applies(mesh):
        return Whole((PADDING,), (padded_between, ()), (padded_between,))
    crops = any(low < 0 or high < 0 for low, high, _ in config)
    if crops and NEGATIVE.applies(mesh):
        return Whole((NEGATIVE,), ((), ()), ((),))
    return None


def cropped(eqn: Any, x: jax.Array, value: jax.Array) -> jax.Array:
    """Computes a `lax.pad` that removes elements by a slice. XLA divides this rightly, without
    gathering an axis."""
    config = eqn.params["padding_config"]
    grown = [(max(low, 0), max(high, 0), between) for low, high, between in config]
    padded = lax.pad(x, value, grown)
    starts = [max(-low, 0) for low, _, _ in config]
    stops = [size - max(-high, 0) for size, (_, high, _) in zip(padded.shape, config)]
    return lax.slice(padded, starts, stops)


def overlapping(window: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Returns the axes of a pooling's windows if the windows overlap, and () otherwise."""
    if all(size <= step for size, step in zip(window, strides)):
        return ()
    return tuple(i for i, size in enumerate(window) if size > 1)


def mesh_of(*arrays: Any) -> Any:
    """Returns the mesh on which one of the arrays lies, or the mesh of `jax.set_mesh` or of `with
    mesh:`. Returns None if there is none, or if the mesh has explicit axes, for which
    `splits_wrongly` reads from the types how the arrays are split."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh(), context_mesh()):
        if not mesh.empty and mesh.size > 1:
            return None if AxisType.Explicit in mesh.axis_types else mesh
    return None


def with_automatic_axes(mesh: Any) -> Any:
    """Returns the same mesh with axes of type Auto in place of Explicit, as inside of
    `jax.sharding.auto_axes`."""
    types = tuple(AxisType.Auto if kind == AxisType.Explicit else kind for kind in mesh.axis_types)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def splits_wrongly(aval: Any, axes: Iterable[int], rows: Iterable[Row]) -> bool:
    """Whether the type of an array on a mesh with explicit axes splits one of its axes, and one of
    the rows applies to the mesh."""
    place = typed(aval)
    if place is None or not any(row.applies(with_automatic_axes(place.mesh)) for row in rows):
        return False
    over = split_over(aval)
    return any(over[axis] is not None for axis in axes)


def automatic_axes(mesh: Any) -> tuple[str, ...]:
    """The mesh axes over which XLA divides arrays. Inside of shard_map, these are not the axes that
    it maps."""
    return tuple(
        name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Auto
    )


def unsplit(x: jax.Array, mesh: Any, axes: Iterable[int]) -> jax.Array:
    """Constrains `x`, and its cotangent, not to be split along some axes. The sharding of its other
    axes stays free."""
    whole = {axis % x.ndim for axis in axes}
    if not whole:
        return x
    spec = P(*(None if i in whole else P.UNCONSTRAINED for i in range(x.ndim)))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
