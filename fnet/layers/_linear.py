"""Affine maps of the last axis: Dense and Maxout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers

from fnet.layers._core import Layer, method
from fnet.layers._cross_entropy import linear_cross_entropy
from fnet.layers._scope import Scope

lecun_normal = initializers.lecun_normal()
zeros = initializers.zeros
ones = initializers.ones


class Dense(Layer):
    """An affine map of the last axis: `y = x @ kernel + bias`.

    Args:
        features: length of the output's last axis.
        use_bias: whether to add the bias. Default True.
        kernel_init, bias_init: initializers, as in `jax.nn.initializers`. Defaults: LeCun normal,
            zeros.
        axes: logical names of the kernel's two axes, which are hints for sharding. Default ("in",
            "out"). If the second name is "vocab" or "classes", the outputs are logits, and Muon
            leaves the kernel to Adam.

    Input: [..., in], floating point. Output: [..., features], in the input's dtype.

    Parameters: kernel [in, features], bias [features].

    >>> params, _ = Dense(3).init(jax.random.key(0), jnp.ones((2, 4)))
    >>> Dense(3)(params, jnp.ones((2, 4))).shape
    (2, 3)
    """

    features: int
    _: KW_ONLY
    use_bias: bool = True
    kernel_init: Callable = lecun_normal
    bias_init: Callable = zeros
    axes: tuple[str | None, str | None] = ("in", "out")

    def forward(self, scope: Scope, x: jax.Array) -> jax.Array:
        x = floating(x, scope, "Dense")
        kernel, bias = self._params(scope, x)
        return linear(x, kernel) if bias is None else affine(x, kernel, bias)

    @method
    def cross_entropy(
        self, scope: Scope, x: jax.Array, labels: jax.Array, softcap: float | None = None
    ) -> jax.Array:
        """Computes the cross-entropy loss with the outputs of this layer as logits, by
        `nn.linear_cross_entropy`.

        x is [..., time, in]; labels and losses are [..., time]. The losses are in nats.
        """
        x = floating(x, scope, "Dense.cross_entropy")
        kernel, bias = self._params(scope, x)
        return linear_cross_entropy(x, kernel, labels, bias=bias, softcap=softcap)

    def _params(self, scope: Scope, x: jax.Array) -> tuple:
        out = "logits" if self.axes[1] in ("vocab", "classes") else "out"
        shape = (*x.shape[-1:], self.features)
        kernel = scope.param("kernel", shape, self.kernel_init, self.axes, roles=("in", out))
        if not self.use_bias:
            return kernel, None
        return kernel, scope.param("bias", shape[1:], self.bias_init, self.axes[1:], roles=("out",))


class Maxout(Layer):
    """Computes several affine maps, and takes their maximum for each feature.

        y[f] = max_p (x @ kernel[:, f, p] + bias[f, p])

    Args:
        features: length of the output's last axis.
        pieces: number of affine maps. Default 2.
        use_bias, kernel_init, bias_init: as in `Dense`.

    Input: [..., in], floating point. Output: [..., features], in the input's dtype.

    Parameters: kernel [in, features, pieces], bias [features, pieces].

    Source: Goodfellow et al. (2013), Maxout Networks, eq. 1.

    >>> from fnet import layers as nn
    >>> maxout = nn.Maxout(3, pieces=2)
    >>> maxout(maxout.init(jax.random.key(0), jnp.ones((2, 4)))[0], jnp.ones((2, 4))).shape
    (2, 3)
    """

    features: int
    pieces: int = 2
    _: KW_ONLY
    use_bias: bool = True
    kernel_init: Callable = initializers.variance_scaling(
        1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=1, batch_axis=2
    )
    bias_init: Callable = zeros

    def forward(self, scope: Scope, x: jax.Array) -> jax.Array:
        x = floating(x, scope, "Maxout")
        shape = (self.features, self.pieces)
        kernel = scope.param(
            "kernel",
            (*x.shape[-1:], *shape),
            self.kernel_init,
            ("in", "out", None),
            roles=("in", "out", "out"),
        )
        # [..., features, pieces]
        y = linear(x, kernel.reshape(*x.shape[-1:], -1)).reshape(*x.shape[:-1], *shape)
        if self.use_bias:
            bias = scope.param("bias", shape, self.bias_init, ("out", None), roles=("out", "out"))
            y = y + align(bias, y)
        return y.max(-1)


def floating(x: jax.Array, scope: Scope, name: str) -> jax.Array:
    """Returns `x` as a floating-point array (real or complex). Integers and booleans raise an error
    that names the layer."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            f"{name} at {scope}: expected floating-point input; got {x.dtype}{list(x.shape)}; "
            "convert it, e.g. x.astype(jnp.float32) / 255 for images"
        )
    if not x.ndim:
        raise ValueError(f"{name} at {scope}: expected at least one axis; got a scalar")
    return x


def wide(x: jax.Array) -> Any:
    """Returns `x` in the dtype in which statistics are computed: float32, or the dtype of `x` if
    that is wider."""
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 32 else x


def align(vector: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `vector` in x's dtype, with leading axes of length 1, so that it broadcasts over x's
    trailing axes."""
    return lax.expand_dims(vector, range(x.ndim - vector.ndim)).astype(x.dtype)


# The function is inlined when traced. In eager mode, it needs one dispatch instead of one for each
# operation.
@functools.partial(jax.jit, inline=True)
def linear(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.dot_general(x, kernel.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())))


@functools.partial(jax.jit, inline=True)
def affine(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    y = lax.dot_general(x, kernel.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())))
    return y + align(bias, y)
