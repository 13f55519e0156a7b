"""Normalization: LayerNorm, RMSNorm, GroupNorm and BatchNorm. Statistics are computed in float32 or
float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fnet import jaxpr
from fnet.jaxpr import automatic
from fnet.layers._core import Layer
from fnet.layers._explicit import like
from fnet.layers._linear import align, floating, ones, wide, zeros
from fnet.layers._scope import Scope

constant = functools.cache(jax.nn.initializers.constant)  # equal options give the same object


class LayerNorm(Layer):
    """Normalizes each position to mean 0 and variance 1 over the last axis, then scales and shifts.

        y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias

    Args:
        epsilon: added to the variance. Default 1e-5.
        use_scale: whether to multiply by scale. Default True.
        use_bias: whether to add bias. Default True.

    Input and output: [..., features], floating point.

    Parameters: scale [features], bias [features].

    Source: Ba, Kiros and Hinton (2016), Layer Normalization.

    >>> from fnet import layers as nn
    >>> params, _ = nn.LayerNorm().init(jax.random.key(0), jnp.ones((2, 4)))
    >>> nn.LayerNorm()(params, jnp.array([[1.0, 3.0], [5.0, 5.0]]).repeat(2, 1)).round(3).tolist()
    [[-1.0, -1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
    """

    _: KW_ONLY
    epsilon: float = 1e-5
    use_scale: bool = True
    use_bias: bool = True

    def forward(self, scope: Scope, x: jax.Array) -> jax.Array:
        x = floating(x, scope, "LayerNorm")
        return _normalize(x, *_affine(self, scope, x.shape[-1:]), epsilon=self.epsilon, center=True)


class RMSNorm(Layer):
    """Normalizes each position to root mean square 1 over the last axis, then scales.

        y = x / sqrt(mean(x²) + epsilon) * (offset + scale)

    Args:
        epsilon: added to the mean square. Default 1e-6.
        use_scale: whether to multiply by scale. Default True.
        use_bias: whether to add bias. Default False.
        offset: a number that is added to the parameter `scale`, as the formula shows. The initial
            value of `scale` is 1 - offset. Default 0; Gemma uses 1.

    Input and output: [..., features], floating point.

    Parameters: scale [features], and bias [features] with `use_bias=True`.

    Source: Zhang and Sennrich (2019), Root Mean Square Layer Normalization.

    >>> from fnet import layers as nn
    >>> params, _ = nn.RMSNorm().init(jax.random.key(0), jnp.ones((2, 4)))
    >>> nn.RMSNorm()(params, jnp.full((1, 4), -3.0)).round(3).tolist()
    [[-1.0, -1.0, -1.0, -1.0]]
    """

    _: KW_ONLY
    epsilon: float = 1e-6
    use_scale: bool = True
    use_bias: bool = False
    offset: float = 0.0

    def forward(self, scope: Scope, x: jax.Array) -> jax.Array:
        x = floating(x, scope, "RMSNorm")
        scale, bias = _affine(
            self, scope, x.shape[-1:], constant(1 - self.offset) if self.offset else ones
        )
        if scale is not None and self.offset:
            scale = self.offset + wide(scale)
        return _normalize(x, scale, bias, epsilon=self.epsilon, center=False)


class GroupNorm(Layer):
    """Normalizes each group of channels of each example to mean 0 and variance 1, over the group
    and all positions, then scales and shifts.

    `GroupNorm(1)` normalizes over all channels, and `GroupNorm(channels)` is instance
    normalization.

    >>> from fnet import layers as nn
    >>> norm, x = nn.GroupNorm(2), jnp.ones((1, 8, 8, 4))
    >>> norm(norm.init(jax.random.key(0), x)[0], x).shape
    (1, 8, 8, 4)

    Args:
        groups: number of channel groups; it must divide the number of channels.
        epsilon: added to the variance. Default 1e-5.
        use_scale: whether to multiply by scale. Default True.
        use_bias: whether to add bias. Default True.

    Input and output: [batch, *space, channels], floating point.

    Parameters: scale [channels], bias [channels].

    Source: Wu and He (2018), Group Normalization.
    """

    groups: int
    _: KW_ONLY
    epsilon: float = 1e-5
    use_scale: bool = True
    use_bias: bool = True

    def forward(self, scope: Scope, x: jax.Array) -> jax.Array:
        x = floating(x, scope, "GroupNorm")
        channels = x.shape[-1]
        if x.ndim < 2 or channels % self.groups:
            raise ValueError(
                f"GroupNorm at {scope}: expected [batch, ..., channels] with channels a multiple "
                f"of groups={self.groups}; got shape {x.shape}"
            )
        scale, bias = _affine(self, scope, (channels,))
        shape = x.shape[0], math.prod(x.shape[1:-1]), self.groups, channels // self.groups
        y = jnp.reshape(wide(x), shape, out_sharding=like(x, 0))  # [batch, space, groups, within]
        mean = y.mean((1, 3), keepdims=True)
        y = y - mean
        y = y * lax.rsqrt(jnp.square(y).mean((1, 3), keepdims=True) + self.epsilon)
        return _scale_shift(
            jnp.reshape(y, x.shape, out_sharding=like(x, *range(x.ndim))), scale, bias
        ).astype(x.dtype)


class BatchNorm(Layer):
    """Normalizes each channel to mean 0 and variance 1 over the batch and space, then scales and
    shifts.

        y = (x - mean) / sqrt(var + epsilon) * scale + bias

    >>> from fnet import layers as nn
    >>> norm, x = nn.BatchNorm(), jnp.ones((4, 3))
    >>> params, state = norm.init(jax.random.key(0), x)
    >>> y, state = norm(params, x, state=state, train=True)
    >>> state["mean"]
    Array([0.1, 0.1, 0.1], dtype=float32)

    With `train=True`, mean and var are the statistics of the batch, and the call updates the
    running statistics in the state:

        mean <- momentum * mean + (1 - momentum) * batch_mean
        var <- momentum * var + (1 - momentum) * batch_var

    Without `train=True`, mean and var are the running statistics, and the state does not change.

    In both variances, the sum of the squared differences is divided by their number n, as in Flax
    and Keras. PyTorch divides by n only to normalize, and by n - 1 for its running variance.

    Args:
        momentum: the weight of the old running statistics in each update, which is 1 minus
            PyTorch's momentum. Default 0.9.
        epsilon: added to the variance. Default 1e-5.
        use_scale: whether to multiply by scale. Default True.
        use_bias: whether to add bias. Default True.
        axis_name: the name of a mapped axis (of `pmap`, `vmap` or `shard_map`), or several names.
            The statistics are computed over the batch and these axes. With `jit` and sharded
            arrays, no name is needed: statistics are always over the complete batch. Default None.
        scale_init: initializer of scale. Default: ones.

    Inputs:
        x: [batch, ..., channels], floating point.
        weight: a weight for each example, [batch], or for each position, such as [batch, time].
            The statistics become weighted means: an example of weight 0.5 counts half as much as
            one of weight 1, and an example or position of weight 0, such as padding, does not
            count at all. Default: all weights are 1.

    Output: the shape and dtype of x.

    Parameters: scale [channels], bias [channels]. State: mean [channels], var [channels], float32.

    Source: Ioffe and Szegedy (2015), Batch Normalization.
    """

    _: KW_ONLY
    momentum: float = 0.9
    epsilon: float = 1e-5
    axis_name: str | tuple[str, ...] | None = None
    use_scale: bool = True
    use_bias: bool = True
    scale_init: Callable = ones

    def forward(self, scope: Scope, x: jax.Array, weight: jax.Array | None = None) -> jax.Array:
        x = floating(x, scope, "BatchNorm")
        if x.ndim < 2:
            raise ValueError(
                f"BatchNorm at {scope}: expected [batch, ..., channels]; got shape {x.shape}"
            )
        channels = x.shape[-1:]
        mean, var = scope.state("mean", channels, zeros), scope.state("var", channels, ones)
        scale, bias = _affine(self, scope, channels, self.scale_init)
        if scope.train:
            y = _own(x)
            batch_mean, batch_var = self._statistics(scope, y, weight)
            for name, old, new in ("mean", mean, batch_mean), ("var", var, batch_var):
                new = lax.stop_gradient(new).astype(old.dtype)
                scope.update(name, self.momentum * old + (1 - self.momentum) * new)
            mean, var = batch_mean, batch_var
        else:
            y = wide(x)
        factor = lax.rsqrt(var.astype(y.dtype) + self.epsilon)
        if scale is not None:
            factor = factor * scale.astype(y.dtype)
        y = (y - align(mean, y)) * align(factor, y)
        return _scale_shift(y, None, bias).astype(x.dtype)

    def _statistics(self, scope: Scope, x: jax.Array, weight: jax.Array | None) -> tuple:
        """Returns mean and biased variance of the batch, both [channels]."""
        axes = range(x.ndim - 1)
        if weight is None:
            mean, var = _moments(x)
            if self.axis_name is None:
                return mean, var
            center = lax.pmean(mean, self.axis_name)
            return center, lax.pmean(var + jnp.square(mean - center), self.axis_name)
        weight = jnp.asarray(weight).astype(x.dtype)
        if weight.ndim > x.ndim - 1 or weight.shape != x.shape[: weight.ndim]:
            raise ValueError(
                f"BatchNorm at {scope}: weight must have the input's shape without channels "
                f"{x.shape[:-1]}, or its first axes; got {weight.shape}"
            )
        weight = lax.expand_dims(weight, range(weight.ndim, x.ndim))  # [batch, 1, ..., 1]
        x = jnp.where(weight == 0, jnp.zeros_like(x), x)  # 0 times NaN is NaN
        each = math.prod(x.shape[:-1]) // weight.size  # positions with one common weight
        count = weight.sum() * each

        def total(values: Any) -> Any:
            return values if self.axis_name is None else lax.psum(values, self.axis_name)

        count = jnp.maximum(total(count), jnp.finfo(x.dtype).tiny)
        mean = total((x * weight).sum(axes)) / count
        return mean, total((jnp.square(x - align(mean, x)) * weight).sum(axes)) / count


def _moments(x: jax.Array) -> tuple:
    """Returns mean and biased variance over all axes except the last, in one pass over x.

    Each channel is shifted by its first value, so that the squares stay small (Chan, Golub and
    LeVeque, 1983, Algorithms for computing the sample variance, eq. 1.6 and section 5). The shifts
    affect rounding only; they are named `fnet.jaxpr.SHIFT`, so that a transform can replace them.
    """
    axes = range(x.ndim - 1)
    if 0 in x.shape:
        return x.mean(axes), x.mean(axes)
    first = automatic(lambda x: x[(0,) * (x.ndim - 1)], like(x, -1))(x)
    shift = checkpoint_name(lax.stop_gradient(first), jaxpr.SHIFT)
    y = x - align(shift, x)
    mean = y.mean(axes)
    var = jnp.square(y).mean(axes) - jnp.square(mean)
    return shift + mean, jnp.where(var < 0, 0, var)  # only rounding makes var negative


def _own(x: jax.Array) -> jax.Array:
    """Returns a copy of `x`, in float32 if its dtype is narrower."""
    # The layer reads `x` only here, so JAX sums the gradients of all its uses before it adds them to
    # the residual stream's, which XLA:CPU would otherwise compute several times: a training step of
    # a ViT took twice as long.
    return jnp.copy(wide(x))


def _affine(norm: Layer, scope: Scope, shape: tuple[int, ...], scale_init: Any = ones) -> tuple:
    """Returns the parameters (scale, bias), with None for a parameter that is not used."""
    scale = (
        scope.param("scale", shape, scale_init, ("norm",), roles=("out",))
        if norm.use_scale
        else None
    )
    bias = scope.param("bias", shape, zeros, ("norm",), roles=("out",)) if norm.use_bias else None
    return scale, bias


def _scale_shift(y: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> Any:
    if scale is not None:
        y = y * align(scale, y)
    return y if bias is None else y + align(bias, y)


# The function is inlined when traced. In eager mode, it needs one dispatch instead of one for each
# operation.
@functools.partial(jax.jit, inline=True, static_argnames=("epsilon", "center"))
def _normalize(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, epsilon: float, center: bool
) -> jax.Array:
    y = _own(x) if center else wide(x)
    if center:
        y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + epsilon)
    return _scale_shift(y, scale, bias).astype(x.dtype)
