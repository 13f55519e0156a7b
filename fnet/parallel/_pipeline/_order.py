"""The order of stacked layers on the stages of a circular schedule.

An array [layers, ...] that is split over S stages lies there in the order of its layers: stage s has
groups s * V ... s * V + V - 1 of the S * V groups of layers. A circular schedule needs every S-th
group on stage s, so the stages exchange their groups.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def exchanged(x: Any, stages: int, rounds: int, axis: str, *, back: bool = False) -> Any:
    """Returns the layers of this stage [layers on a stage, ...] in the order of a circular
    schedule, inside a shard_map, or with `back` those of the order of the array."""
    if rounds == 1:
        return x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        numbers = exchanged(jax.random.key_data(x), stages, rounds, axis, back=back)
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
    groups = x.reshape(rounds, x.shape[0] // rounds, *x.shape[1:])
    stage, received = lax.axis_index(axis), groups
    for turn in _turns(stages, rounds):
        if back:
            turn = {to: (into, s, slot) for s, (slot, to, into) in turn.items()}
        slots = jnp.asarray([turn[s][0] for s in range(stages)])
        into = {to: slot for _, to, slot in turn.values()}
        places = jnp.asarray([into[s] for s in range(stages)])
        group = lax.dynamic_index_in_dim(groups, slots[stage], keepdims=False)
        group = lax.ppermute(group, axis, [(s, to) for s, (_, to, _) in turn.items()])
        received = lax.dynamic_update_index_in_dim(received, group, places[stage], 0)
    return received.reshape(x.shape)


def _turns(stages: int, rounds: int) -> list[dict[int, tuple[int, int, int]]]:
    """Returns, for each of as many exchanges as there are rounds, {stage: (slot that it sends,
    stage that receives it, slot there)}, such that each stage sends and receives once in each."""
    open_ = {
        s: {
            s * rounds + slot: (slot, (s * rounds + slot) % stages, (s * rounds + slot) // stages)
            for slot in range(rounds)
        }
        for s in range(stages)
    }
    turns = []
    for _ in range(rounds):
        match: dict[int, tuple[int, int]] = {}  # receiver -> (sender, group)
        for s in range(stages):
            _augment(s, open_, match, set())
        turns.append({s: open_[s].pop(group) for s, group in match.values()})
    return turns


def _augment(sender: int, open_: dict, match: dict, seen: set) -> bool:
    """Adds a sender to a matching of senders and receivers. A regular bipartite graph always has a
    perfect one (Kőnig, 1916)."""
    for group, (_, receiver, _) in open_[sender].items():
        if receiver in seen:
            continue
        seen.add(receiver)
        if receiver not in match or _augment(match[receiver][0], open_, match, seen):
            match[receiver] = sender, group
            return True
    return False
