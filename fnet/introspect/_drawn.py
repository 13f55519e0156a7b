"""Draws arrays that are only described."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def filled(x: Any, rng: np.random.Generator) -> Any:
    """Returns an array: `x`, or one with its shape and dtype. Floating-point numbers are normal,
    and integers 0 or 1, which are valid indices of most axes."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), x.shape) if x.shape else jax.random.key(0)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.asarray(rng.normal(size=x.shape), x.dtype)
    return jnp.asarray(rng.integers(0, 2, x.shape), x.dtype)
