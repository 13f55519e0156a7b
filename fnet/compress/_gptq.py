"""GPTQ: rounds a parameter row by row, and compensates for the rounding error of a row by changing
later rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.vmap, in_axes=(None, 0, 0, 0))
def gptq(rounded: Callable, values: Any, scale: Any, gram: Any) -> jax.Array:
    """Rounds a kernel (weight matrix) to a quantized format so that its matrix product with the
    inputs changes little.

    Row i of the kernel is multiplied by input feature i. The rows of the kernel are rounded one
    after the other, in the order of decreasing second moments of the input features. After a row is
    rounded, the rows that are not rounded yet are changed to compensate for the rounding error of
    this row. This compensation for rounding errors reduces the error |x (values - scale *
    result)|^2 of the matrix product for the recorded inputs x, where `result` is the array that
    `gptq` returns.

    Args:
        rounded: a function that rounds scaled values (values / scale) to the values that the format
            represents.
        values: the kernel, [stack, n, outputs], where n is the number of inputs.
        scale: the scale of each value, [stack, n, outputs].
        gram: [stack, n, n], the sum of x^T x over the calibration batches.

    Returns:
        The rounded scaled values, [stack, n, outputs]. If the inverse of `gram` cannot be computed
        in float32, each value is rounded to the nearest one.

    Source: Frantar et al. (2023), GPTQ: Accurate Post-Training Quantization for Generative
    Pre-trained Transformers, algorithm 1, with its damping of 1 %.
    """
    n = len(values)
    diagonal = jnp.diagonal(gram)
    gram = gram + jnp.diag(
        0.01 * diagonal.mean() + jnp.where(diagonal.any(), 0.0, 1.0) * jnp.ones(n)
    )
    order = jnp.argsort(-diagonal)
    lower = jnp.linalg.cholesky(jnp.linalg.inv(gram[order][:, order]))

    def one(i, carry):
        values, codes = carry
        code = rounded(values[i] / scale[order[i]])
        error = (values[i] - code * scale[order[i]]) / lower[i, i]
        later = jnp.where(jnp.arange(n) > i, lower[:, i], 0)
        return values - jnp.outer(later, error), codes.at[i].set(code)

    codes = jax.lax.fori_loop(0, n, one, (values[order], jnp.zeros_like(values)))[1]
    codes = jnp.zeros_like(values).at[order].set(codes)
    # A code of NaN would be a number.
    return jnp.where(jnp.isfinite(lower).all(), codes, rounded(values / scale))
