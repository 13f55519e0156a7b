"""Rules of tune for CPUs that rewrite convolutions for which XLA:CPU has no fast kernel.

XLA:CPU computes four kinds of convolutions one element at a time: depthwise convolutions, the
gradients of all convolutions with groups, convolutions whose window is larger than their input, and
some convolutions with a dilated input (an input with zeros between its elements). A depthwise
convolution is replaced by a sum of elementwise products, one for each position of the window. The
gradient of a convolution with groups is replaced by one convolution for each group. A convolution
whose window is larger than its input is replaced by a matrix product. A convolution with a dilated
input is changed in one of two ways: either the zeros between the elements are written to memory
before the convolution, or the operands are exchanged, so that the dilated array becomes the window.
The rewritten convolutions take between a half and a hundredth of the original time (`python -m
benchmarks.convolutions`).
"""

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
from jax import lax

from fnet import jaxpr
from fnet.transforms._tune import _library as library

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
_TAPS = 64  # maximum size of a depthwise convolution's window; each position becomes an operation
WORK = 1 << 22  # minimum multiplications for which a matrix product is worth its copies
_GROUPS = 32  # maximum number of groups that become separate convolutions
_ZEROS = 8  # maximum factor by which zeros enlarge an input
# Bytes of the examples for which a part of a kernel's gradient is computed at once.
_CACHED = 1 << 19


def depthwise_convolution(eqn, inputs):
    """Computes a depthwise convolution, or one of its gradients, by elementwise products and sums
    of shifted arrays."""
    product = jaxpr.product(eqn)
    if product.op is not jaxpr.CONVOLUTION or product.dtype not in (F32, BF16):
        return None
    (x, w), (lhs, rhs, out), result = (
        (value.x for value in inputs),
        product.dimensions,
        eqn.outvars[0].aval,
    )
    strides, padding, x_dilation, w_dilation = product.window
    space = tuple(result.shape[i] for i in out[2:])
    kind = _kind(product, x.shape, w.shape)
    if kind is None or 0 in (*x.shape, *result.shape):
        return None
    x, w = (jnp.asarray(a, product.dtype).astype(F32) for a in (x, w))
    if kind == "kernel":
        if math.prod(space) > _TAPS:
            return None
        x, g = (a.transpose(axes[1], *axes[2:], axes[0]) for a, axes in ((x, lhs), (w, rhs)))
        y = _kernel_gradient(x, g, space, strides, padding, x_dilation, w_dilation)
    else:
        if math.prod(w.shape[i] for i in rhs[2:]) > _TAPS:
            return None
        x, w = x.transpose(lhs[0], *lhs[2:], lhs[1]), w.transpose(rhs[1], *rhs[2:], rhs[0])
        if all(d == 1 for d in x_dilation):
            y = _forward(x, w, space, strides, padding, w_dilation)
        elif all(s == 1 for s in strides):
            y = _dilated(x, w, space, padding, x_dilation, w_dilation)
        else:
            return None
    places = out[0], *out[2:], out[1]  # of the axes of y: examples, space, channels
    return [y.astype(result.dtype).transpose([places.index(i) for i in range(y.ndim)])]


def grouped_convolution(eqn, inputs):
    """Computes a convolution with few groups, or one of its gradients, as one convolution for each
    group."""
    product = jaxpr.product(eqn)
    if product.op is not jaxpr.CONVOLUTION or product.dtype not in (F32, BF16):
        return None
    (lhs, rhs, out), (features, batches) = product.dimensions, product.groups
    if not 1 < features * batches <= _GROUPS or min(features, batches) > 1:
        return None
    x, w = (jnp.asarray(value.x, product.dtype) for value in inputs)
    options = product.without("feature_group_count", "batch_group_count")
    pairs = zip(
        jnp.split(x, features, lhs[1]) if features > 1 else jnp.split(x, batches, lhs[0]),
        jnp.split(w, features * batches, rhs[0]),
    )
    return [
        jnp.concatenate(
            [
                lax.conv_general_dilated_p.bind(
                    *pair, feature_group_count=1, batch_group_count=1, **options
                )
                for pair in pairs
            ],
            out[1],
        )
    ]


