"""Gathers, scatters and slices of packed values. A position that is read or written is one of a
text, counted from its beginning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._padded import NoRule
from fnet.transforms._pack._moves import Source
from fnet.transforms._pack._rules import Call, rule
from fnet.transforms._pack._shifts import moved
from fnet.transforms._pack._values import (
    ROW,
    TEXT,
    Packed,
    Time,
    along,
    merged,
)

_MODE = lax.GatherScatterMode
_CLIPPED = _MODE.CLIP, _MODE.PROMISE_IN_BOUNDS


@dataclasses.dataclass
class _Form:
    """How a gather or scatter reads its operand.

    Attributes:
        indexed: the axes of the operand for which there are indices.
        batched: pairs of an axis of the operand and one of the indices that go together.
        windows: the axes of the operand that are axes of the windows, in order.
        sizes: the size of the window along each axis of the operand.
        moved: those of `indexed` that are axes of positions or texts, or become such.
    """

    indexed: tuple[int, ...]
    batched: tuple[tuple[int, int], ...]
    windows: tuple[int, ...]
    sizes: tuple
    moved: tuple[int, ...]


def _form(call: Call, indexed: Any, batching: Any, gone: Any, sizes: Any) -> _Form:
    shape, operand = call.shape(0), call.values[0]
    windows = tuple(i for i in range(len(shape)) if i not in gone and i not in dict(batching))
    packed = lambda i: any(not isinstance(role, int) for role in operand.groups[i])
    moving = tuple(
        i for i in indexed
        if (packed(i) or _sizes.is_open(sizes[i])) and not _whole(shape[i], sizes[i])
    )  # fmt: skip
    return _Form(tuple(indexed), tuple(batching), windows, tuple(sizes), moving)


def _whole(size: Any, window: Any) -> bool:
    return str(size) == str(window) and str(size) != "1"


@rule("gather")
def _gather(call: Call) -> list:
    numbers, mode = call.options.dimension_numbers, _MODE.from_any(call.options.mode)
    batching = tuple(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims))
    gone = set(numbers.collapsed_slice_dims)
    form = _form(call, numbers.start_index_map, batching, gone, call.options.slice_sizes)
    fill = None if mode in _CLIPPED else _fill_of(call)
    places = [i for i in range(len(call.result())) if i not in numbers.offset_dims]
    if not form.moved:
        return _gathered(call, form, numbers, places)
    value, indices = call.values
    if len(call.shape(1)) == 1:
        value = _window(call, value, indices, form, fill)
        keep = [i for i in range(len(value.groups)) if i not in gone]
        return [_dropped(value, keep)]
    return [_by_position(call, form, numbers.offset_dims, places, fill)]


def _fill_of(call: Call) -> Any:
    dtype = call.eqn.outvars[0].aval.dtype
    if call.options.fill_value is not None:
        return np.asarray(call.options.fill_value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(np.nan, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    least = jnp.iinfo(dtype)
    return np.asarray(least.min if jnp.issubdtype(dtype, jnp.signedinteger) else least.max, dtype)


def _gathered(call: Call, form: _Form, numbers: Any, places: list) -> list:
    """A gather that leaves texts and positions where they are."""
    operand, indices = call.values
    if indices.pending:
        raise NoRule("its indices are sums over texts")
    batch = list(indices.groups[:-1])
    groups: list[Any] = [None] * len(call.result())
    for i, group in zip(places, batch):
        groups[i] = group
    for i, axis in zip(numbers.offset_dims, form.windows):
        full = str(form.sizes[axis]) == str(call.shape(0)[axis])
        groups[i] = operand.groups[axis] if full else (int(form.sizes[axis]),)
    for axis, other in form.batched:
        if operand.groups[axis] != batch[other]:
            raise NoRule("its indices belong to other texts")
    x = merged(operand)
    sizes = list(form.sizes)
    for axis in range(len(sizes)):
        if _sizes.is_open(sizes[axis]):
            sizes[axis] = x.shape[axis + (operand.lead is not None)]
    return call.batched([operand, indices], [groups], slice_sizes=tuple(map(int, sizes)))


def _dropped(value: Packed, keep: Sequence[int]) -> Packed:
    """Returns a value without its axes of size 1 that are not kept."""
    gone = [k for i in range(len(value.groups)) if i not in keep for k in value.axes_of(i)]
    groups = tuple(value.groups[i] for i in keep)
    return value.like(jnp.squeeze(value.x, gone), groups=groups)


def _window(call: Call, value: Packed, indices: Packed, form: _Form, fill: Any) -> Packed:
    """A window of the operand, as `x[:, 1:]` is one."""
    for number, axis in enumerate(form.indexed):
        size = form.sizes[axis]
        if _whole(call.shape(0)[axis], size):
            continue
        start = _start(call, indices, number, call.shape(0)[axis], size, fill is None)
        if axis not in form.moved:
            if getattr(start, "ndim", 0):
                raise NoRule("it reads another element of a fixed axis for each text")
            (at,) = value.axes_of(axis)
            x = lax.dynamic_slice_in_dim(value.x, start, int(size), at)
            groups = list(value.groups)
            groups[axis] = (int(size),)
            value = value.like(x, groups=tuple(groups))
            continue
        value = moved(call, value, axis, Source(start), size, 0 if fill is None else fill)
    return value


def _start(call: Call, indices: Packed, number: int, whole_size: Any, size: Any, clip: bool) -> Any:
    """The index of the first element of a window: a number, or one for each text."""
    rows = call.rows
    indices = indices.seed or indices
    x = indices.x if isinstance(indices.x, jax.core.Tracer) else np.asarray(indices.x)
    x = x[..., number] if indices.groups else x
    if indices.lead not in (None, TEXT) or indices.pending:
        raise NoRule("its indices differ from position to position")
    if isinstance(x, np.ndarray | np.generic):
        x = int(x) if np.ndim(x) == 0 else jnp.asarray(x)
    if not clip:
        return x
    limit = whole_size - size
    if isinstance(x, int) and x == 0:
        return 0
    most = rows.value(limit) if _sizes.is_open(limit) else int(limit)
    if isinstance(x, int) and not isinstance(most, int):
        # A window that is too long for a text begins before it; sizes below 0 count as 0.
        return x
    if isinstance(x, int):
        return max(0, min(x, most))
    return jnp.clip(x, 0, jnp.maximum(most, 0))


@dataclasses.dataclass
class _Points:
    """Elements of texts, one for each index.

    Attributes:
        axis: the axis of the operand's positions, and of its texts.
        text, position: the number of the text and the position in it, with the axes `batch`.
        fixed: {fixed axis of the operand: the element of it that is read for each index}.
    """

    axis: int
    row: int | None
    text: Any
    position: Any
    batch: list
    fixed: dict[int, Any]

    @property
    def single(self) -> set:
        """The axes of the operand of which an index is one element."""
        return {self.axis, self.row, *self.fixed}

    def arrays(self, value: Packed, clip: bool) -> tuple[list[int], list, Any]:
        """Returns the axes of the operand's array that are indexed beside those of the rows and
        positions, their indices, and whether these exist."""
        axes, index, inside = [], [], True
        for axis, number in self.fixed.items():
            (at,) = value.axes_of(axis)
            last = value.x.shape[at] - 1
            if not clip:
                inside = inside & (number >= 0) & (number <= last)
            axes.append(at)
            index.append(jnp.clip(number, 0, last))
        return axes, index, inside


def _points(call: Call, form: _Form, value: Packed, indices: Packed) -> _Points:
    """Reads which elements are indexed."""
    rows = call.rows
    times = [i for i in form.moved if isinstance(value.groups[i][0], Time)]
    if len(times) != 1 or indices.pending or value.pending:
        raise NoRule("it selects some of the texts")
    (axis,) = times
    row = next((i for i, group in enumerate(value.groups) if group == (ROW,)), None)
    if len(value.times) != 1 or len(value.groups[axis]) != 1:
        raise NoRule("it indexes pairs of positions")
    position = indices.x[..., form.indexed.index(axis)].astype(jnp.int32)
    batch = list(indices.groups[:-1])
    roles = list(indices.roles[:-1])
    tokens = indices.tokens
    if ROW not in roles and TEXT not in roles:
        if row is not None and row not in form.windows and row not in form.indexed:
            raise NoRule("its indices are the same for all texts")
        position = jnp.broadcast_to(position, (rows.texts, *position.shape))
        roles.insert(0, TEXT)
        if row is None or row not in form.windows:
            raise NoRule("it selects some of the texts")
    elif row is not None and row in form.windows and indices.lead is None:
        raise NoRule("each text reads positions of all others")
    if row is not None and row in form.indexed:
        text = indices.x[..., form.indexed.index(row)]
    elif tokens:
        layout = rows.layout(next(r for r in roles if isinstance(r, Time)).size)
        at = [roles.index(ROW), next(k for k, r in enumerate(roles) if isinstance(r, Time))]
        text = along(layout.text, at, position.ndim)
    else:
        text = along(rows.numbers, [roles.index(TEXT)], position.ndim)
    text = jnp.broadcast_to(text, position.shape)
    return _Points(axis, row, text, position, batch, _fixed(form, value, indices, position, axis))


def _fixed(form: _Form, value: Packed, indices: Packed, position: Any, axis: int) -> dict:
    """Returns which elements of fixed axes are indexed."""
    found: dict[int, Any] = {}
    extra = position.ndim - (indices.x.ndim - 1)  # the texts, if the indices are those of all
    for other, number in form.batched:
        if value.groups[other] == (ROW,):
            continue
        if len(value.groups[other]) != 1 or not isinstance(value.groups[other][0], int):
            raise NoRule("its indices belong to other texts")
        (at,) = indices.axes_of(number)
        shape = [1] * position.ndim
        shape[at + extra] = position.shape[at + extra]
        count = jnp.arange(position.shape[at + extra], dtype=jnp.int32).reshape(shape)
        found[other] = jnp.broadcast_to(count, position.shape)
    for number, other in enumerate(form.indexed):
        if other != axis and value.groups[other] != (ROW,):
            if str(form.sizes[other]) != "1":
                raise NoRule("it indexes a fixed axis, too")
            index = indices.x[..., number].astype(jnp.int32)
            found[other] = jnp.broadcast_to(index, position.shape)
    return found


def _by_position(
    call: Call, form: _Form, offset_dims: Sequence[int], places: list, fill: Any
) -> Packed:
    value, indices = call.values
    points = _points(call, form, value, indices)
    if any(not _whole_window(call, form, i) for i in form.windows if i not in points.single):
        raise NoRule("it indexes a fixed axis, too")
    rows = call.rows
    time = value.axes_of(points.axis)[0]
    layout = rows.layout(value.roles[time].size)
    size = jnp.take(layout.size, points.text, mode="clip")
    position = points.position
    if fill is None:
        position = jnp.clip(position, 0, jnp.maximum(size - 1, 0))
    inside = (position >= 0) & (position < size) & (points.text >= 0) & (points.text < rows.texts)
    axes, numbers, exists = points.arrays(value, fill is None)
    inside = inside & exists
    row, place = _places_of(points, position, inside, layout, rows)
    call.note("read at the positions of each text")
    physical = value.roles.index(ROW)
    order = physical, time, *axes
    x = jnp.moveaxis(value.x, order, range(len(order)))
    x = x[(row, place, *numbers)]  # [*batch, ...]
    filling = jnp.asarray(0 if fill is None else fill, x.dtype)
    x = jnp.where(inside.reshape(*inside.shape, *[1] * (x.ndim - inside.ndim)), x, filling)
    return _assembled(call, form, points, value, x, offset_dims, places)


def _whole_window(call: Call, form: _Form, axis: int) -> bool:
    return str(call.shape(0)[axis]) == str(form.sizes[axis])


def _places_of(points: _Points, position: Any, inside: Any, layout: Any, rows: Any) -> tuple:
    row = jnp.where(inside, jnp.take(rows.row, points.text, mode="clip"), 0)
    place = jnp.take(layout.start, points.text, mode="clip") + position
    return row, jnp.where(inside, place, 0)


def _assembled(
    call: Call,
    form: _Form,
    points: _Points,
    value: Packed,
    x: Any,
    offset_dims: Sequence[int],
    places: list,
) -> Packed:
    """Puts the axes of what was read, [*axes of the indices, *rest of the operand], in order."""
    count = points.position.ndim
    labels: list[Any] = [("index", k) for k in range(count)]
    rest = [i for i in range(len(value.groups)) if i not in points.single]
    labels += [(i, j) for i in rest for j in range(len(value.groups[i]))]
    batch = list(points.batch)
    free_text = points.row is not None and points.row in form.windows
    bound = call.values[1].lead if free_text else None
    k = int(free_text)  # the texts are in front
    spelled: list[Any] = []
    for group in batch:
        spelled.append([("index", k + j) for j in range(len(group))])
        k += len(group)
    lead = None if free_text else call.values[1].lead
    if lead:
        spelled = [[("index", n + 1) for _, n in group] for group in spelled]
    groups: list[Any] = [None] * len(call.result())
    order: list[Any] = [None] * len(call.result())
    for place, group, names in zip(places, batch, spelled):
        groups[place], order[place] = group, names
    for place, axis in zip(offset_dims, form.windows):
        if axis == points.row:
            groups[place], order[place] = (bound or TEXT,), [("index", 0)]
        elif axis in points.single:
            groups[place], order[place] = (1,), [None]
        else:
            groups[place] = value.groups[axis]
            order[place] = [(axis, j) for j in range(len(value.groups[axis]))]
    want = [label for names in order for label in names]
    if lead:
        want.insert(0, ("index", 0))
    real = [label for label in want if label is not None]
    y = lax.transpose(x, [labels.index(label) for label in real])
    shape = iter(y.shape)
    y = y.reshape([1 if label is None else next(shape) for label in want])
    return Packed(y, tuple(groups), lead)


@rule("dynamic_slice")
def _dynamic_slice(call: Call) -> list:
    value, *starts = call.values
    sizes = call.options.slice_sizes
    fixed = []
    for axis, (whole_size, size) in enumerate(zip(call.shape(0), sizes)):
        if str(whole_size) == str(size):
            continue
        start = starts[axis]
        packed = any(not isinstance(role, int) for role in value.groups[axis])
        if packed or _sizes.is_open(size) or start.lead is not None:
            begin = _start(call, start, 0, whole_size, size, True)
            value = moved(call, value, axis, Source(begin), size, 0)
        else:
            fixed.append((axis, start.x, int(size)))
    for axis, start, size in fixed:
        (at,) = value.axes_of(axis)
        groups = list(value.groups)
        groups[axis] = (size,)
        x = lax.dynamic_slice_in_dim(value.x, start, size, at)
        value = value.like(x, groups=tuple(groups))
    return [value]
