"""The parameters of JAX's primitives as typed records, one for each primitive.

    options(eqn).permutation        # of a transpose

The records name the parameters that fnet reads, as JAX names them. A version of JAX that renames a
parameter is adapted to here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax

Shape = tuple[int, ...]
Axes = Sequence[int]


class Broadcast(NamedTuple):
    shape: Shape
    broadcast_dimensions: Axes  # of the result, for each axis of the operand


class Reshape(NamedTuple):
    new_sizes: Shape
    dimensions: Axes | None  # the order in which the axes of the operand are read


class Transpose(NamedTuple):
    permutation: Axes


class Dimensions(NamedTuple):
    """Of squeeze, expand_dims and rev."""

    dimensions: Axes


class Dimension(NamedTuple):
    """Of concatenate."""

    dimension: int


class Sort(NamedTuple):
    dimension: int
    num_keys: int


class TopK(NamedTuple):
    k: int
    axis: int


class Reduction(NamedTuple):
    """Of reductions, and of the position of an extreme element."""

    axes: Axes


class Cumulative(NamedTuple):
    axis: int
    reverse: bool


class Window(NamedTuple):
    """Of poolings."""

    window_dimensions: Shape
    window_strides: Shape
    padding: Sequence[tuple[int, int]]
    base_dilation: Shape
    window_dilation: Shape


class Pooled(NamedTuple):
    """Of the gradient of poolings."""

    window_dimensions: Shape
    window_strides: Shape
    padding: tuple[tuple[int, int], ...]


class Iota(NamedTuple):
    dimension: int


class Fourier(NamedTuple):
    fft_lengths: Shape


class Slice(NamedTuple):
    start_indices: Shape
    limit_indices: Shape
    strides: Shape | None


class DynamicSlice(NamedTuple):
    slice_sizes: Shape


class Split(NamedTuple):
    axis: int
    sizes: Shape


class Axis(NamedTuple):
    """Of stack and unstack."""

    axis: int


class Tile(NamedTuple):
    reps: Shape


class Pad(NamedTuple):
    padding_config: Sequence[tuple[int, int, int]]  # before, after and between the elements


class Gather(NamedTuple):
    dimension_numbers: lax.GatherDimensionNumbers
    slice_sizes: Shape
    fill_value: Any
    mode: Any


class Scatter(NamedTuple):
    dimension_numbers: lax.ScatterDimensionNumbers
    update_jaxpr: Any  # None if an update replaces the element
    mode: Any


class Dot(NamedTuple):
    dimension_numbers: tuple  # ((contracted axes of both operands), (batch axes of both operands))
    precision: Any
    preferred_element_type: Any


class Convolution(NamedTuple):
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int
    window_strides: Shape
    padding: Sequence[tuple[int, int]]
    lhs_dilation: Shape
    rhs_dilation: Shape
    precision: Any


class Draw(NamedTuple):
    """Of random_bits and random_split."""

    shape: Shape


class Size(NamedTuple):
    dim: Any  # an expression of symbolic sizes


class Attention(NamedTuple):
    """Of fnet's own attention, forward and backward."""

    form: Any


class ShardMap(NamedTuple):
    in_specs: Sequence[Any]
    out_specs: Sequence[Any]
    newly_manual_axes: frozenset[str]


class Summed(NamedTuple):
    """Of a sum over devices."""

    axes: Sequence[str]


class Power(NamedTuple):
    y: int


class Convert(NamedTuple):
    new_dtype: Any


class While(NamedTuple):
    cond_nconsts: int
    body_nconsts: int
    body_jaxpr: Any


_RECORDS: dict[str, type] = {
    "broadcast_in_dim": Broadcast,
    "reshape": Reshape,
    "transpose": Transpose,
    **dict.fromkeys(("squeeze", "expand_dims", "rev"), Dimensions),
    "concatenate": Dimension,
    "sort": Sort,
    "top_k": TopK,
    **dict.fromkeys(("random_bits", "random_split"), Draw),
    "dim_as_value": Size,
    **{f"reduce_{name}": Reduction for name in "sum prod max min and or xor".split()},
    **dict.fromkeys(("argmax", "argmin"), Reduction),
    **{f"cum{name}": Cumulative for name in "sum prod max min logsumexp".split()},
    **{f"reduce_window{name}": Window for name in ("_sum", "_max", "_min")},
    "iota": Iota,
    "select_and_scatter_add": Pooled,
    "fft": Fourier,
    "slice": Slice,
    "dynamic_slice": DynamicSlice,
    "split": Split,
    **dict.fromkeys(("stack", "unstack"), Axis),
    "tile": Tile,
    "pad": Pad,
    "gather": Gather,
    **{f"scatter{name}": Scatter for name in ("", "-add", "-sub", "-mul", "-min", "-max")},
    "dot_general": Dot,
    "conv_general_dilated": Convolution,
    "integer_pow": Power,
    **dict.fromkeys(("attention", "attention_backward"), Attention),
    "convert_element_type": Convert,
    "shard_map": ShardMap,
    "psum": Summed,
    "while": While,
}


def options(eqn: Any) -> Any:
    """Returns the parameters of an equation, as the record of its primitive."""
    record: Any = _RECORDS[eqn.primitive.name]
    return record(*(eqn.params[name] for name in record._fields))


def reduced_axes(eqn: Any) -> Axes | None:
    """Returns the axes over which an equation reduces, or None if it is no reduction."""
    return options(eqn).axes if _RECORDS.get(eqn.primitive.name) is Reduction else None