def small_input(eqn, inputs):
    """Computes a convolution as a matrix product, if its window is larger than its input along each
    spatial axis.

    Windows that are larger than the input occur in the last layers of a network for small images.
    """
    product = jaxpr.product(eqn)
    if product.op is not jaxpr.CONVOLUTION or product.groups != (1, 1):
        return None
    if product.dtype not in (F32, BF16):
        return None
    x, w = (value.x for value in inputs)
    lhs, rhs, out = product.dimensions
    result = eqn.outvars[0].aval
    strides, _, _, w_dilation = product.window
    window, space = [w.shape[i] for i in rhs[2:]], [result.shape[i] for i in out[2:]]
    small = len(lhs) > 2 and all(k > x.shape[i] for k, i in zip(window, lhs[2:]))
    if not small or math.prod(window) > _TAPS or result.size * w.size < WORK * w.shape[rhs[0]]:
        return None
    if product.dtype == BF16 and library.onednn():  # the first call compiles a program
        return None

    x = jnp.asarray(x, product.dtype).transpose(lhs[0], *lhs[2:], lhs[1])
    w = jnp.asarray(w, product.dtype).transpose(*rhs[2:], rhs[1], rhs[0])
    inside = _taps_inside(product, x.shape[1:-1], window, space)
    if not all(inside):
        return None
    _, padding, x_dilation, _ = product.window
    padded = _padded(x, padding, x_dilation)
    taps = itertools.product(*inside)
    columns = [_slice(padded, tap, w_dilation, space, strides) for tap in taps]
    for axis, places in enumerate(inside):  # with a stride, they need not be adjacent
        if len(places) < w.shape[axis]:
            w = jnp.concatenate([lax.slice_in_dim(w, k, k + 1, axis=axis) for k in places], axis)
    w = w.reshape(-1, w.shape[-1])
    # [examples, *space, features]
    y = jnp.dot(jnp.concatenate(columns, -1), w, preferred_element_type=F32).astype(result.dtype)
    order = out[0], *out[2:], out[1]
    return [y.transpose([order.index(i) for i in range(y.ndim)])]


def _taps_inside(product, sizes, window, space) -> list[list[int]]:
    """Returns for each spatial axis the positions of the window that are inside the input for an
    element of the output. `sizes`, `window` and `space` are the lengths of the axis in the input,
    the kernel and the output."""
    strides, padding, x_dilation, w_dilation = product.window
    inside = []
    for axis, (size, taps, count) in enumerate(zip(sizes, window, space)):
        last = (size - 1) * x_dilation[axis]
        places = []
        for tap in range(taps):
            first = tap * w_dilation[axis] - padding[axis][0]
            if any(0 <= first + i * strides[axis] <= last for i in range(count)):
                places.append(tap)
        inside.append(places)
    return inside


def dilated_input(eqn, inputs):
    """Rewrites a convolution whose input is dilated, if the convolution has three spatial
    dimensions or a large window.

    A dilated input (an input with zeros between its elements) occurs in transposed convolutions and
    in gradients of strided convolutions. If the convolution has three spatial dimensions, the
    dilated input with its zeros is written to memory before the convolution. The gradient of a
    transposed convolution with respect to its kernel is a convolution with a dilated input and a
    large window. In a convolution with a large window, the operands are exchanged, so that the
    dilated array becomes the window. XLA has a fast kernel for convolutions with a dilated window.
    """
    product = jaxpr.product(eqn)
    if product.op is not jaxpr.CONVOLUTION or product.dtype not in (F32, BF16):
        return None
    (lhs, rhs, out), (strides, padding, dilation, w_dilation) = product.dimensions, product.window
    x, w = (jnp.asarray(value.x, product.dtype) for value in inputs)
    if all(d == 1 for d in dilation):
        return None
    options = product.without("lhs_dilation")
    ones = (1,) * len(dilation)
    sizes = [eqn.outvars[0].aval.shape[i] for i in out[2:]]
    if (window := math.prod(w.shape[i] for i in rhs[2:])) > max(_TAPS, math.prod(sizes)):
        if product.groups != (1, 1) or strides != ones or w_dilation != ones:
            return None
        before = [k - 1 - low for k, (low, _) in zip(sizes, padding)]
        after = [
            k + (x.shape[i] - 1) * d - w.shape[j] - low
            for k, i, d, j, low in zip(sizes, lhs[2:], dilation, rhs[2:], before)
        ]
        options |= dict(
            padding=tuple(zip(before, after)),
            rhs_dilation=dilation,
            dimension_numbers=(lax.ConvDimensionNumbers(rhs, lhs, (out[1], out[0], *out[2:]))),
        )
        return [
            lax.rev(lax.conv_general_dilated_p.bind(w, x, lhs_dilation=ones, **options), out[2:])
        ]
    if len(dilation) < 3 or math.prod(dilation) > _ZEROS or window > _TAPS:
        return None
    edges = [(0, 0, 0)] * x.ndim
    for axis, d in zip(lhs[2:], dilation):
        edges[axis] = 0, 0, d - 1
    x = lax.optimization_barrier(lax.pad(x, jnp.zeros((), x.dtype), edges))
    return [lax.conv_general_dilated_p.bind(x, w, lhs_dilation=ones, **options)]


def _kind(product, x, w) -> str | None:
    """Returns "forward" for a depthwise convolution, "kernel" for the gradient of a depthwise
    convolution with respect to its kernel, and None for any other operation. The gradient of a
    depthwise convolution with respect to its input has the form of a depthwise convolution, so
    `_kind` also returns "forward" for this gradient."""
    (lhs, rhs, _), (features, batches) = product.dimensions, product.groups
    if batches == 1 and 1 < features == x[lhs[1]] == w[rhs[0]]:
        return "forward"
    if features == 1 and 1 < batches == x[lhs[0]] == w[rhs[0]]:
        return "kernel"
    return None


