"""Cross-entropy of a linear head in chunks, so that the logits over a large vocabulary are never
all in memory."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from fnet.layers._sizes import sized

LOGITS = 1 << 29  # the maximum number of logits in a chunk: 2 GiB in float32
POSITIONS = (
    64  # the minimum length of a chunk, which matters if a batch is divided among many devices
)


def linear_cross_entropy(
    x: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> jax.Array:
    """Computes `optax.softmax_cross_entropy_with_integer_labels(x @ kernel + bias, labels)` in
    chunks of positions, so that the logits are never all in memory.

    >>> x, kernel = jnp.ones((2, 6, 4)), jnp.zeros((4, 10))
    >>> linear_cross_entropy(x, kernel, jnp.zeros((2, 6), int), chunk_size=2).round(4)[0, 0]    # ln 10
    Array(2.3026, dtype=float32)

    The logits [batch, time, vocab_size] are the largest array in a training step of a language
    model: 6.6 GB in float32 for 32 texts of 1,024 tokens and GPT-2's vocabulary of 50,257 tokens,
    and as much again for their gradient. This function has at most 2^29 of them at once (2 GiB in
    float32, enough for 10 such texts). For more, it splits the time axis into chunks, reduces the
    logits of each to losses, and computes them again in the backward pass. A training step then has
    four matrix products of the size of x @ kernel instead of three.

    Sums over the vocabulary are computed in float32 for every input dtype. Forward-mode and
    reverse-mode derivatives of any order are supported.

    Args:
        x: [..., time, features], floating point. Only the time axis is split, so the axes before it
            can be sharded.
        kernel: [features, vocab_size], cast to the dtype of x. For tied embeddings, pass
            `embedding.T`.
        labels: [..., time], integers in 0 .. vocab_size - 1. The loss of any other label is NaN.
        bias: [vocab_size]. Default None: no bias.
        softcap: a bound on the logits: softcap * tanh(logits / softcap) replaces them, as in Gemma
            2. Default None: no bound.
        chunk_size: the maximum number of positions in a chunk. Default: as many as give at most
            2^29 logits, but at least 64. With a single chunk, nothing is recomputed. If x has a
            symbolic size (see `jax.export`), the default is one chunk; set chunk_size for a large
            vocabulary.

    Returns:
        Losses [..., time] in nats, float32. Padded positions have losses too; multiply these by 0.

    Raises:
        ValueError: the shapes or dtypes of the arguments do not match.

    Source: Milakov and Gimelshein (2018), Online normalizer calculation for softmax; Wijmans et al.
    (2025), Cut Your Losses in Large-Vocabulary Language Models.
    """
    x, kernel, labels = (jnp.asarray(array) for array in (x, kernel, labels))
    _check(x, kernel, labels, bias, chunk_size)
    # int32 can represent every label.
    labels = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
    time, vocab_size = x.shape[-2], kernel.shape[1]
    rows = math.prod(x.shape[:-2])
    if chunk_size is None and sized(rows, time):
        chunk_size = max(POSITIONS, LOGITS // (rows * vocab_size or 1))
    kernel = kernel.astype(x.dtype)
    bias = None if bias is None else jnp.asarray(bias).astype(jnp.float32)
    if chunk_size is None or (sized(time) and chunk_size >= time):
        return _losses(x, kernel, labels, bias, softcap)
    count = _count(time, chunk_size) if sized(time) else -(-time // chunk_size)
    size = -(-time // count) if sized(time) else chunk_size
    padding = count * size - time
    x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, padding), (0, 0)])
    labels = jnp.pad(labels, [*[(0, 0)] * (labels.ndim - 1), (0, padding)])
    axis = x.ndim - 2
    chunks = (
        jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, x.shape[-1]), axis, 0),
        jnp.moveaxis(labels.reshape(*labels.shape[:axis], count, size), axis, 0),
    )
    # Scan already prevents common-subexpression elimination.
    chunk = jax.checkpoint(
        lambda x, labels: _losses(x, kernel, labels, bias, softcap), prevent_cse=False
    )
    losses = lax.map(lambda pair: chunk(*pair), chunks)  # [count, ..., size]
    losses = jnp.moveaxis(losses, 0, axis).reshape(*labels.shape[:-1], count * size)
    return lax.slice_in_dim(losses, 0, time, axis=axis)


def _losses(
    x: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    softcap: float | None,
) -> jax.Array:
    logits = lax.dot_general(
        x, kernel, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    if bias is not None:
        logits = logits + lax.expand_dims(bias, range(logits.ndim - 1))
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    # A comparison that is fused into the sum replaces a gather, because the gradient of a gather is
    # a scatter.
    tokens = lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    chosen = jnp.where(tokens == labels[..., None], logits, 0).sum(-1)
    valid = (labels >= 0) & (labels < kernel.shape[1])
    return jnp.where(valid, jax.nn.logsumexp(logits, -1) - chosen, jnp.nan)


def _count(time: int, chunk_size: int) -> int:
    """Returns the number of chunks into which a time axis of length `time` is split.

    With n = ceil(time / chunk_size), the function returns the smallest number from n to 1.5 n that
    divides `time` (which avoids padding), or n if there is no such number.
    """
    fewest = -(-time // chunk_size)
    return next(
        (
            count
            for count in range(fewest, min(fewest + fewest // 2, time) + 1)
            if time % count == 0
        ),
        fewest,
    )


def _check(
    x: jax.Array,
    kernel: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    chunk_size: int | None,
) -> None:
    if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"linear_cross_entropy: expected floating-point x [..., time, features]; got {x.dtype}"
            f"{list(x.shape)}"
        )
    if (
        kernel.ndim != 2
        or kernel.shape[0] != x.shape[-1]
        or not jnp.issubdtype(kernel.dtype, jnp.floating)
    ):
        raise ValueError(
            f"linear_cross_entropy: expected a floating-point kernel [{x.shape[-1]}, vocab_size] "
            f"for x of shape {list(x.shape)}; got {kernel.dtype}{list(kernel.shape)}"
        )
    if labels.shape != x.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"linear_cross_entropy: expected integer labels {list(x.shape[:-1])} for x of shape "
            f"{list(x.shape)}; got {labels.dtype}{list(labels.shape)}"
        )
    if bias is not None and jnp.shape(bias) != kernel.shape[1:]:
        raise ValueError(
            f"linear_cross_entropy: expected a bias [{kernel.shape[1]}] for a kernel of shape "
            f"{list(kernel.shape)}; got {list(jnp.shape(bias))}"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"linear_cross_entropy: chunk_size must be >= 1; got {chunk_size}")
