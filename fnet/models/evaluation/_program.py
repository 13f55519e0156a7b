"""The log-probabilities of chosen tokens, by a program that never holds the logits of a whole batch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet.models._model import LanguageModel
from fnet.models.generation._generate import reading

CHUNK = 256  # positions whose logits are in memory at once: 50 MB for 49,152 tokens


class Batch(NamedTuple):
    """Texts in rows, and the tokens to score.

    `tokens` and `segments` are [rows, time]; segments are None if each row holds one text. The
    first `count` of `positions` and `labels`, both [multiple of the chunk], are used: after
    position p of the flattened tokens, the program scores the token labels[i].
    """

    tokens: np.ndarray
    segments: np.ndarray | None
    positions: np.ndarray
    labels: np.ndarray
    count: np.ndarray


def chunk_of(rows: int, time: int) -> int:
    """Returns how many positions of a batch the program takes at once."""
    return min(CHUNK, rows * time)


@functools.partial(jax.jit, static_argnums=0)
def scored(model: Any, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns, for each position, the log-probability of its label (float32) and whether no other
    token is more probable."""
    reduce = functools.partial(_reduced, batch)

    def compute(params, tokens, segments):
        if isinstance(model, LanguageModel):
            return model.reduced(params, tokens, reduce, segments=segments)
        logits = model(params, tokens)
        shape = getattr(logits, "shape", None)
        if shape is None or len(shape) != 3 or shape[:2] != tokens.shape:
            raise ValueError(
                f"score: expected logits [{tokens.shape[0]}, {tokens.shape[1]}, vocab_size] of "
                f"tokens [{tokens.shape[0]}, {tokens.shape[1]}]; got "
                f"{type(logits).__name__ if shape is None else f'shape {shape}'}. Pass a language "
                "model, or a function f(params, tokens) that returns logits"
            )
        return reduce(logits, lambda x: x)

    return reading(compute, params)(params, batch.tokens, batch.segments)


def _reduced(batch, x, logits_of):
    """Scores the labels of a batch. `x` is the input [rows, time, features] of the head, and
    `logits_of` the head. Only the chosen positions reach it, so padding and prompts cost nothing
    there, and only the logits of a chunk are ever in memory."""
    size = chunk_of(*x.shape[:2])
    x = x.reshape(-1, x.shape[-1])  # [rows * time, features]

    def chunk(number, found):
        start = number * size
        index, labels = (
            lax.dynamic_slice(array, (start,), (size,)) for array in (batch.positions, batch.labels)
        )
        logits = logits_of(x[index]).astype(jnp.float32)  # [chunk, vocab_size]
        chosen = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
        new = chosen - jax.nn.logsumexp(logits, -1), logits.argmax(-1).astype(jnp.int32) == labels
        return tuple(lax.dynamic_update_slice(a, b, (start,)) for a, b in zip(found, new))

    count = len(batch.positions)
    nothing = jnp.zeros(count, jnp.float32), jnp.zeros(count, bool)
    return lax.fori_loop(0, (batch.count + size - 1) // size, chunk, nothing)
