"""Pooling: the maximum or mean over windows or over all positions; and Flatten."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet.jaxpr import misdivided
from fnet.layers._conv import Padding, geometry, pads
from fnet.layers._core import Layer
from fnet.layers._divided import OTHER, SPACE, divided, unsplit
from fnet.layers._linear import floating, wide
from fnet.layers._scope import Scope


class MaxPool(Layer):
    """Computes the maximum over each window.

    If windows overlap and an image axis is split over several devices, XLA computes a wrong
    gradient. The layer avoids this wherever it sees the mesh, which it does not if `jax.jit` with
    `in_shardings` gets only arrays that were never placed: place one with `jax.device_put`, use
    `jax.set_mesh(mesh)` or `plan.jit` (docs/parallel.md, "What is not left to XLA").

    Args:
        window: size of the window, one number for all dimensions or one for each dimension.
        strides: step of the window. Default: the size of the window, so that windows do not
            overlap.
        padding: "VALID" (default; no padding), "SAME", or explicit as in `Conv`. Padded positions
            do not affect the maximum.

    Input: [batch, *space, channels], real numbers. Output: [batch, *space', channels], in the
    input's dtype.

    >>> from fnet import layers as nn
    >>> nn.MaxPool(2)({}, jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """

    window: int | tuple[int, ...]
    strides: int | tuple[int, ...] | None = None
    _: KW_ONLY
    padding: Padding = "VALID"

    def forward(self, scope: Scope, x: jax.Array) -> jax.Array:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating) and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(
                f"MaxPool at {scope}: expected real numbers; got {x.dtype}{list(x.shape)}"
            )
        lowest = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
        return _windows(self, scope, x, np.array(lowest, x.dtype), lax.max)[0]


class AvgPool(Layer):
    """Computes the mean over each window, in float32 or float64.

    Args:
        window, strides, padding: as in `MaxPool`.
        count_padding: whether the mean includes the zeros of the padding, as in PyTorch. Default
            False: the mean is computed over the positions that are not padding, as in Keras.

    Input: [batch, *space, channels], floating point. Output: [batch, *space', channels], in the
    input's dtype.

    >>> from fnet import layers as nn
    >>> nn.AvgPool(2)({}, jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
    [[2.5, 4.5], [10.5, 12.5]]
    """

    window: int | tuple[int, ...]
    strides: int | tuple[int, ...] | None = None
    _: KW_ONLY
    padding: Padding = "VALID"
    count_padding: bool = False

    def forward(self, scope: Scope, x: jax.Array) -> jax.Array:
        x = floating(x, scope, "AvgPool")
        values = wide(x)
        zero = np.array(0, values.dtype)
        total, window, padded = _windows(self, scope, values, zero, lax.add)
        if self.count_padding or not padded:
            return (total / math.prod(window)).astype(x.dtype)
        inside = jnp.ones((1, *x.shape[1:-1], 1), values.dtype)
        count, _, _ = _windows(self, scope, inside, zero, lax.add)
        return (total / jnp.broadcast_to(count, total.shape)).astype(x.dtype)


class GlobalAvgPool(Layer):
    """Computes the mean over all positions, in float32 or float64: [batch, *space, channels] to
    [batch, channels].

    >>> from fnet import layers as nn
    >>> nn.GlobalAvgPool()({}, jnp.arange(8.0).reshape(1, 2, 2, 2)).tolist()
    [[3.0, 4.0]]
    """

    def forward(self, scope: Scope, x: jax.Array) -> jax.Array:
        x = floating(x, scope, "GlobalAvgPool")
        if x.ndim < 3:
            raise ValueError(
                f"GlobalAvgPool at {scope}: expected [batch, *space, channels]; got shape {x.shape}"
            )
        return wide(x).mean(range(1, x.ndim - 1)).astype(x.dtype)


class Flatten(Layer):
    """Merges all axes except the first: [batch, ...] to [batch, features].

    >>> from fnet import layers as nn
    >>> nn.Flatten()({}, jnp.ones((2, 4, 4, 3))).shape
    (2, 48)
    """

    def forward(self, scope: Scope, x: jax.Array) -> jax.Array:
        x = jnp.asarray(x)
        if not x.ndim:
            raise ValueError(f"Flatten at {scope}: expected [batch, ...]; got a scalar")
        return jnp.reshape(x, (x.shape[0], math.prod(x.shape[1:])))


def _windows(pool: Any, scope: Scope, x: jax.Array, start: Any, reduce: Any) -> tuple:
    """Returns (the result of reducing each window, the size of the window, whether there is
    padding)."""
    who = type(pool).__name__
    strides = pool.window if pool.strides is None else pool.strides
    window, strides, _ = geometry(who, scope, x, pool.window, strides)
    padding = pads(who, scope, pool.padding, window)
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(x.shape[1:-1], window, strides, padding)
    if any(pad >= size for size, pair in zip(window, padding) for pad in pair):
        raise ValueError(
            f"{who} at {scope}: padding {list(padding)} must be smaller than the window {window}"
        )
    if any(low + size + high < k for k, size, (low, high) in zip(window, x.shape[1:-1], padding)):
        raise ValueError(
            f"{who} at {scope}: the window {window} is larger than the input {x.shape[1:-1]}"
        )
    windows = (1, *window, 1), (1, *strides, 1), ((0, 0), *map(tuple, padding), (0, 0))
    mesh = misdivided.mesh_of(x) if reduce is lax.max else None
    whole = misdivided.overlapping(*windows[:2]) if misdivided.MAX_POOL.applies(mesh) else ()
    divide = lambda value: value
    if whole:  # XLA computes another gradient where windows overlap
        axes = "".join(SPACE if i in whole else OTHER for i in range(x.ndim))
        divide = lambda value: divided(value, axes, misdivided.MAX_POOL, mesh)
    pool = lambda x: lax.reduce_window(x, start, reduce, *windows)
    if reduce is lax.max and mesh is None:
        overlap = misdivided.overlapping(*windows[:2])
        y = unsplit(pool, x, space=overlap, rows=(misdivided.MAX_POOL,))
    else:
        y = divide(pool(divide(x)))
    return y, window, any(pad for pair in padding for pad in pair)
