"""Attention: multi-head, grouped-query, rotary, causal, sliding window, with a key/value cache."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet.jaxpr import automatic, tag
from fnet.layers._attend import attend, mask_of, where_seen
from fnet.layers._attend_xla import Form, Products
from fnet.layers._attend_xla import weights as attention_weights
from fnet.layers._core import Layer
from fnet.layers._dropout import Dropout
from fnet.layers._explicit import like
from fnet.layers._linear import Dense, floating, lecun_normal, wide, zeros
from fnet.layers._scope import Scope
from fnet.layers._segments import numbered, padded, segment_lengths, segment_positions
from fnet.layers._sizes import integers


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: rotates pairs of features by angles that grow with the position.

        angle(position, i) = position * base ** (-2 i / head_dim),  i = 0 .. head_dim / 2 - 1

    >>> from fnet import layers as nn
    >>> nn.Attention(4, causal=True, rotary=nn.Rotary(base=500_000.0)).rotary.base
    500000.0

    Called as `rotary(x, positions, lengths=None)` with x [batch, time, heads, head_dim] and
    positions [batch, time], it returns the shape and dtype of x. Angles are computed in float32.

    Args:
        base: the base of the powers above. The pair that rotates most slowly completes one rotation
            in about 2 pi * base positions. Default 10,000.
        interleaved: whether the pairs of features are (0, 1), (2, 3), ... as in the paper and
            llama2.c. Default False: they are (i, i + head_dim / 2), as in GPT-NeoX and in Hugging
            Face's Llama.
        scaling: a function that changes the angles, for models whose context was extended after
            training, such as a `models.Llama3Scaling`. It gets the angles between two successive
            positions, a float32 NumPy array [head_dim / 2], and returns new ones. Two attributes
            are optional: `amplitude`, a factor for the rotated features, and `by_length`; see
            below. Default None.
        features: number of features of each head that are rotated, counted from the first. It then
            takes the place of head_dim in the formula. Default None: all.

    With `scaling.by_length`, angles depend on the length of the text: `lengths`, [batch] or, for
    texts that are packed into rows, [batch, time]. `scaling` then has a second argument, the number
    of tokens of each text [texts], and returns [texts, head_dim / 2]. An `Attention` caches such
    keys unrotated, and rotates all of them with the angles for the current length. When these
    change with a longer text, the cached keys and values of deeper layers are not recomputed, so
    they still depend on the angles for the shorter one.

    Source: Su et al. (2021), RoFormer, eq. 34.
    """

    base: float = 10000.0
    _: KW_ONLY
    interleaved: bool = False
    scaling: Callable | None = None
    features: int | None = None

    @property
    def by_length(self) -> bool:
        """Whether the angles depend on the length of the text."""
        return getattr(self.scaling, "by_length", False)

    def __call__(
        self, x: jax.Array, positions: jax.Array, lengths: jax.Array | None = None
    ) -> jax.Array:
        dim = x.shape[-1] if self.features is None else self.features
        if dim % 2 or not 0 < dim <= x.shape[-1]:
            raise ValueError(
                f"Rotary: head_dim must be even; got {dim}"
                if self.features is None
                else f"Rotary: features must be even, from 2 to head_dim={x.shape[-1]}; got {dim}"
            )
        if dim < x.shape[-1]:
            head, rest = x[..., :dim], x[..., dim:]
            return jnp.concatenate(
                [dataclasses.replace(self, features=None)(head, positions, lengths), rest], -1
            )
        rates = np.float32(self.base) ** (-np.arange(0, dim, 2, dtype=np.float32) / dim)
        if self.scaling is None:
            rates = rates[None, None, None]
        elif self.by_length:
            lengths = positions.max(1) + 1 if lengths is None else lengths
            rates = self.scaling(rates, lengths.reshape(-1)).reshape(*lengths.shape, dim // 2)
            # [b, 1, 1, dim/2] or [b, t, 1, dim/2]
            rates = lax.expand_dims(rates, (1, 2) if lengths.ndim == 1 else (2,))
        else:
            rates = self.scaling(rates)[None, None, None]
        angles = lax.expand_dims(positions.astype(jnp.float32), (2, 3)) * rates  # [b, t, 1, dim/2]
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        if (amplitude := getattr(self.scaling, "amplitude", 1.0)) != 1:
            sin, cos = sin * amplitude, cos * amplitude
        y = wide(x)
        pairs = (
            y.reshape(*y.shape[:-1], dim // 2, 2)
            if self.interleaved
            else y.reshape(*y.shape[:-1], 2, dim // 2)
        )
        axis = -1 if self.interleaved else -2
        a, b = (lax.index_in_dim(pairs, i, axis % pairs.ndim, keepdims=False) for i in (0, 1))
        sin, cos = sin.astype(y.dtype), cos.astype(y.dtype)
        turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis)
        return turned.reshape(x.shape).astype(x.dtype)


class _Turn(NamedTuple):
    """How the queries and keys of one call are rotated.

    Attributes:
        rotary: the `Rotary` of the layer.
        positions: the positions of the queries [b, t].
        lengths: the lengths of the texts, earlier calls included, [b], or [b, t] for texts that are
            packed into rows, or None.
        cached_keys: whether all keys of the cache are rotated in each call.
    """

    rotary: Rotary
    positions: jax.Array
    lengths: jax.Array | None
    cached_keys: bool

    def __call__(self, x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        return self.rotary(x, self.positions if positions is None else positions, self.lengths)


class Attention(Layer):
    """Multi-head attention with query, key, value and output projections.

        out = concat_h softmax(q_h k_h^T / sqrt(head_dim) + mask) v_h

    >>> from fnet import layers as nn
    >>> attention, x = nn.Attention(4, causal=True), jnp.ones((2, 8, 32))
    >>> params, _ = attention.init(jax.random.key(0), x)
    >>> attention(params, x).shape
    (2, 8, 32)

    In this formula, mask is 0 for keys to which a query may attend, and minus infinity for others.

    Glossary: b batch, t time of the queries, s time of the keys, f features, h heads, g key/value
    heads, d head_dim.

    Args:
        heads: number of query heads.
        kv_heads: number of key/value heads, a divisor of `heads`. Each is shared by heads /
            kv_heads query heads (Ainslie et al., 2023). Default: heads.
        head_dim: number of features of each head. Default: f / heads.
        causal: whether a query attends only to its own and earlier positions. Default False.
        rotary: a `Rotary` for queries and keys. Default None: no rotation.
        window: the size of a sliding window (Beltagy et al., 2020). With `causal`, a query attends
            to the last `window` keys, its own included; without, to all keys less than `window`
            positions away. Default None: no limit.
        scale: the factor by which the logits are multiplied. Default: 1 / sqrt(head_dim).
        softcap: a bound on the logits: softcap * tanh(logits / softcap) replaces the scaled logits,
            as in Gemma 2. Default None: no bound.
        qk_norm: a normalization layer for queries and keys before the rotation, such as
            `nn.RMSNorm()`. Default None.
        norm_heads: whether `qk_norm` normalizes each head separately, as in Qwen 3, or with False
            all heads together, as in OLMo 2. Default True.
        use_bias: whether the four projections have a bias. Default True.
        out_bias: whether the output projection has a bias. Default: use_bias.
        dropout: the dropout rate of the attention weights. Default 0.
        kernel_init: initializer of the projections' kernels. Default: LeCun normal.
        out_init: initializer of the output projection's kernel. Default: kernel_init.

    Inputs:
        x: [b, t, f], floating point.
        context: [b, s, f'], the source of keys and values for cross-attention. Default: x.
        mask: boolean, True if a query may attend to a key: [t, s], [b, t, s] or [b, h, t, s], where
            each axis may have size 1, as in [b, 1, 1, s] for padding. Default: no mask.
        lengths: integers [b], the number of valid keys at the start of each example; the others
            (padding) are ignored. Default: all are valid.
        positions: integers [b, t] or [t], for the rotary embedding. Default: 0, 1, ..., or those
            after the cached tokens.
        segments: integers [b, t], for self-attention over texts that are packed into rows: the
            number of the text of each token, or 0 for padding. A query attends only to its own
            text, and the default `positions` restart with each (`nn.segment_positions`). Default:
            one text in each row.

    Output: [b, t, f] in the dtype of x. A query that attends to no key gives the output projection
    a 0. The softmax is computed in float32, or in float64 for float64 inputs.

    Parameters: query/kernel [f, h d], key/kernel and value/kernel [f, g d], out/kernel [h d, f],
    and biases; with `qk_norm` also query_norm/scale and key_norm/scale.

    State: a key/value cache of kind "cache", which `model.cache(x)` creates: cached_key and
    cached_value [b, g, max_length, d], and index [b], the number of cached tokens. With a cache in
    `state`, a causal layer without `context` appends the keys and values of x to it, and each query
    attends to the cached keys of its example. With `lengths`, only the first `lengths[i]` new ones
    of example i are kept, so prompts of unequal length can be padded on the right. Outputs of an
    example whose tokens do not fit are NaN.

    Source: Vaswani et al. (2017), Attention Is All You Need, section 3.2.
    """

    heads: int
    _: KW_ONLY
    kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool = False
    rotary: Rotary | None = None
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    qk_norm: Layer | None = None
    norm_heads: bool = True
    use_bias: bool = True
    out_bias: bool | None = None
    dropout: float = 0.0
    kernel_init: Callable = lecun_normal
    out_init: Callable | None = None

    def forward(
        self,
        scope: Scope,
        x: jax.Array,
        context: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        lengths: jax.Array | None = None,
        positions: jax.Array | None = None,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        x = floating(x, scope, "Attention")
        source = x if context is None else floating(context, scope, "Attention")
        groups, dim = self._sizes(scope, x, source)
        if lengths is not None:
            lengths = integers(lengths, x.shape[0], f"Attention at {scope}: lengths")
        q = self._project(scope, "query", x, self.heads, dim, self.qk_norm)  # [b, t, h, d]
        k = self._project(scope, "key", source, groups, dim, self.qk_norm)  # [b, s, g, d]
        v = self._project(scope, "value", source, groups, dim)
        cache = self._cache(scope, k) if self.causal and context is None else None
        if segments is not None:
            segments = self._segments(scope, segments, x, context, cache)
            if lengths is not None:
                segments, lengths = padded(segments, lengths), None
        start = jnp.zeros(x.shape[0], jnp.int32) if cache is None else cache[2]

        turn = None
        if self.rotary is not None:
            if context is not None:
                raise ValueError(
                    f"Attention at {scope}: rotary= needs self-attention; call it without context="
                )
            if segments is None:
                turn = self._turn(
                    scope, self.rotary, x, start, positions, lengths, cache is not None
                )
            else:
                turn = self._packed_turn(scope, self.rotary, x, positions, segments)
            q = turn(q)
            if not turn.cached_keys:
                k = turn(k)
        if cache is not None:
            k, v, fits = self._append(scope, cache, k, v, lengths)
            lengths = None  # the causal mask hides the keys that are not yet in the cache
            if turn is not None and turn.cached_keys:
                everywhere = jnp.arange(k.shape[1], dtype=jnp.int32)[None]
                k = turn(k, jnp.broadcast_to(everywhere, k.shape[:2]))

        if mask is not None:
            shape = (x.shape[0], self.heads, x.shape[1], k.shape[1])
            mask = mask_of(mask, shape, f"Attention at {scope}: mask")
        where = where_seen(mask, lengths, None if cache is None else start, segments)
        if self.dropout and scope.train:
            y = self._dropped(scope, q, k, v, where)
        else:
            y = attend(
                q,
                k,
                v,
                **where,
                causal=self.causal,
                window=self.window,
                scale=self.scale,
                softcap=self.softcap,
            )  # [b, t, h, d]
        if cache is not None:
            y = jnp.where(fits[:, None, None, None], y, jnp.nan)
        y = y.reshape(*x.shape[:2], self.heads * dim)
        bias = self.use_bias if self.out_bias is None else self.out_bias
        return Dense(
            x.shape[-1],
            use_bias=bias,
            kernel_init=self.out_init or self.kernel_init,
            axes=("heads", "embed"),
        )(scope["out"], y)

    def _turn(
        self,
        scope: Scope,
        rotary: Rotary,
        x: jax.Array,
        start: jax.Array,
        positions: jax.Array | None,
        lengths: jax.Array | None,
        cached: bool,
    ) -> _Turn:
        """Returns how `rotary` turns the queries and keys of a call that begins at the positions
        `start` [b]."""
        time = x.shape[1]
        # Angles that depend on the length change with each token, also those of earlier keys, so
        # the cache holds keys that are not rotated.
        cached_keys = rotary.by_length and cached
        if positions is not None:
            turned = self._positions(scope, positions, x)
            if cached_keys:
                raise ValueError(
                    f"Attention at {scope}: positions= with a cache needs a rotary= whose scaling "
                    "does not depend on the length"
                )
            return _Turn(rotary, turned, None, cached_keys)
        order = start[:, None] + jnp.arange(time, dtype=jnp.int32)[None]  # [b, t]
        texts = None
        if lengths is not None:
            texts = start + lengths.astype(jnp.int32)
        elif cached_keys:
            texts = start + time
        return _Turn(rotary, order, texts, cached_keys)

    def _packed_turn(
        self,
        scope: Scope,
        rotary: Rotary,
        x: jax.Array,
        positions: jax.Array | None,
        segments: jax.Array,
    ) -> _Turn:
        order = (
            segment_positions(segments)
            if positions is None
            else self._positions(scope, positions, x)
        )
        return _Turn(rotary, order, segment_lengths(segments), False)

    def _sizes(self, scope: Scope, x: jax.Array, source: jax.Array) -> tuple[int, int]:
        if x.ndim != 3 or source.ndim != 3 or x.shape[0] != source.shape[0]:
            raise ValueError(
                f"Attention at {scope}: expected [batch, time, features]; got {x.shape}"
                + ("" if source is x else f" with context {source.shape}")
            )
        groups = self.kv_heads or self.heads
        if self.heads % groups:
            raise ValueError(
                f"Attention at {scope}: heads={self.heads} must be a multiple of kv_heads={groups}"
            )
        if self.head_dim is None and x.shape[-1] % self.heads:
            raise ValueError(
                f"Attention at {scope}: the {x.shape[-1]} features must be a multiple of "
                f"heads={self.heads}; or set head_dim"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"Attention at {scope}: window must be >= 1; got {self.window}")
        dim = self.head_dim or x.shape[-1] // self.heads
        if self.rotary is not None and self.rotary.features is None and dim % 2:
            raise ValueError(f"Attention at {scope}: head_dim must be even for rotary=; got {dim}")
        return groups, dim

    def _project(
        self, scope: Scope, name: str, x: jax.Array, heads: int, dim: int, norm: Layer | None = None
    ) -> jax.Array:
        y = Dense(
            heads * dim,
            use_bias=self.use_bias,
            kernel_init=self.kernel_init,
            axes=("embed", "heads"),
        )(scope[name], x)
        if norm is not None and not self.norm_heads:
            y = norm(scope[f"{name}_norm"], y)
        y = y.reshape(*x.shape[:2], heads, dim)
        return norm(scope[f"{name}_norm"], y) if norm is not None and self.norm_heads else y

    def _segments(
        self,
        scope: Scope,
        segments: jax.Array,
        x: jax.Array,
        context: jax.Array | None,
        cache: tuple | None,
    ) -> jax.Array:
        if context is not None:
            raise ValueError(
                f"Attention at {scope}: segments= needs self-attention; pass mask= with context="
            )
        if cache is not None:
            raise ValueError(
                f"Attention at {scope}: segments= cannot be combined with a cache; give each text "
                "a row of its own"
            )
        return numbered(segments, x.shape[:2], f"Attention at {scope}: segments")

    def _positions(self, scope: Scope, positions: jax.Array, x: jax.Array) -> jax.Array:
        positions = jnp.asarray(positions)
        if positions.shape not in (x.shape[:2], x.shape[1:2]):
            raise ValueError(
                f"Attention at {scope}: positions must be [batch, time] {x.shape[:2]} or [time]; "
                f"got {positions.shape}"
            )
        return jnp.broadcast_to(positions if positions.ndim == 2 else positions[None], x.shape[:2])

    def _cache(self, scope: Scope, k: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array] | None:
        """Returns (keys, values, index) of the cache, or None if the caller passed none."""
        # Products read keys and values with the heads before the time.
        batch, time, groups, dim = k.shape
        cache = (
            scope.state("cached_key", (batch, groups, time, dim), zeros, "cache", dtype=k.dtype),
            scope.state("cached_value", (batch, groups, time, dim), zeros, "cache", dtype=k.dtype),
            scope.state("index", (batch,), zeros, "cache", dtype=jnp.int32),
        )
        if cache[0] is None:
            return None
        held = cache[0].shape
        if len(held) != 4 or held[:2] != (batch, groups) or held[3] != dim:
            raise ValueError(
                f"Attention at {scope}: keys {k.shape} do not match the cache {held}; create it "
                "with model.cache for inputs of this batch size"
            )
        return cache

    def _append(
        self, scope: Scope, cache: tuple, k: jax.Array, v: jax.Array, lengths: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Appends keys and values to the cache.

        Returns:
            (all cached keys, all cached values, booleans [b] that are True for examples that fit
            into the cache).
        """
        keys, values, index = cache
        if lengths is None:
            new = jnp.full(index.shape, k.shape[1], jnp.int32)
        else:
            new = jnp.asarray(lengths, jnp.int32)
        rows = jnp.arange(index.shape[0], dtype=jnp.int32)[:, None]
        columns = index[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)[None]

        def write(held: jax.Array, rows: jax.Array, columns: jax.Array, x: jax.Array) -> jax.Array:
            return held.at[rows, :, columns].set(x.astype(held.dtype), mode="drop")

        put = automatic(write, like(k, 0))
        keys, values = put(keys, rows, columns, k), put(values, rows, columns, v)
        scope.update("cached_key", keys)
        scope.update("cached_value", values)
        scope.update("index", index + new)
        # Attention transposes keys and values back, so that XLA reads them without a copy.
        return (
            keys.swapaxes(1, 2).astype(k.dtype),
            values.swapaxes(1, 2).astype(v.dtype),
            index + new <= keys.shape[2],
        )

    def _dropped(
        self,
        scope: Scope,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        where: dict[str, jax.Array],
    ) -> jax.Array:
        """Returns the attention output, an array [b, t, h, d], with dropout applied to the
        attention weights."""
        b, t, heads, dim = q.shape
        scale = 1 / math.sqrt(dim) if self.scale is None else self.scale
        form = Form(self.causal, self.window, scale, tuple(where), softcap=self.softcap)
        # [b, h, t, s]
        weights = attention_weights(form, Products(q.dtype, q.dtype, None), q, k, *where.values())
        weights = Dropout(self.dropout)(scope["dropout"], tag(weights, "weights"))
        weights = weights.astype(v.dtype).reshape(b, k.shape[2], -1, k.shape[1])
        # [b, g, h/g t, d]
        y = lax.dot_general(weights, v.transpose(0, 2, 1, 3), (((3,), (2,)), ((0, 1), (0, 1))))
        return y.reshape(b, heads, t, dim).transpose(0, 2, 1, 3)