def _taps(window):
    return itertools.product(*map(range, window))


def _slice(x, tap, step, size, stride):
    """Slices every spatial axis of x, an array [examples, *space, channels]. Along each spatial
    axis, the slice starts at the index `tap * step`, where `tap` is a position in the convolution
    window, and `step` is the dilation of the window. The slice has `size` elements along each
    spatial axis, with the stride `stride`."""
    start = [0, *(k * d for k, d in zip(tap, step)), 0]
    stop = [
        len(x),
        *(k * d + s * (n - 1) + 1 for k, d, n, s in zip(tap, step, size, stride)),
        x.shape[-1],
    ]
    return lax.slice(x, start, stop, [1, *stride, 1])


def _padded(x, padding, dilation):
    edges = [(0, 0, 0), *((*each, d - 1) for each, d in zip(padding, dilation)), (0, 0, 0)]
    return lax.pad(x, jnp.zeros((), x.dtype), edges)


def _forward(x, w, space, strides, padding, dilation):
    """Computes the depthwise convolution of x [examples, *space, channels] with the kernel w [1,
    *window, channels]."""
    x = _padded(x, padding, (1,) * len(space))
    return sum(
        _slice(x, tap, dilation, space, strides) * _filter(w, tap) for tap in _taps(w.shape[1:-1])
    )


def _filter(w, tap):
    """Returns the weights of all channels at the position `tap` of the window, as an array [1, ...,
    1, channels]."""
    return lax.slice(w, (0, *tap, 0), (1, *(k + 1 for k in tap), w.shape[-1]))


def _dilated(x, w, space, padding, x_dilation, w_dilation):
    """Computes a depthwise convolution with a dilated input, as in the gradient of a strided
    convolution. A dilated input has zeros between its elements; the argument x is the input before
    these zeros are inserted."""
    total, zero = 0.0, jnp.zeros((), x.dtype)
    for tap in _taps(w.shape[1:-1]):
        low = [first - k * d for (first, _), k, d in zip(padding, tap, w_dilation)]
        high = [
            n - (size - 1) * d - 1 - first
            for n, size, d, first in zip(space, x.shape[1:-1], x_dilation, low)
        ]
        edges = [(0, 0, 0), *((*each, d - 1) for *each, d in zip(low, high, x_dilation)), (0, 0, 0)]
        total = total + lax.pad(x * _filter(w, tap), zero, edges)
    return total


def _kernel_gradient(x, g, window, step, padding, dilation, strides):
    """Computes the gradient of a depthwise kernel, an array [1, *window, channels]. x is the input
    and g the cotangent of the convolution, both [examples, *space, channels]."""

    def part(x, g):
        x = _padded(x, padding, dilation)
        taps = [
            (_slice(x, tap, step, g.shape[1:-1], strides) * g).sum(range(g.ndim - 1))
            for tap in _taps(window)
        ]
        return jnp.stack(taps)

    size = max(1, _CACHED * len(x) // max(1, 4 * x.size))  # examples that fit into the cache
    count = next(
        count for count in range(1, len(x) + 1) if len(x) % count == 0 and len(x) // count <= size
    )
    if count == 1:
        total = part(x, g)
    else:
        x, g = (a.reshape(count, -1, *a.shape[1:]) for a in (x, g))
        zeros = jnp.zeros((math.prod(window), x.shape[-1]), x.dtype)
        total = lax.scan(lambda total, pair: (total + part(*pair), None), zeros, (x, g))[0]
    return total.reshape(1, *window, x.shape[-1])


def kernel_layout(eqn, inputs):
    """Transposes the kernel of a bfloat16 convolution to [*window, in, out].

    XLA calls oneDNN only for kernels with the layout [*window, in, out]. In the gradient with
    respect to the input of a convolution, the kernel has the layout [*window, out, in].
    """
    product = jaxpr.product(eqn)
    if product.op is not jaxpr.CONVOLUTION or product.dtype != BF16:
        return None
    (x, w), (lhs, rhs, out) = (value.x for value in inputs), product.dimensions
    channels_last = (0, x.ndim - 1, *range(1, x.ndim - 1))
    usual = (x.ndim - 1, x.ndim - 2, *range(x.ndim - 2))
    if rhs == usual or not lhs == out == channels_last:
        return None
    w = w.astype(BF16).transpose(*rhs[2:], rhs[1], rhs[0])
    return [
        lax.conv_general_dilated_p.bind(
            x.astype(BF16),
            w,
            dimension_numbers=lax.ConvDimensionNumbers(lhs, usual, out),
            **product.without("dimension_numbers"),
        )
    ]
