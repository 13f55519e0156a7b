"""Slices, gathers and scatters of padded arrays. Indices count from the front, and what is out of
bounds is decided by the true sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._padded import NoRule, highest, lowest, open_axes, resized, window
from fnet.transforms._bucket._rules import Call, rule

_MODE = lax.GatherScatterMode


@rule("slice")
def _slice(call: Call) -> list:
    (x,), options = call.arrays, call.options
    steps = options.strides or (1,) * x.ndim
    for axis, (start, step) in enumerate(zip(options.start_indices, steps)):
        limit = options.limit_indices[axis]
        if not any(map(_sizes.is_open, (start, step, limit, call.shape(0)[axis]))):
            x = lax.slice_in_dim(x, start, limit, step, axis)
            continue
        if _sizes.is_open(step):
            raise NoRule("its stride depends on a length")
        count = call.lengths.padded(call.result()[axis])
        if _sizes.is_open(start):
            call.note("sliced from {} on", [start])
        x = window(x, axis, call.lengths.true(start), max(0, (count - 1) * step + 1))
        x = lax.slice_in_dim(x, 0, None, step, axis) if step != 1 else x
    return [x]


def _limit(call: Call, whole: Any, size: Any) -> Any:
    """The last index at which a window of a size fits."""
    return call.lengths.true(whole) - call.lengths.true(size)


def _clipped(start: Any, limit: Any) -> Any:
    zero = jnp.zeros((), start.dtype)
    return jnp.clip(start, zero, jnp.asarray(limit).astype(start.dtype))


@rule("dynamic_slice")
def _dynamic_slice(call: Call) -> list:
    x, *starts = call.arrays
    sizes = call.options.slice_sizes
    for axis, (whole, size) in enumerate(zip(call.shape(0), sizes)):
        if not _sizes.is_open(whole) and not _sizes.is_open(size):
            continue
        if str(whole) != str(size):
            call.note("its start is clamped to the true end of {}", [whole])
        starts[axis] = _clipped(starts[axis], _limit(call, whole, size))
        if _sizes.is_open(size) and str(whole) != str(size):
            x = resized(x, axis, x.shape[axis] + call.lengths.padded(size))
    return [lax.dynamic_slice(x, starts, call.padded(sizes))]


@rule("dynamic_update_slice")
def _dynamic_update_slice(call: Call) -> list:
    x, update, *starts = call.arrays
    kept, partial = x.shape, []
    for axis, (whole, size) in enumerate(zip(call.shape(0), call.shape(1))):
        if not _sizes.is_open(whole) and not _sizes.is_open(size):
            continue
        starts[axis] = _clipped(starts[axis], _limit(call, whole, size))
        if str(whole) != str(size):
            call.note("its start is clamped to the true end of {}", [whole])
            if _sizes.is_open(size):
                partial.append(axis)
                x = resized(x, axis, x.shape[axis] + update.shape[axis])
    if partial:
        old = lax.dynamic_slice(x, starts, update.shape)
        update = jnp.where(call.lengths.inside(update.shape, call.shape(1), partial), update, old)
    y = lax.dynamic_update_slice(x, update, starts)
    for axis, size in enumerate(kept):
        y = resized(y, axis, size)
    return [y]


@rule("gather")
def _gather(call: Call) -> list:
    (x, indices), options = call.arrays, call.options
    numbers, mode = options.dimension_numbers, _MODE.from_any(options.mode)
    if mode not in (_MODE.CLIP, _MODE.FILL_OR_DROP, _MODE.PROMISE_IN_BOUNDS):
        raise NoRule(f"its mode is {mode}")
    sizes = options.slice_sizes
    x = _with_room(call, x, sizes, numbers.start_index_map)
    limits = [(call.shape(0)[axis], sizes[axis]) for axis in numbers.start_index_map]
    # XLA clips indices of gathers that are promised to be in bounds and are not.
    clipping = _MODE.CLIP, _MODE.PROMISE_IN_BOUNDS
    indices = _bounded(call, indices, limits, mode in clipping, None)
    return call.again([x, indices], slice_sizes=call.padded(sizes))


def _with_room(call: Call, x: Any, sizes: Sequence, indexed: Sequence[int]) -> Any:
    """Returns the operand with room for windows that are padded beyond its end."""
    for axis, (whole, size) in enumerate(zip(call.shape(0), sizes)):
        if str(whole) == str(size) or not _sizes.is_open(size):
            continue
        more = call.lengths.padded(size) if axis in indexed else 0
        x = resized(x, axis, max(x.shape[axis] + more, call.lengths.padded(size)))
    return x


def _bounded(call: Call, indices: Any, limits: Sequence[tuple], clip: bool, drop: Any) -> Any:
    """Returns the indices, clipped to the true sizes, or -1 where one is out of bounds, and where
    `drop` says so."""
    if not limits:
        return indices
    opened = any(_sizes.is_open(size) for pair in limits for size in pair)
    if not opened and drop is None:
        return indices
    if not jnp.issubdtype(indices.dtype, jnp.signedinteger):
        indices = indices.astype(jnp.int32)
    last = jnp.stack([jnp.asarray(_limit(call, *each), indices.dtype) for each in limits])
    last = last.reshape((1,) * (indices.ndim - 1) + (len(limits),))
    if opened:
        call.note("its indices are bounded by {}", _opened(limits))
    zero = jnp.zeros_like(last)
    if clip:
        indices = jnp.clip(indices, zero, last)
    else:
        inside = jnp.all((indices >= zero) & (indices <= last), axis=-1, keepdims=True)
        drop = ~inside if drop is None else drop | ~inside
    if drop is None:
        return indices
    return jnp.where(drop, jnp.asarray(-1, indices.dtype), indices)


def _opened(limits: Sequence[tuple]) -> list:
    return [size for pair in limits for size in pair if _sizes.is_open(size)]


# What leaves an element as it is, for each kind of scatter.
_NEUTRAL: dict[str, Callable] = {
    "scatter-add": lambda dtype: 0,
    "scatter-sub": lambda dtype: 0,
    "scatter-mul": lambda dtype: 1,
    "scatter-min": highest,
    "scatter-max": lowest,
}


@rule("scatter", *_NEUTRAL)
def _scatter(call: Call) -> list:
    (x, indices, updates), options = call.arrays, call.options
    numbers, mode = options.dimension_numbers, _MODE.from_any(options.mode)
    if mode not in (_MODE.CLIP, _MODE.FILL_OR_DROP, _MODE.PROMISE_IN_BOUNDS):
        raise NoRule(f"its mode is {mode}")
    outside = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [axis for axis in range(x.ndim) if axis not in outside]
    sizes: list[Any] = [1] * x.ndim
    for axis, update in zip(windows, sorted(numbers.update_window_dims)):
        sizes[axis] = call.shape(2)[update]
    partial = [
        (axis, update)
        for axis, update in zip(windows, sorted(numbers.update_window_dims))
        if _sizes.is_open(sizes[axis]) and str(sizes[axis]) != str(call.shape(0)[axis])
    ]
    batch = call.shape(1)[:-1]
    drop = None
    if open_axes(batch):
        if not numbers.scatter_dims_to_operand_dims:
            raise NoRule("it has padded updates without indices")
        call.note("updates beyond {} are dropped", [batch[i] for i in open_axes(batch)])
        padded = (*indices.shape[:-1], 1)
        drop = ~call.lengths.inside(padded, (*batch, 1), range(len(batch)))
    limits = [(call.shape(0)[axis], sizes[axis]) for axis in numbers.scatter_dims_to_operand_dims]
    indices = _bounded(call, indices, limits, mode == _MODE.CLIP, drop)
    changes: dict[str, Any] = {}
    if drop is not None or _opened(limits):
        changes = {"mode": _MODE.FILL_OR_DROP, "unique_indices": False, "indices_are_sorted": False}
    if not partial:
        return call.again([x, indices, updates], **changes)
    call.note("only the true part is written, up to {}", [sizes[axis] for axis, _ in partial])
    return [_written(call, indices, partial, changes)]


def _written(call: Call, indices: Any, partial: Sequence[tuple[int, int]], changes: dict) -> Any:
    """A scatter of windows that are padded, and smaller than what they are written to."""
    x, _, updates = call.arrays
    name, kept = call.eqn.primitive.name, x.shape
    along = [update for _, update in partial]
    for axis, update in partial:
        x = resized(x, axis, x.shape[axis] + updates.shape[update])
    if name in _NEUTRAL:
        neutral = _NEUTRAL[name](x.dtype)
        updates = call.lengths.masked(updates, call.shape(2), along, neutral)
        (y,) = call.again([x, indices, updates], **changes)
    else:
        if any(size != 1 for size in call.shape(1)[:-1]):
            raise NoRule("its windows are padded, and may overlap")
        (y,) = call.again([x, indices, updates], **changes)
        inside = call.lengths.inside(updates.shape, call.shape(2), along)
        inside = jnp.broadcast_to(inside, updates.shape)
        nowhere = jnp.zeros(x.shape, bool)
        (here,) = call.again(
            [nowhere, indices, inside], **changes, update_jaxpr=None, update_consts=()
        )
        y = jnp.where(here, y, x)
    for axis, size in enumerate(kept):
        y = resized(y, axis, size)
    return y
