"""Texts that are packed into rows: where each begins, and which token each predicts.

`segments` are integers [batch, time]: the number of the text to which a token belongs, or 0 for
padding. The tokens of a text stand next to one another, and texts of one row have different
numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def segment_positions(segments: jax.Array) -> jax.Array:
    """Returns the position of each token within its own text.

    >>> segment_positions(jnp.array([[1, 1, 1, 2, 2, 0]]))
    Array([[0, 1, 2, 0, 1, 0]], dtype=int32)

    Attention with a rotary embedding and the decoders of `fnet.models` call it themselves.

    Args:
        segments: integers [batch, time]: the number of the text of each token, 0 for padding. The
            tokens of a text stand next to one another.

    Returns:
        int32 [batch, time]: 0, 1, ... in each text, and 0 for padding.

    Raises:
        ValueError: `segments` are not integers with two axes.
    """
    segments = _rows(segments, "segment_positions")
    order = _order(segments)
    begins = segments != jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1]  # padding at the start: 0
    starts = lax.cummax(jnp.where(begins, order, 0), axis=1)
    return jnp.where(segments == 0, 0, order - starts)


def segment_lengths(segments: jax.Array) -> jax.Array:
    """Returns the number of tokens of each token's own text, int32 [batch, time], and 0 for padding.
    `segments` are as in `segment_positions`."""
    order = _order(segments)
    ends = segments != _following(segments)
    stops = lax.cummin(jnp.where(ends, order, jnp.iinfo(jnp.int32).max), axis=1, reverse=True)
    return jnp.where(segments == 0, 0, segment_positions(segments) + stops - order + 1)


def next_tokens(
    tokens: jax.Array, segments: jax.Array, *, per: str = "token"
) -> tuple[jax.Array, jax.Array]:
    """Returns the labels of a language model for texts that are packed into rows, and their weights.

        labels, weights = nn.next_tokens(tokens, segments)
        losses = model.cross_entropy(params, tokens, labels, segments=segments)     # [batch, time]
        loss = (losses * weights).sum() / weights.sum()

    Padding predicts nothing, and the last token of a text does not predict the first of the next
    one: there the weight is 0, and the label is the token itself, so that its loss is finite and
    holds nothing of another text.

    >>> labels, weights = next_tokens(jnp.array([[5, 6, 7, 8, 9, 0]]), jnp.array([[1, 1, 1, 2, 2, 0]]))
    >>> labels.tolist(), weights.tolist()
    ([[6, 7, 7, 9, 9, 0]], [[1.0, 1.0, 0.0, 1.0, 0.0, 0.0]])

    Args:
        tokens: integers [batch, time].
        segments: integers [batch, time]: the number of the text of each token, 0 for padding.
        per: "token" weighs all predictions equally. "text" weighs all texts equally: the weights of
            a text's predictions sum to 1. Default "token".

    Returns:
        (labels, weights): integers [batch, time] in the dtype of `tokens`, and float32 [batch,
        time].

    Raises:
        ValueError: `tokens` and `segments` are not integers of one shape with two axes, or `per` is
            neither "token" nor "text".
    """
    segments = _rows(segments, "next_tokens")
    tokens = numbered(tokens, segments.shape, "next_tokens: tokens")
    if per not in ("token", "text"):
        raise ValueError(f"next_tokens: per must be 'token' or 'text'; got {per!r}")
    predicts = (segments == _following(segments)) & (segments != 0)
    labels = jnp.where(predicts, _following(tokens), tokens)
    weights = predicts.astype(jnp.float32)
    if per == "text":
        predictions = segment_lengths(segments) - 1
        weights = weights / jnp.maximum(predictions, 1).astype(jnp.float32)
    return labels, weights


def numbered(x: jax.Array, shape: tuple[int, ...], what: str) -> jax.Array:
    """Returns an array with an integer for each token. `what` is the beginning of the error
    message."""
    x = jnp.asarray(x)
    if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"{what} must be integers [batch, time] {shape}; got {x.dtype}{list(x.shape)}"
        )
    return x


def padded(segments: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns `segments` with 0 for the tokens beyond the `lengths` [batch] of the rows."""
    valid = _order(segments) < lengths.astype(jnp.int32)[:, None]
    return jnp.where(valid, segments, 0)


def _rows(segments: jax.Array, who: str) -> jax.Array:
    segments = jnp.asarray(segments)
    if segments.ndim != 2:
        raise ValueError(f"{who}: segments must be [batch, time]; got {list(segments.shape)}")
    return numbered(segments, segments.shape, f"{who}: segments")


def _following(x: jax.Array) -> jax.Array:
    """Returns for each token the number of the next one in its row, and 0 for the last."""
    return jnp.pad(x, ((0, 0), (0, 1)))[:, 1:]


def _order(segments: jax.Array) -> jax.Array:
    """Returns the index of each token in its row, int32 [1, time]."""
    return jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
