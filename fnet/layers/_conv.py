"""Convolution and transposed convolution, in one or more dimensions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet.jaxpr import misdivided
from fnet.layers._core import Layer
from fnet.layers._divided import OTHER, ROWS, SPACE, divided, unsplit
from fnet.layers._explicit import by_rows
from fnet.layers._linear import align, floating, lecun_normal, zeros
from fnet.layers._scope import Scope

Padding = str | int | Sequence[int | tuple[int, int]]


class Conv(Layer):
    """A convolution (cross-correlation, as in all neural network libraries) over the axes between
    batch and channels.

    >>> conv = Conv(8, 3, strides=2)
    >>> params, _ = conv.init(jax.random.key(0), jnp.ones((1, 28, 28, 3)))
    >>> conv(params, jnp.ones((1, 28, 28, 3))).shape
    (1, 14, 14, 8)

    With a number as its kernel_size, `Conv(64, 3)` works for sequences, images and volumes: the
    input determines the number of dimensions. A tuple has one size for each.

    On a mesh of two or more axes with images, time, the kernel or, with groups, the batch split,
    XLA computes wrong results of convolutions. The layer avoids this wherever it sees the mesh,
    which it does not if `jax.jit` with `in_shardings` gets only arrays that were never placed:
    place one with `jax.device_put`, use `jax.set_mesh(mesh)` or `plan.jit` (docs/parallel.md, "What
    is not left to XLA").

    Args:
        features: number of output channels.
        kernel_size: size of the window, one number for all dimensions or one for each.
        strides: step of the window, one number or one for each dimension. Default 1.
        padding: "SAME" (default) adds zeros so that the output size is the input size / stride,
            rounded up. "VALID" adds none. "CAUSAL", for one dimension only, adds zeros before the
            first position, so that no output depends on later ones. Or explicit: one number for all
            dimensions, one for each, or a (before, after) pair for each.
        dilation: spacing of the window's elements. Default 1.
        groups: number of channel groups, each with its own convolution. As many groups as input
            channels make it depthwise; see `DepthwiseConv`. Default 1.
        use_bias: whether to add a bias. Default True.
        kernel_init, bias_init: initializers, as in `jax.nn.initializers`. Defaults: LeCun normal,
            zeros.

    Input: [batch, *space, in]. Output: [batch, *space', features], in the input's dtype.

    Parameters: kernel [*window, in // groups, features], bias [features].

    Source: Dumoulin and Visin (2016), A guide to convolution arithmetic for deep learning.
    """

    features: int
    kernel_size: int | tuple[int, ...]
    strides: int | tuple[int, ...] = 1
    _: KW_ONLY
    padding: Padding = "SAME"
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    use_bias: bool = True
    kernel_init: Callable = lecun_normal
    bias_init: Callable = zeros

    def forward(self, scope: Scope, x: jax.Array) -> jax.Array:
        x = floating(x, scope, "Conv")
        window, strides, dilation = geometry(
            "Conv", scope, x, self.kernel_size, self.strides, self.dilation
        )
        kernel = _kernel("Conv", self, scope, x, window).astype(x.dtype)
        padding = pads("Conv", scope, self.padding, window, dilation)
        y = _convolved(self, scope, x, kernel, strides, padding, rhs_dilation=dilation)
        if 0 in y.shape[1:-1]:
            raise ValueError(
                f"Conv at {scope}: the window {window} is larger than the input {x.shape[1:-1]}"
            )
        return y


class DepthwiseConv(Layer):
    """A separate convolution for each input channel: `Conv` with one group for each input channel.

    Args:
        kernel_size, strides, padding, dilation, use_bias, kernel_init, bias_init: as in `Conv`.
        multiplier: output channels for each input channel. Default 1.

    Input: [batch, *space, in]. Output: [batch, *space', multiplier * in], in the input's dtype.

    Parameters: kernel [*window, 1, multiplier * in], bias [multiplier * in].

    >>> from fnet import layers as nn
    >>> conv, x = nn.DepthwiseConv(3, multiplier=2), jnp.ones((1, 8, 8, 4))
    >>> conv(conv.init(jax.random.key(0), x)[0], x).shape
    (1, 8, 8, 8)
    """

    kernel_size: int | tuple[int, ...]
    strides: int | tuple[int, ...] = 1
    _: KW_ONLY
    multiplier: int = 1
    padding: Padding = "SAME"
    dilation: int | tuple[int, ...] = 1
    use_bias: bool = True
    kernel_init: Callable = lecun_normal
    bias_init: Callable = zeros

    def forward(self, scope: Scope, x: jax.Array) -> jax.Array:
        inputs = floating(x, scope, "DepthwiseConv").shape[-1]
        conv = Conv(
            inputs * self.multiplier,
            self.kernel_size,
            self.strides,
            padding=self.padding,
            dilation=self.dilation,
            groups=inputs,
            use_bias=self.use_bias,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
        )
        return conv.forward(scope, x)


class ConvTranspose(Layer):
    """Transposed convolution, for example to increase the resolution of images by the factor
    `strides`.

    >>> from fnet import layers as nn
    >>> conv, x = nn.ConvTranspose(8, 3, strides=2), jnp.ones((1, 14, 14, 4))
    >>> conv(conv.init(jax.random.key(0), x)[0], x).shape
    (1, 28, 28, 8)

    As in PyTorch and Keras, it is the transpose of a `Conv` with the same window, strides, padding
    and dilation, plus a bias: what that layer does to gradients in its backward pass, this one does
    to its input. So its output has the size that the other's input would have: with "SAME", the
    input size times the stride; with "VALID" and dilation 1, (input size - 1) * stride + window.
    Explicit padding of 2, which there adds 2 positions at each end of the input, here removes 2 at
    each end of the output.

    Args:
        features: number of output channels.
        kernel_size, strides, padding, dilation, groups, use_bias, kernel_init, bias_init: as in
            `Conv`, except that padding cannot be "CAUSAL".
        output_padding: number of positions added at the end of each dimension of the output, one
            number or one for each. It settles which input size is meant: a `Conv` with stride 2,
            window 3 and "VALID" maps both 7 and 8 to 3, and its transpose maps 3 to 7 with
            `output_padding=0`, to 8 with `output_padding=1`. Default 0.

    Input: [batch, *space, in]. Output: [batch, *space', features], in the input's dtype.

    Parameters: kernel [*window, in // groups, features], bias [features].

    Source: Dumoulin and Visin (2016), A guide to convolution arithmetic for deep learning, section
    4.
    """

    features: int
    kernel_size: int | tuple[int, ...]
    strides: int | tuple[int, ...] = 1
    _: KW_ONLY
    padding: Padding = "SAME"
    output_padding: int | tuple[int, ...] = 0
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    use_bias: bool = True
    kernel_init: Callable = lecun_normal
    bias_init: Callable = zeros

    def forward(self, scope: Scope, x: jax.Array) -> jax.Array:
        x = floating(x, scope, "ConvTranspose")
        window, strides, dilation = geometry(
            "ConvTranspose", scope, x, self.kernel_size, self.strides, self.dilation
        )
        if self.padding == "CAUSAL":
            raise ValueError(
                f"ConvTranspose at {scope}: padding must be 'SAME', 'VALID' or explicit; got "
                f"'CAUSAL'"
            )
        kernel = jnp.flip(
            _kernel("ConvTranspose", self, scope, x, window), range(len(window))
        ).astype(x.dtype)
        extra = numbers("output_padding", self.output_padding, len(window), "ConvTranspose", scope)
        form = pads("ConvTranspose", scope, self.padding, window, dilation)
        padding = []
        for i, (size, step, gap) in enumerate(zip(window, strides, dilation)):
            reach = gap * (size - 1) + 1  # from the first to the last position of a window
            skipped = 0
            if form == "VALID":
                low, high = 0, 0
            elif form == "SAME":  # the padding of the convolution that maps size * stride to size
                total = max(reach - step, 0)
                low, high = total // 2, total - total // 2
                # A convolution whose stride is larger than its window skips positions at the end.
                skipped = max(step - reach, 0)
            else:
                low, high = form[i]
            padding.append((reach - 1 - low, reach - 1 - high + extra[i] + skipped))
        return _convolved(
            self,
            scope,
            x,
            kernel,
            (1,) * len(window),
            padding,
            lhs_dilation=strides,
            rhs_dilation=dilation,
        )


def _kernel(who: str, layer: Any, scope: Scope, x: jax.Array, window: tuple[int, ...]) -> jax.Array:
    """Returns the kernel of a convolution, [*window, in // groups, features]."""
    inputs, groups = x.shape[-1], layer.groups
    if inputs % groups or layer.features % groups:
        raise ValueError(
            f"{who} at {scope}: the input's {inputs} channels and features={layer.features} must "
            f"be multiples of groups={groups}"
        )
    out = "out" if groups == 1 else f"{groups}*out"
    return scope.param(
        "kernel",
        (*window, inputs // groups, layer.features),
        layer.kernel_init,
        (*[None] * len(window), "in", "out"),
        roles=(*["in"] * len(window), "in", out),
    )


def _convolved(
    layer: Any,
    scope: Scope,
    x: jax.Array,
    kernel: jax.Array,
    strides: Any,
    padding: Any,
    **dilations: Any,
) -> jax.Array:
    """Convolves the input, and adds the bias."""
    padding = padding if isinstance(padding, str) else tuple(map(tuple, padding))
    options = dict(
        window_strides=strides,
        padding=padding,
        dimension_numbers=layout(x.ndim),
        feature_group_count=layer.groups,
        **dilations,
    )
    bias = None
    if layer.use_bias:
        bias = scope.param("bias", (layer.features,), layer.bias_init, ("out",), roles=("out",))
    mesh = misdivided.mesh_of(x, kernel)
    # For `vmap`.
    rows = (
        (misdivided.GROUPED,)
        if layer.groups > 1
        else (misdivided.SPLIT_IMAGE, misdivided.SPLIT_KERNEL, misdivided.GROUPED)
    )
    if any(row.applies(mesh) for row in rows):
        y = _divided(x, kernel, mesh, rows[0], options)
    else:
        y = _convolution(x, kernel, options)
    return y if bias is None else y + align(bias, y)


def _divided(
    x: jax.Array, kernel: jax.Array, mesh: Any, row: misdivided.Row, options: dict
) -> jax.Array:
    """As `_convolution`, divided so that XLA computes the results and the gradients of one device
    (see `fnet.jaxpr.misdivided`)."""
    divide = lambda value, axes: divided(value, axes, row, mesh, x, kernel)
    space = SPACE * (x.ndim - 2)
    y = _convolution(divide(x, ROWS + space + OTHER), divide(kernel, space + 2 * OTHER), options)
    return divide(y, ROWS + space + OTHER)  # before the bias, which may be split otherwise


def _convolution(x: jax.Array, kernel: jax.Array, options: dict) -> jax.Array:
    convolve = functools.partial(lax.conv_general_dilated, **options)
    if options["feature_group_count"] > 1:  # XLA gathers the batch of a grouped convolution
        convolve = functools.partial(by_rows, convolve)
    rows = misdivided.SPLIT_IMAGE, misdivided.SPLIT_KERNEL
    return unsplit(convolve, x, kernel, space=range(1, x.ndim - 1), rows=rows)


def layout(ndim: int) -> lax.ConvDimensionNumbers:
    """Returns the dimension numbers for inputs [batch, *space, channels] and kernels [*window, in,
    out]."""
    data = (0, ndim - 1, *range(1, ndim - 1))
    return lax.ConvDimensionNumbers(data, (ndim - 1, ndim - 2, *range(ndim - 2)), data)


def numbers(name: str, value: Any, dims: int, who: str, scope: Scope) -> tuple[int, ...]:
    """Returns `value` as a tuple with one number for each dimension."""
    value = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(value) != dims:
        raise ValueError(
            f"{who} at {scope}: expected {dims} numbers for {name}, one for each dimension; got "
            f"{value}"
        )
    return value


def geometry(
    who: str,
    scope: Scope,
    x: jax.Array,
    window: int | tuple[int, ...],
    strides: Any,
    dilation: Any = 1,
) -> tuple[tuple[int, ...], ...]:
    """Returns window, strides and dilation with one number for each spatial dimension of the input."""
    dims = x.ndim - 2 if isinstance(window, int) else len(window)
    if x.ndim != dims + 2 or dims < 1:
        needed = f"{dims + 2} axes for window {window}"
        if isinstance(window, int):
            needed = "[batch, *space, channels]"
        hint = "; add a batch axis: x[None]" if x.ndim == dims + 1 else ""
        raise ValueError(f"{who} at {scope}: expected {needed}; got shape {x.shape}{hint}")
    given = ("kernel_size", window), ("strides", strides), ("dilation", dilation)
    return tuple(numbers(name, value, dims, who, scope) for name, value in given)


def pads(
    who: str, scope: Scope, padding: Any, window: tuple[int, ...], dilation: Any = None
) -> Any:
    """Returns a padding in JAX's form: "SAME", "VALID" or a (before, after) pair for each
    dimension."""
    dims = len(window)
    if isinstance(padding, str):
        if padding in ("SAME", "VALID"):
            return padding
        if padding == "CAUSAL" and dims == 1:
            return [((dilation[0] if dilation else 1) * (window[0] - 1), 0)]
        raise ValueError(
            f"{who} at {scope}: padding must be 'SAME', 'VALID', 'CAUSAL' (one dimension) or "
            f"explicit; got {padding!r} for {dims} dimensions"
        )
    if isinstance(padding, int):
        return [(padding, padding)] * dims
    pairs = [(pad, pad) if isinstance(pad, int) else tuple(pad) for pad in padding]
    if len(pairs) != dims or any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"{who} at {scope}: explicit padding must be a number or a (before, after) pair for "
            f"each of {dims} dimensions; got {padding}"
        )
    return pairs
