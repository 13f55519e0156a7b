"""Sizes of arrays that `jax.export` traces: an int, or a symbolic size that stands for many."""

from __future__ import annotations

import jax


def sized(*sizes) -> bool:
    """Whether all of these sizes are known, i.e. none is symbolic."""
    return all(isinstance(size, int) for size in sizes)


def at_most(who: str, size, limit: int) -> bool:
    """Whether a size is at most `limit`.

    Args:
        who: begins the message of the error.
        size: an int or a symbolic size.
        limit: the largest size allowed.

    Raises:
        ValueError: for a symbolic size whose constraints do not decide it.
    """
    try:
        return size <= limit
    except jax.errors.InconclusiveDimensionOperation:
        raise ValueError(f"{who}: the symbolic size {size} must be at most {limit}, which its constraints do not say: "
                         f"call jax.export.symbolic_shape with constraints=('{size} <= {limit}',)") from None
