"""Quantized parameters, which are stored as codes (numbers of few bits) and scales."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import native
from fnet.compress._calibrate import InputStatistics
from fnet.compress._formats import METHODS, NF4, Format, Int4, Int8
from fnet.compress._gptq import gptq
from fnet.compress._rules import apply_rules
from fnet.jaxpr import Convolution, ImplicitArray, is_implicit, map_arrays, pack, plain_dot
from fnet.jaxpr import materialize as _materialized


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "inputs"],
    meta_fields=["format", "axes", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class Quantized(ImplicitArray):
    """A parameter stored as low-bit codes and float32 scales: `values = decode(codes) * scale`.
    `quantize` creates it.

    >>> params = compress.quantize({"kernel": jnp.ones((64, 4))}, {"kernel": compress.Int8()})
    >>> params["kernel"].codes.dtype, params["kernel"].scale.shape, params["kernel"].shape
    (dtype('int8'), (1, 4), (64, 4))

    Attributes:
        codes: an int8 or float8 array with the shape of the parameter. For 4-bit formats a uint8
            array, whose bytes each hold two codes that are adjacent along the last axis in `axes`.
        scale: float32, with as many axes as the parameter. The contracted axes have length 1,
            except that the last of them has one element for each group, if the format has groups.
        format: the format of the codes.
        axes: the contracted axes, over which matrix products and convolutions sum, a tuple of
            negative integers (counted from the end).
        dtype: the dtype of the parameter.
        inputs: the scale for rounding the activations that are multiplied by the parameter, with as
            many axes as the parameter. All have length 1, except those over which layers are
            stacked. None (default): activations are not rounded, or their scale is computed at run
            time.
    """

    codes: Any
    scale: Any
    format: Format
    axes: tuple[int, ...]
    dtype: Any
    inputs: Any = None
    beside: ClassVar[Mapping[str, str]] = {"scale": "codes"}

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(jnp.shape(self.codes))
        if self.format.packed:
            shape[self.axes[-1]] *= 2
        return tuple(shape)

    @property
    def has_leading_axis(self) -> bool:
        return leads(self.shape, self.axes, self.inputs)

    def materialize(self) -> jax.Array:
        return self._values(self.dtype)

    def dot(self, x: jax.Array, axes: tuple[int, ...], dot: Callable) -> Any:
        if self._is_read_once(x, axes):
            return native.packed_product(
                x,
                self.codes,
                self.scale,
                wide=self.axes == (-2,),
                table=self.format.table,
                portable=_Product(self.format, self.axes, self.dtype),
            )
        return self._dot(x, axes, dot)

    def _is_read_once(self, x, axes) -> bool:
        """Whether `native.packed_product` computes the product of x."""
        return (
            isinstance(self.format, Int8 | Int4 | NF4)
            and not self._rounds_inputs
            and tuple(axes) == (self.ndim + self.axes[-1],)
            and len(self.axes) == 1
            and native.suits(x, self.codes)
        )

    def _dot(self, x, axes, dot):
        if any(self.scale.shape[i] != 1 for i in axes) or self._may_overflow(x):
            return dot(x, self._values(x.dtype), axes)
        outputs = [n for i, n in enumerate(self.scale.shape) if i not in axes]
        scale = self.scale.reshape(*(1,) * (x.ndim - len(axes)), *outputs)
        if self._rounds_inputs:
            step = self._input_scale(x, range(x.ndim - len(axes), x.ndim))
            return _integer_dot(tuple(axes), x, self.codes, scale, step)
        y = dot(x, self.format.decode(self._unpack(self.codes), x.dtype), axes)
        return y * scale.astype(y.dtype)

    def convolve(self, x: jax.Array, convolution: Convolution) -> Any:
        shared = all(n == 1 for i, n in enumerate(self.scale.shape) if i != convolution.kernel_axis)
        if not shared or self._may_overflow(x):
            return convolution(x, self._values(x.dtype))
        scale = self.scale.reshape([-1 if i == convolution.out_axis else 1 for i in range(x.ndim)])
        if self._rounds_inputs:
            step = self._input_scale(x, [i for i in range(x.ndim) if i != convolution.batch])
            x += lax.stop_gradient((_codes(x, step) * step).astype(x.dtype) - x)
        y = convolution(x, self.format.decode(self._unpack(self.codes), x.dtype))
        return y * scale.astype(y.dtype)

    def lookup(self, take: Callable) -> Any:
        if (self.format.packed and self.axes[-1] == -self.ndim) or self.scale.shape[0] not in (
            1,
            self.shape[0],
        ):
            return NotImplemented
        codes = self.format.decode(self._unpack(take(self.codes)), jnp.float32)  # [..., *shape[1:]]
        if self.scale.shape[0] == self.shape[0]:
            return self._scaled(codes, take(self.scale)).astype(self.dtype)
        # NaN for indices out of range.
        known = take(jnp.ones((self.shape[0], *(1,) * (self.ndim - 1))))
        scale = lax.expand_dims(self.scale.squeeze(0), range(codes.ndim - self.ndim + 1))
        return (self._scaled(codes, scale) * known).astype(self.dtype)

    def _may_overflow(self, x) -> bool:
        """Whether sums of x times codes, which are up to 448, may exceed 65504, the largest number
        of float16."""
        return x.dtype == jnp.float16 and not self._rounds_inputs

    @property
    def _rounds_inputs(self):
        return getattr(self.format, "activations", None) is not None

    def _input_scale(self, x, axes):
        """Returns the scale of x in float32. If `inputs` is None, the scale is computed from x over
        `axes`."""
        if self.inputs is not None:
            return self.inputs.reshape((1,) * x.ndim)
        largest = jnp.abs(x).max(tuple(axes), keepdims=True)
        return jnp.maximum(largest, jnp.finfo(jnp.float32).tiny).astype(jnp.float32) / 127

    def _values(self, dtype):
        codes = self.format.decode(self._unpack(self.codes), jnp.float32)
        return self._scaled(codes, self.scale).astype(dtype)

    def full_scale(self) -> jax.Array:
        """Returns the scale of each value, as an array with the shape of the parameter."""
        return self._scaled(jnp.ones(jnp.shape(self.codes), jnp.float32), self.scale)

    def pack(self, codes: jax.Array) -> jax.Array:
        """Packs two 4-bit codes into a byte. Codes that do not have 4 bits are returned unchanged."""
        if not self.format.packed:
            return codes
        low, high = (
            lax.slice_in_dim(codes, start, None, 2, codes.ndim + self.axes[-1]) for start in (0, 1)
        )
        return low | (high << 4)

    def _unpack(self, codes):
        """Converts bytes with two 4-bit codes (numbers) to an array with one code in each element.
        `codes` can be the codes of the whole parameter or of some of its rows."""
        if not self.format.packed:
            return codes
        axis = codes.ndim + self.axes[-1]
        pairs = jnp.stack([codes & 15, codes >> 4], axis + 1)
        return pairs.reshape(*codes.shape[:axis], 2 * codes.shape[axis], *codes.shape[axis + 1 :])

    def _scaled(self, values, scale):
        """Returns values * scale. `values` and `scale` have the same number of axes. Along the axis
        `self.axes[-1]`, one element of `scale` may apply to several adjacent elements of
        `values`."""
        axis = values.ndim + self.axes[-1]
        groups, n = scale.shape[axis], values.shape[axis]
        if groups in (1, n):
            return values * scale
        split = (*values.shape[:axis], groups, n // groups, *values.shape[axis + 1 :])
        return (values.reshape(split) * jnp.expand_dims(scale, axis + 1)).reshape(values.shape)


@dataclasses.dataclass(frozen=True)
class _Product:
    """The product of an array and a `Quantized`, given its codes and its scale."""

    format: Format
    axes: tuple[int, ...]
    dtype: Any

    def __call__(self, x: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
        kernel = Quantized(codes, scale, self.format, self.axes, self.dtype)
        return kernel._dot(x, (kernel.ndim + self.axes[0],), plain_dot(None, None))


def leads(shape: tuple[int, ...], axes: tuple[int, ...], inputs: Any) -> bool:
    """Whether axis 0 of a parameter is axis 0 of its codes, scales and `inputs`. If scales are
    shared along axis 0, it is not, even if its size is 1."""
    return -len(shape) not in axes and (inputs is None or jnp.shape(inputs)[:1] == shape[:1])


def _codes(x, step):
    return jnp.clip(jnp.round(x / step), -127, 127)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _integer_dot(axes, x, codes, scale, step):
    """Computes the matrix product of x, an array [..., *contracted], and a quantized parameter.
    `codes` is the int8 array of the parameter, and `axes` are its contracted axes. x is rounded to
    multiples of `step`. Sums are computed in int32. The matrix product of the rounded x and `codes`
    is multiplied by `scale`, which can be broadcast to the shape of this matrix product. `step` has
    as many axes as x."""
    last = tuple(range(x.ndim - len(axes), x.ndim))
    y = lax.dot_general(
        _codes(x, step).astype(jnp.int8),
        codes,
        ((last, axes), ((), ())),
        preferred_element_type=jnp.int32,
    )
    step = step.reshape(*step.shape[: last[0]], *(1,) * (codes.ndim - len(axes)))
    return (y.astype(jnp.float32) * step * scale).astype(x.dtype)


@_integer_dot.defjvp
def _integer_dot_jvp(axes, primals, tangents):
    """Computes the derivative. The derivative with respect to x ignores the rounding of x. The
    codes (stored numbers of few bits) have no tangent."""
    (x, codes, scale, step), (dx, _, dscale, _) = primals, tangents
    last = tuple(range(x.ndim - len(axes), x.ndim))

    def product(x, scale):
        return lax.dot_general(x, codes.astype(x.dtype), ((last, axes), ((), ()))) * scale.astype(
            x.dtype
        )

    return _integer_dot(axes, x, codes, scale, step), product(dx, scale) + product(x, dscale)


def quantize(
    params: Any, recipe: Mapping[str, Format], *, stats: Mapping[str, InputStatistics] | None = None
) -> Any:
    """Stores the selected parameters as codes of few bits.

        params = compress.quantize(params, {"blocks/.*": compress.Int4(group=32), "embed": compress.Int8(axes=-1)})
        logits = ft.use_implicit_arrays(model)(params, x)

    Each block of values w has one scale, max|w| divided by the largest decoded value of the format:
    127 for `Int8`, 7 for `Int4`, 1 for `NF4`, 448 for `Float8`. A block extends over the `axes` of
    the format, or with `group` over that many adjacent values of the last of them.

    Results are correct for any `axes`, but matrix products are fastest if these are the axes that
    they sum over: the scale is then applied to their result. That is the default: the second-last
    axis of kernels [in, out] and stacked kernels [depth, in, out], and all axes but the last of
    kernels with four or more, such as [height, width, in, out]. For an embedding table [vocab,
    features] that also computes the logits, pass `axes=-1`.

    Args:
        params: a tree of arrays, or a module of flax.nnx or Equinox, of which a copy is changed.
        recipe: {pattern: format}. A pattern is a regular expression that matches the whole path of
            a parameter, or its first parts such as "blocks"; the first that matches applies.
            Parameters with fewer than two axes, named bias, scale, b or offset, or not in floating
            point stay as they are.
        stats: statistics of the activations, from `calibrate`. Scales of activations are computed
            from them, and kernels in all formats but `Float8` are rounded by GPTQ (Frantar et al.
            2023), which keeps the products with the recorded activations closer than rounding to
            the nearest code. In 4-bit formats, each block then also gets the best of several scales
            by squared error: the default one times factors from 0.54 to 1 and from -1 to -0.54.
            Default None: every value is rounded to the nearest code.

    Returns:
        The tree `params`, with `Quantized` leaves in place of the selected parameters.

    Raises:
        ValueError: a pattern matches no parameter that can be quantized, an axis is not a multiple
            of `group`, `stats` lacks the activations that a format needs, or matrix products sum
            over different axes of a parameter whose activations have one scale. With GPTQ, also if
            a recorded matrix product sums over other axes than those of the format.
        TypeError: a format is not `Int8`, `Int4`, `NF4` or `Float8`.

    >>> params = {"kernel": jnp.arange(6.0).reshape(3, 2), "bias": jnp.ones(2)}
    >>> params = compress.quantize(params, {"kernel": compress.Int8()})
    >>> params["kernel"].codes.tolist()
    [[0, 25], [64, 76], [127, 127]]
    """
    return apply_rules(
        "quantize",
        params,
        recipe,
        _check,
        lambda leaf: not is_implicit(leaf),
        functools.partial(_quantized, checked_stats("quantize", stats)),
    )


def checked_stats(who: str, stats: Any) -> Mapping[str, InputStatistics]:
    """Returns the statistics of `calibrate` that the user passed, or {} if the user passed None."""
    if stats is not None and not isinstance(stats, Mapping):
        raise TypeError(
            f"{who}: expected stats from compress.calibrate(...), a mapping by path; got "
            f"{type(stats).__name__}"
        )
    return stats or {}


def _check(pattern, format):
    if not isinstance(format, Format):
        raise TypeError(
            f"quantize: expected compress.Int8(), Int4(), NF4() or Float8() for {pattern!r}; got "
            f"{format!r}"
        )


def _quantized(stats, path, w, format) -> Quantized:
    result, found, inputs = unrounded(path, w, format), stats.get(path), None
    if getattr(format, "activations", None) in METHODS:
        inputs = input_scale(path, found, result)
    if found is not None and found.gram is not None and isinstance(format, Int8 | Int4 | NF4):
        result = _corrected(path, result, found)
    codes = result.pack(result.format.encode(result.codes / result.full_scale()))
    return dataclasses.replace(result, codes=codes, inputs=inputs)


def input_scale(path: str, found: InputStatistics | None, array: Quantized) -> jax.Array:
    """Returns the scale for rounding the activations that are multiplied by a parameter. The scale
    is computed from the statistics of `calibrate` by the method of the format, such as "absmax".
    The returned array has as many axes as the parameter."""
    method = array.format.activations
    if found is None:
        raise ValueError(
            f"quantize: {path} needs statistics of its inputs for activations={method!r}; pass "
            "stats=compress.calibrate(...), or use activations='dynamic'"
        )
    if (
        found.conflict
    ):  # the statistics describe the inputs of some products only; those of others would be clipped
        raise ValueError(
            f"quantize: {path} has no single scale for its inputs: {found.conflict}; use "
            "activations='dynamic'"
        )
    if not np.all(np.asarray(found.rows)):
        raise ValueError(
            f"quantize: {path}: no inputs of some of its layers were recorded; pass batches to "
            "calibrate that use every layer, or use activations='dynamic'"
        )
    bound = jnp.maximum(found.bound(method), jnp.finfo(jnp.float32).tiny * 127)
    return bound.reshape(*bound.shape, *(1,) * (array.ndim - bound.ndim)) / 127


def _corrected(path, array, found):
    """Rounds the values of a parameter with GPTQ. For 4-bit formats, first selects the scales with
    the least squared rounding error. The attribute `codes` of the result contains the rounded
    values in float32, which are not packed yet."""
    if found.conflict or found.axes != array.axes:
        reason = found.conflict or f"products contract it over axes {found.axes}"
        raise ValueError(
            f"quantize: {path} has scales for axes {array.axes}, but {reason}; set `axes` of its "
            "format, or remove it from `stats`"
        )
    values, gram = array.codes, jnp.asarray(found.gram, jnp.float32)
    lead, contracted = gram.ndim - 2, [values.ndim + i for i in array.axes]
    order = (
        *range(lead),
        *contracted,
        *(i for i in range(lead, values.ndim) if i not in contracted),
    )
    shape = [values.shape[i] for i in order]
    stack, n = math.prod(shape[:lead]), gram.shape[-1]
    forth = lambda a: jnp.transpose(a, order).reshape(stack, n, -1)
    back = lambda a: a.reshape(shape).transpose([order.index(i) for i in range(values.ndim)])
    diagonal = jnp.diagonal(gram, axis1=-2, axis2=-1).reshape(stack, n, 1)
    array = _searched(
        array, back(jnp.broadcast_to(diagonal, (stack, n, values.size // (stack * n))))
    )
    scale = forth(array.full_scale())
    codes = gptq(array.format.rounded, forth(values), scale, gram.reshape(stack, n, n))
    return dataclasses.replace(array, codes=back(codes * scale))


def _searched(array, weights):
    """For each block of values, selects the scale with the least weighted squared rounding error.
    Positive and negative scales are tried, because 4-bit codes represent one more negative value
    than positive values."""
    best, least = array.scale, jnp.inf
    for factor in np.outer([1, -1], np.linspace(1, 0.54, 24)).flat if array.format.packed else ():
        candidate = dataclasses.replace(array, scale=array.scale * factor)
        scale = candidate.full_scale()
        wrong = weights * (array.codes - array.format.rounded(array.codes / scale) * scale) ** 2
        error = _over_blocks(jnp.sum, wrong, array.axes, array.format.group)
        best, least = jnp.where(error < least, candidate.scale, best), jnp.minimum(error, least)
    return dataclasses.replace(array, scale=best)


def unrounded(path: str, w: Any, format: Format) -> Quantized:
    """Returns a `Quantized` object whose attribute `codes` contains the values of w in float32,
    before rounding. The scale of each block is max|w| / `format.largest`."""
    axes = _axes(path, w, format)
    if not w.size:
        raise ValueError(
            f"quantize: {path} has no values, its shape is {tuple(w.shape)}; exclude it from the "
            f"recipe"
        )
    last, n = axes[-1], w.shape[axes[-1]]
    group = n if format.group is None else format.group
    if n % group:
        raise ValueError(
            f"quantize: {path} has {n} values along axis {last}, which cannot be divided into "
            f"groups of {group}; use group=None or a divisor of {n}"
        )
    if format.packed and n % 2:
        raise ValueError(
            f"quantize: {path} has {n} values along axis {last}; {type(format).__name__} needs an "
            "even number"
        )
    values, group = jnp.asarray(w, jnp.float32), None if group == n else group
    scale = _over_blocks(jnp.max, jnp.abs(values), axes, group)
    scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny * format.largest) / format.largest
    return Quantized(
        values, scale, dataclasses.replace(format, group=group), axes, jnp.dtype(w.dtype)
    )


def _over_blocks(reduce, values, axes, group):
    """Reduces values over the contracted axes, or over each group of values along the last
    contracted axis. The result has the shape of the scales."""
    if group is None:
        return reduce(values, axes, keepdims=True)
    at = values.ndim + axes[-1]
    grouped = values.reshape(*values.shape[:at], -1, group, *values.shape[at + 1 :])
    over = (at + 1, *(values.ndim + i + (values.ndim + i > at) for i in axes[:-1]))
    return reduce(grouped, over, keepdims=True).squeeze(at + 1)


def _axes(path, w, format) -> tuple[int, ...]:
    """Returns the contracted axes, as negative integers in increasing order."""
    if format.axes is None:
        return (-2,) if w.ndim < 4 else tuple(range(-w.ndim, -1))
    axes = (format.axes,) if isinstance(format.axes, int) else tuple(format.axes)
    if not axes or any(not isinstance(i, int) or not -w.ndim <= i < w.ndim for i in axes):
        raise ValueError(f"quantize: {path} has {w.ndim} axes; got axes={format.axes!r}")
    negative = sorted({i if i < 0 else i - w.ndim for i in axes})
    if len(negative) < len(axes):
        raise ValueError(f"quantize: axes={format.axes!r} name an axis of {path} twice")
    return tuple(negative)


def materialize(params: Any) -> Any:
    """Replaces the implicit arrays of a tree by the plain arrays that they stand for.

    >>> params = compress.quantize({"kernel": jnp.eye(2)}, {"kernel": compress.Int8()})
    >>> compress.materialize(params)["kernel"].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    return map_arrays(lambda _, x: _materialized(x), params)


def size(params: Any) -> int:
    """Returns the number of bytes of a tree: of plain arrays, and of what implicit arrays store.

    >>> params = {"kernel": jnp.zeros((4, 8))}
    >>> compress.size(params), compress.size(compress.quantize(params, {"kernel": compress.Int8()}))
    (128, 64)
    """
    arrays, _ = pack(params)
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(arrays))
