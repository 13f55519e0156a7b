"""A copy of a tree that stays as it is while training goes on, and the bytes of it that this process is to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fnet.training.checkpoints import _leaves


class Piece(NamedTuple):
    """An array to be written: a whole leaf, or the stretch of one that `index` says."""

    path: str
    name: str
    array: np.ndarray
    index: list[list[int]] | None


@jax.jit
def _twins(arrays):
    return [jnp.copy(jax.random.key_data(x) if _leaves.is_key(x) else x) for x in arrays]


def snapshot(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves copied: on the device, without waiting for it, what is there; on the host what is on the host.

    The step donates its buffers while they are still being written: hence a copy. Where the device has no room for one
    it is made on the host, and then this waits.
    """
    copies: dict[str, Any] = {}
    places: dict[Any, list[str]] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, jax.Array):
            places.setdefault(frozenset(leaf.sharding.device_set), []).append(path)
        elif isinstance(leaf, np.ndarray | np.generic):
            copies[path] = np.array(leaf)
        else:
            copies[path] = _leaves.number_bytes(leaf)
    for names in places.values():
        arrays = [leaves[name] for name in names]
        try:
            twins = _twins(arrays)
        except jax.errors.JaxRuntimeError:
            if not all(x.is_fully_addressable for x in arrays):
                raise
            twins = [np.array(jax.random.key_data(x) if _leaves.is_key(x) else x) for x in arrays]
        copies |= zip(names, twins)
    return {path: copies[path] for path in leaves}


def pieces(copies: Mapping[str, Any]) -> list[Piece]:
    """What this process writes: every leaf, or in a run of several processes the parts that are its own.

    What several processes hold alike is written by the first of them.
    """
    made = []
    for path, copy in copies.items():
        if not isinstance(copy, jax.Array) or copy.is_fully_addressable:
            if jax.process_index() == 0:
                made.append(Piece(path, path, np.asarray(copy), None))
            continue
        for number, shard in enumerate(copy.addressable_shards):
            if shard.replica_id == 0:
                index = [list(where.indices(size)[:2]) for where, size in zip(shard.index, copy.shape)]
                made.append(Piece(path, f"{path}#{jax.process_index()}.{number}", np.asarray(shard.data), index))
    return made
