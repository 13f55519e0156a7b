"""Beam search, an approximate search for the most probable texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fnet import layers as nn
from fnet.jaxpr import automatic
from fnet.layers._explicit import like
from fnet.models.generation import _generate
from fnet.models.generation._sampling import sampling

_NEVER = -1e9  # the score of an invalid text


class Beams(NamedTuple):
    """The output of `beam_search`: for each prompt, the best text first.

    Attributes:
        tokens: [batch, beams, max_tokens], the tokens of each text, with 0 after its end.
        lengths: [batch, beams], the number of tokens of each text before its stop token.
        scores: [batch, beams], the sum of the log-probabilities of a text's tokens, divided by
            (number of its tokens) ** length_penalty. Both count the stop token.

    >>> gpt = models.GPT(vocab_size=16, width=8, depth=1, heads=1, context=8)
    >>> params, _ = gpt.init(jax.random.key(0), gpt.example())
    >>> models.beam_search(gpt, params, jnp.array([[1, 2]]), beams=4, max_tokens=3).tokens.shape
    (1, 4, 3)
    """

    tokens: jax.Array
    lengths: jax.Array
    scores: jax.Array


def beam_search(
    model: nn.Layer,
    params: dict,
    prompts: jax.Array,
    *,
    beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    stop: Sequence[int] = (),
    lengths: jax.Array | None = None,
    dtype: Any = None,
) -> Beams:
    """Continues each prompt with the highest-scoring texts that beam search finds.

        best = models.beam_search(model, params, prompts, beams=4, max_tokens=50, stop=tokenizer.stop)
        print(tokenizer.decode(best.tokens[0, 0, :best.lengths[0, 0]]))

    Each iteration extends the best `beams` texts of each prompt by every possible token, and keeps
    the best `beams` results. A text that ends with a stop token is finished. The search ends after
    `max_tokens` tokens, or once `beams` texts are finished and no unfinished text has a higher
    score than the worst of them.

    Args:
        model, params, prompts, lengths, stop, dtype: as for `generate`.
        beams: number of texts that are kept for each prompt.
        max_tokens: the maximum number of tokens to generate.
        length_penalty: the exponent p in a text's score, the sum of the log-probabilities of its n
            tokens divided by n ** p. 0 favors short texts.

    Returns:
        `Beams(tokens, lengths, scores)`. The texts of each prompt are sorted by their scores.

    Raises:
        ValueError, TypeError: as for `generate`. Also ValueError if beams < 1.

    Source: Wu et al. (2016), Google's Neural Machine Translation System, section 7. The length
    penalty is that of the library transformers.

    >>> gpt = models.GPT(vocab_size=16, width=8, depth=1, heads=1, context=8)
    >>> params, _ = gpt.init(jax.random.key(0), gpt.example())
    >>> models.beam_search(gpt, params, jnp.array([[1, 2]]), beams=4, max_tokens=3).scores.shape
    (1, 4)
    """
    if not isinstance(beams, int) or beams < 1:
        raise ValueError(f"beam_search: beams must be an integer >= 1; got {beams!r}")
    inputs, sizes = _generate.prepare(
        "beam_search", model, prompts, lengths, None, False, beams, max_tokens
    )
    found = _search(
        model,
        params,
        *inputs,
        jnp.asarray(stop, jnp.int32),
        jnp.asarray(max_tokens, jnp.int32),
        jnp.asarray(length_penalty, jnp.float32),
        **sizes,
        beams=beams,
        dtype=None if dtype is None else jnp.dtype(dtype),
    )
    return found._replace(tokens=found.tokens[:, :, :max_tokens])


class _State(NamedTuple):
    count: jax.Array
    open: jax.Array  # [batch, 1], whether the search for the prompt continues
    last: jax.Array  # [batch * beams]
    running: Beams  # the sums of log-probabilities
    finished: Beams
    cache: Any


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("room", "capacity", "beams", "dtype")
)
def _search(
    model,
    params,
    prompts,
    lengths,
    key,
    stop,
    max_tokens,
    length_penalty,
    *,
    room,
    capacity,
    beams,
    dtype,
):
    run = functools.partial(
        _searched, model, room=room, capacity=capacity, beams=beams, dtype=dtype
    )
    return automatic(run, like(prompts, 0))(
        params, prompts, lengths, key, stop, max_tokens, length_penalty
    )


def _searched(
    model,
    params,
    prompts,
    lengths,
    key,
    stop,
    max_tokens,
    length_penalty,
    *,
    room,
    capacity,
    beams,
    dtype,
):
    model, params = _generate.prepared(model, params, dtype)
    batch = prompts.shape[0]
    begin = _generate.start(
        model,
        params,
        prompts,
        lengths,
        key,
        sampling("beam_search", temperature=0),
        room=room,
        capacity=capacity,
        samples=beams,
    )
    tokens, ends = jnp.zeros((batch, beams, room), jnp.int32), jnp.zeros((batch, beams), jnp.int32)
    first = jnp.tile(jnp.where(jnp.arange(beams) == 0, 0, _NEVER)[None], (batch, 1)).astype(
        jnp.float32
    )
    nothing = Beams(tokens, ends, jnp.full((batch, beams), _NEVER, jnp.float32))

    def going(state):
        return (state.count < max_tokens) & state.open.any()

    def step(state):
        logits, cache = _generate.reading(model, params)(
            params, state.last[:, None], state=state.cache
        )
        scores = jax.nn.log_softmax(logits[:, 0].astype(jnp.float32)).reshape(batch, beams, -1)
        vocab_size = scores.shape[-1]
        scores = (state.running.scores[:, :, None] + scores).reshape(batch, -1)
        several = min((1 + max(1, len(stop))) * beams, scores.shape[1])
        scores, index = lax.top_k(scores, several)  # [batch, several]
        parent, token = index // vocab_size, (index % vocab_size).astype(jnp.int32)
        count, final = state.count + 1, state.count + 1 == max_tokens
        ended = (token[:, :, None] == stop[None, None]).any(-1)
        texts = jnp.take_along_axis(state.running.tokens, parent[:, :, None], 1)
        zero = jnp.zeros_like(state.count)
        texts = lax.dynamic_update_slice(
            texts, jnp.where(ended, 0, token)[:, :, None], (zero, zero, state.count)
        )
        # Only a text among the best `beams` may finish. Others could still be replaced by better
        # texts.
        finishes = (ended | final) & (jnp.arange(several) < beams)[None]
        norm = count.astype(jnp.float32) ** length_penalty
        new = Beams(
            texts,
            jnp.where(ended, state.count, count),
            jnp.where(finishes & state.open, scores / norm, _NEVER),
        )
        finished = _best(
            jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), state.finished, new), beams
        )
        unfinished = Beams(texts, jnp.zeros_like(token), jnp.where(ended | final, _NEVER, scores))
        order = lax.top_k(unfinished.scores, beams)[1]  # [batch, beams]
        running, parent, token = _taken((unfinished, parent, token), order)
        rows = (parent + beams * jnp.arange(batch)[:, None]).reshape(-1)
        cache = _generate.taken(model, cache, rows, batch * beams, capacity)
        still = state.open & (running.scores[:, :1] / norm > finished.scores[:, -1:])
        return _State(count, still, token.reshape(-1), running, finished, cache)

    better = jnp.ones((batch, 1), bool)
    state = _State(
        begin.count, better, begin.last, Beams(tokens, ends, first), nothing, begin.cache
    )
    return lax.while_loop(going, step, state).finished


def _best(texts: Beams, beams: int) -> Beams:
    return _taken(texts, lax.top_k(texts.scores, beams)[1])


def _taken(tree, order):
    """Returns the elements of arrays [batch, n, ...] at the indices `order` [batch, beams]."""
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), 1), tree
    )
