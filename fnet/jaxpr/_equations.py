"""Functions that read the parameters of jaxpr equations.

All packages of fnet except `fnet._jax` and `fnet.jaxpr` read the parameters of JAX's primitives
with functions of `fnet.jaxpr`, and not by name from `eqn.params`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

from jax import lax

from fnet import _jax
from fnet.jaxpr._primitives import description

CONVOLUTION, DOT = lax.conv_general_dilated_p, lax.dot_general_p
BILINEAR = {DOT.name: DOT, CONVOLUTION.name: CONVOLUTION}
SHIFT = "fnet:shift"
"""The name of a value that a program subtracts from data to sum the data accurately. The choice of
this value affects only the rounding of the program's results. A transform may replace the value by
any other value, such as 0."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution in a jaxpr, as a primitive of JAX or as an equivalent
    primitive of `ft.autocast`.

    Attributes:
        eqn: the equation.
        op: the primitive: `DOT`, `CONVOLUTION` or a ragged product.
        options: the parameters of `op`.
        dtype: the dtype to which the operands are rounded.
    """

    eqn: Any
    op: Any
    options: dict
    dtype: Any

    @property
    def dimensions(self) -> Any:
        """The `dimension_numbers` of `op`. For a dot, the dimensions are a pair (contracted axes,
        batch axes). Each item of the pair is itself a pair (axes of the left operand, axes of the
        right operand). For a convolution, the dimensions are its `ConvDimensionNumbers`."""
        return self.options["dimension_numbers"]

    @property
    def precision(self) -> Any:
        return self.options.get("precision")

    @property
    def default_precision(self) -> bool:
        """Whether the precision of the matrix product or convolution is None or
        `lax.Precision.DEFAULT`."""
        return self.precision in (None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT,) * 2)

    @property
    def groups(self) -> tuple[int, int]:
        """A convolution's (feature groups, batch groups)."""
        return self.options["feature_group_count"], self.options["batch_group_count"]

    @property
    def window(self) -> tuple[tuple, tuple, tuple, tuple]:
        """A convolution's strides, padding, and dilations of the input and the kernel, for each
        spatial axis."""
        names = "window_strides", "padding", "lhs_dilation", "rhs_dilation"
        strides, padding, lhs, rhs = (self.options[name] for name in names)
        return tuple(strides), tuple(map(tuple, padding)), tuple(lhs), tuple(rhs)

    @property
    def summed(self) -> int:
        """The number of terms in the sum that gives one element of the matrix product or
        convolution."""
        left, right = (v.aval.shape for v in self.eqn.invars[:2])
        if self.op is DOT:
            return math.prod(left[i] for i in self.dimensions[0][0])
        return math.prod(right) // max(1, right[self.dimensions.rhs_spec[0]])

    def without(self, *names: str) -> dict:
        """Returns the parameters of `op` except those with the names `names`."""
        return {name: value for name, value in self.options.items() if name not in names}


def product(eqn: Any) -> Product | None:
    """Describes the matrix product or convolution in an equation of a jaxpr. Returns None for other
    equations."""
    primitive = eqn.primitive
    if primitive.name in BILINEAR:
        return Product(eqn, primitive, eqn.params, getattr(eqn.invars[0].aval, "dtype", None))
    stands_for = description(primitive).stands_for
    return Product(eqn, *stands_for(eqn.params)) if stands_for else None


def new_dtype(eqn: Any) -> Any:
    """Returns the dtype to which a convert_element_type equation converts."""
    return eqn.params["new_dtype"]


def kept_bits(eqn: Any) -> tuple[int, int]:
    """Returns (bits of the exponent, bits of the mantissa) that a reduce_precision equation keeps."""
    return eqn.params["exponent_bits"], eqn.params["mantissa_bits"]


def value_name(eqn: Any) -> str | None:
    """Returns the name that an equation of `jax.ad_checkpoint.checkpoint_name` gives to a value.
    Returns None for other equations."""
    return eqn.params["name"] if eqn.primitive.name == "name" else None


def random_bits(eqn: Any) -> tuple[int, int]:
    """Returns (bits of each random number, number of random numbers) of a random_bits equation."""
    return eqn.params["bit_width"], math.prod(eqn.params["shape"])


