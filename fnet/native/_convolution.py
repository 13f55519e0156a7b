"""Convolutions and their gradients as a primitive with a kernel in C++.

The kernel computes two operations, on arrays whose last axis is that of the channels:

    product    y[n, o, f] = sum over k and c of x[n, o s + k d - p, c] w[k, c, f]
    gradient   w[k, c, f] = sum over n and o of x[n, o s + k d - p, c] y[n, o, f]

for the strides s, the dilation d and the padding p. JAX writes the gradients of a convolution as
convolutions with exchanged axes, and `form` finds out which of the two operations an equation is.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet.native._library import library
from fnet.native._primitive import define

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
AXES = 3  # spatial axes of the kernel's arrays


@dataclasses.dataclass(frozen=True)
class Form:
    """How the kernel computes an equation. The operands and the result are transposed to the
    kernel's order of axes: examples, space, channels for arrays, and space, channels of the input,
    channels of the output for windows.

    Attributes:
        gradient: whether the operation is a gradient (see above).
        exchanged: whether the first operand of the kernel is the equation's second one.
        orders: the orders of the axes of the kernel's operands and of its result.
        strides, low, x_dilation, w_dilation: for each spatial axis. `low` is the padding before the
            first element.
        groups: the number of groups of the channels.
        flipped: whether the window is read from its end. The result, if it is a gradient.
        transposed: whether the order of the window's channels is output, input.
    """

    gradient: bool
    exchanged: bool
    orders: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    strides: tuple[int, ...]
    low: tuple[int, ...]
    x_dilation: tuple[int, ...]
    w_dilation: tuple[int, ...]
    groups: int = 1
    flipped: bool = False
    transposed: bool = False


def form(
    options: dict, lhs: tuple[int, ...], rhs: tuple[int, ...], out: tuple[int, ...]
) -> Form | None:
    """Returns how the kernel computes a convolution with these options and shapes, or None if it
    does not."""
    x, w, y = options["dimension_numbers"]
    names = "window_strides", "lhs_dilation", "rhs_dilation"
    strides, dilation, spread = (tuple(options[name]) for name in names)
    low = tuple(before for before, _ in options["padding"])
    features, batches = options["feature_group_count"], options["batch_group_count"]
    if len(low) > AXES or any(s > 1 and d > 1 for s, d in zip(strides, dilation)):
        return None
    space = lambda spec: tuple(spec[2:])
    size = lambda shape, spec: math.prod(shape[i] for i in space(spec))
    more = size(rhs, w) - size(out, y)
    if features == 1 and (more > 0 or (more == 0 and x[0] == len(x) - 1)):
        last = (x[1], *space(x), x[0]), (w[1], *space(w), w[0])
        if all(d == 1 for d in dilation):
            place = (*space(y), y[0], y[1])
            return Form(True, False, (*last, place), spread, low, dilation, strides, batches)
        if batches > 1:
            return None
        # i d = o + k s - p has the solutions o = i d - k s + p, so the roles are exchanged.
        far = tuple((out[i] - 1) * s - before for i, s, before in zip(space(y), strides, low))
        place = (*space(y), y[1], y[0])
        ones = (1,) * len(low)
        if any(d != 1 for d in spread):
            return None
        return Form(
            True, True, (last[1], last[0], place), dilation, far, ones, strides, flipped=True
        )
    if batches > 1:
        return None
    straight, swapped = (*space(w), w[1], w[0]), (*space(w), w[0], w[1])
    transposed = features == 1 and swapped == tuple(range(len(w)))
    return Form(
        False,
        False,
        (
            (x[0], *space(x), x[1]),
            swapped if transposed else straight,
            (y[0], *space(y), y[1]),
        ),
        strides,
        low,
        dilation,
        spread,
        features,
        transposed=transposed,
    )


def convolution(
    x: jax.Array, w: jax.Array, *, options: dict, compute: Any, out: Any, flipped: bool = False
) -> jax.Array:
    """Computes `lax.conv_general_dilated_p.bind(x, w, **options)` by the kernel.

    Args:
        x, w: the operands, which are cast to `compute`.
        options: the parameters of the primitive. There must be a `form` for them.
        compute: float32 or bfloat16. Sums are in float32.
        out: the dtype of the result.
        flipped: whether the spatial axes of `w` are reversed before.
    """
    return convolution_p.bind(
        x,
        w,
        options=tuple(sorted(options.items())),
        compute=jnp.dtype(compute),
        out=jnp.dtype(out),
        flipped=flipped,
    )[0]


def _portable(x: Any, w: Any, *, options: tuple, compute: Any, out: Any, flipped: bool) -> list:
    """The same result by JAX's own operation."""
    given = dict(options)
    x, w = (lax.convert_element_type(a, compute) for a in (x, w))
    if flipped:
        w = lax.rev(w, given["dimension_numbers"].rhs_spec[2:])
    # XLA:CPU's bfloat16 convolutions have bfloat16 results.
    given["preferred_element_type"] = None if compute == BF16 else F32
    y = lax.conv_general_dilated_p.bind(x, w, **given)
    return [lax.convert_element_type(y, out)]


def _by_kernel(
    types: list, x: Any, w: Any, *, options: tuple, compute: Any, out: Any, flipped: bool
) -> list:
    (shape,) = (result.shape for result in types)
    given = dict(options)
    how = form(given, x.shape, w.shape, shape)
    assert how is not None
    if flipped and how.gradient:  # then the window is an array like any other
        w, flipped = lax.rev(w, given["dimension_numbers"].rhs_spec[2:]), False
    operands = [lax.convert_element_type(a, compute) for a in (x, w)]
    if how.exchanged:
        operands.reverse()
    operands = [a.transpose(order) for a, order in zip(operands, how.orders)]
    missing = AXES - len(how.strides)
    array, window = 1, 0  # the places of the first spatial axis
    first, second, third = (array, array, window) if how.gradient else (array, window, array)
    result = tuple(shape[i] for i in how.orders[2])
    call = jax.ffi.ffi_call(
        library().target("fnet_convolution"),
        jax.ShapeDtypeStruct(_widened(result, third, missing), out),
    )
    spatial = dict(strides=1, low=0, x_dilation=1, w_dilation=1)
    y = call(
        *(a.reshape(_widened(a.shape, i, missing)) for a, i in zip(operands, (first, second))),
        kind=np.int64(how.gradient),
        groups=np.int64(how.groups),
        flipped=np.int64(flipped),
        transposed=np.int64(how.transposed),
        **{
            name: np.array([filler] * missing + list(getattr(how, name)), np.int64)
            for name, filler in spatial.items()
        },
    ).reshape(result)
    if how.flipped:
        y = lax.rev(y, tuple(range(len(how.strides))))
    return [y.transpose(np.argsort(how.orders[2]).tolist())]


def _widened(shape: tuple, place: int, missing: int) -> tuple:
    """Returns the shape with spatial axes of size 1 inserted at `place`."""
    return (*shape[:place], *(1,) * missing, *shape[place:])


convolution_p = define("native_convolution", _portable, _by_kernel)
