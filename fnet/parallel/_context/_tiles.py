"""Attention between one block of queries and one block of keys, the step of which ring attention
consists. Blocks have positions in time, from which follows which keys a query sees.

Glossary: b batch, t queries of the block, s keys of the block, g key/value heads, r query heads of
each, d head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fnet.layers._attend_xla import Form, Products, cast


class Sums(NamedTuple):
    """What the blocks of keys so far give to a block of queries, with the softmax still open.

    Attributes:
        out: the weighted values [b, g, r, t, d].
        peak: the maximum of each row of logits [b, g, r, t].
        total: the sum of exp(logits - peak) of each row [b, g, r, t].
    """

    out: jax.Array
    peak: jax.Array
    total: jax.Array


class Saved(NamedTuple):
    """What the backward pass reads for a block of queries.

    Attributes:
        of_out: the cotangent of the output [b, g, r, t, d], divided by the total of each row.
        peak, total: as in `Sums`, of the complete rows.
        mean: the mean of the weights' cotangents of each row [b, g, r, t].
    """

    of_out: jax.Array
    peak: jax.Array
    total: jax.Array
    mean: jax.Array


def begin(q: jax.Array, dtype: Any) -> Sums:
    """Returns the sums of queries [..., d] that have seen no key."""
    rows = q.shape[:-1]
    return Sums(
        jnp.zeros(q.shape, dtype), jnp.full(rows, jnp.finfo(dtype).min), jnp.zeros(rows, dtype)
    )


def add(
    form: Form, products: Products, q: jax.Array, k: jax.Array, v: jax.Array, seen: Any, sums: Sums
) -> Sums:
    """Adds a block of keys and values [b, g, s, d] to the sums of queries [b, g, r, t, d]. `seen`
    are booleans that broadcast to [b, g, r, t, s], or None."""
    logits = _logits(form, products, q, k, seen)
    peak = jnp.maximum(sums.peak, logits.max(-1))
    weights = jnp.exp(logits - peak[..., None])
    if seen is not None:  # a row that sees nothing has equal logits
        weights = jnp.where(seen, weights, 0)
    faded = jnp.exp(sums.peak - peak)
    mixed = products.mix(_merged(weights), v).reshape(q.shape)
    return Sums(sums.out * faded[..., None] + mixed, peak, sums.total * faded + weights.sum(-1))


def finish(sums: Sums) -> Sums:
    """Divides by the totals. A query that saw no key gets 0."""
    total = jnp.where(sums.total == 0, 1, sums.total)
    return Sums(sums.out / total[..., None], sums.peak, total)


def save(products: Products, out: jax.Array, of_out: jax.Array, peak: Any, total: Any) -> Saved:
    """Returns what the backward pass reads, all [..., t, d] or [..., t].

    The mean of the weights' cotangents is the product of the output and its cotangent (Dao et al.,
    2022, FlashAttention, appendix B.4).
    """
    out, of_out, peak, total = (cast(x, products.wide) for x in (out, of_out, peak, total))
    mean = (out * of_out).sum(-1)
    if products.compute != jnp.float16:  # in which a divided cotangent would underflow
        of_out, mean = of_out / total[..., None], mean / total
    return Saved(of_out, peak, total, mean)


def pull(
    form: Form,
    products: Products,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: Any,
    saved: Saved,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what a block of keys and a block of queries add to the cotangents of q, k and v."""
    with jax.named_scope("rematted_computation"):  # jax.checkpoint's name for recomputation
        logits = _logits(form, products, q, k, seen)
        weights = jnp.exp(logits - saved.peak[..., None])
    if seen is not None:
        weights = jnp.where(seen, weights, 0)
    if products.compute == jnp.float16:
        weights = weights / saved.total[..., None]
    of_out = _merged(saved.of_out)
    of_weights = products.rows(of_out, v).reshape(weights.shape)
    of_logits = weights * (of_weights - saved.mean[..., None])
    if form.softcap is not None:  # hidden logits have weight 0
        of_logits = of_logits * (1 - jnp.square(jnp.clip(logits / form.softcap, -1, 1)))
    of_logits = _merged(of_logits * form.scale)
    of_q = products.mix(of_logits, k).reshape(q.shape)
    return of_q, products.sums(of_logits, _merged(q)), products.sums(_merged(weights), of_out)


def _logits(form: Form, products: Products, q: jax.Array, k: jax.Array, seen: Any) -> jax.Array:
    logits = products.rows(_merged(q), k).reshape(*q.shape[:-1], k.shape[-2]) * form.scale
    if form.softcap is not None:
        logits = form.softcap * jnp.tanh(logits / form.softcap)
    return logits if seen is None else jnp.where(seen, logits, jnp.finfo(logits.dtype).min)


