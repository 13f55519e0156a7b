"""Quantized parameters: codes and scales."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet.compress._formats import Format
from fnet.compress._rules import apply_rules
from fnet.jaxpr import ImplicitArray, is_implicit
from fnet.jaxpr import materialize as _materialized


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"],
                   meta_fields=["format", "axes", "dtype"])
@dataclasses.dataclass(frozen=True)
class Quantized(ImplicitArray):
    """A parameter as codes of few bits and scales: `values = decode(codes) * scale`. `quantize` creates it.

    Attributes:
        codes: [*shape] in int8 or float8; two 4-bit codes in a uint8 along the last of `axes`.
        scale: float32, of length 1 on `axes`; with groups, of length n / group on the last of them.
        format: how values are encoded.
        axes: the contracted axes, counted from the end (negative).
        dtype: of the values.
    """

    codes: Any
    scale: Any
    format: Format
    axes: tuple[int, ...]
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(jnp.shape(self.codes))
        if self.format.packed:
            shape[self.axes[-1]] *= 2
        return tuple(shape)

    def materialize(self) -> jax.Array:
        return self._values(self.dtype)

    def dot(self, x: jax.Array, axes: tuple[int, ...], dot: Callable) -> Any:
        if any(self.scale.shape[i] != 1 for i in axes):    # scales differ along the contracted axes
            return dot(x, self._values(x.dtype), axes)
        outputs = [n for i, n in enumerate(self.scale.shape) if i not in axes]
        scale = self.scale.reshape(*(1,) * (x.ndim - len(axes)), *outputs)
        if getattr(self.format, "activations", False):
            return _integer_dot(tuple(axes), x, self.codes, scale)
        y = dot(x, self.format.decode(self._unpack(self.codes), x.dtype), axes)
        return y * scale.astype(y.dtype)

    def convolve(self, x: jax.Array, axis: int, out_axis: int, convolve: Callable) -> Any:
        if any(n != 1 for i, n in enumerate(self.scale.shape) if i != axis):
            return convolve(x, self._values(x.dtype))
        y = convolve(x, self.format.decode(self._unpack(self.codes), x.dtype))
        return y * self.scale.reshape([-1 if i == out_axis else 1 for i in range(y.ndim)]).astype(y.dtype)

    def lookup(self, take: Callable) -> Any:
        if (self.format.packed and self.axes[-1] == -self.ndim) or self.scale.shape[0] not in (1, self.shape[0]):
            return NotImplemented
        codes = self.format.decode(self._unpack(take(self.codes)), jnp.float32)    # [..., *shape[1:]]
        if self.scale.shape[0] == self.shape[0]:
            return self._scaled(codes, take(self.scale)).astype(self.dtype)
        known = take(jnp.ones((self.shape[0], *(1,) * (self.ndim - 1))))    # NaN for indices out of range
        scale = lax.expand_dims(self.scale.squeeze(0), range(codes.ndim - self.ndim + 1))
        return (self._scaled(codes, scale) * known).astype(self.dtype)

    def _values(self, dtype):
        codes = self.format.decode(self._unpack(self.codes), jnp.float32)
        return self._scaled(codes, self.scale).astype(dtype)

    def _unpack(self, codes):
        """One code in each element. The axis of groups is counted from the end, so that rows can be unpacked, too."""
        if not self.format.packed:
            return codes
        axis = codes.ndim + self.axes[-1]
        pairs = jnp.stack([codes & 15, codes >> 4], axis + 1)
        return pairs.reshape(*codes.shape[:axis], 2 * codes.shape[axis], *codes.shape[axis + 1:])

    def _scaled(self, values, scale):
        """values * scale, of equal rank; the last contracted axis of `scale` may have an element for each group."""
        axis = values.ndim + self.axes[-1]
        groups, n = scale.shape[axis], values.shape[axis]
        if groups in (1, n):
            return values * scale
        split = (*values.shape[:axis], groups, n // groups, *values.shape[axis + 1:])
        return (values.reshape(split) * jnp.expand_dims(scale, axis + 1)).reshape(values.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _integer_dot(axes, x, codes, scale):
    """x [..., *contracted] rounded to 8 bits, times int8 codes over `axes`, with sums in int32; scale has y's rank."""
    last = tuple(range(x.ndim - len(axes), x.ndim))
    rows = jnp.maximum(jnp.abs(x).max(last, keepdims=True), jnp.finfo(jnp.float32).tiny).astype(jnp.float32) / 127
    rounded = jnp.clip(jnp.round(x / rows), -127, 127).astype(jnp.int8)
    y = lax.dot_general(rounded, codes, ((last, axes), ((), ())), preferred_element_type=jnp.int32)
    rows = rows.reshape(*x.shape[:x.ndim - len(axes)], *(1,) * (codes.ndim - len(axes)))
    return (y.astype(jnp.float32) * rows * scale).astype(x.dtype)


@_integer_dot.defjvp
def _integer_dot_jvp(axes, primals, tangents):
    """The rounding of x is ignored. Codes have no tangent."""
    (x, codes, scale), (dx, _, dscale) = primals, tangents
    last = tuple(range(x.ndim - len(axes), x.ndim))

    def product(x, scale):
        return lax.dot_general(x, codes.astype(x.dtype), ((last, axes), ((), ()))) * scale.astype(x.dtype)

    return _integer_dot(axes, x, codes, scale), product(dx, scale) + product(x, dscale)


