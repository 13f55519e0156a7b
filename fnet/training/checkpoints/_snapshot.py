"""Copies a tree before further training changes it, and selects the parts of the copy that this
process writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fnet.training.checkpoints import _leaves


class Piece(NamedTuple):
    """An array to write: a complete leaf, or one part of a leaf. `index` is (begin, end) of the
    part along each axis, or None for a complete leaf."""

    path: str
    name: str
    array: np.ndarray
    index: list[list[int]] | None


@jax.jit
def _twins(arrays):
    return [jnp.copy(jax.random.key_data(x) if _leaves.is_key(x) else x) for x in arrays]


def snapshot(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of each leaf of a state.

    Device arrays are copied on the device, without waiting for the copy. Host arrays are copied on
    the host. A background thread writes the copies to disk while the training continues. The
    original arrays cannot be written in the background, because their buffers may be donated to the
    next step, which then overwrites them. If the device has too little memory for the copies, its
    arrays are copied to the host. The copy to the host waits until the device has computed the
    state.
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
    """Returns the arrays that this process writes to a checkpoint. If a run has only one process,
    this process writes every leaf. If a run has several processes, each process writes the parts of
    the leaves on its devices.

    If several devices have replicas of a part of a leaf, only the first replica is written. Leaves
    that are not distributed are written by process 0.
    """
    made = []
    for path, copy in copies.items():
        if not isinstance(copy, jax.Array) or copy.is_fully_addressable:
            if jax.process_index() == 0:
                made.append(Piece(path, path, np.asarray(copy), None))
            continue
        for number, shard in enumerate(copy.addressable_shards):
            if shard.replica_id == 0:
                index = [
                    list(where.indices(size)[:2]) for where, size in zip(shard.index, copy.shape)
                ]
                made.append(
                    Piece(
                        path,
                        f"{path}#{jax.process_index()}.{number}",
                        np.asarray(shard.data),
                        index,
                    )
                )
    return made
