"""Attention as operations of `jax.lax`: forward pass, backward pass and tangent, in blocks of
queries.

Glossary: b batch, t time of the queries, s time of the keys, h heads, g key/value heads, r = h / g,
d head_dim. Statistics of a row of logits: peak is its maximum, and total is the sum of exp(logits -
peak). Both are [b, h, t].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fnet.layers._sizes import sized


@dataclasses.dataclass(frozen=True)
class Form:
    """The options of an attention operation: everything except its arrays.

    Attributes:
        causal, window, scale, softcap: as in `dot_product_attention`.
        given: the names of the optional arrays that were passed, in the order "mask", "lengths",
            "starts", "segments". The optional arrays follow query, key and value in the operands.
        precision: the precision of the matrix products, as in `jax.default_matmul_precision`. None:
            the platform's default.
    """

    causal: bool
    window: int | None
    scale: float
    given: tuple[str, ...] = ()
    precision: Any = None
    softcap: float | None = None

    def blind(self, t: int, s: int) -> bool:
        """Whether the options allow queries that attend to no key. If the number t of queries or
        the number s of keys is symbolic, the method assumes t > s unless t and s are the same
        expression."""
        more = t > s if sized(t, s) else t != s
        return bool(self.given) or (self.window is not None and more)


class Span(NamedTuple):
    """A block of queries and its keys: the queries start .. stop - 1 attend only to the keys low ..
    high - 1."""

    start: int
    stop: int
    low: int
    high: int


def spans(form: Form, t: int, s: int) -> list[Span]:
    """Splits the queries into up to eight blocks (more with a window), each with the keys that it
    can attend to.

    With a causal mask, four blocks of queries attend to 1/4, 2/4, 3/4 and all of the keys, so only
    5/8 of the attention logits are computed. With more than eight blocks, the matrix products have
    so few rows that the total time increases. If the number of queries or of keys is symbolic, all
    queries form one block.
    """
    if not sized(t, s):
        return [Span(0, t, 0, s)]
    size = max(32, -(-t // (8 if t >= 1024 else 4)))
    if form.window is not None:
        size = max(min(size, max(64, form.window)), -(-t // 32))
    if (not form.causal and form.window is None) or "starts" in form.given:
        return [Span(0, t, 0, s)]
    found = []
    for start in range(0, max(t, 1), size):
        stop, low, high = min(start + size, t), 0, s
        if size < t and form.causal:
            high = min(high, stop)
        if size < t and form.window is not None:
            low, high = max(0, start - form.window + 1), min(high, stop - 1 + form.window)
        found.append(Span(start, stop, low, max(low, high)))
    return found


def widened(dtype: Any) -> Any:
    """Returns the dtype of sums and of the softmax for inputs of the given dtype."""
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype


class Products(NamedTuple):
    """Matrix products [b, g, m, k] x [b, g, k, n]. The attribute `operand` is the dtype in which
    the operands are multiplied. Before the multiplication, the operands are rounded to the
    precision of the dtype `compute`, and then converted to the dtype `operand`. Sums have the dtype
    `wide`. If `barred` is True, optimization barriers prevent XLA:CPU from merging transposes into
    the matrix products, because merged bfloat16 products would fail at run
    time."""

    compute: Any
    operand: Any
    precision: Any
    barred: bool = False

    @property
    def wide(self) -> Any:
        return widened(self.compute)

    def read(self, x: jax.Array) -> jax.Array:
        if self.compute == self.operand:
            return cast(x, self.compute)
        # Rounds the value but not the derivative; x + (rounded - x) is exact.
        x = cast(x, self.operand)
        return x + lax.stop_gradient(cast(cast(x, self.compute), self.operand) - x)

    def rows(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Computes the matrix product x y^T for x [b, g, m, k] and y [b, g, n, k]."""
        return self._dot(x, y, 3, 3)

    def mix(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Computes the matrix product x y for x [b, g, m, k] and y [b, g, k, n]."""
        return self._dot(x, y, 3, 2)

    def sums(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Computes the matrix product x^T y for x [b, g, k, m] and y [b, g, k, n]."""
        if not self.barred:
            return self._dot(x, y, 2, 2)
        return self._dot(lax.optimization_barrier(self.read(x).swapaxes(2, 3)), y, 3, 2)

    def _dot(self, x: jax.Array, y: jax.Array, i: int, j: int) -> jax.Array:
        x, y = self.read(x), self.read(y)
        if not self.barred:
            return lax.dot_general(
                x,
                y,
                (((i,), (j,)), ((0, 1), (0, 1))),
                precision=self.precision,
                preferred_element_type=self.wide,
            )
        shape = (*x.shape[:2], x.shape[2], y.shape[5 - j])
        x, y = (lax.optimization_barrier(a).reshape(-1, *a.shape[2:]) for a in (x, y))
        z = lax.dot_general(
            x, y, (((2,), (j - 1,)), ((0,), (0,))), preferred_element_type=self.wide
        )
        return lax.optimization_barrier(z).reshape(shape)


def forward(
    form: Form,
    products: Products,
    blocks: list[Span],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *where: jax.Array,
) -> tuple:
    """Computes attention in blocks of queries.

    Returns (output [b, t, h, d], peak [b, h, t], total [b, h, t]), where peak is the maximum of
    each row of logits, and total is the row sum of exp(logits - peak). The three returned arrays
    have the dtype `products.wide`.

    The attention weights are normalized after the product with the values, so that an array [t, d]
    is divided instead of an array [t, s].
    """
    b, t, h, _ = q.shape
    g = k.shape[2]
    q, k, v = _split(q, g), _split(k, g), _split(v, g)  # [b, g, r, t, d], [b, g, 1, s, d]
    k, v = k[:, :, 0], v[:, :, 0]
    parts = []
    for at in blocks:
        if at.low == at.high:
            zeros = jnp.zeros((b, h, at.stop - at.start), products.wide)
            parts.append(
                (
                    jnp.zeros((b, g, h // g, at.stop - at.start, v.shape[-1]), products.wide),
                    zeros,
                    zeros + 1,
                )
            )
            continue
        logits, seen = _logits(form, products, at, q, k, where)  # [b, h, t, s]
        peak = lax.stop_gradient(logits.max(-1))
        weights = jnp.exp(logits - peak[..., None])
        total = weights.sum(-1)
        if seen is not None and form.blind(t, k.shape[2]):
            weights = jnp.where(seen, weights, 0)
        y = products.mix(_grouped(weights, g), v[:, :, at.low : at.high])
        y = y.reshape(b, g, h // g, -1, v.shape[-1]) / total.reshape(b, g, h // g, -1, 1)
        parts.append((y, peak, total))
    y, peak, total = zip(*parts)
    return _join(_concatenate(y, 3)), _concatenate(peak, 2), _concatenate(total, 2)


def weights(
    form: Form, products: Products, q: jax.Array, k: jax.Array, *where: jax.Array
) -> jax.Array:
    """Returns the attention weights [b, h, t, s] in the dtype `products.wide`; masked keys have
    weight 0."""
    g = k.shape[2]
    at = Span(0, q.shape[1], 0, k.shape[1])
    logits, seen = _logits(form, products, at, _split(q, g), _split(k, g)[:, :, 0], where)
    weights = jax.nn.softmax(logits)
    return (
        jnp.where(seen, weights, 0)
        if seen is not None and form.blind(q.shape[1], k.shape[1])
        else weights
    )


def mixed(products: Products, weights: jax.Array, v: jax.Array) -> jax.Array:
    """Returns the output [b, t, h, d] for the attention weights `weights` [b, h, t, s]."""
    b, h, t, _ = weights.shape
    g = v.shape[2]
    y = products.mix(_grouped(weights, g), _split(v, g)[:, :, 0])
    return _join(y.reshape(b, g, h // g, t, v.shape[-1]))


def backward(
    form: Form,
    products: Products,
    blocks: list[Span],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: jax.Array,
) -> tuple:
    """Returns the cotangents of q, k and v.

    `rest` contains the optional arrays (mask, lengths, starts, segments), the three results of `forward`, and
    the cotangent of the attention output. The results of `forward` are the attention output, the
    maximum `peak` of each row of logits, and the row sum `total` of exp(logits - peak).

    The attention weights are recomputed from q, k, peak and total, with the same operations as in
    the forward pass. If the forward and the backward pass are in one program, XLA computes the
    attention weights only once. In the formulas, w contains the normalized attention weights, and y
    = w v is the output. A prime denotes a cotangent; for example, v' is the cotangent of v:

        v' = w^T y',  w' = y' v^T,  logits' = w (w' - sum(w w')),  q' = logits' k,  k' = logits'^T q

    In exact arithmetic, sum(w w'), the dot product of a query's attention weights and their
    cotangents, equals the dot product of the attention output and its cotangent. The dot product of
    the attention output and its cotangent, which sums over the features, is faster to compute than
    sum(w w'), which sums over the keys (Dao et al., 2022, FlashAttention, appendix B.4). In 16-bit
    dtypes, however, the attention output is rounded. The cotangents of a row of logits sum to 0 in
    exact arithmetic, but would not sum to exactly 0 if they were computed from the rounded output.
    Therefore `backward` computes the dot product of the attention weights and their cotangents.
    """
    *where, _, peak, total, y = rest
    b, t, h, d = q.shape
    g, s = k.shape[2], k.shape[1]
    inverse = 1 / total.astype(products.wide)
    # The cotangent is divided by total. In float16, the weights are divided, because the divided
    # cotangent would underflow.
    early = products.compute == jnp.float16
    y = _split(y.astype(products.wide), g)
    if not early:
        y = y * inverse.reshape(b, g, h // g, t, 1)
    q, k, v = _split(q, g), _split(k, g)[:, :, 0], _split(v, g)[:, :, 0]
    of_q, of_k, of_v = [], [], []
    for at in blocks:
        rows, keys = slice(at.start, at.stop), slice(at.low, at.high)
        if at.low == at.high:
            of_q.append(jnp.zeros((b, g, h // g, at.stop - at.start, d), products.wide))
            continue
        with jax.named_scope("rematted_computation"):  # jax.checkpoint's name for recomputation
            logits, seen = _logits(form, products, at, q, k, where)
            weights = jnp.exp(logits - peak[:, :, rows, None].astype(products.wide))
        if early:
            weights = weights * inverse[:, :, rows, None]
        if seen is not None and form.blind(t, s):
            weights = jnp.where(seen, weights, 0)
        part = _merged(y[:, :, :, rows])  # [b, g, r t, d]
        cotangent = products.rows(part, v[:, :, keys]).reshape(weights.shape)
        mean = (weights * cotangent).sum(-1, keepdims=True)
        if not early:
            mean = mean * inverse[:, :, rows, None]
        cotangent = weights * (cotangent - mean)
        if form.softcap is not None:  # hidden logits have weight 0
            cotangent = cotangent * (1 - jnp.square(jnp.clip(logits / form.softcap, -1, 1)))
        cotangent = _grouped(cotangent * form.scale, g)
        of_q.append(products.mix(cotangent, k[:, :, keys]).reshape(b, g, h // g, -1, d))
        pad = ((0, 0), (0, 0), (at.low, s - at.high), (0, 0))
        of_k.append(jnp.pad(products.sums(cotangent, _merged(q[:, :, :, rows])), pad))
        of_v.append(jnp.pad(products.sums(_grouped(weights, g), part), pad))
    of_k, of_v = (
        functools.reduce(jnp.add, parts) if parts else jnp.zeros((b, g, s, d), products.wide)
        for parts in (of_k, of_v)
    )
    return _join(_concatenate(of_q, 3)), of_k.swapaxes(1, 2), of_v.swapaxes(1, 2)


def tangent(
    form: Form,
    products: Products,
    blocks: list[Span],
    moving: tuple[bool, ...],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *rest: jax.Array,
) -> Any:
    """Returns the tangent of the output. `moving` contains three booleans, which state whether q, k
    and v have tangents. The tangents of q, k and v are at the end of `rest`."""
    tangents = iter(rest[len(form.given) :])
    return jax.jvp(
        lambda q, k, v: forward(form, products, blocks, q, k, v, *rest[: len(form.given)])[0],
        (q, k, v),
        tuple(
            cast(next(tangents), x.dtype) if moves else jnp.zeros_like(x)
            for x, moves in zip((q, k, v), moving)
        ),
    )[1]


def seen(form: Form, at: Span, shape: tuple[int, ...], where: Any) -> Any:
    """Returns a boolean mask for a block of queries, True where a query may attend to a key, or
    None if all are True.

    The mask broadcasts to [b, h, t, s] for the t queries of the block and the s keys of the block.

    Args:
        form: the options of the attention.
        at: a block of queries, and the range of keys to which these queries may attend.
        shape: (t, s) of all queries and keys.
        where: the optional arrays (mask, lengths, starts, segments) whose names are in
            `form.given`.
    """
    given = dict(zip(form.given, where))
    found = []
    rows = jnp.arange(at.start, at.stop, dtype=jnp.int32)
    keys = jnp.arange(at.low, at.high, dtype=jnp.int32)
    if form.causal or form.window is not None:
        ahead = (rows[:, None] - keys[None])[None, None]
        if "starts" in given:
            ahead = ahead + lax.expand_dims(given["starts"].astype(jnp.int32), (1, 2, 3))
        if form.causal:
            found.append(ahead >= 0)
        if form.window is not None:
            found.append(ahead < form.window if form.causal else jnp.abs(ahead) < form.window)
    if "lengths" in given:
        found.append(
            keys[None, None, None] < lax.expand_dims(given["lengths"].astype(jnp.int32), (1, 2, 3))
        )
    if "segments" in given:
        found.append(
            alike(
                lax.slice_in_dim(given["segments"], at.start, at.stop, axis=1),
                lax.slice_in_dim(given["segments"], at.low, at.high, axis=1),
            )
        )
    if "mask" in given:
        mask = given["mask"]
        for axis, size, low, high in (
            (2, shape[0], at.start, at.stop),
            (3, shape[1], at.low, at.high),
        ):
            if mask.shape[axis] == size:
                mask = lax.slice_in_dim(mask, low, high, axis=axis)
        found.append(mask)
    return functools.reduce(jnp.logical_and, found) if found else None


def alike(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns booleans [b, 1, t, s] that are True where a query [b, t] and a key [b, s] have the
    same number, which is not that of padding, 0."""
    queries, keys = queries[:, None, :, None], keys[:, None, None]
    return (queries == keys) & (keys != 0)


def _logits(
    form: Form, products: Products, at: Span, q: jax.Array, k: jax.Array, where: Any
) -> tuple:
    """Returns (the logits [b, h, t, s] of a block of queries and its keys, the result of `seen` for
    this block)."""
    b, g, r, t, _ = q.shape
    shape = b, g * r, at.stop - at.start, at.high - at.low
    logits = (
        products.rows(_merged(q[:, :, :, at.start : at.stop]), k[:, :, at.low : at.high]).reshape(
            shape
        )
        * form.scale
    )
    if form.softcap is not None:
        logits = form.softcap * jnp.tanh(logits / form.softcap)
    mask = seen(form, at, (t, k.shape[2]), where)
    return logits if mask is None else jnp.where(mask, logits, jnp.finfo(logits.dtype).min), mask


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def _split(x: jax.Array, groups: int) -> jax.Array:
    """Groups the query heads by key/value head, so that keys are not repeated: [b, t, h, d] -> [b,
    g, r, t, d]."""
    b, t, h, d = x.shape
    return x.reshape(b, t, groups, h // groups, d).transpose(0, 2, 3, 1, 4)


def _join(x: jax.Array) -> jax.Array:
    """Rearranges [b, g, r, t, d] to [b, t, h, d]."""
    b, g, r, t, d = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, t, g * r, d)


def _merged(x: jax.Array) -> jax.Array:
    """Reshapes [b, g, r, t, d] to [b, g, r * t, d]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _grouped(x: jax.Array, groups: int) -> jax.Array:
    """Reshapes [b, h, t, s] to [b, g, r * t, s]. Each of the g key/value heads is shared by r = h /
    g query heads."""
    return x.reshape(x.shape[0], groups, -1, x.shape[-1])


def _concatenate(parts: Sequence, axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