def quantize(params: Any, recipe: Mapping[str, Format]) -> Any:
    """Replaces parameters by quantized ones.

        params = compress.quantize(params, {"blocks/.*": compress.Int4(group=32), "embed": compress.Int8(axes=-1)})
        logits = ft.use_implicit_arrays(model)(params, x)

    A scale is max|w| / largest over a block of values, where `largest` is that of the format (127, 7, 1 or 448). A
    block extends over the contracted axes of the parameter, or over a group along the last of them. The default of
    `axes` is the second-last axis, for kernels [in, out] and stacked kernels [depth, in, out]; for kernels with four or
    more axes (convolutions [height, width, in, out]) all axes but the last. An embedding [vocab, features] whose logits
    are tied is contracted over its last axis: `axes=-1`. Any axes are correct. Products are fastest if `axes` are the
    axes that the program contracts, because the scale is then applied to the result.

    Args:
        params: a tree of arrays.
        recipe: {pattern: format}. A regular expression applies to a parameter if it matches its path, or a prefix of
            it, completely; the first one that matches decides. Parameters with fewer than two axes, those named bias,
            scale, b or offset, and those that are not floating point are not changed.

    Returns:
        The tree with `Quantized` leaves. Biases, norms, and leaves that no pattern matches are unchanged.

    Raises:
        ValueError: a pattern matches no parameter that can be quantized, or a group does not divide its axis.
        TypeError: a format is not `Int8`, `Int4`, `NF4` or `Float8`.

    >>> from fnet import compress
    >>> params = {"kernel": jnp.arange(6.0).reshape(3, 2), "bias": jnp.ones(2)}
    >>> params = compress.quantize(params, {"kernel": compress.Int8()})
    >>> params["kernel"].codes.tolist()
    [[0, 25], [64, 76], [127, 127]]
    """
    return apply_rules("quantize", params, recipe, _check, _can_be_quantized, _quantized)


def _check(pattern, format):
    if not isinstance(format, Format):
        raise TypeError(f"quantize: expected compress.Int8(), Int4(), NF4() or Float8() for {pattern!r}; got "
                        f"{format!r}")


def _can_be_quantized(leaf) -> bool:
    return (not is_implicit(leaf) and len(getattr(leaf, "shape", ())) >= 2
            and jnp.issubdtype(leaf.dtype, jnp.floating))


def _quantized(path, w, format) -> Quantized:
    axes = _axes(path, w, format)
    last, n = axes[-1], w.shape[axes[-1]]
    group = n if format.group is None else format.group
    if n % group:
        raise ValueError(f"quantize: {path} has {n} values along axis {last}, which cannot be divided into groups of "
                         f"{group}; use group=None or a divisor of {n}")
    if format.packed and n % 2:
        raise ValueError(f"quantize: {path} has {n} values along axis {last}; {type(format).__name__} needs an even "
                         "number")
    values, at = jnp.asarray(w, jnp.float32), w.ndim + last
    if group != n:
        grouped = values.reshape(*w.shape[:at], n // group, group, *w.shape[at + 1:])
        over = (at + 1, *(w.ndim + i + (w.ndim + i > at) for i in axes[:-1]))
        scale = jnp.abs(grouped).max(over, keepdims=True).squeeze(at + 1)
    else:
        scale = jnp.abs(values).max(axes, keepdims=True)
    scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny * format.largest) / format.largest
    result = Quantized(values, scale, dataclasses.replace(format, group=None if group == n else group), axes,
                       jnp.dtype(w.dtype))
    codes = format.encode(values / Quantized._scaled(result, jnp.ones_like(values), scale))
    if format.packed:
        low, high = (lax.slice_in_dim(codes, start, None, 2, at) for start in (0, 1))
        codes = low | (high << 4)
    return dataclasses.replace(result, codes=codes)


def _axes(path, w, format) -> tuple[int, ...]:
    """The contracted axes, negative and in increasing order."""
    if format.axes is None:
        return (-2,) if w.ndim < 4 else tuple(range(-w.ndim, -1))
    axes = (format.axes,) if isinstance(format.axes, int) else tuple(format.axes)
    if not axes or any(not -w.ndim <= i < w.ndim for i in axes):
        raise ValueError(f"quantize: {path} has {w.ndim} axes; got axes={format.axes!r}")
    return tuple(sorted(i if i < 0 else i - w.ndim for i in axes))


def materialize(params: Any) -> Any:
    """The tree with the arrays that implicit arrays represent.

    >>> from fnet import compress
    >>> params = compress.quantize({"kernel": jnp.eye(2)}, {"kernel": compress.Int8()})
    >>> compress.materialize(params)["kernel"].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    return jax.tree.map(_materialized, params, is_leaf=is_implicit)


def size(params: Any) -> int:
    """The bytes of all arrays in a tree, including those of implicit arrays.

    >>> from fnet import compress
    >>> params = {"kernel": jnp.zeros((4, 8))}
    >>> compress.size(params), compress.size(compress.quantize(params, {"kernel": compress.Int8()}))
    (128, 64)
    """
    return sum(math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(params))
