"""Ulysses attention: the devices exchange time for heads, compute attention over all of time with
the kernels that one device has, and exchange back (Jacobs et al., 2023).

The functions work on the parts of one device, inside of `jax.shard_map`. Heads and key/value heads
must be multiples of the number of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet.parallel._context._layout import Layout


def forward(bind: Callable[..., Sequence], layout: Layout, *arrays: jax.Array) -> list:
    """Returns a device's part of the output [b, t, h, d]; and, if `bind` returns them too, peak and
    total [b, h, time] of the device's heads.

    Args:
        bind: the attention of whole arrays: a function of q, k, v and the optional arrays.
        layout: how time is divided.
        arrays: the device's part of q [b, t, h, d], k and v [b, t, g, d], then the optional arrays
            of its heads and of the whole time.
    """
    whole = [by_heads(layout, x) for x in arrays[:3]]
    out, *statistics = bind(*whole, *arrays[3:])
    return [by_time(layout, out), *(_padded(layout, x, 2) for x in statistics)]


def backward(bind: Callable[..., Sequence], layout: Layout, *arrays: jax.Array) -> list:
    """Returns a device's part of the cotangents of q, k and v. The last four of `arrays` are the
    results of `forward` and the cotangent of the output."""
    q, k, v, *where, out, peak, total, of_out = arrays
    q, k, v, out, of_out = (by_heads(layout, x) for x in (q, k, v, out, of_out))
    peak, total = (lax.slice_in_dim(x, 0, layout.time, axis=2) for x in (peak, total))
    return [by_time(layout, x) for x in bind(q, k, v, *where, out, peak, total, of_out)]


def by_heads(layout: Layout, x: jax.Array) -> jax.Array:
    """[b, t, h, d], a part of time with all heads -> [b, time, h / n, d]"""
    x = lax.all_to_all(x, layout.axis, split_axis=2, concat_axis=1, tiled=True)
    return lax.slice_in_dim(x, 0, layout.time, axis=1)


def by_time(layout: Layout, x: jax.Array) -> jax.Array:
    """[b, time, h / n, d] -> [b, t, h, d]"""
    x = _padded(layout, x, 1)
    return lax.all_to_all(x, layout.axis, split_axis=1, concat_axis=2, tiled=True)


def _padded(layout: Layout, x: jax.Array, axis: int) -> Any:
    widths = [(0, layout.padded - layout.time if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths)
