"""Pads this process's rows of each batch, and transfers the rows to the devices with the plan's
shardings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import keystr

WEIGHT = "weight"


class _Rows(NamedTuple):
    """The rows of a batch on this process.

    Attributes:
        path: the first leaf with rows, or None if no leaf has any.
        count: the number of rows of this leaf.
        share: the number of rows that the plan has here for this leaf.
        short: whether a leaf has fewer rows than in the plan.
    """

    path: str | None
    count: int
    share: int
    short: bool


class LocalBatches:
    """The part of a plan's batch that is on this process's devices.

    Attributes:
        weighted: whether the step reads `batch["weight"]`. Short batches can be padded only if the
            step reads `batch["weight"]`.
        drop: whether short batches are omitted instead of padded.
        why: a text for error messages that states why batches cannot be padded.
        choices: a text for error messages that states what the user can do if batches cannot be
            padded.
    """

    def __init__(self, plan: Any, drop: bool):
        self.shapes, self.plan, self.drop = plan.shapes, plan, drop
        leaves, self.structure = jax.tree.flatten_with_path(plan.shapes)
        self.paths = [keystr(path) for path, _ in leaves]
        self.wanted = [leaf for _, leaf in leaves]
        self.places = jax.tree.leaves(plan.batch)
        self.parts = [_parts(leaf, place) for leaf, place in zip(self.wanted, self.places)]
        self.shares = [
            None if parts is None else sum(end - begin for begin, end in parts)
            for parts in self.parts
        ]
        self.several = len({device.process_index for device in plan.mesh.devices.flat}) > 1
        # A CPU device may share the memory of an array.
        self.copies = plan.mesh.devices.flat[0].platform == "cpu"
        self.last: list | None = None
        has = isinstance(plan.shapes, Mapping) and WEIGHT in plan.shapes
        path = keystr((jax.tree_util.DictKey(WEIGHT),))
        self.adds = has
        self.weighted = has and path not in plan.unused
        self.why = (
            f"the step does not read batch{path}" if has else f"the plan's batch has no {WEIGHT!r}"
        )
        self.choices = (
            f"weight the loss by batch{path}, float32 [rows], in step and plan; or omit short "
            "batches with drop_remainder=True; or use a number of rows and devices that every "
            "batch fills"
        )
        if has:
            self.at = self.paths.index(path)
            leaf = self.wanted[self.at]
            if len(leaf.shape) != 1 or leaf.dtype != np.float32:
                raise ValueError(
                    f"feed: batch{path} must be a weight, float32 [rows]; in the plan it is "
                    f"{leaf.dtype}{list(leaf.shape)}"
                )

    def fill(self, batch: Any, at: int, *, whole: bool = False) -> list | None:
        """Returns the leaves of a batch, padded to the number of rows of this process, or None if
        the batch is omitted.

        Args:
            batch: the batch.
            at: the number of the batch, for error messages.
            whole: whether the batch may contain the rows of all processes instead of only those of
                this process. If `whole` is True and the batch contains the rows of all processes,
                `fill` selects the rows of this process. Default False.

        Raises:
            ValueError: the batch does not match the plan's batch, or the batch is short and cannot
                be padded.
        """
        leaves = self._leaves(batch)
        if whole and self.several and self._has_all_rows(leaves):
            leaves = [_rows_of(x, parts) for x, parts in zip(leaves, self.parts)]
        rows = self._checked(leaves)
        if rows.short and self.drop:
            return None
        if rows.short and not self.weighted:
            raise ValueError(
                f"feed: batch {at} has {rows.count} rows here, fewer than this process's share of "
                f"{rows.share}, and {self.why}, so it cannot be padded; {self.choices}"
            )
        if self.adds and leaves[self.at] is None:
            # Every row that was passed has weight 1. The weights may have another number of rows.
            share = self.shares[self.at]
            count = share if rows.path is None else rows.count * share // rows.share
            leaves[self.at] = np.ones(count, np.float32)
        if rows.short:
            leaves = [
                x if share is None else self._padded(i, np.asarray(x), share)
                for i, (x, share) in enumerate(zip(leaves, self.shares))
            ]
        if self.several and self.weighted:
            self.last = leaves
        return leaves

    def _has_all_rows(self, leaves: list) -> bool:
        """Whether each leaf has the rows of all processes."""
        for x, parts, wanted in zip(leaves, self.parts, self.wanted):
            if x is not None and parts is not None and len(x) != wanted.shape[0]:
                return False
        return True

    def _checked(self, leaves: list) -> _Rows:
        """Checks the leaves of a batch, and returns the number of its rows."""
        rows = _Rows(None, 0, 0, short=False)
        for path, x, wanted, share in zip(self.paths, leaves, self.wanted, self.shares):
            if x is None:
                continue
            _check_leaf(path, x, wanted, share)
            if share is None:
                continue
            count = np.shape(x)[0]
            if count > share:
                raise ValueError(
                    f"feed: batch{path} of shape {np.shape(x)} has {count} rows, but this "
                    f"process's share of the plan's {wanted.shape[0]} is {share}; pass {share} "
                    "rows, or plan for more"
                )
            if rows.path is None:
                rows = _Rows(path, count, share, short=False)
            elif count * rows.share != rows.count * share:
                raise ValueError(
                    f"feed: batch{path} has {count} rows and batch{rows.path} has {rows.count}; "
                    "all leaves of a batch must have the same number of rows"
                )
            if count < share:
                rows = rows._replace(short=True)
        return rows

    def nothing(self) -> list:
        """Returns a batch in which every row has weight 0. All leaves of the returned batch except
        `batch["weight"]` are those of the previous batch, or zeros if there is no previous
        batch."""
        leaves = self.last or [
            np.zeros(x.shape if share is None else (share, *x.shape[1:]), _dtype(x))
            for x, share in zip(self.wanted, self.shares)
        ]
        return [np.zeros_like(x) if i == self.at else x for i, x in enumerate(leaves)]

    def place(self, leaves: list) -> Any:
        """Transfers the batch to the devices."""
        if self.several:
            rows = zip(leaves, self.wanted, self.places, self.shares)
            placed = [self._global(x, wanted, place, share) for x, wanted, place, share in rows]
        else:
            if self.copies:
                rows = zip(leaves, self.wanted, self.places)
                leaves = [_own(x, wanted, place) for x, wanted, place in rows]
            placed = jax.device_put(leaves, self.places)
        return jax.tree.unflatten(self.structure, placed)

    def _leaves(self, batch):
        """Returns the leaves of a batch, in the same order as the leaves of the plan's batch (the
        batch that was passed to `parallel.plan`). If the plan's batch has the leaf "weight" and the
        given batch does not, the result contains None for this leaf, and `fill` replaces None by an
        array of ones."""
        leaves, structure = jax.tree.flatten(batch)
        if structure == self.structure:
            return leaves
        if self.adds and isinstance(batch, Mapping) and WEIGHT not in batch:
            leaves, structure = jax.tree.flatten({**batch, WEIGHT: 0.0})
            if structure == jax.tree.structure(dict(self.shapes)):
                leaves[self.at] = None
                return leaves
        given = [f"batch{keystr(path)}" for path, _ in jax.tree.leaves_with_path(batch)]
        raise ValueError(
            f"feed: expected {', '.join('batch' + path for path in self.paths)} as in the plan; "
            f"got {', '.join(given) or 'nothing'}"
        )

    def _padded(self, i: int, x: np.ndarray, share: int) -> np.ndarray:
        """Returns leaf i with `share` rows: the weights are padded with 0, other leaves with their
        last row."""
        if len(x) == share:
            return x
        if i == self.at:
            return np.concatenate([x, np.zeros(share - len(x), x.dtype)])
        if len(x):
            row = x[-1:]
        elif self.last:
            row = self.last[i][-1:]
        else:
            row = np.zeros((1, *x.shape[1:]), x.dtype)
        return np.concatenate([x, np.repeat(row, share - len(x), 0)])

    def _global(self, x, wanted, place, share):
        if share is None:
            return _everywhere(x, place)
        x = np.asarray(x, _dtype(wanted))
        x = _own(x, wanted, place) if self.copies else x
        return jax.make_array_from_process_local_data(place, x, wanted.shape)


def _rows_of(x: Any, parts: list[tuple[int, int]] | None) -> Any:
    if x is None or parts is None:
        return x
    return np.concatenate([x[begin:end] for begin, end in parts])


def _check_leaf(path: str, x: Any, wanted: Any, share: int | None) -> None:
    """Raises a ValueError if the dtype of a leaf, its number of axes or its sizes, except the
    number of rows, are not those of the plan's batch."""
    shape, dtype = np.shape(x), _dtype(x)
    same_axes = len(shape) == len(wanted.shape) and shape[1:] == wanted.shape[1:]
    if not same_axes or dtype != _dtype(wanted):
        expected = [share, *wanted.shape[1:]] if wanted.shape else []
        raise ValueError(
            f"feed: expected batch{path} to be {_dtype(wanted)}{expected} from this process, as in "
            f"the plan; got {dtype}{list(shape)}"
        )
    lost = _wrapped(x)
    if lost is not None:
        raise ValueError(
            f"feed: batch{path} holds {lost}, which does not fit into 32 bits: leave it out, or "
            "set jax.config.update('jax_enable_x64', True)"
        )


