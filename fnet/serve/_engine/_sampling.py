"""The state of every row on the device, and the choice of its next token.

The numbers that are drawn for a token depend on the seed of the request and the index of the token,
as in `models.generate` with `jax.random.key(seed)`: not on the row, nor on other requests.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fnet.models.generation._sampling import Sampling, candidates, penalized
from fnet.serve._engine._checks import MOST_ALTERNATIVES, Options

_OFF = float("inf")


class Rows(NamedTuple):
    """The rows of the table: the next input, and how its successor is chosen.

    Attributes:
        last: [rows], the last token.
        count: [rows], how many tokens were generated.
        keys: [rows], random keys.
        adapters: [rows], the number of the adapter, 0 for none.
        alternatives: [rows], how many of the most probable tokens are reported.
        options: the sampling options, each [rows, 1].
    """

    last: jax.Array
    count: jax.Array
    keys: jax.Array
    adapters: jax.Array
    alternatives: jax.Array
    options: Sampling


class Counts(NamedTuple):
    """What penalties need: whether a token is in the prompt, how often it was generated, and what is
    added to its logit, all [rows, vocab_size]."""

    seen: jax.Array
    generated: jax.Array
    bias: jax.Array


class Picked(NamedTuple):
    """The next token of each row, its log-probability, and the most probable tokens with theirs,
    [rows, MOST_ALTERNATIVES] or less if the vocabulary is smaller."""

    tokens: jax.Array
    log_probs: jax.Array
    top: jax.Array
    top_log_probs: jax.Array


@functools.partial(jax.jit, static_argnames="rows")
def no_rows(*, rows: int) -> Rows:
    """Returns rows that nobody has taken."""
    zero, column = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, 1), jnp.float32)
    keys = jnp.broadcast_to(jax.random.key(0), (rows,))
    return Rows(zero, zero, keys, zero, zero, Sampling(*[column] * len(Sampling._fields)))


@functools.partial(jax.jit, static_argnames=("rows", "vocab_size"))
def no_counts(*, rows: int, vocab_size: int) -> Counts:
    shape = rows, vocab_size
    zeros = functools.partial(jnp.zeros, shape)
    return Counts(zeros(bool), zeros(jnp.int32), zeros(jnp.float32))


def seat(rows: Rows, slot: int, last: int, adapter: int, options: Options) -> Rows:
    """Puts a request into a row."""
    numbers = Sampling(*options.sampling)
    return _seated(
        rows, slot, last, adapter, options.log_probs, jax.random.key(options.seed), numbers
    )


@functools.partial(jax.jit, donate_argnums=0)
def _seated(
    rows: Rows, slot: Any, last: Any, adapter: Any, top: Any, key: Any, options: Any
) -> Rows:
    # `models.generate` folds in the number of the text, which is 0 for one that is alone.
    row = Rows(last, 0, jax.random.fold_in(key, 0), adapter, top, options)
    return jax.tree.map(
        lambda x, y: x.at[slot].set(y if x.dtype == rows.keys.dtype else jnp.asarray(y, x.dtype)),
        rows,
        row,
    )


@functools.partial(jax.jit, donate_argnums=0)
def count_prompt(counts: Counts, slot: jax.Array, seen: jax.Array, bias: jax.Array) -> Counts:
    """Begins the counts of a row: `seen` [vocab_size], whether the prompt contains a token, and
    `bias` [vocab_size]."""
    return Counts(
        counts.seen.at[slot].set(seen),
        counts.generated.at[slot].set(0),
        counts.bias.at[slot].set(bias),
    )


@jax.jit
def rows_taken(tree: Any, slots: jax.Array) -> Any:
    """Returns the rows in `slots`, of `Rows` or `Counts`."""
    return jax.tree.map(lambda x: x[slots], tree)


def pick(
    logits: jax.Array,
    rows: Rows,
    active: jax.Array,
    counts: Counts | None,
    allowed: jax.Array | None,
) -> tuple[Rows, Counts | None, Picked]:
    """Chooses the next token of each row.

    Args:
        logits: [rows, vocab_size].
        rows: their state.
        active: booleans [rows]. Work that no active row needs is left out.
        counts: what penalties need, or None if no row has penalties.
        allowed: booleans [rows, vocab_size], the tokens that may come next. Default None: all.
    """
    options, chosen = rows.options, logits
    if counts is not None:
        chosen = penalized(chosen, options, counts.seen, counts.generated) + counts.bias
    if allowed is not None:
        chosen = jnp.where(allowed, chosen, -jnp.inf)
    tokens = _next(chosen, rows, active)
    total = jax.nn.logsumexp(logits, -1, keepdims=True)
    log_probs = (jnp.take_along_axis(logits, tokens[:, None], 1) - total)[:, 0]
    many = min(MOST_ALTERNATIVES, logits.shape[-1])

    def most() -> tuple[jax.Array, jax.Array]:
        top_log_probs, top = lax.top_k(logits - total, many)
        return top.astype(jnp.int32), top_log_probs

    def none() -> tuple[jax.Array, jax.Array]:
        shape = len(tokens), many
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    top, top_log_probs = lax.cond(jnp.any(active & (rows.alternatives > 0)), most, none)
    if counts is not None:
        line = jnp.arange(len(tokens), dtype=jnp.int32)
        counts = counts._replace(generated=counts.generated.at[line, tokens].add(1))
    rows = rows._replace(last=tokens, count=rows.count + 1)
    return rows, counts, Picked(tokens, log_probs, top, top_log_probs)


picked = jax.jit(pick, donate_argnums=(1, 3))


def _next(logits: jax.Array, rows: Rows, active: jax.Array) -> jax.Array:
    """The most probable token of each row with temperature 0, a drawn one of the others. An option
    that changes nothing in a row changes no bit of it, so rows with and without it go together."""
    options, column = rows.options, active[:, None]
    best = logits.argmax(-1).astype(jnp.int32)
    narrow = jnp.any(column & ((options.top_k < _OFF) | (options.top_p < 1) | (options.min_p > 0)))

    def drawn() -> jax.Array:
        few = Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
        kept = lax.cond(
            narrow,
            lambda: candidates(logits, few),
            lambda: candidates(logits, Sampling(options.temperature)),
        )
        keys = jax.vmap(jax.random.fold_in)(rows.keys, rows.count)
        draws = jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
        return jnp.where(options.temperature[:, 0] > 0, draws, best)

    return lax.cond(jnp.any(column & (options.temperature > 0)), drawn, lambda: best)
