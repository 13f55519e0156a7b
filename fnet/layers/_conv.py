"""Convolution and its transpose in one, two or three dimensions (or more)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY

import jax.numpy as jnp
from jax import lax

from fnet.layers._core import Layer
from fnet.layers._linear import align, floating, lecun_normal, zeros
from fnet.layers._scope import Scope

Padding = str | int | Sequence[int | tuple[int, int]]


class Conv(Layer):
    """A convolution (cross-correlation, as everywhere in this field) over the axes between batch and channels.

    The number of dimensions is kernel_size's where that is a tuple, and the input's (its axes less two) where it is
    one number, so that `Conv(64, 3)` serves sequences, images and volumes.

    Parameters: kernel [*window, in // groups, features], bias [features].

    Args:
        features: output channels.
        kernel_size: the window, one number for all dimensions or one for each.
        strides: steps of the window.
        padding: "SAME" (output size is input size over stride, rounded up), "VALID" (none), "CAUSAL" (one dimension:
            nothing to the right of a position enters), or explicit: one number, one for each dimension, or (before,
            after) pairs.
        dilation: spacing of the window's elements.
        groups: channel groups that do not mix. `groups=in` with `features = multiplier * in` is a depthwise
            convolution; see `DepthwiseConv`.
        use_bias, kernel_init, bias_init: as in `Dense`.

    Input [batch, *space, in], output [batch, *space', features], in the input's dtype.

    Source: Dumoulin and Visin (2016), A guide to convolution arithmetic for deep learning.

    >>> conv = Conv(8, 3, strides=2)
    >>> params, _ = conv.init(jax.random.key(0), jnp.ones((1, 28, 28, 3)))
    >>> conv(params, jnp.ones((1, 28, 28, 3))).shape
    (1, 14, 14, 8)
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

    def forward(self, scope: Scope, x):
        x = floating(x, scope, "Conv")
        window, strides, dilation = geometry("Conv", scope, x, self.kernel_size, self.strides, self.dilation)
        inputs = x.shape[-1]
        if inputs % self.groups or self.features % self.groups:
            raise ValueError(f"Conv at {scope}: {self.groups} groups must divide the input's {inputs} channels and "
                             f"the {self.features} features")
        shape = (*window, inputs // self.groups, self.features)
        kernel = scope.param("kernel", shape, self.kernel_init, (*[None] * len(window), "in", "out"))
        y = lax.conv_general_dilated(
            x, kernel.astype(x.dtype), strides, pads("Conv", scope, self.padding, window, dilation),
            rhs_dilation=dilation, dimension_numbers=layout(x.ndim), feature_group_count=self.groups)
        if 0 in y.shape[1:-1]:
            raise ValueError(f"Conv at {scope}: the window {window} does not fit into the input's {x.shape[1:-1]}")
        if self.use_bias:
            y = y + align(scope.param("bias", (self.features,), self.bias_init, ("out",)), y)
        return y


class DepthwiseConv(Layer):
    """A convolution that keeps channels apart: `Conv` with one group for each input channel.

    Parameters: kernel [*window, 1, multiplier * in], bias [multiplier * in].

    Args:
        kernel_size, strides, padding, dilation: as in `Conv`.
        multiplier: output channels for each input channel.

    Input [batch, *space, in], output [batch, *space', multiplier * in].
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

    def forward(self, scope: Scope, x):
        inputs = floating(x, scope, "DepthwiseConv").shape[-1]
        conv = Conv(inputs * self.multiplier, self.kernel_size, self.strides, padding=self.padding,
                    dilation=self.dilation, groups=inputs, use_bias=self.use_bias, kernel_init=self.kernel_init,
                    bias_init=self.bias_init)
        return conv.forward(scope, x)


class ConvTranspose(Layer):
    """The transpose of `Conv`: the map that takes Conv's outputs back to the shape of its inputs.

    It is the gradient of a `Conv(in, ...)` of the same window, strides, padding and dilation with respect to that
    convolution's input, as in PyTorch and Keras: with "SAME", the output is the input's size times the stride, with
    "VALID" (size - 1) * stride + window, and explicit padding is what the convolution would have padded.

    Parameters: kernel [*window, in // groups, features], bias [features].

    Args:
        features: output channels.
        kernel_size, strides, padding, dilation, groups: as in `Conv` (no "CAUSAL").
        output_padding: rows added at the end, which tell apart the input sizes a strided convolution maps to one.

    Input [batch, *space, in], output [batch, *space', features].

    Source: Dumoulin and Visin (2016), section 4.
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

    def forward(self, scope: Scope, x):
        x = floating(x, scope, "ConvTranspose")
        window, strides, dilation = geometry("ConvTranspose", scope, x, self.kernel_size, self.strides, self.dilation)
        inputs, groups = x.shape[-1], self.groups
        if inputs % groups or self.features % groups:
            raise ValueError(f"ConvTranspose at {scope}: {groups} groups must divide the input's {inputs} channels "
                             f"and the {self.features} features")
        if self.padding == "CAUSAL":
            raise ValueError(f"ConvTranspose at {scope}: padding is 'SAME', 'VALID' or explicit; got 'CAUSAL'")
        shape = (*window, inputs // groups, self.features)
        kernel = scope.param("kernel", shape, self.kernel_init, (*[None] * len(window), "in", "out"))
        extra = numbers("output_padding", self.output_padding, len(window), "ConvTranspose", scope)
        reach = [d * (k - 1) + 1 for k, d in zip(window, dilation)]
        explicit = pads("ConvTranspose", scope, self.padding, window, dilation)
        if explicit == "VALID":
            explicit = [(0, 0)] * len(window)
        elif explicit == "SAME":    # of the convolution that maps size * stride to size
            explicit = [(total // 2, total - total // 2) for total in (max(r - s, 0) for r, s in zip(reach, strides))]
            # A stride beyond the window skips rows at the end; its transpose puts them back.
            extra = [e + max(s - r, 0) for e, r, s in zip(extra, reach, strides)]
        padding = [(r - 1 - low, r - 1 - high + e) for r, (low, high), e in zip(reach, explicit, extra)]
        y = lax.conv_general_dilated(
            x, jnp.flip(kernel, range(len(window))).astype(x.dtype), (1,) * len(window), padding,
            lhs_dilation=strides, rhs_dilation=dilation, dimension_numbers=layout(x.ndim), feature_group_count=groups)
        if self.use_bias:
            y = y + align(scope.param("bias", (self.features,), self.bias_init, ("out",)), y)
        return y


def layout(ndim: int) -> lax.ConvDimensionNumbers:
    """Batch first and channels last: [batch, *space, channels] and kernel [*window, in, out]."""
    data = (0, ndim - 1, *range(1, ndim - 1))
    return lax.ConvDimensionNumbers(data, (ndim - 1, ndim - 2, *range(ndim - 2)), data)


def numbers(name, value, dims, who, scope) -> tuple[int, ...]:
    """One number for each dimension."""
    value = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(value) != dims:
        raise ValueError(f"{who} at {scope}: {name} {value} has {len(value)} numbers for {dims} dimensions")
    return value


def geometry(who, scope, x, window, strides, dilation=1):
    """Window, strides and dilation, one number for each of the input's dimensions of space."""
    dims = x.ndim - 2 if isinstance(window, int) else len(window)
    if x.ndim != dims + 2 or dims < 1:
        needed = "[batch, *space, channels]" if isinstance(window, int) else f"{dims + 2} axes for window {window}"
        raise ValueError(f"{who} at {scope} needs {needed}; got shape {x.shape}"
                         + (": add the batch axis with x[None]" if x.ndim == dims + 1 else ""))
    given = ("kernel_size", window), ("strides", strides), ("dilation", dilation)
    return tuple(numbers(name, value, dims, who, scope) for name, value in given)


def pads(who, scope, padding, window, dilation=None):
    """JAX's form of a padding: "SAME", "VALID" or a (before, after) pair for each dimension."""
    dims = len(window)
    if isinstance(padding, str):
        if padding in ("SAME", "VALID"):
            return padding
        if padding == "CAUSAL" and dims == 1:
            return [((dilation[0] if dilation else 1) * (window[0] - 1), 0)]
        raise ValueError(f"{who} at {scope}: padding is 'SAME', 'VALID', 'CAUSAL' (one dimension) or explicit; "
                         f"got {padding!r} for {dims} dimensions")
    if isinstance(padding, int):
        return [(padding, padding)] * dims
    pairs = [(pad, pad) if isinstance(pad, int) else tuple(pad) for pad in padding]
    if len(pairs) != dims or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{who} at {scope}: explicit padding is a number or a (before, after) pair for each of "
                         f"{dims} dimensions; got {padding}")
    return pairs