def _parts(leaf, place) -> list[tuple[int, int]] | None:
    """Returns the ranges (begin, end) of a leaf's rows on this process's devices, or None if the
    leaf has no axes."""
    if not leaf.shape:
        return None
    indices = place.addressable_devices_indices_map(leaf.shape).values()
    return sorted({index[0].indices(leaf.shape[0])[:2] for index in indices})


def _dtype(x: Any) -> Any:
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def _wrapped(x: Any) -> int | None:
    """Returns a 64-bit integer of a NumPy array that JAX would wrap around to 32 bits, or None."""
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "iu" or not x.size:
        return None
    if _dtype(x) == x.dtype:
        return None
    limits = np.iinfo(_dtype(x))
    for value in (int(x.min()), int(x.max())):
        if not limits.min <= value <= limits.max:
            return value
    return None


def _own(x, wanted, place):
    """Copies an array `x` if a CPU device could share its memory, because the user may overwrite
    `x` later. If the memory of `x` is not aligned, JAX itself copies `x` to the CPU device, so
    `_own` need not copy it."""
    if not isinstance(x, np.ndarray) or not x.size:
        return x
    part = math.prod(place.shard_shape(wanted.shape)) * x.itemsize
    return x.copy() if x.ctypes.data % math.gcd(64, part) == 0 else x


def _everywhere(x, place):
    """Transfers a leaf without axes to every device. The leaf must be equal in all processes."""
    if jax.dtypes.issubdtype(_dtype(x), jax.dtypes.prng_key):
        wrap = lambda data: jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jax.jit(wrap, out_shardings=place)(np.asarray(jax.random.key_data(x)))
    host = np.asarray(x, _dtype(x))
    return jax.make_array_from_callback(host.shape, place, lambda index: host[index])
