"""Checks of array sizes, including the symbolic sizes of functions that `jax.export` traces."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def sized(*sizes: Any) -> bool:
    """Whether all given sizes are integers, not symbolic."""
    return all(isinstance(size, int) for size in sizes)


def at_most(who: str, size: int, limit: int) -> bool:
    """Whether a size is at most `limit`.

    Args:
        who: the beginning of the error message.
        size: an int or a symbolic size.
        limit: the largest size allowed.

    Raises:
        ValueError: the size is symbolic, and its constraints do not determine whether it is at most
            `limit`.
    """
    try:
        return size <= limit
    except jax.errors.InconclusiveDimensionOperation:
        raise ValueError(
            f"{who}: the symbolic size {size} must be at most {limit}, but is not constrained; "
            f"call jax.export.symbolic_shape with constraints=('{size} <= {limit}',)"
        ) from None


def integers(x: jax.Array, batch: int, what: str) -> jax.Array:
    """Returns an array with one integer for each example. `what` is the beginning of the error
    message."""
    x = jnp.asarray(x)
    if x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"{what} must be integers [batch] ({batch},); got {x.dtype}{list(x.shape)}"
        )
    return x
