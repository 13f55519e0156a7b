"""Convolutions and pooling over padded axes.

Each is computed on an operand that has no padding of its own: what the equation pads in front is
put there, and all that follows the true part is the identity, 0 or -inf. How much follows is chosen
so that the result has its padded size.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from fnet import jaxpr
from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._padded import (
    NoRule,
    highest,
    lowest,
    resized,
    shifted,
)
from fnet.transforms._bucket._rules import Call, _pad_axis, rule


def _spread(size: int, dilation: int) -> int:
    return (size - 1) * dilation + 1 if size else 0


def _in_front(call: Call, x: Any, axis: int, low: Any, dilation: int, size: int, fill: Any) -> Any:
    """Returns `x` with elements of `fill` between its own, `low` elements before it, and cut or
    filled to a size."""
    x = _pad_axis(x, _scalar(x, fill), axis, 0, 0, dilation - 1)
    if _sizes.is_open(low):
        return shifted(x, axis, call.lengths.true(low), size, fill)
    if low < 0 and -low >= x.shape[axis]:
        x = resized(x, axis, -low + 1, fill)
    return resized(_pad_axis(x, _scalar(x, fill), axis, low, 0, 0), axis, size, fill)


def _scalar(x: Any, fill: Any) -> Any:
    return lax.full((), fill, x.dtype)


@rule("conv_general_dilated")
def _convolution(call: Call) -> list:
    options, (x, kernel) = call.options, call.arrays
    image, weights, result = options.dimension_numbers
    (batch, feature, *space), (_, _, *kernel_space) = image, weights
    shape, kernel_shape = call.shape(0), call.shape(1)
    grouped = options.feature_group_count > 1 or options.batch_group_count > 1
    mixed = [shape[feature], *(kernel_shape[axis] for axis in weights[:2])]
    if grouped and any(map(_sizes.is_open, (shape[batch], *mixed))):
        if any(map(_sizes.is_open, mixed)) or options.batch_group_count > 1:
            raise NoRule("its groups are cut from a padded axis")
    why = "masked with 0 before the convolution"
    x = call.masked(0, (feature, *space), 0, why)
    kernel = call.masked(1, (weights[1], *kernel_space), 0, why)
    padding, inner = list(options.padding), list(options.lhs_dilation)
    for i, (axis, taps) in enumerate(zip(space, kernel_space)):
        out = call.result()[result[2 + i]]
        if not any(map(_sizes.is_open, (*padding[i], shape[axis], kernel_shape[taps], out))):
            continue
        reach = _spread(kernel.shape[taps], options.rhs_dilation[i])
        size = (call.lengths.padded(out) - 1) * options.window_strides[i] + reach
        x = _in_front(call, x, axis, padding[i][0], inner[i], size, 0)
        padding[i], inner[i] = (0, 0), 1
    return call.again([x, kernel], padding=tuple(padding), lhs_dilation=tuple(inner))


_POOLS = {"reduce_window_max": lowest, "reduce_window_min": highest, "reduce_window_sum": None}


@rule(*_POOLS)
def _pool(call: Call) -> list:
    (x,), options = call.arrays, call.options
    identity = _POOLS[call.eqn.primitive.name]
    fill = identity(x.dtype) if identity else 0
    ones = (1,) * x.ndim
    inner = list(options.base_dilation or ones)
    dilation = options.window_dilation or ones
    padding, windows = list(options.padding), list(options.window_dimensions)
    shape, out, steps = call.shape(0), call.result(), options.window_strides
    axes = [i for i in range(x.ndim) if _pooled(windows[i], padding[i], steps[i], inner[i])]
    x = call.masked(0, axes, fill, "masked before the windows")
    for i in axes:
        if not any(map(_sizes.is_open, (*padding[i], shape[i], out[i], windows[i]))):
            continue
        low, taps = padding[i][0], windows[i]
        if _sizes.is_open(taps) and not (str(taps) == str(shape[i]) and low == 0 and out[i] == 1):
            raise NoRule("the size of its windows depends on a length")
        windows[i] = call.lengths.padded(taps)
        size = (call.lengths.padded(out[i]) - 1) * steps[i] + _spread(windows[i], dilation[i])
        x = _in_front(call, x, i, low, inner[i], size, fill)
        padding[i], inner[i] = (0, 0), 1
    changes = {"padding": tuple(padding), "window_dimensions": tuple(windows)}
    return call.again([x], **changes, base_dilation=tuple(inner))


def _pooled(taps: Any, padding: Any, step: int, dilation: int = 1) -> bool:
    """Whether the windows along an axis are more than its single elements."""
    return (taps, tuple(padding), step, dilation) != (1, (0, 0), 1, 1)


@rule("select_and_scatter_add")
def _pool_backward(call: Call) -> list:
    (source, x), options = call.arrays, call.options
    largest = jaxpr.selects_largest(call.eqn)
    fill = (lowest if largest else highest)(x.dtype)
    padding, windows = list(options.padding), options.window_dimensions
    steps, kept = options.window_strides, x.shape
    axes = [i for i in range(x.ndim) if _pooled(windows[i], padding[i], steps[i])]
    source = call.masked(0, axes, 0, "masked with 0 before it is scattered")
    x = call.masked(1, axes, fill, "masked before the windows")
    moved = []
    for i in axes:
        if _sizes.is_open(windows[i]):
            raise NoRule("the size of its windows depends on a length")
        if not any(map(_sizes.is_open, (*padding[i], call.shape(0)[i], call.shape(1)[i]))):
            continue
        size = (source.shape[i] - 1) * steps[i] + windows[i]
        x = _in_front(call, x, i, padding[i][0], 1, size, fill)
        moved.append((i, padding[i][0]))
        padding[i] = (0, 0)
    (y,) = call.again([source, x], padding=tuple(padding))
    for i, low in moved:
        y = shifted(y, i, -call.lengths.true(low), kept[i], 0)
    return [y]
