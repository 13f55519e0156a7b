"""Slices, paddings and joins: what is moved to other positions of a text stops at its borders."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._padded import NoRule
from fnet.transforms._pack._moves import (
    Source,
    at_positions,
    expanded,
    picked,
    resolved,
)
from fnet.transforms._pack._rules import Call, _is_zero, rule
from fnet.transforms._pack._values import (
    ROW,
    TEXT,
    Packed,
    Time,
    along,
    group_of,
    masked,
    size_of,
)


@rule("slice")
def _slice(call: Call) -> list:
    value, options = call.values[0], call.options
    steps = options.strides or (1,) * len(value.groups)
    limits = zip(options.start_indices, options.limit_indices, steps)
    for axis, (start, limit, step) in enumerate(limits):
        size = call.shape(0)[axis]
        if str(start) == "0" and str(limit) == str(size) and step == 1:
            continue
        value = _cut_axis(call, value, axis, start, step, call.result()[axis])
    return [value]


def _cut_axis(call: Call, value: Packed, axis: int, start: Any, step: Any, size: Any) -> Packed:
    """Returns `size` elements of an axis of a value."""
    rows, over = call.rows, value.axes_of(axis)
    role = value.roles[over[0]]
    if len(over) != 1 or role == TEXT or role == ROW or _sizes.is_open(step):
        raise NoRule("it selects some of the texts")
    offset = rows.value(start) if _sizes.is_open(start) else int(start)
    if isinstance(role, int) and not _sizes.is_open(size):
        if _sizes.is_open(start):
            raise NoRule("it begins at a text's length")
        stop = offset + (int(size) - 1) * step + 1 if int(size) else offset
        x = lax.slice_in_dim(value.x, offset, stop, step, over[0])
        return _resized(value, axis, x, (int(size),))
    return moved(call, value, axis, Source(offset, step), size, 0)


def _resized(value: Packed, axis: int, x: Any, group: tuple) -> Packed:
    groups = list(value.groups)
    groups[axis] = group
    return value.like(x, groups=tuple(groups))


def moved(call: Call, value: Packed, axis: int, source: Source, size: Any, fill: Any) -> Packed:
    """Returns a value whose axis has another size: element i is the one that `source` says of i, or
    `fill` if there is none. The axis, or the new one, is one of positions."""
    rows, over = call.rows, value.axes_of(axis)
    if len(over) != 1:
        raise NoRule("it moves along all tokens of the batch")
    role = value.roles[over[0]]
    new = group_of(size, rows)[0] if _sizes.is_open(size) else int(size)
    if role in (TEXT, ROW) or new == TEXT:
        raise NoRule("it selects some of the texts")
    if isinstance(role, Time) and isinstance(new, Time):
        if value.pending:
            fill = 0
        call.note(f"moved within each text, from {role.size} to {new.size}")
        return picked(value, over[0], new, source, fill, rows)
    if isinstance(new, Time):
        call.note(f"placed at its positions in each text, along {new.size}")
        return expanded(resolved(value, rows), over[0], new, source, fill, rows)
    if isinstance(role, int):
        raise NoRule("it moves along a fixed axis")
    if source.every != 1:
        raise NoRule("it spreads the positions of a text")
    call.note(f"taken from each text, from {role.size}")
    offset = jnp.asarray(source.offset, jnp.int32).reshape(-1, 1)
    positions = offset + jnp.arange(new, dtype=jnp.int32) * source.step
    return at_positions(
        value, over[0], jnp.broadcast_to(positions, (rows.texts, new)), True, fill, rows
    )


@rule("pad")
def _pad(call: Call) -> list:
    value, fill = call.values
    for axis, (low, high, inner) in enumerate(call.options.padding_config):
        before, after = call.shape(0)[axis], call.result()[axis]
        if (str(low), str(high), inner) == ("0", "0", 0):
            continue
        if value.seed is not None and not value.pending:
            value = dataclasses.replace(value, seed=None)
        if fill.lead is not None or fill.groups:
            raise NoRule("its filling depends on the text")
        if not any(map(_sizes.is_open, (low, high, before, after))):
            at = value.axes_of(axis)[0]
            padding = [(0, 0, 0)] * value.x.ndim
            padding[at] = (int(low), int(high), int(inner))
            value = _resized(value, axis, lax.pad(value.x, fill.x, padding), (int(after),))
            continue
        value = _padded(call, value, axis, low, inner, after, fill)
    return [value]


def _padded(
    call: Call, value: Packed, axis: int, low: Any, inner: int, after: Any, fill: Packed
) -> Packed:
    if value.pending and not _sizes.is_open(after):
        return _pending_pad(call, value, axis, low, inner, int(after), fill)
    offset = -call.rows.value(low) if _sizes.is_open(low) else -int(low)
    return moved(call, value, axis, Source(offset, 1, int(inner) + 1), after, fill.x)


def _pending_pad(
    call: Call, value: Packed, axis: int, low: Any, inner: int, after: int, fill: Packed
) -> Packed:
    """The sum over all texts of positions, at the front of a fixed axis."""
    if not _is_zero(fill) or _sizes.is_open(low) or inner:
        raise NoRule("it fills a sum over texts")
    (time,) = value.axes_of(axis)
    rows, layout = call.rows, call.rows.layout(value.roles[time].size)
    if len(value.times) > 1:
        raise NoRule("it pads a sum over the texts at each pair of positions")
    x = jnp.moveaxis(masked(value, [time], 0, rows), time, 1)
    target, _ = Source(low).of(layout)
    where = jnp.where(layout.valid, target, after)
    where = jnp.where((where < 0) | (where > after), after, where).reshape(-1)
    table = jax.ops.segment_sum(x.reshape(-1, *x.shape[2:]), where, after + 1)[:-1]
    groups = list(value.groups)
    groups[axis] = (after,)
    return Packed(jnp.moveaxis(table, 0, time - 1), tuple(groups))


@rule("concatenate")
def _concatenate(call: Call) -> list:
    axis, rows = call.options.dimension, call.rows
    shapes = [call.shape(i)[axis] for i in range(len(call.values))]
    values = [v for v, n in zip(call.values, shapes) if str(n) != "0"]
    pending = all(v.pending or (v.seed is not None and _is_zero(v.seed)) for v in values)
    pending = pending and any(v.pending for v in values)
    values = values if pending else [resolved(v, rows) for v in values]
    values = [dataclasses.replace(v, seed=None) for v in values]
    sizes = [n for n in shapes if str(n) != "0"]
    size = call.result()[axis]
    if not any(map(_sizes.is_open, (*sizes, size))):
        values = _alike(values, axis, rows)
        x = lax.concatenate([v.x for v in values], values[0].axes_of(axis)[0])
        found = _resized(values[0], axis, x, (int(size),))
        return [dataclasses.replace(found, pending=pending)]
    offset: Any = 0
    total = None
    for value, n in zip(values, sizes):
        start = -rows.value(offset) if _sizes.is_open(offset) else -int(offset)
        part = moved(call, value, axis, Source(start), size, 0)
        if total is None:
            total = part
        else:
            total, part = _alike([total, part], axis, rows)
            (at,) = total.axes_of(axis)
            inside = _from(total, at, start, rows)
            total = total.like(jnp.where(inside, part.x, total.x))
        offset = offset + n
    return [dataclasses.replace(total, pending=pending)]


def _from(value: Packed, axis: int, start: Any, rows: Any) -> Any:
    """Which positions are at `-start` or behind it."""
    layout = rows.layout(value.roles[axis].size)
    position, _ = Source(start).of(layout)
    return along(position >= 0, [value.roles.index(ROW), axis], value.x.ndim)


def _alike(values: list, axis: int, rows: Any) -> list:
    """Returns values that differ in the size of one axis with the same other axes."""
    leads = [v for v in values if v.lead is not None]
    best = max(values, key=lambda v: (v.tokens, v.lead is not None))
    found = []
    for value in values:
        groups = list(best.groups)
        groups[axis] = value.groups[axis]
        if value.groups != tuple(groups) and not value.tokens and best.tokens:
            raise NoRule("it joins values of texts and of tokens")
        if value.lead is None and leads and value.is_global:
            size = size_of(leads[0].lead, rows)
            value = dataclasses.replace(
                value, x=jnp.broadcast_to(value.x, (size, *value.x.shape)), lead=leads[0].lead
            )
        if value.groups != tuple(groups) or value.lead != best.lead:
            raise NoRule("it joins values that belong to different texts")
        found.append(value)
    return found


@rule("rev")
def _reverse(call: Call) -> list:
    value, rows = call.values[0], call.rows
    for axis in call.options.dimensions:
        over = value.axes_of(axis)
        role = value.roles[over[0]]
        if len(over) != 1 or role in (TEXT, ROW):
            raise NoRule("it reverses the order of the texts")
        if isinstance(role, int):
            value = value.like(lax.rev(value.x, tuple(over)))
            continue
        call.note("reversed within each text")
        last = rows.layout(role.size).size - 1
        value = picked(value, over[0], role, Source(last, -1), 0, rows)
    return [value]
