"""Low-rank changes of parameters: LoRA, and QLoRA for quantized parameters."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fnet.compress._rules import apply_rules
from fnet.jaxpr import Convolution, ImplicitArray, implicit_dot, is_implicit, map_arrays
from fnet.jaxpr import materialize as _materialized


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["base", "a", "b"],
    meta_fields=["scale", "inputs"],
)
@dataclasses.dataclass(frozen=True)
class LowRank(ImplicitArray):
    """A parameter with a low-rank change: `base + scale * a @ b`. `lora` creates it.

    >>> params = compress.lora(jax.random.key(0), {"kernel": jnp.ones((8, 4))}, {"kernel": 2}, alpha=4)
    >>> params["kernel"].a.shape, params["kernel"].b.shape, params["kernel"].scale
    ((8, 2), (2, 4), 2.0)
    >>> bool((params["kernel"].materialize() == 1).all())    # b is zero
    True

    Attributes:
        base: the original parameter [*lead, *in, out], an array or an implicit array such as a
            `Quantized`. `lead` are the leading axes of a stack of layers, `in` the input axes, and
            `out` the output axis.
        a: the first factor, [*lead, *in, rank].
        b: the second factor, [*lead, rank, out], initially zeros.
        scale: `alpha / rank`, from the arguments of `lora`.
        inputs: the number of input axes of `base`, for example 1 for a kernel [in, out].
    """

    base: Any
    a: Any
    b: Any
    scale: float
    inputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    @property
    def has_leading_axis(self) -> bool:
        stacked = self.ndim > self.inputs + 1  # otherwise, axis 0 of `b` is the rank
        return stacked and (not is_implicit(self.base) or self.base.has_leading_axis)

    def materialize(self) -> jax.Array:
        if self.ndim <= self.inputs:
            raise ValueError(
                f"LowRank: expected a base with {self.inputs + 1} or more axes, got shape "
                f"{self.shape}. A scan or vmap over this parameter slices axis 0 of each of its "
                "arrays, but axis 0 is an input axis. Call ft.use_implicit_arrays(f) outside of "
                "the scan or vmap"
            )
        base, lead = _materialized(self.base), self.ndim - self.inputs - 1
        a = self.a.reshape(*self.a.shape[:lead], -1, self.a.shape[-1])
        return base + (self.scale * (a @ self.b)).astype(base.dtype).reshape(base.shape)

    def dot(self, x: jax.Array, axes: tuple[int, ...], dot: Callable) -> Any:
        kernel, out = tuple(range(self.inputs)), (self.inputs,)
        if self.ndim != self.inputs + 1 or axes not in (kernel, out):
            return NotImplemented
        y = implicit_dot(self.base, x, axes, dot)
        if y is NotImplemented:
            return y
        if axes == kernel:
            return y + self.scale * dot(
                dot(x, self.a.astype(x.dtype), axes), self.b.astype(x.dtype), (0,)
            )
        inner = self.scale * dot(x, self.b.astype(x.dtype), (1,))  # [..., rank]
        return y + dot(inner, self.a.astype(x.dtype), (self.inputs,))

    def convolve(self, x: jax.Array, convolution: Convolution) -> Any:
        channels = self.ndim - 1
        if (convolution.kernel_axis, self.inputs, convolution.groups) != (channels, channels, 1):
            return NotImplemented
        base, out = self.base, convolution.out_axis
        y = (
            base.convolve(x, convolution)
            if is_implicit(base)
            else convolution(x, base.astype(x.dtype))
        )
        if y is NotImplemented:
            return y
        inner = jnp.moveaxis(convolution(x, self.a.astype(x.dtype)), out, -1)  # [..., rank]
        return y + self.scale * jnp.moveaxis(inner @ self.b.astype(x.dtype), -1, out)

    def lookup(self, take: Callable) -> Any:
        if self.ndim != 2:
            return NotImplemented
        base = self.base.lookup(take) if is_implicit(self.base) else take(self.base)
        return base if base is NotImplemented else base + self.scale * (take(self.a) @ self.b)


def lora(
    key: jax.Array, params: Any, rules: Mapping[str, int], *, alpha: float | None = None
) -> Any:
    """Adds trainable low-rank changes to the selected parameters: `w + alpha / rank * a @ b`.

        params = compress.lora(key, params, {"blocks/attention/.*": 8})
        trainable, frozen = nn.partition(params, ".*/[ab]")
        loss = lambda trainable: f(ft.use_implicit_arrays(model)(nn.combine(trainable, frozen), x))

    `b` starts at zero, so the outputs of the model do not change before training. The parameters
    may be quantized (QLoRA).

    Args:
        key: a `jax.random.key` for `a`, which is uniform with variance 1/(3n) for n inputs, as in
            PEFT.
        params: a tree of arrays and quantized arrays. Kernels have the shape [in, out], stacked
            kernels [depth, in, out], and kernels of convolutions [height, width, in, out].
        rules: {pattern: rank}. A pattern is a regular expression that matches the whole path of a
            parameter, or its first parts such as "blocks"; the first that matches applies.
            Parameters with fewer than two axes, or named bias, scale, b or offset, do not change.
        alpha: a number. `a @ b` is multiplied by alpha / rank. Default: twice the rank.

    Returns:
        The tree `params`, with `LowRank` leaves in place of the selected parameters.

    Raises:
        ValueError: a pattern matches no parameter that can be changed, or a rank is not a positive
            integer.

    Source: Hu et al. (2022), LoRA: Low-Rank Adaptation of Large Language Models; Dettmers et al.
    (2023), QLoRA.

    >>> params = lora(jax.random.key(0), {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}, {"kernel": 1})
    >>> params["kernel"].a.shape, params["kernel"].b.tolist()
    ((3, 1), [[0.0, 0.0]])
    """

    def check(pattern, rank):
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ValueError(
                f"lora: expected a positive integer as rank for {pattern!r}; got {rank!r}"
            )

    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, int | float)):
        raise TypeError(f"lora: expected a number or None as alpha; got {alpha!r}")

    def low_rank(path, w, rank):
        inputs = 1 if w.ndim < 4 else w.ndim - 1
        lead = w.ndim - inputs - 1
        count = math.prod(w.shape[lead:-1])
        digest = jax.random.fold_in(key, _digest(path))
        a = jax.random.uniform(digest, (*w.shape[:-1], rank), jnp.float32, -1, 1) / math.sqrt(count)
        b = jnp.zeros((*w.shape[:lead], rank, w.shape[-1]), jnp.float32)
        return LowRank(w, a, b, (2.0 if alpha is None else alpha / rank), inputs)

    return apply_rules(
        "lora", params, rules, check, lambda leaf: not isinstance(leaf, LowRank), low_rank
    )


def _digest(path) -> int:
    """Returns a 31-bit hash of a path, which is the same in all processes, unlike the result of
    Python's `hash`."""
    return zlib.crc32(path.encode()) & 0x7FFFFFFF


def merge(params: Any) -> Any:
    """Adds the changes of `lora` to the original parameters. All `LowRank` leaves become plain
    arrays, also those whose original is quantized.

    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> merge(lora(jax.random.key(0), params, {"kernel": 1}))["kernel"].tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    return map_arrays(lambda _, x: x.materialize() if isinstance(x, LowRank) else x, params)
