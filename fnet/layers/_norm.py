"""Normalization: LayerNorm, RMSNorm, GroupNorm and BatchNorm. Statistics are taken in float32 at least."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import KW_ONLY

import jax
import jax.numpy as jnp
from jax import lax

from fnet.layers._core import Layer
from fnet.layers._linear import align, floating, ones, wide, zeros
from fnet.layers._scope import Scope


class LayerNorm(Layer):
    """Each position to mean 0 and variance 1 over its last axis, then scale and shift.

        y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias

    Parameters: scale [features], bias [features].

    Source: Ba, Kiros and Hinton (2016), Layer Normalization.
    """

    _: KW_ONLY
    epsilon: float = 1e-5
    use_scale: bool = True
    use_bias: bool = True

    def forward(self, scope: Scope, x):
        x = floating(x, scope, "LayerNorm")
        return _normalize(x, *_affine(self, scope, x.shape[-1:]), epsilon=self.epsilon, center=True)


class RMSNorm(Layer):
    """Each position to root mean square 1 over its last axis, then scale (no shift by default).

        y = x / sqrt(mean(x²) + epsilon) * scale

    Parameters: scale [features], and bias [features] with `use_bias=True`.

    Source: Zhang and Sennrich (2019), Root Mean Square Layer Normalization.
    """

    _: KW_ONLY
    epsilon: float = 1e-6
    use_scale: bool = True
    use_bias: bool = False

    def forward(self, scope: Scope, x):
        x = floating(x, scope, "RMSNorm")
        return _normalize(x, *_affine(self, scope, x.shape[-1:]), epsilon=self.epsilon, center=False)


class GroupNorm(Layer):
    """Each example to mean 0 and variance 1 over space and each group of channels, then scale and shift.

    `GroupNorm(1)` takes all channels together; as many groups as channels make it instance normalization.

    Parameters: scale [channels], bias [channels].

    Input [batch, *space, channels].

    Source: Wu and He (2018), Group Normalization.
    """

    groups: int
    _: KW_ONLY
    epsilon: float = 1e-5
    use_scale: bool = True
    use_bias: bool = True

    def forward(self, scope: Scope, x):
        x = floating(x, scope, "GroupNorm")
        channels = x.shape[-1]
        if x.ndim < 2 or channels % self.groups:
            raise ValueError(f"GroupNorm at {scope}: {self.groups} groups must divide the {channels} channels of an "
                             f"input [batch, ..., channels]; got shape {x.shape}")
        scale, bias = _affine(self, scope, (channels,))
        y = wide(x).reshape(x.shape[0], -1, self.groups, channels // self.groups)    # [batch, space, groups, within]
        mean = y.mean((1, 3), keepdims=True)
        y = y - mean
        y = y * lax.rsqrt(jnp.square(y).mean((1, 3), keepdims=True) + self.epsilon)
        return _scale_shift(y.reshape(x.shape), scale, bias).astype(x.dtype)


class BatchNorm(Layer):
    """Each channel to mean 0 and variance 1 over the batch and space, then scale and shift.

        y = (x - mean) / sqrt(var + epsilon) * scale + bias

    With `train=True` mean and variance are the batch's own, and the state moves towards them,
    `mean <- momentum * mean + (1 - momentum) * batch_mean`; otherwise they are the state's. The variance is the
    biased one (divided by n) in both places, as in Flax and Keras; PyTorch's running variance is divided by n - 1.

    Parameters: scale [channels], bias [channels]. State: mean [channels], var [channels], float32.

    Args:
        momentum: how much of the running statistics stays at each step (PyTorch's momentum is 1 minus this).
        epsilon: added to the variance.
        axis_name: a mapped axis (`pmap`, `vmap`, `shard_map`) to take the statistics over as well. Under `jit` over
            a mesh they are global without it.

    Input x [batch, ..., channels]; weight: [batch] or broadcastable to x without its channels, counts rows (0: a row of
    padding, which leaves the statistics alone).

    Source: Ioffe and Szegedy (2015), Batch Normalization.
    """

    _: KW_ONLY
    momentum: float = 0.9
    epsilon: float = 1e-5
    axis_name: str | tuple[str, ...] | None = None
    use_scale: bool = True
    use_bias: bool = True
    scale_init: Callable = ones

    def forward(self, scope: Scope, x, weight=None):
        x = floating(x, scope, "BatchNorm")
        if x.ndim < 2:
            raise ValueError(f"BatchNorm at {scope} needs [batch, ..., channels]; got shape {x.shape}")
        channels = x.shape[-1:]
        mean, var = scope.state("mean", channels, zeros), scope.state("var", channels, ones)
        scale, bias = _affine(self, scope, channels, self.scale_init)
        y = _own(x) if scope.train else wide(x)
        if scope.train:
            batch_mean, batch_var = self._statistics(scope, y, weight)
            for name, old, new in ("mean", mean, batch_mean), ("var", var, batch_var):
                new = lax.stop_gradient(new).astype(old.dtype)
                scope.update(name, self.momentum * old + (1 - self.momentum) * new)
            mean, var = batch_mean, batch_var
        factor = lax.rsqrt(var.astype(y.dtype) + self.epsilon)
        if scale is not None:
            factor = factor * scale.astype(y.dtype)
        y = (y - align(mean, y)) * align(factor, y)
        return _scale_shift(y, None, bias).astype(x.dtype)

    def _statistics(self, scope, x, weight):
        """Mean and (biased) variance of the batch.  [channels], [channels]"""
        axes = range(x.ndim - 1)
        if weight is None:
            if self.axis_name is None:
                mean = x.mean(axes)
                return mean, jnp.square(x - align(mean, x)).mean(axes)
            mean = lax.pmean(x.mean(axes), self.axis_name)
            return mean, lax.pmean(jnp.square(x - align(mean, x)).mean(axes), self.axis_name)
        weight = jnp.asarray(weight).astype(x.dtype)
        if weight.ndim > x.ndim - 1 or weight.shape != x.shape[:weight.ndim]:
            raise ValueError(f"BatchNorm at {scope}: weight {weight.shape} must be the first axes of the input "
                             f"{x.shape} without its channels")
        weight = lax.expand_dims(weight, range(weight.ndim, x.ndim))      # [batch, 1, ..., 1]
        x = jnp.where(weight == 0, jnp.zeros_like(x), x)                  # 0 times NaN is NaN
        each = math.prod(x.shape[:-1]) // weight.size                     # positions that one weight speaks for
        count = weight.sum() * each

        def total(values):
            return values if self.axis_name is None else lax.psum(values, self.axis_name)

        count = jnp.maximum(total(count), jnp.finfo(x.dtype).tiny)
        mean = total((x * weight).sum(axes)) / count
        return mean, total((jnp.square(x - align(mean, x)) * weight).sum(axes)) / count


def _own(x):
    """`x`, in float32 at least, as a value of its own, so that its gradient is summed up before it meets others'.

    A norm's gradient ends in the broadcast of a mean. Added last to the gradient of a residual stream, it makes a sum
    that XLA:CPU computes anew wherever it is read, and with it those of all blocks behind: twice a ViT's step.
    """
    return jnp.copy(wide(x))


def _affine(norm, scope, shape, scale_init=ones):
    """The parameters scale and bias, or None for one that is not used."""
    scale = scope.param("scale", shape, scale_init, ("norm",)) if norm.use_scale else None
    bias = scope.param("bias", shape, zeros, ("norm",)) if norm.use_bias else None
    return scale, bias


def _scale_shift(y, scale, bias):
    if scale is not None:
        y = y * align(scale, y)
    return y if bias is None else y + align(bias, y)


# Inlined when traced; in eager mode one dispatch instead of one for each operation.
@functools.partial(jax.jit, inline=True, static_argnames=("epsilon", "center"))
def _normalize(x, scale, bias, *, epsilon, center):
    y = _own(x) if center else wide(x)
    if center:
        y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + epsilon)
    return _scale_shift(y, scale, bias).astype(x.dtype)
