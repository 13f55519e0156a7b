"""Formats of quantized parameters. A format states how values are converted to codes (numbers of
few bits) and back."""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fnet.jaxpr import automatic, typed

# The 16 values of Dettmers et al. (2023), QLoRA, appendix E: quantiles of the normal distribution,
# with an exact zero.
_NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)

# Methods to compute the scale of activations from statistics.
METHODS = ("absmax", "percentile", "mse")


class Format:
    """How a parameter is quantized: `values = decode(codes) * scale`, with one scale for each block
    of values.

    Attributes:
        bits: the number of bits of a code.
        group: the number of values along the last contracted axis that share a scale, or None if
            all of them do.
        axes: the contracted axes of the parameter, over which matrix products and convolutions sum.
            Values along them share a scale. None: the default axes of `quantize`.
        largest: the largest decoded value. The scale of a block is its largest magnitude, divided
            by `largest`.
        table: the decoded values of the 16 codes of a format with 4 bits, or ().
    """

    bits: ClassVar[int]
    largest: ClassVar[float]
    table: ClassVar[tuple[float, ...]] = ()
    group: int | None
    axes: int | tuple[int, ...] | None

    def __post_init__(self):
        if self.group is not None and (not isinstance(self.group, int) or self.group < 1):
            raise ValueError(
                f"{type(self).__name__}: group must be a positive integer or None; got "
                f"{self.group!r}"
            )
        if self.bits == 4 and self.group is not None and self.group % 2:
            raise ValueError(
                f"{type(self).__name__}: group must be even, because a byte holds two codes; got "
                f"{self.group}"
            )

    def encode(self, values: Any) -> Any:
        """Converts scaled values (values / scale), which lie between -largest and largest, to
        codes.

        The codes are int8 or float8 numbers if the format has 8 bits. If the format has 4 bits, the
        codes are uint8 numbers from 0 to 15.
        """
        raise NotImplementedError

    def decode(self, codes: Any, dtype: Any) -> Any:
        """Converts codes (the stored numbers of few bits) to scaled values."""
        raise NotImplementedError

    def rounded(self, values: Any) -> Any:
        """Rounds scaled values to values that the format represents."""
        return self.decode(self.encode(values), values.dtype)

    @property
    def packed(self) -> bool:
        """Whether a byte contains two codes (stored numbers of 4 bits)."""
        return self.bits == 4


@dataclasses.dataclass(frozen=True)
class Int8(Format):
    """8-bit integers from -127 to 127, a quarter of the bytes of float32.

    >>> Int8().bits
    8

    Args:
        group: the number of values along the contracted axis that share a scale. Default None: all
            of them. Then a matrix product is computed with the codes, and its result is multiplied
            by the scale.
        axes: the contracted axes of the parameter, over which matrix products and convolutions sum.
            Default None: see `quantize`.
        activations: how to round the activations, the other operands, to 8 bits as well. Default
            None: not at all (weight-only quantization). Otherwise, matrix products are computed
            with 8-bit integers, and convolutions in floating point with rounded inputs. With
            "dynamic", scales are computed at run time, one for each row of a matrix product and one
            for each example of a convolution. With "absmax", "percentile" or "mse", there is a
            single scale, which `quantize` computes from statistics (see `InputStatistics.bound`).
            Derivatives with respect to activations ignore the rounding (straight-through
            estimator).
    """

    group: int | None = None
    axes: int | tuple[int, ...] | None = None
    _: KW_ONLY
    activations: str | None = None
    bits: ClassVar[int] = 8
    largest: ClassVar[float] = 127.0

    def __post_init__(self):
        super().__post_init__()
        if self.activations not in (None, "dynamic", *METHODS):
            raise ValueError(
                "Int8: activations must be None, 'dynamic', 'absmax', 'percentile' or 'mse'; got "
                f"{self.activations!r}"
            )

    def encode(self, values: Any) -> Any:
        return jnp.clip(jnp.round(values), -127, 127).astype(jnp.int8)

    def decode(self, codes: Any, dtype: Any) -> Any:
        return codes.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Int4(Format):
    """4-bit integers from -8 to 7, two in a byte. The scale of a block is its largest magnitude,
    divided by 7.

    >>> Int4().group
    32

    Args:
        group: the number of values along the contracted axis that share a scale, or None if all of
            them do. Default 32, as in GGUF.
        axes: the contracted axes of the parameter, over which matrix products and convolutions sum.
            Default None: see `quantize`.
    """

    group: int | None = 32
    axes: int | tuple[int, ...] | None = None
    bits: ClassVar[int] = 4
    largest: ClassVar[float] = 7.0
    table: ClassVar[tuple[float, ...]] = tuple(map(float, range(-8, 8)))

    def encode(self, values: Any) -> Any:
        return (jnp.clip(jnp.round(values), -8, 7) + 8).astype(jnp.uint8)

    def decode(self, codes: Any, dtype: Any) -> Any:
        return codes.astype(dtype) - 8


@dataclasses.dataclass(frozen=True)
class NF4(Format):
    """4-bit codes of 16 quantiles of a normal distribution, two in a byte.

    >>> NF4().decode(jnp.array([0, 7, 15]), jnp.float32).tolist()
    [-1.0, 0.0, 1.0]

    Args:
        group: the number of values along the contracted axis that share a scale, or None if all of
            them do. Default 64, as in the QLoRA paper.
        axes: the contracted axes of the parameter, over which matrix products and convolutions sum.
            Default None: see `quantize`.

    Source: Dettmers et al. (2023), QLoRA: Efficient Finetuning of Quantized LLMs, section 3.
    """

    group: int | None = 64
    axes: int | tuple[int, ...] | None = None
    bits: ClassVar[int] = 4
    largest: ClassVar[float] = 1.0
    table: ClassVar[tuple[float, ...]] = tuple(_NF4.tolist())

    def encode(self, values: Any) -> Any:
        nearest = lambda x: jnp.searchsorted((_NF4[1:] + _NF4[:-1]) / 2, x).astype(jnp.uint8)
        return automatic(nearest, typed(jax.typeof(values)))(values)

    def decode(self, codes: Any, dtype: Any) -> Any:
        return jnp.asarray(_NF4, dtype).at[codes].get(out_sharding=typed(jax.typeof(codes)))


@dataclasses.dataclass(frozen=True)
class Float8(Format):
    """8-bit floating-point numbers (float8_e4m3fn): 4 bits of exponent, 3 of mantissa, at most 448.

    >>> Float8().largest
    448.0

    Args:
        group: the number of values along the contracted axis that share a scale. Default None: all
            of them.
        axes: the contracted axes of the parameter, over which matrix products and convolutions sum.
            Default None: see `quantize`.

    Source: Micikevicius et al. (2022), FP8 Formats for Deep Learning.
    """

    group: int | None = None
    axes: int | tuple[int, ...] | None = None
    bits: ClassVar[int] = 8
    largest: ClassVar[float] = 448.0

    def encode(self, values: Any) -> Any:
        return values.astype(jnp.float8_e4m3fn)

    def decode(self, codes: Any, dtype: Any) -> Any:
        return codes.astype(dtype)
