"""Pads this process's rows of each batch, and transfers the rows to the devices with the plan's
shardings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

WEIGHT = "weight"


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
            f"batches "
            "with drop_remainder=True; or use a number of rows and devices that every batch fills"
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
        if (
            whole
            and self.several
            and all(
                x is None or parts is None or len(x) == wanted.shape[0]
                for x, parts, wanted in zip(leaves, self.parts, self.wanted)
            )
        ):
            leaves = [
                x
                if x is None or parts is None
                else np.concatenate([x[begin:end] for begin, end in parts])
                for x, parts in zip(leaves, self.parts)
            ]
        short, count = False, None
        for path, x, wanted, share in zip(self.paths, leaves, self.wanted, self.shares):
            if x is None:
                continue
            shape, dtype = np.shape(x), _dtype(x)
            if (
                len(shape) != len(wanted.shape)
                or shape[1:] != wanted.shape[1:]
                or dtype != _dtype(wanted)
            ):
                whole = [share, *wanted.shape[1:]] if wanted.shape else []
                raise ValueError(
                    f"feed: expected batch{path} to be {_dtype(wanted)}{whole} from this process, "
                    f"as in "
                    f"the plan; got {dtype}{list(shape)}"
                )
            if (lost := _wrapped(x)) is not None:
                raise ValueError(
                    f"feed: batch{path} holds {lost}, which does not fit into 32 bits: leave it "
                    f"out, or "
                    "set jax.config.update('jax_enable_x64', True)"
                )
            if share is None:
                continue
            if shape[0] > share:
                raise ValueError(
                    f"feed: batch{path} of shape {shape} has {shape[0]} rows, but this process's "
                    f"share of "
                    f"the plan's {wanted.shape[0]} is {share}; pass {share} rows, or plan for more"
                )
            if count is None:
                count = (path, shape[0], share)
            elif shape[0] * count[2] != count[1] * share:
                raise ValueError(
                    f"feed: batch{path} has {shape[0]} rows and batch{count[0]} has {count[1]}; "
                    f"all "
                    "leaves of a batch must have the same number of rows"
                )
            short |= shape[0] < share
        if short and self.drop:
            return None
        if short and not self.weighted:
            raise ValueError(
                f"feed: batch {at} has {count[1]} rows here, fewer than this process's share of "
                f"{count[2]}"
                f", and {self.why}, so it cannot be padded; {self.choices}"
            )
        if self.adds and leaves[self.at] is None:
            share = self.shares[self.at]
            rows = share if count is None else count[1] * share // count[2]
            leaves[self.at] = np.ones(rows, np.float32)
        if short:
            leaves = [
                x if share is None else self._padded(i, np.asarray(x), share)
                for i, (x, share) in enumerate(zip(leaves, self.shares))
            ]
        if self.several and self.weighted:
            self.last = leaves
        return leaves

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
            placed = [
                self._global(x, *rest)
                for x, *rest in zip(leaves, self.wanted, self.places, self.shares)
            ]
        else:
            if self.copies:
                leaves = [
                    _own(x, wanted, place)
                    for x, wanted, place in zip(leaves, self.wanted, self.places)
                ]
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
            f"got "
            f"{', '.join(given) or 'nothing'}"
        )

    def _padded(self, i, x, share):
        if len(x) == share:
            return x
        if i == self.at:
            return np.concatenate([x, np.zeros(share - len(x), x.dtype)])
        last = (
            x[-1:]
            if len(x)
            else self.last[i][-1:]
            if self.last
            else np.zeros((1, *x.shape[1:]), x.dtype)
        )
        return np.concatenate([x, np.repeat(last, share - len(x), 0)])

    def _global(self, x, wanted, place, share):
        if share is None:
            return _everywhere(x, place)
        x = np.asarray(x, _dtype(wanted))
        x = _own(x, wanted, place) if self.copies else x
        return jax.make_array_from_process_local_data(place, x, wanted.shape)


def _parts(leaf, place) -> list[tuple[int, int]] | None:
    """Returns the ranges (begin, end) of a leaf's rows on this process's devices, or None if the
    leaf has no axes."""
    if not leaf.shape:
        return None
    indices = place.addressable_devices_indices_map(leaf.shape).values()
    return sorted({index[0].indices(leaf.shape[0])[:2] for index in indices})


def _dtype(x):
    dtype = x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
    return (
        dtype
        if jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
        else jax.dtypes.canonicalize_dtype(dtype)
    )


def _wrapped(x) -> int | None:
    """Returns a 64-bit integer of a NumPy array that JAX would wrap around to 32 bits, or None."""
    if (
        not isinstance(x, np.ndarray)
        or x.dtype.kind not in "iu"
        or not x.size
        or _dtype(x) == x.dtype
    ):
        return None
    range_ = np.iinfo(_dtype(x))
    return next(
        (value for value in (int(x.min()), int(x.max())) if not range_.min <= value <= range_.max),
        None,
    )


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
