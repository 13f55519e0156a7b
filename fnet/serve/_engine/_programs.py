"""The compiled functions of the model: a piece of a prompt, and one token of every row.

They are compiled once for a model and the shapes, and shared by all engines with that model.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet import transforms as ft
from fnet.models.generation import _generate
from fnet.serve._engine import _adapters
from fnet.serve._engine._cache import Layout
from fnet.serve._engine._sampling import Counts, Picked, Rows, pick


def next_logits(
    model: Any, params: Any, adapters: jax.Array, last: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
    """Returns the logits of the next token [rows, vocab_size] in float32, and the cache with the
    tokens `last` [rows]."""
    chosen = _adapters.for_rows(params, adapters)
    logits, cache = _generate.decoder(model)(chosen, last[:, None], cache)
    return logits[:, 0].astype(jnp.float32), cache


def _one_by_one(
    model: Any, params: Any, adapters: jax.Array, last: jax.Array, cache: Any, layout: Layout
) -> tuple[jax.Array, Any]:
    """`next_logits` of one row after another, by a loop whose body sees a single row."""
    structure = jax.tree.structure(cache)

    def one(row: tuple) -> tuple[jax.Array, list]:
        adapter, token, leaves = row
        single = [jnp.expand_dims(x, leaf.rows) for x, leaf in zip(leaves, layout.leaves)]
        logits, after = next_logits(
            model, params, adapter[None], token[None], jax.tree.unflatten(structure, single)
        )
        pairs = zip(jax.tree.leaves(after), layout.leaves)
        return logits[0], [jnp.squeeze(x, leaf.rows) for x, leaf in pairs]

    rows_first = [
        jnp.moveaxis(x, leaf.rows, 0) for x, leaf in zip(jax.tree.leaves(cache), layout.leaves)
    ]
    logits, after = lax.map(one, (adapters, last, rows_first))
    moved = [jnp.moveaxis(x, 0, leaf.rows) for x, leaf in zip(after, layout.leaves)]
    return logits, jax.tree.unflatten(structure, moved)


def _step(
    model: Any, params: Any, adapters: jax.Array, last: jax.Array, cache: Any, layout: Layout | None
) -> tuple[jax.Array, Any]:
    if layout is None:
        return next_logits(model, params, adapters, last, cache)
    return _one_by_one(model, params, adapters, last, cache, layout)


@functools.partial(jax.jit, static_argnames=("model", "layout"), donate_argnames="cache")
def decode(
    model: Any,
    params: Any,
    adapters: jax.Array,
    last: jax.Array,
    cache: Any,
    *,
    layout: Layout | None,
) -> tuple[jax.Array, Any]:
    """`next_logits` of all rows at once, or with a layout one by one."""
    return _step(model, params, adapters, last, cache, layout)


@functools.partial(
    jax.jit,
    static_argnames=("model", "layout", "turns"),
    donate_argnames=("rows", "counts", "cache"),
)
def advance(
    model: Any,
    params: Any,
    rows: Rows,
    active: jax.Array,
    counts: Counts | None,
    cache: Any,
    *,
    layout: Layout | None,
    turns: int,
) -> tuple[Rows, Counts | None, Any, Picked]:
    """Computes `turns` tokens of every row. Returns (rows, counts, cache, the tokens [turns, rows])."""

    def turn(carry: tuple, _: Any) -> tuple[tuple, Picked]:
        rows, counts, cache = carry
        logits, cache = _step(model, params, rows.adapters, rows.last, cache, layout)
        rows, counts, picked = pick(logits, rows, active, counts, None)
        return (rows, counts, cache), picked

    carry = rows, counts, cache
    if turns == 1:
        carry, picked = turn(carry, None)
        return *carry, jax.tree.map(lambda x: x[None], picked)
    carry, picked = lax.scan(turn, carry, length=turns)
    return *carry, picked


@functools.lru_cache(64)
def decode_exactly(model: Any) -> Any:
    """`next_logits` with the same bits for a row whatever the number of rows (`ft.invariant`)."""
    same = ft.invariant(functools.partial(next_logits, model), argnums=(1, 2, 3))
    return jax.jit(same, donate_argnums=3)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def read(
    model: Any, params: Any, adapters: jax.Array, tokens: jax.Array, length: jax.Array, cache: Any
) -> Any:
    """Returns the cache of one row with the first `length` [1] of the tokens [1, size]. XLA removes
    the unused logits."""
    chosen = _adapters.for_rows(params, adapters)
    reading = ft.tune(_generate.reading(model, chosen))
    return reading(chosen, tokens, lengths=length, state=cache)[1]
