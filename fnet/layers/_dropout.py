"""Dropout."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp

from fnet.jaxpr import automatic
from fnet.layers._core import Layer
from fnet.layers._explicit import like
from fnet.layers._linear import floating
from fnet.layers._scope import Scope


class Dropout(Layer):
    """With `train=True`, sets random elements of the input to zero, and multiplies the others by 1
    / (1 - rate).

    >>> from fnet import layers as nn
    >>> y = nn.Dropout(0.5)({}, jnp.ones(8), key=jax.random.key(0), train=True)
    >>> sorted(set(y.tolist()))
    [0.0, 2.0]

    Without `train=True`, or with rate 0, the output is the input, and no key is needed.

    Args:
        rate: the probability that an element is set to zero, in [0, 1]. Default None: each call
            must pass `rate=`.
        broadcast: axes along which all elements share one random decision; `(1, 2)` drops whole
            channels of images. Default (): each element has its own.

    Inputs:
        x: a floating-point array of any shape with at least one axis.
        rate: a number or a scalar array, which replaces the rate of the layer in this call. So the
            rate can be a hyperparameter in a population of models (`fnet.search.population`). In an
            array, values outside [0, 1] are not detected. Default None: the rate of the layer.

    Output: the shape and dtype of x.

    Source: Srivastava et al. (2014), Dropout: A Simple Way to Prevent Neural Networks from
    Overfitting.
    """

    rate: float | None = None
    _: KW_ONLY
    broadcast: tuple[int, ...] = ()

    def forward(
        self, scope: Scope, x: jax.Array, rate: float | jax.Array | None = None
    ) -> jax.Array:
        rate = self.rate if rate is None else rate
        if rate is None:
            raise ValueError(
                f"Dropout at {scope}: expected a rate, got none: Dropout(0.1), or rate=0.1 in the "
                f"call"
            )
        if jnp.ndim(rate):
            raise ValueError(f"Dropout at {scope}: expected one rate, got shape {jnp.shape(rate)}")
        known = not isinstance(rate, jax.Array)
        if known and not 0 <= rate <= 1:
            raise ValueError(f"Dropout at {scope}: rate must be between 0 and 1; got {rate}")
        x = floating(x, scope, "Dropout")
        if not scope.train or (known and rate == 0):
            return x
        if known and rate == 1:
            return jnp.zeros_like(x)
        along = {axis % x.ndim for axis in self.broadcast}
        shape = [1 if axis in along else size for axis, size in enumerate(x.shape)]

        def drop(x: jax.Array, key: Any, rate: float = rate) -> jax.Array:
            keep = jnp.broadcast_to(jax.random.bernoulli(key, 1 - rate, shape), x.shape)
            # Rate 1 keeps nothing.
            scale = 1 - rate if known else jnp.where(rate < 1, 1 - rate, 1).astype(x.dtype)
            return jnp.where(keep, x / scale, jnp.zeros_like(x))

        arrays = (x, scope.key()) if known else (x, scope.key(), rate)
        return automatic(drop, like(x, *range(x.ndim)))(*arrays)
