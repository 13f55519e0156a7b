"""Training with rounded parameters (quantization-aware training)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from fnet.compress._calibrate import InputStatistics
from fnet.compress._formats import METHODS, Format, Int4, Int8
from fnet.compress._quantize import Quantized, checked_stats, input_scale, leads, unrounded
from fnet.compress._rules import apply_rules
from fnet.jaxpr import Convolution, ImplicitArray, is_implicit


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "step", "inputs"],
    meta_fields=["format", "axes"],
)
@dataclasses.dataclass(frozen=True)
class FakeQuantized(ImplicitArray):
    """A trainable parameter that is rounded in each use, to multiples of a step size that is
    trained too. `fake_quantize` creates it.

    >>> from fnet import compress
    >>> fake = compress.fake_quantize({"kernel": jnp.array([[7.0], [0.4]])}, {"kernel": compress.Int4(None)})["kernel"]
    >>> fake.step.tolist(), fake.materialize().tolist()
    ([[1.0]], [[7.0], [0.0]])

    Attributes:
        values: the values before rounding.
        step: the step size of each block of values, the distance between neighboring rounded
            values. Its shape is that of `scale` in `Quantized`.
        inputs: the step size for rounding the activations that are multiplied by the parameter.
            None: the format does not round them, or computes their step size at run time.
        format, axes: as in `Quantized`.
    """

    values: Any
    step: Any
    inputs: Any
    format: Format
    axes: tuple[int, ...]
    beside: ClassVar[Mapping[str, str]] = {"step": "values"}

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(jnp.shape(self.values))

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def has_leading_axis(self) -> bool:
        return leads(self.shape, self.axes, self.inputs)

    def materialize(self) -> jax.Array:
        blocks = self._quantized(self.values)
        count = math.prod(self.shape) / max(1, math.prod(jnp.shape(self.step)))
        step = dataclasses.replace(
            blocks, scale=_scaled_gradient(self.step, count, self.format.largest)
        ).full_scale()
        return _rounded(self.values.astype(jnp.float32), step, self.format.largest).astype(
            self.dtype
        )

    def dot(self, x: jax.Array, axes: tuple[int, ...], dot: Callable) -> Any:
        return dot(
            self._input(x, range(x.ndim - len(axes), x.ndim)),
            self.materialize().astype(x.dtype),
            axes,
        )

    def convolve(self, x: jax.Array, convolution: Convolution) -> Any:
        x = self._input(x, [i for i in range(x.ndim) if i != convolution.batch])
        return convolution(x, self.materialize().astype(x.dtype))

    def lookup(self, take: Callable) -> Any:
        return take(self.materialize())

    def quantized(self) -> Quantized:
        """Returns the same rounded values as a `Quantized`, with integer codes and scales."""
        result = self._quantized(self.values.astype(jnp.float32))
        largest = self.format.largest
        codes = self.format.encode(jnp.clip(result.codes / result.full_scale(), -largest, largest))
        return dataclasses.replace(result, codes=result.pack(codes))

    def _quantized(self, codes):
        return Quantized(
            codes, self.step, self.format, self.axes, jnp.dtype(self.dtype), self.inputs
        )

    def _input(self, x, axes):
        if getattr(self.format, "activations", None) is None:
            return x
        if self.inputs is not None:
            step = _scaled_gradient(self.inputs, x.size, 127).reshape((1,) * x.ndim)
            return _rounded(x.astype(jnp.float32), step, 127).astype(x.dtype)
        largest = jnp.abs(x).max(tuple(axes), keepdims=True).astype(jnp.float32)
        step = jnp.maximum(largest, jnp.finfo(jnp.float32).tiny) / 127
        return x + lax.stop_gradient((jnp.round(x / step) * step).astype(x.dtype) - x)


def _scaled_gradient(step, count, largest):
    """The step size, with its gradient divided by sqrt(count * largest) as in learned step size
    quantization, so that it changes about as fast as the `count` values that share it."""
    factor = 1 / math.sqrt(max(count, 1) * largest)  # an empty slice has no values
    return factor * step + lax.stop_gradient(step - factor * step)


def _rounded(x, step, largest):
    """Rounds x to the nearest multiple of `step` between -largest * step and largest * step. The
    derivative ignores the rounding, but is zero with respect to elements of x outside the interval
    [-largest * step, largest * step]."""
    scaled = jnp.clip(x / step, -largest, largest)
    return (scaled + lax.stop_gradient(jnp.round(scaled) - scaled)) * step


def fake_quantize(
    params: Any, recipe: Mapping[str, Format], *, stats: Mapping[str, InputStatistics] | None = None
) -> Any:
    """Prepares parameters for quantization-aware training: they are rounded in each use, and
    trained with the rounding.

        params = compress.fake_quantize(params, {".*": compress.Int4(group=32)})
        loss = lambda params: f(ft.use_implicit_arrays(model)(params, x))    # train as usual
        params = compress.convert(params)                                    # codes and scales

    Values are rounded to multiples of a step size, and the derivative ignores the rounding
    (straight-through estimator). Step sizes begin as the scales that `quantize` computes, and are
    trained together with the values (learned step size quantization). `convert` turns them into the
    scales of quantized parameters.

    Args:
        params: a tree of arrays.
        recipe: {pattern: format} as for `quantize`. The format must be `Int8` or `Int4`.
        stats: statistics of the activations from `calibrate`, from which their initial scales are
            computed. Default None.

    Returns:
        The tree `params`, with `FakeQuantized` leaves in place of the selected parameters.

    Raises:
        ValueError: as for `quantize`.
        TypeError: a format is not `Int8` or `Int4`.

    Source: Esser et al. (2020), Learned Step Size Quantization, equations 1 to 5.

    >>> from fnet import compress
    >>> params = compress.fake_quantize({"kernel": jnp.array([[0.25], [127.0]])}, {"kernel": compress.Int8()})
    >>> compress.materialize(compress.convert(params))["kernel"].round(1).tolist()
    [[0.0], [127.0]]
    """
    stats = checked_stats("fake_quantize", stats)

    def check(pattern, format):
        if not isinstance(format, Int8 | Int4):
            raise TypeError(
                f"fake_quantize: expected compress.Int8() or Int4() for {pattern!r}; got {format!r}"
            )

    def fake(path, w, format):
        blocks = unrounded(path, w, format)
        known = getattr(format, "activations", None) in METHODS
        inputs = input_scale(path, stats.get(path), blocks) if known else None
        return FakeQuantized(jnp.asarray(w), blocks.scale, inputs, blocks.format, blocks.axes)

    return apply_rules(
        "fake_quantize", params, recipe, check, lambda leaf: not is_implicit(leaf), fake
    )


def convert(params: Any) -> Any:
    """Turns each `FakeQuantized` leaf of a trained tree into a `Quantized` with the same rounded
    values.

    >>> from fnet import compress
    >>> params = compress.fake_quantize({"kernel": jnp.ones((2, 2))}, {"kernel": compress.Int8()})
    >>> compress.convert(params)["kernel"].codes.tolist()
    [[127, 127], [127, 127]]
    """
    is_fake = lambda x: isinstance(x, FakeQuantized)
    return jax.tree.map(lambda x: x.quantized() if is_fake(x) else x, params, is_leaf=is_fake)
