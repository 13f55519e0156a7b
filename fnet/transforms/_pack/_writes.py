"""Scatters into packed values, and of tokens into arrays that all share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._padded import NoRule
from fnet.transforms._pack._indexing import (
    _CLIPPED,
    _MODE,
    _Form,
    _form,
    _places_of,
    _points,
    _start,
    _whole,
    _whole_window,
)
from fnet.transforms._pack._moves import Source
from fnet.transforms._pack._rules import Call, rule
from fnet.transforms._pack._shifts import _pending_pad, moved
from fnet.transforms._pack._values import (
    ROW,
    Packed,
    Time,
    along,
    merged,
    size_of,
    together,
    whole,
)

# The scatters that may be done in any order, and what leaves an element as it is.
_ANY_ORDER = ("scatter-add", "scatter-mul", "scatter-min", "scatter-max")
_METHOD = {
    "scatter": "set",
    "scatter-add": "add",
    "scatter-mul": "multiply",
    "scatter-min": "min",
    "scatter-max": "max",
}


@rule("scatter", *_ANY_ORDER)
def _scatter(call: Call) -> list:
    numbers, mode = call.options.dimension_numbers, _MODE.from_any(call.options.mode)
    batching = tuple(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims))
    gone = set(numbers.inserted_window_dims)
    shape, updates = call.shape(0), call.shape(2)
    sizes: list[Any] = [1] * len(shape)
    windows = [i for i in range(len(shape)) if i not in gone and i not in dict(batching)]
    dims = sorted(numbers.update_window_dims)
    for axis, update in zip(windows, dims):
        sizes[axis] = updates[update]
    form = _form(call, numbers.scatter_dims_to_operand_dims, batching, gone, sizes)
    operand = call.values[0]
    places = [i for i in range(len(updates)) if i not in dims]
    if operand.is_global and not form.moved:
        return [_into_global(call, numbers, mode)]
    if not form.moved:
        return _scattered(call, form, places)
    if len(call.shape(1)) == 1:
        return [_into_window(call, form, gone, mode in _CLIPPED)]
    return [_into_positions(call, form, dims, places, mode == _MODE.CLIP)]


def _scattered(call: Call, form: _Form, places: list) -> list:
    """A scatter that leaves texts and positions where they are."""
    operand, indices, updates = call.values
    if operand.seed is not None and operand.groups:
        operand = dataclasses.replace(operand, seed=None)
    if indices.pending or operand.pending or updates.pending:
        operand, indices, updates = call.settled()
    for axis, other in form.batched:
        if operand.groups[axis] != indices.groups[other]:
            raise NoRule("its indices belong to other texts")
    if any(operand.groups[i] == (ROW,) for i in form.indexed):
        raise NoRule("it writes to some of the texts")
    if indices.tokens and not any(ROW in operand.groups[i] for i, _ in form.batched):
        raise NoRule("tokens are written to one array for each text")
    return call.batched([operand, indices, updates], [operand.groups])


def _into_global(call: Call, numbers: Any, mode: Any) -> Packed:
    """Tokens or texts, written to an array that all share, as in the gradient of an embedding."""
    operand, indices, updates = call.values
    rows, name = call.rows, call.eqn.primitive.name
    if indices.is_global and updates.is_global:
        return whole(call.bind([v.x for v in call.values])[0])
    if indices.pending:
        indices = call.settled()[1]
    if name not in _ANY_ORDER or numbers.operand_batching_dims:
        raise NoRule("the last text that writes would decide")
    leads = updates.lead, indices.lead
    if any(leads) and not updates.pending:
        raise NoRule("it is one array for each text")
    if updates.pending and name != "scatter-add":
        raise NoRule("it is not linear")
    lead = next((each for each in leads if each), None)
    if lead:
        size = size_of(lead, rows)
        indices, updates = (
            v if v.lead else dataclasses.replace(
                v, x=jnp.broadcast_to(v.x, (size, *v.x.shape)), lead=lead)
            for v in (indices, updates)
        )  # fmt: skip
        shift = lambda dims: tuple(i + 1 for i in dims)
        numbers = numbers._replace(update_window_dims=shift(numbers.update_window_dims))
    for i in numbers.update_window_dims:
        group = updates.groups[i - (lead is not None)]
        if any(not isinstance(role, int) for role in group):
            raise NoRule("whole texts are written")
    over = [k for k, role in enumerate(indices.roles) if not isinstance(role, int)]
    inside = together(indices, [k for k in over if indices.roles[k] != ROW], rows)
    call.note("what exists is added" if name == "scatter-add" else "what exists is written")
    index = indices.x if jnp.issubdtype(indices.x.dtype, jnp.signedinteger) else (
        indices.x.astype(jnp.int32))  # fmt: skip
    if mode == _MODE.CLIP:
        raise NoRule("its indices are clipped")
    index = jnp.where(inside, index, jnp.asarray(-1, index.dtype))
    index = merged(dataclasses.replace(indices, x=index))
    (y,) = call.bind(
        [operand.x, index, merged(updates)],
        dimension_numbers=numbers,
        mode=_MODE.FILL_OR_DROP,
        unique_indices=False,
        indices_are_sorted=False,
    )
    return whole(y)


def _into_window(call: Call, form: _Form, gone: set, clip: bool) -> Packed:
    """A window is written, as the gradient of `x[:, 1:]` does."""
    operand, indices, updates = call.values
    name = call.eqn.primitive.name
    if name not in ("scatter", "scatter-add"):
        raise NoRule("it combines a window of each text")
    value = updates if updates.pending else dataclasses.replace(updates, seed=None)
    value = _with_ones(value, form, len(call.shape(0)))
    for number, axis in enumerate(form.indexed):
        whole_size, size = call.shape(0)[axis], form.sizes[axis]
        if _whole(whole_size, size):
            continue
        start = _start(call, indices, number, whole_size, size, clip)
        if axis not in form.moved:
            raise NoRule("it writes to a fixed axis, too")
        if value.pending and operand.is_global:
            if name == "scatter":
                raise NoRule("it writes sums over texts")
            zero = whole(np.zeros((), value.x.dtype))
            value = _pending_pad(call, value, axis, start, 0, int(whole_size), zero)
            return whole(operand.x + value.x)
        value = moved(call, value, axis, Source(0 - start), whole_size, 0)
        if name == "scatter":
            value = _written(call, operand, value, axis, start, size)
    if name == "scatter":
        return value
    pending = value.pending
    if operand.seed is not None or operand.groups != value.groups or operand.lead != value.lead:
        if operand.seed is None:
            raise NoRule("its operand and its updates belong to different texts")
        total = value.x + operand.seed.x.astype(value.x.dtype)
        if pending and operand.seed.x.any():
            raise NoRule("it writes sums over texts")
        return value.like(total)
    return value.like(operand.x + value.x)


def _with_ones(value: Packed, form: _Form, ndim: int) -> Packed:
    """Returns updates with an axis of size 1 for each axis of the operand that they lack."""
    groups: list[Any] = [(1,)] * ndim
    x = value.x
    for k, axis in enumerate(form.windows):
        groups[axis] = value.groups[k]
    lead = x.shape[: value.lead is not None]
    flat = iter(x.shape[len(lead) :])
    sizes = [
        1 if axis not in form.windows else next(flat) for axis in range(ndim) for _ in groups[axis]
    ]
    return value.like(x.reshape(*lead, *sizes), groups=tuple(groups))


def _written(
    call: Call, operand: Packed, value: Packed, axis: int, start: Any, size: Any
) -> Packed:
    """Returns the operand with the window in place of its own elements."""
    rows = call.rows
    (at,) = value.axes_of(axis)
    role = value.roles[at]
    if not isinstance(role, Time) or (operand.seed is None and operand.groups != value.groups):
        raise NoRule("it writes to other texts")
    layout = rows.layout(role.size)
    position, _ = Source(0 - start).of(layout)
    length = jnp.asarray(rows.value(size) if _sizes.is_open(size) else int(size))
    if length.ndim:
        length = jnp.take(length, layout.text, mode="clip")
    inside = along(
        (position >= 0) & (position < length), [value.roles.index(ROW), at], value.x.ndim
    )
    old = operand.seed.x if operand.seed is not None else operand.x
    return value.like(jnp.where(inside, value.x, old.astype(value.x.dtype)))


def _into_positions(
    call: Call, form: _Form, dims: Sequence[int], places: list, clip: bool
) -> Packed:
    """Single positions of texts are written."""
    operand, indices, updates = call.values
    if updates.pending:
        raise NoRule("it writes sums over texts")
    operand = dataclasses.replace(operand, seed=None)
    points = _points(call, form, operand, indices)
    rows = call.rows
    if any(not _whole_window(call, form, i) for i in form.windows if i not in points.single):
        raise NoRule("it indexes a fixed axis, too")
    shared = points.row is not None and points.row in form.windows
    if shared and indices.lead is None:
        raise NoRule("it writes the same positions of all texts")
    if updates.lead != (None if shared else indices.lead):
        raise NoRule("its indices belong to other texts")
    time = operand.axes_of(points.axis)[0]
    physical = operand.roles.index(ROW)
    layout = rows.layout(operand.roles[time].size)
    size = jnp.take(layout.size, points.text, mode="clip")
    position = jnp.clip(points.position, 0, size - 1) if clip else points.position
    inside = (position >= 0) & (position < size) & (points.text >= 0)
    exists = together(
        Packed(position, tuple((r,) for r in indices.roles[:-1])),
        [k for k, r in enumerate(indices.roles[:-1]) if r != ROW],
        rows,
    )
    axes, numbers, there = points.arrays(operand, clip)
    inside = inside & (points.text < rows.texts) & (True if exists is None else exists) & there
    row, place = _places_of(points, position, inside, layout, rows)
    row = jnp.where(inside, row, rows.shape[0])
    call.note("written at the positions of each text")
    # The updates, [*axes of the indices, *rest of the operand].
    order = [0] if updates.lead else []
    order += [k for i in places for k in updates.axes_of(i)]
    squeezed = []
    for update, axis in zip(dims, form.windows):
        if axis == points.row:  # that of the indices' lead axis
            order = [*updates.axes_of(update), *order]
        elif axis in points.single:
            squeezed += updates.axes_of(update)
        else:
            order += updates.axes_of(update)
    u = lax.transpose(updates.x, [*order, *squeezed])
    u = jnp.squeeze(u, tuple(range(len(order), u.ndim)))
    moving = physical, time, *axes
    x = jnp.moveaxis(jnp.asarray(operand.x), moving, range(len(moving)))
    write: Callable = getattr(x.at[(row, place, *numbers)], _METHOD[call.eqn.primitive.name])
    return operand.like(jnp.moveaxis(write(u, mode="drop"), range(len(moving)), moving))


@rule("dynamic_update_slice")
def _dynamic_update_slice(call: Call) -> list:
    operand, update, *starts = call.values
    operand, update = (dataclasses.replace(v, seed=None) for v in (operand, update))
    if operand.pending or update.pending:
        raise NoRule("it writes sums over texts")
    partial = [
        axis for axis, (n, m) in enumerate(zip(call.shape(0), call.shape(1))) if str(n) != str(m)
    ]
    packed = [axis for axis in partial if not all(isinstance(r, int) for r in operand.groups[axis])]
    if not packed:
        if operand.lead != update.lead or any(
            operand.groups[i] != update.groups[i]
            for i in range(len(operand.groups))
            if i not in partial
        ):
            raise NoRule("its operand and its update belong to different texts")
        x = operand.x
        begin = [jnp.zeros((), jnp.int32)] * x.ndim
        for axis in partial:
            if starts[axis].lead is not None:
                raise NoRule("it writes to another element of a fixed axis for each text")
            begin[operand.axes_of(axis)[0]] = starts[axis].x.astype(jnp.int32)
        return [operand.like(lax.dynamic_update_slice(x, update.x, begin))]
    if len(partial) != 1:
        raise NoRule("it writes to a fixed axis, too")
    (axis,) = partial
    size = call.shape(1)[axis]
    start = _start(call, starts[axis], 0, call.shape(0)[axis], size, True)
    value = moved(call, update, axis, Source(0 - start), call.shape(0)[axis], 0)
    return [_written(call, operand, value, axis, start, size)]