def pooling_window(eqn: Any) -> tuple[int, ...] | None:
    """Returns the size of a pooling's windows along each axis, or None if the windows overlap, have
    gaps between them, or contain padding."""
    params, window = eqn.params, tuple(eqn.params["window_dimensions"])
    tiles = (
        window == tuple(params["window_strides"])
        and not any(low or high for low, high in params["padding"])
        and all(
            d == 1 for name in ("base_dilation", "window_dilation") for d in params.get(name, ())
        )
    )
    return window if tiles else None


def sorted_axis(eqn: Any) -> int:
    """Returns the axis of a top_k equation. Before jax 0.11 it is the last one."""
    axis = eqn.params.get("axis", -1)
    return axis % len(eqn.invars[0].aval.shape)


def selects_largest(eqn: Any) -> bool:
    """Whether a select_and_scatter_add selects the largest element (the first one, if several are
    equal), as the gradient of a max pooling does."""
    return eqn.params["select_prim"] is lax.ge_p


def lookup_mode(eqn: Any) -> str | None:
    """Returns the mode of a gather or scatter that accesses one element of each row, or None for
    other equations.

    The mode of a gather or scatter states what happens for an index out of range: "fill", "clip" or
    "promised". The mode "promised" means that the program promises that all indices are in range.
    The rows of an operand [..., n] are its vectors of n elements along the last axis. There is one
    index for each row, in an array [..., 1, 1].
    """
    params, (x, indices) = eqn.params, (v.aval for v in eqn.invars[:2])
    numbers, rows, last = params["dimension_numbers"], tuple(range(x.ndim - 1)), (x.ndim - 1,)
    if eqn.primitive.name == "gather":
        axes = (
            numbers.offset_dims,
            numbers.collapsed_slice_dims,
            numbers.operand_batching_dims,
            numbers.start_index_map,
            numbers.start_indices_batching_dims,
        )
    else:
        axes = (
            numbers.update_window_dims,
            numbers.inserted_window_dims,
            numbers.operand_batching_dims,
            numbers.scatter_dims_to_operand_dims,
            numbers.scatter_indices_batching_dims,
        )
    if axes != ((), last, rows, last, rows) or tuple(indices.shape) != (*x.shape[:-1], 1, 1):
        return None
    known = {
        lax.GatherScatterMode.CLIP: "clip",
        lax.GatherScatterMode.PROMISE_IN_BOUNDS: "promised",
    }
    if params["mode"] in known:
        return known[params["mode"]]
    fill = params.get("fill_value")
    return "fill" if fill is None or fill != fill else None


def overwritten(eqn: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Returns the axes of a scatter that overwrites complete slices of its operand and ignores
    indices out of range.

    Returns:
        A tuple (indexed axes of the operand, window axes of the updates), or None for any other
        scatter. The indexed axes of a scatter are its `scatter_dims_to_operand_dims`. The window
        axes (`update_window_dims`) of the updates correspond, in order, to the axes of the operand
        that are not indexed.
    """
    params, (x, _, updates) = eqn.params, (v.aval for v in eqn.invars)
    if (
        params["update_jaxpr"] is not None
    ):  # x.at[i].apply(f), which is a scatter with a function of its own
        return None
    numbers = params["dimension_numbers"]
    axes, window = tuple(numbers.scatter_dims_to_operand_dims), tuple(numbers.update_window_dims)
    complete = tuple(x.shape[i] for i in range(x.ndim) if i not in axes) == tuple(
        updates.shape[i] for i in window
    )
    plain = not numbers.operand_batching_dims and sorted(axes) == sorted(
        numbers.inserted_window_dims
    )
    return (
        (axes, window)
        if complete and plain and params["mode"] is lax.GatherScatterMode.FILL_OR_DROP
        else None
    )


def operation(eqn: Any) -> Hashable | None:
    """Identifies what an equation computes, by its primitive, parameters and types, or is None if
    its parameters cannot be compared, or do not say all, as those of JAX's HiPrims."""
    if _jax.hi_primitive(eqn) is not None:
        return None
    types = tuple(_type(v) for v in (*eqn.invars, *eqn.outvars))
    key = eqn.primitive, tuple(sorted(eqn.params.items(), key=lambda item: item[0])), types
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _type(v: Any) -> tuple:
    return getattr(v.aval, "shape", None), getattr(v.aval, "dtype", None)
