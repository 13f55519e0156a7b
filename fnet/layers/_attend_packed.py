"""Attention over texts that are packed into rows, on a CPU: blocks of queries and keys without a
common text are skipped.

Which these are is known only when the program runs, and differs from row to row. So the blocks of
queries of all rows are sorted by the number of key blocks that they need, and a loop for each of a
few numbers visits its own. (With `lax.switch` instead, XLA copies the sums that the blocks are
added to.) The operations within a block are those of `_attend_xla`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fnet.layers import _attend_xla as xla
from fnet.layers._attend_xla import Form, Products, Span
from fnet.layers._sizes import sized

BLOCK = 128  # queries, and keys
FEWEST = 4  # blocks in a row; with fewer, the loops cost more than they save


def suits(form: Form, t: int, s: int) -> bool:
    """Whether `forward` and `backward` of this module compute an attention, and faster."""
    if "segments" not in form.given or "mask" in form.given or not sized(t, s):
        return False
    return t % BLOCK == 0 and t // BLOCK >= FEWEST


def forward(
    form: Form,
    products: Products,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
) -> tuple:
    """Returns (output [b, t, h, d], peak [b, h, t], total [b, h, t]), as `_attend_xla.forward`
    does."""
    b, t, h, _ = q.shape

    def visit(place: _Place, width: int, results: tuple) -> tuple:
        inner, keys, where = _inside(form, place, width, segments)
        parts = xla.forward(
            inner,
            products,
            [Span(0, BLOCK, 0, width * BLOCK)],
            _part(q, place.row, place.block),
            *(_part(x, place.row, keys, width) for x in (k, v)),
            *where,
        )
        return tuple(
            _updated(x, part, place.row, place.block, axis)
            for x, part, axis in zip(results, parts, (1, 2, 2))
        )

    statistics = jnp.zeros((b, h, t), products.wide)
    results = jnp.zeros(q.shape, products.wide), statistics, statistics
    return _visited(visit, form, segments, results)


def backward(
    form: Form,
    products: Products,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *rest: jax.Array,
) -> tuple:
    """Returns the cotangents of q, k and v, as `_attend_xla.backward` does. `rest` contains the
    results of `forward` and the cotangent of the output."""
    out, peak, total, cotangent = rest

    def visit(place: _Place, width: int, results: tuple) -> tuple:
        inner, keys, where = _inside(form, place, width, segments)
        block = place.row, place.block
        of_q, *more = xla.backward(
            inner,
            products,
            [Span(0, BLOCK, 0, width * BLOCK)],
            _part(q, *block),
            *(_part(x, place.row, keys, width) for x in (k, v)),
            *where,
            _part(out, *block),
            *(_part(x, *block, axis=2) for x in (peak, total)),
            _part(cotangent, *block),
        )
        sums = (
            _updated(x, _part(x, place.row, keys, width) + part, place.row, keys)
            for x, part in zip(results[1:], more)
        )
        return _updated(results[0], of_q, *block), *sums

    results = tuple(jnp.zeros(x.shape, products.wide) for x in (q, k, v))
    return _visited(visit, form, segments, results)


class _Place(NamedTuple):
    """A block of queries of a row, and the first of the key blocks that it needs: integers."""

    row: jax.Array
    block: jax.Array
    low: jax.Array


def _visited(visit: Callable, form: Form, segments: jax.Array, results: tuple) -> tuple:
    """Returns `results` after `results = visit(place, width, results)` for each block of queries,
    with the smallest `width`, in blocks of keys, that suffices for it."""
    places, counts = _places(form, segments)
    widths = _widths(segments.shape[1] // BLOCK)
    numbers = jnp.searchsorted(jnp.asarray(widths, counts.dtype), counts)
    order = jnp.argsort(numbers, stable=True)
    stops = (numbers[None] <= jnp.arange(len(widths), dtype=numbers.dtype)[:, None]).sum(1)
    start = jnp.zeros((), stops.dtype)
    for width, stop in zip(widths, stops):

        def body(i: jax.Array, results: tuple, width: int = width) -> tuple:
            place = jax.tree.map(lambda x: x[order[i]], places)
            return visit(place, width, results)

        results = lax.fori_loop(start, stop, body, results)
        start = stop
    return results


def _places(form: Form, segments: jax.Array) -> tuple[_Place, jax.Array]:
    """Returns the blocks of queries of all rows, and how many key blocks each needs.

    A key block is needed unless the range of the numbers of its texts and that of the queries' do
    not overlap.
    """
    b, t = segments.shape
    n = t // BLOCK
    numbers = segments.reshape(b, n, BLOCK)
    high = numbers.max(2)
    low = jnp.where(numbers == 0, jnp.iinfo(segments.dtype).max, numbers).min(2)
    needed = (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])  # [b, n, n]
    order = jnp.arange(n, dtype=jnp.int32)
    ahead = order[:, None] - order[None]
    if form.causal:
        needed = needed & (ahead >= 0)[None]
    if form.window is not None:
        needed = needed & (jnp.abs(ahead) <= -(-(form.window - 1) // BLOCK))[None]
    first = jnp.where(needed, order[None, None], n).min(2).reshape(-1)
    last = jnp.where(needed, order[None, None], -1).max(2).reshape(-1)
    rows, blocks = (lax.broadcasted_iota(jnp.int32, (b, n), i).reshape(-1) for i in (0, 1))
    # A block of padding needs none. It gets one, whose keys are all hidden.
    return _Place(rows, blocks, jnp.minimum(first, n - 1)), jnp.maximum(last - first + 1, 1)


def _widths(n: int) -> list[int]:
    """Returns numbers of key blocks up to n, each at most half as large again as the one before it
    plus 1."""
    widths = [1]
    while widths[-1] < n:
        widths.append(min(n, max(widths[-1] + 1, widths[-1] * 3 // 2)))
    return widths


def _inside(form: Form, place: _Place, width: int, segments: jax.Array) -> tuple:
    """Returns (the form of the attention within a block, its first key block, its mask and
    start)."""
    keys = jnp.minimum(place.low, segments.shape[1] // BLOCK - width)
    mask = xla.alike(
        _part(segments, place.row, place.block), _part(segments, place.row, keys, width)
    )
    start = ((place.block - keys) * BLOCK)[None]
    return dataclasses.replace(form, given=("mask", "starts")), keys, (mask, start)


def _part(
    x: jax.Array, row: jax.Array, block: jax.Array, width: int = 1, axis: int = 1
) -> jax.Array:
    """Returns `width` blocks from `block` on, in one row of an array with the time on `axis`."""
    sizes = [width * BLOCK if i == axis else n for i, n in enumerate(x.shape)]
    return lax.dynamic_slice(x, _start(x, row, block, axis), [1, *sizes[1:]])


def _updated(
    x: jax.Array, part: jax.Array, row: jax.Array, block: jax.Array, axis: int = 1
) -> jax.Array:
    return lax.dynamic_update_slice(x, part, _start(x, row, block, axis))


def _start(x: jax.Array, row: jax.Array, block: jax.Array, axis: int) -> list[jax.Array]:
    zero = jnp.zeros((), block.dtype)
    return [row, *(block * BLOCK if i == axis else zero for i in range(1, x.ndim))]