def _merged(x: jax.Array) -> jax.Array:
    """Reshapes [b, g, r, t, n] to [b, g, r t, n]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


class Hidden(NamedTuple):
    """Which keys are hidden, beside those that the `Form` hides. Each array but the mask is that of
    the whole time; what is not given is None.

    Attributes:
        time: the number of true keys; those behind are padding.
        mask: booleans [b, g, r, t, s] or 1 in place of any of them, of the device's queries and of
            all keys.
        lengths, starts: integers [b].
        segments: integers [b, whole time].
    """

    time: int
    mask: jax.Array | None = None
    lengths: jax.Array | None = None
    starts: jax.Array | None = None
    segments: jax.Array | None = None

    @classmethod
    def of(cls, form: Form, time: int, where: Sequence[jax.Array], groups: int) -> Hidden:
        """Names the optional arrays of an attention."""
        given = dict(zip(form.given, where))
        if (mask := given.get("mask")) is not None:
            b, h, t, s = mask.shape
            given["mask"] = mask.reshape(b, *((1, 1) if h == 1 else (groups, h // groups)), t, s)
        for name in {"lengths", "starts"} & given.keys():
            given[name] = given[name].astype(jnp.int32)
        return cls(time, **given)


class Block(NamedTuple):
    """A block of queries or keys. `start` is the position of its first one in time, which may be
    known only when the program runs, `size` their number, and `row` the number of the block's first
    query among those of the device."""

    start: Any
    size: int
    row: Any = 0


def seen(form: Form, hidden: Hidden, queries: Block, keys: Block, padded: int) -> Any:
    """Returns booleans that broadcast to [b, g, r, t, s], True where a query sees a key, or None if all are
    True. `padded` is the length of the whole time with its padding."""
    found = []
    rows, columns = (_positions(block) for block in (queries, keys))
    if form.causal or form.window is not None:
        ahead = lax.expand_dims(rows[:, None] - columns[None], range(3))
        if hidden.starts is not None:
            ahead = ahead + _by_row(hidden.starts)
        if form.causal:
            found.append(ahead >= 0)
        if form.window is not None:
            found.append(ahead < form.window if form.causal else jnp.abs(ahead) < form.window)
    columns = lax.expand_dims(columns, range(4))
    if hidden.time < padded:
        found.append(columns < hidden.time)
    if hidden.lengths is not None:
        found.append(columns < _by_row(hidden.lengths))
    if hidden.segments is not None:
        own, other = (_part(hidden.segments, 1, block) for block in (queries, keys))
        own, other = own[:, None, None, :, None], other[:, None, None, None]
        found.append((own == other) & (other != 0))
    if hidden.mask is not None:
        mask = hidden.mask
        if mask.shape[3] > 1:
            mask = lax.dynamic_slice_in_dim(mask, queries.row, queries.size, axis=3)
        if mask.shape[4] > 1:
            mask = lax.dynamic_slice_in_dim(mask, keys.start, keys.size, axis=4)
        found.append(mask)
    return functools.reduce(jnp.logical_and, found) if found else None


def _positions(block: Block) -> jax.Array:
    return block.start + jnp.arange(block.size, dtype=jnp.int32)


def matters(form: Form, hidden: Hidden, queries: Block, keys: Block) -> Any:
    """Whether some query of a block may see some key of another one: a boolean, which is known when
    the program runs. Blocks that do not matter are skipped."""
    checks = [keys.start < hidden.time]
    nearest = queries.start - (keys.start + keys.size - 1)
    farthest = queries.start + queries.size - 1 - keys.start
    if hidden.starts is not None:
        nearest, farthest = nearest + hidden.starts.min(), farthest + hidden.starts.max()
    if form.causal:
        checks.append(farthest >= 0)
    if form.window is not None:
        checks.append(nearest < form.window)
        if not form.causal:
            checks.append(-farthest < form.window)
    if hidden.lengths is not None:
        checks.append(keys.start < hidden.lengths.max())
    if hidden.segments is not None:
        checks.append(_overlap(*(_part(hidden.segments, 1, block) for block in (queries, keys))))
    return functools.reduce(jnp.logical_and, checks)


def _overlap(own: jax.Array, other: jax.Array) -> jax.Array:
    """Whether the numbers of the texts in two blocks may have one in common, by their ranges."""
    most = jnp.iinfo(own.dtype).max
    first = [jnp.where(x == 0, most, x).min(1) for x in (own, other)]
    last = [x.max(1) for x in (own, other)]
    return ((first[0] <= last[1]) & (first[1] <= last[0])).any()


def _part(x: jax.Array, axis: int, block: Block) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, block.start, block.size, axis=axis)


def _by_row(x: jax.Array) -> jax.Array:
    return lax.expand_dims(x, (1, 2, 3, 4))
