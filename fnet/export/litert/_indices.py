"""Gathers, scatters and slices at computed positions, for LiteRT.

The operators of LiteRT stop with an error at an index out of range, where JAX moves the index into
the range or drops the update. They look up and replace rows and elements, but no windows. The
interpreter has no operator for other kinds of updates, such as the maximum, so these compare each
position with the position of each update.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet.export import _evaluate
from fnet.export.litert._values import Unsupported, _choose, _number

_LARGEST = 2**26  # elements of the comparison of positions with updates


def _int32(indices, highest):
    """Indices as int32. Those that are out of range become -1 or one more than the highest."""
    indices, highest = jnp.asarray(indices), np.asarray(highest)
    if indices.dtype in (jnp.uint32, jnp.uint64):  # LiteRT does not compare them
        signed = jnp.int32 if indices.dtype == jnp.uint32 else jnp.int64
        indices = lax.bitcast_convert_type(indices, signed)
        indices = _choose(indices < 0, np.iinfo(signed).max, indices)
    elif indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    low, high = (
        np.broadcast_to(bound, indices.shape).astype(indices.dtype) for bound in (-1, highest + 1)
    )
    return lax.min(lax.max(indices, low), high).astype(jnp.int32)


def _starts(options, shape, indices, sizes):
    """Returns the first index of each window, moved into the range, and whether it was inside:
    [*batch, indexed]."""
    highest = np.asarray([shape[a] - sizes[a] for a in options["indexed"]], np.int32)
    indices = _int32(indices, highest)
    zero = np.zeros_like(highest)
    inside = jnp.all((indices >= zero) & (indices <= highest), -1)
    return jnp.minimum(jnp.maximum(indices, zero), highest), inside


def _places(options, shape, starts, sizes, dropped):
    """Returns the positions of the windows' elements in the flat array: int32 [*batch, *windows]."""
    batch = starts.shape[:-1]
    windows = [a for a in range(len(shape)) if a not in dropped and a not in options["batch"]]
    place = jnp.zeros(batch + (1,) * len(windows), jnp.int32)
    for axis, n in enumerate(shape):
        stride = np.int32(math.prod(shape[axis + 1 :]))
        if axis in options["indexed"]:
            start = starts[..., options["indexed"].index(axis)]
            place = place + start.reshape(batch + (1,) * len(windows)) * stride
        elif axis in options["batch"]:
            along = options["index_batch"][options["batch"].index(axis)]
            place = place + _range(n, along, len(batch) + len(windows)) * stride
        if axis in windows:
            place = (
                place
                + _range(sizes[axis], len(batch) + windows.index(axis), len(batch) + len(windows))
                * stride
            )
    return place


def _range(n, axis, rank):
    return np.arange(n, dtype=np.int32).reshape([n if i == axis else 1 for i in range(rank)])


def _of_rows(options, shape, sizes, dropped) -> bool:
    """Whether the indexed axes have windows of one element, and the others are whole."""
    return set(options["indexed"]) <= set(dropped) and all(
        sizes[a] == n
        for a, n in enumerate(shape)
        if a not in options["indexed"] and a not in options["batch"]
    )


def gather(run, options, types, x, indices):
    sizes, offset, (_, wanted) = run.shape(options["sizes"]), options["offset"], types[0]
    if 0 in (*x.shape, *wanted):
        return _evaluate.OPERATIONS["gather"](run, options, types, x, indices)
    starts, inside = _starts(options, x.shape, indices, sizes)
    if _of_rows(options, x.shape, sizes, options["collapsed"]):
        y = _evaluate.OPERATIONS["gather"](run, {**options, "fill": None}, types, x, starts)
    else:
        place = _places(options, x.shape, starts, sizes, options["collapsed"])
        y = jnp.asarray(x).reshape(-1).at[place].get(mode="promise_in_bounds")
        count, rest = inside.ndim, iter(range(inside.ndim))
        y = y.transpose(
            [count + offset.index(i) if i in offset else next(rest) for i in range(y.ndim)]
        )
    if options["fill"] is None:
        return y
    inside = inside.reshape([1 if i in offset else y.shape[i] for i in range(y.ndim)])
    return _choose(
        jnp.broadcast_to(inside, y.shape), y, _number(y, _evaluate._number(options["fill"]))
    )


