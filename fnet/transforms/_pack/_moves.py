"""Moves of packed values: to other positions of the same text, from tokens to texts, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet.transforms._bucket._padded import NoRule, highest, lowest, resized
from fnet.transforms._pack._values import (
    ROW,
    TEXT,
    Packed,
    Time,
    along,
    masked,
    together,
)


@dataclasses.dataclass(frozen=True)
class Source:
    """Which position an element is taken from: (position * step + offset) / every, if that is
    whole. The offset is a number, or an array [texts]."""

    offset: Any = 0
    step: int = 1
    every: int = 1

    @property
    def number(self) -> int | None:
        """By how many places all texts are shifted, or None."""
        return (
            self.offset if isinstance(self.offset, int) and self.step == self.every == 1 else None
        )

    def of(self, layout: Any) -> tuple[Any, Any]:
        """Returns the position for each place of a layout, and whether it is whole."""
        offset = self.offset
        if getattr(offset, "ndim", 0) == 1:
            offset = jnp.take(offset.astype(jnp.int32), layout.text, mode="clip")
        position = layout.position * self.step + offset
        if self.every == 1:
            return position, None
        return position // self.every, position % self.every == 0


def picked(value: Packed, axis: int, time: Time, source: Source, fill: Any, rows: Any) -> Packed:
    """Returns the elements of an axis of places at other positions of the same texts, along an axis
    of another size, with `fill` where there is none. `axis` is one of the array."""
    roles = value.roles
    old, new = rows.layout(roles[axis].size), rows.layout(time.size)
    row = roles.index(ROW)
    position, exact = source.of(new)
    plain = old.plain and new.plain
    count = old.count if plain else jnp.take(old.size, new.text, mode="clip")
    inside = (position >= 0) & (position < count) & new.valid
    if exact is not None:
        inside = inside & exact
    if source.number is not None and plain:
        x = _rolled(value.x, axis, source.number)
        inside = inside & (_rolled(old.segments, 1, source.number) == new.segments)
    else:
        begin = old.begin if plain else jnp.take(old.start, new.text, mode="clip")
        place = begin + position
        x = _at_places(value.x, row, axis, jnp.where(inside, place, 0))
    x = jnp.where(along(inside, [row, axis], x.ndim), x, jnp.asarray(fill, x.dtype))
    return _replaced(value, axis, (time,), x)


def _rolled(x: Any, axis: int, offset: int) -> Any:
    if offset == 0:
        return x
    n = x.shape[axis]
    if abs(offset) >= n:
        return jnp.zeros_like(x)
    if offset > 0:
        return resized(lax.slice_in_dim(x, offset, n, axis=axis), axis, n)
    padding = [(0, 0, 0)] * x.ndim
    padding[axis] = (-offset, offset, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), padding)


def _at_places(x: Any, row: int, axis: int, places: Any) -> Any:
    """Returns x with the elements `places` [rows, size] of each row along an axis."""
    moved = jnp.moveaxis(x, (row, axis), (0, 1))
    y = jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"))(moved, places)
    return jnp.moveaxis(y, (0, 1), (row, axis))


def _replaced(value: Packed, axis: int, roles: tuple, x: Any) -> Packed:
    """Returns a value whose array has other axes in place of one."""
    groups, i = [], int(value.lead is not None)
    for group in value.groups:
        each: list = []
        for role in group:
            each += roles if i == axis else (role,)
            i += 1
        groups.append(tuple(each))
    return value.like(x, groups=tuple(groups))


def _to_texts(value: Packed, axis: int, roles: tuple, x: Any) -> Packed:
    """As `_replaced`, with texts in place of the rows."""
    found = _replaced(value, axis, roles, x)
    groups = tuple(tuple(TEXT if r == ROW else r for r in group) for group in found.groups)
    lead = TEXT if value.lead == ROW else value.lead
    return dataclasses.replace(found, groups=groups, lead=lead)


def at_positions(
    value: Packed, axis: int, positions: Any, keep: bool, fill: Any, rows: Any
) -> Packed:
    """Returns the elements of each text at some positions along an axis of places: [texts, k], as
    an axis of size k, or without an axis if not `keep` and k is 1. `fill` where there is none;
    None for the nearest."""
    if value.pending:
        raise NoRule("it takes single positions of a sum over texts")
    roles, layout = value.roles, rows.layout(value.roles[axis].size)
    size = layout.size[:, None]
    if fill is None:
        positions = jnp.clip(positions, 0, jnp.maximum(size - 1, 0))
    inside = (positions >= 0) & (positions < size)
    places = jnp.where(inside, layout.start[:, None] + positions, 0)  # [texts, k]
    k = int(places.shape[1])
    row = roles.index(ROW)
    new: tuple = (k,) if keep else ()
    others = [i for i in value.times if i != axis]
    if others:
        text = rows.layout(roles[others[0]].size).text  # [rows, length]
        here = jnp.take(places, text, axis=0, mode="clip")  # [rows, length, k]
        ok = jnp.take(inside, text, axis=0, mode="clip")
        moved = jnp.moveaxis(value.x, (row, others[0], axis), (0, 1, 2))
        one = lambda x, i: jnp.take(x, i, axis=0, mode="clip")
        y = jax.vmap(jax.vmap(one))(moved, here)
        y = jnp.where(ok.reshape(*ok.shape, *[1] * (y.ndim - 3)), y, _filled(fill, y.dtype))
        y = jnp.moveaxis(y, (0, 1, 2), (row, others[0], axis))
        y = y if keep else jnp.squeeze(y, axis)
        return _replaced(value, axis, new, y)
    moved = jnp.moveaxis(value.x, (row, axis), (0, 1))
    y = moved[rows.row[:, None], places]  # [texts, k, ...]
    y = jnp.where(inside.reshape(*inside.shape, *[1] * (y.ndim - 2)), y, _filled(fill, y.dtype))
    y = jnp.moveaxis(y, (0, 1), (row, axis))
    y = y if keep else jnp.squeeze(y, axis)
    return _to_texts(value, axis, new, y)


def _filled(fill: Any, dtype: Any) -> Any:
    return jnp.asarray(0 if fill is None else fill, dtype)


def expanded(value: Packed, axis: int, time: Time, source: Source, fill: Any, rows: Any) -> Packed:
    """Returns a value whose static axis becomes one of places: at each, the element of the place's
    text with the position that `source` says, or `fill` if there is none."""
    n, layout = value.x.shape[axis], rows.layout(time.size)
    position, exact = source.of(layout)  # [rows, length]
    inside = (position >= 0) & (position < n) & layout.valid
    if exact is not None:
        inside = inside & exact
    index = jnp.clip(position, 0, max(n - 1, 0))
    roles = value.roles
    if ROW in roles:
        raise NoRule("a second axis of positions is made of one of a fixed size")
    if TEXT in roles:
        text = roles.index(TEXT)
        moved = jnp.moveaxis(value.x, (text, axis), (0, 1))
        y = moved[layout.text, index]
        y = jnp.moveaxis(y, (0, 1), (text, axis))
        groups = tuple(tuple(ROW if r == TEXT else r for r in group) for group in value.groups)
        lead = ROW if value.lead == TEXT else value.lead
        at = [text, axis]
    else:
        moved = jnp.moveaxis(value.x, axis, 0)
        y = jnp.moveaxis(jnp.take(moved, index, axis=0, mode="clip"), 1, axis + 1)
        groups, lead, at = value.groups, ROW, [0, axis + 1]
    y = jnp.where(along(inside, at, y.ndim), y, jnp.asarray(fill, y.dtype))
    shifted = at[1]
    new = Packed(y, groups, lead)
    return _replaced(new, shifted, (time,), y)


# The reductions of tokens to texts, and their identities.
IDENTITY: dict[str, Callable] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": lowest,
    "min": highest,
    "and": lambda dtype: True if jnp.issubdtype(dtype, jnp.bool_) else -1,
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
}
_SEGMENTS: dict[str, Callable] = {
    "sum": jax.ops.segment_sum,
    "prod": jax.ops.segment_prod,
    "max": jax.ops.segment_max,
    "min": jax.ops.segment_min,
}


def reduced(value: Packed, kind: str, over: Sequence[int], rows: Any) -> Packed:
    """Reduces some axes of the array."""
    roles = value.roles
    over = list(over)
    rest = [i for i in value.times if i not in over]
    if value.pending and not rest and value.times:
        over.append(roles.index(ROW))
    fill = IDENTITY[kind](value.x.dtype)
    packed = [i for i in over if not isinstance(roles[i], int)]
    x = masked(value, packed, fill, rows) if packed else value.x
    value = value.like(x)
    gone = value.times and not rest
    if ROW in roles and not gone and roles.index(ROW) in over:
        if kind != "sum" or value.lead == ROW:
            raise NoRule("it compares the same position of all texts")
        return _summed_later(value, over, rows)
    if gone and roles.index(ROW) not in over:
        return _by_text(value, kind, over, rows)
    return without(value.like(_plainly(x, kind, over)), over)


def _plainly(x: Any, kind: str, over: Sequence[int]) -> Any:
    axes = tuple(sorted(over))
    if kind == "sum":
        return jnp.sum(x, axes, dtype=x.dtype)
    if kind == "prod":
        return jnp.prod(x, axes, dtype=x.dtype)
    if kind in ("max", "min"):
        return (jnp.max if kind == "max" else jnp.min)(x, axes)
    kinds = {"and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}
    return lax.reduce(x, jnp.asarray(IDENTITY[kind](x.dtype), x.dtype), kinds[kind], axes)


def without(value: Packed, over: Sequence[int]) -> Packed:
    """Returns a value of which axes of the array are gone, and with them the axes of the value that
    consist of these alone."""
    groups, i = [], int(value.lead is not None)
    for group in value.groups:
        kept = tuple(role for j, role in enumerate(group, i) if j not in over)
        i += len(group)
        if kept or not group:
            groups.append(kept)
    lead = None if value.lead is not None and 0 in over else value.lead
    return value.like(
        value.x, groups=tuple(groups), lead=lead, pending=value.pending and bool(lead)
    )


def _summed_later(value: Packed, over: list[int], rows: Any) -> Packed:
    """A sum over the texts at each position: it stays to be taken when the positions are summed,
    too, as in the gradient of an embedding of positions."""
    row = value.roles.index(ROW)
    rest = [i for i in over if i != row]
    x = masked(value, value.times, 0, rows)
    value = value.like(_plainly(x, "sum", rest))
    value = without(value, rest)
    row = value.roles.index(ROW)
    x = jnp.moveaxis(value.x, row, 0)
    gone = without(value, [row])
    return Packed(x, gone.groups, ROW, pending=True)


def _by_text(value: Packed, kind: str, over: list[int], rows: Any) -> Packed:
    """Reduces all axes of places, to one value for each text."""
    roles = value.roles
    row, time = roles.index(ROW), value.times[0]
    rest = [i for i in over if i != time]
    x = value.x
    if kind in ("and", "or") and x.dtype == bool:
        x, kind = x.astype(jnp.int32), "min" if kind == "and" else "max"
        found = _by_text(value.like(x), kind, over, rows)
        return found.like(found.x > 0)
    if kind not in _SEGMENTS:
        raise NoRule(f"the {kind} of a text's bits")
    if rest:
        x = _plainly(x, kind, rest)
    shrunk = without(value.like(x), rest)
    row, time = shrunk.roles.index(ROW), shrunk.times[0]
    moved = jnp.moveaxis(shrunk.x, (row, time), (0, 1))
    layout = rows.layout(shrunk.roles[time].size)
    flat = moved.reshape(-1, *moved.shape[2:])
    y = _SEGMENTS[kind](flat, layout.text.reshape(-1), rows.texts, mode="drop")
    y = jnp.moveaxis(y, 0, row - (time < row))
    gone = without(shrunk, [time])
    groups = tuple(tuple(TEXT if r == ROW else r for r in group) for group in gone.groups)
    lead = TEXT if gone.lead == ROW else gone.lead
    return Packed(y, groups, lead)


def resolved(value: Packed, rows: Any) -> Packed:
    """Takes a sum over the texts that is still to be taken."""
    if not value.pending:
        return value
    if not value.times:
        axis = 0
        x = jnp.sum(masked(value, [axis], 0, rows), axis, dtype=value.x.dtype)
        return without(dataclasses.replace(value, x=x, pending=False), [0])
    if len(value.times) > 1:
        raise NoRule("a sum over the texts at each pair of positions is read again")
    table, layout, time = _table(value, rows)
    y = jnp.take(table, layout.position.reshape(-1), axis=0, mode="clip")
    y = y.reshape(*layout.position.shape, *table.shape[1:])
    y = jnp.moveaxis(y, 1, time)
    return dataclasses.replace(value, x=y, pending=False)


def _table(value: Packed, rows: Any) -> tuple:
    """Returns the sums over the texts at each position, [positions, ...]."""
    (time,) = value.times
    layout = rows.layout(value.roles[time].size)
    x = jnp.moveaxis(masked(value, [time], 0, rows), time, 1)  # [rows, length, ...]
    where = jnp.where(layout.valid, layout.position, layout.length).reshape(-1)
    table = jax.ops.segment_sum(x.reshape(-1, *x.shape[2:]), where, layout.length + 1)
    return table[:-1], layout, time


def pending_table(value: Packed, rows: Any) -> Any:
    """Returns the sums over the texts at each position with the axis of the positions first."""
    return _table(value, rows)[0]


def existing(value: Packed, rows: Any) -> Any:
    """Returns the array with zeros where no element exists."""
    inside = together(value, [i for i, r in enumerate(value.roles) if r != ROW], rows)
    return value.x if inside is None else jnp.where(inside, value.x, jnp.zeros((), value.x.dtype))