def scatter(run, options, types, x, indices, updates):
    native = lambda indices: _evaluate.OPERATIONS["scatter"](
        run, options, types, x, indices, updates
    )
    if options["kind"] == "apply" or 0 in (*x.shape, *updates.shape):
        return native(indices)
    shape, window, dropped = x.shape, options["window"], options["inserted"]
    kept = [a for a in range(x.ndim) if a not in dropped and a not in options["batch"]]
    sizes = [1] * x.ndim
    for axis, at in zip(kept, window):
        sizes[axis] = updates.shape[at]
    starts, inside = _starts(options, shape, indices, sizes)
    if options["clip"]:
        inside = jnp.ones_like(inside)
    rows = _of_rows(options, shape, sizes, dropped)
    if rows and options["kind"] == "replace":
        return native(_int32(indices, [shape[a] - 1 for a in options["indexed"]]))
    updates = updates.transpose([i for i in range(updates.ndim) if i not in window] + window)
    if rows and not options["batch"]:
        indexed = options["indexed"]
        order = [*indexed, *kept]
        strides = np.asarray(
            [math.prod(shape[a] for a in indexed[i + 1 :]) for i in range(len(indexed))], np.int32
        )
        places = (starts * strides).sum(-1, dtype=jnp.int32).reshape(-1)
        table = x.transpose(order).reshape(math.prod(shape[a] for a in indexed), -1)
        updates = updates.reshape(len(places), -1)
        y = _combined(options["kind"], table, places, inside.reshape(-1), updates)
        return y.reshape([shape[a] for a in order]).transpose(
            [order.index(a) for a in range(x.ndim)]
        )
    places = _places(options, shape, starts, sizes, dropped)
    inside = jnp.broadcast_to(
        inside.reshape(inside.shape + (1,) * len(window)), updates.shape
    ).reshape(-1)
    places, updates = jnp.broadcast_to(places, updates.shape).reshape(-1), updates.reshape(-1)
    if options["kind"] == "replace":
        return (
            x.reshape(-1)
            .at[_choose(inside, places, x.size)]
            .set(updates, mode="drop")
            .reshape(shape)
        )
    return _combined(options["kind"], x.reshape(-1, 1), places, inside, updates[:, None]).reshape(
        shape
    )


def _combined(kind, x, places, inside, updates):
    """Combines the rows of x [rows, width] with updates [updates, width] at the places [updates]
    that are inside."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    width = 1 if kind == "add" and floating else x.shape[1]
    if len(x) * len(places) * width > _LARGEST:
        raise Unsupported(
            f"LiteRT: the operation 'scatter' of kind {kind!r} would compare {len(x)} positions "
            f"with {len(places)} updates{f' of {width} elements' if width > 1 else ''}, which is "
            "too many"
        )
    # [rows, updates]
    hit = (np.arange(len(x), dtype=np.int32)[:, None] == places[None]) & inside[None]
    if kind == "add" and floating:
        return _added(x, hit, updates)
    if x.dtype == jnp.bool_:
        y = _combined(kind, x.astype(jnp.int32), places, inside, updates.astype(jnp.int32))
        return y != 0
    whole = (*hit.shape, x.shape[1])
    hit, updates = jnp.broadcast_to(hit[:, :, None], whole), jnp.broadcast_to(updates[None], whole)
    limits = jnp.finfo(x.dtype) if floating else jnp.iinfo(x.dtype)
    neutral, reduce, combine = {
        "add": (0, lambda z: z.sum(1, dtype=z.dtype), lax.add),
        "mul": (1, lambda z: z.prod(1, dtype=z.dtype), lax.mul),
        "max": (-np.inf if floating else limits.min, lambda z: z.max(1), lax.max),
        "min": (np.inf if floating else limits.max, lambda z: z.min(1), lax.min),
    }[kind]
    y = combine(x, reduce(_choose(hit, updates, neutral)))
    if floating and kind in ("max", "min"):  # LiteRT ignores NaN
        nan = _choose(hit, (updates != updates).astype(jnp.float32), 0.0).max(1) > 0
        y = _choose(nan | (x != x), np.nan, y)
    return _choose(hit.astype(jnp.float32).max(1) > 0, y, x)


def _added(x, hit, updates):
    """Adds the updates of each row as a matrix product. Infinities and NaN would make all rows NaN,
    because they are multiplied by zero there. Therefore they are counted instead, as are the
    updates other than -0.0, which changes nothing."""
    plus, minus, nan = updates == np.inf, updates == -np.inf, updates != updates
    unchanged = (updates == 0) & (_number(updates, 1) / updates < 0)
    finite = _choose(plus | minus | nan, 0.0, updates)
    parts = [finite, *(flag.astype(x.dtype) for flag in (plus | nan, minus | nan, ~unchanged))]
    sums, plus, minus, changed = jnp.split(hit.astype(x.dtype) @ jnp.concatenate(parts, 1), 4, 1)
    sums = _choose(minus > 0, -np.inf, sums)
    sums = _choose(plus > 0, _choose(minus > 0, np.nan, jnp.full_like(sums, np.inf)), sums)
    return _choose(changed > 0, x + sums, x)


def dynamic_slice(run, options, types, x, *starts):
    sizes = run.shape(options["sizes"])
    return _evaluate.OPERATIONS["dynamic_slice"](
        run, options, types, x, *_within(x.shape, sizes, starts)
    )


def dynamic_update_slice(run, options, types, x, update, *starts):
    starts = _within(x.shape, update.shape, starts)
    return _evaluate.OPERATIONS["dynamic_update_slice"](run, options, types, x, update, *starts)


def _within(shape, sizes, starts):
    highest = [n - size for n, size in zip(shape, sizes)]
    return [jnp.clip(_int32(start, most), 0, most) for start, most in zip(starts, highest)]


OPERATIONS = {
    "gather": gather,
    "scatter": scatter,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
