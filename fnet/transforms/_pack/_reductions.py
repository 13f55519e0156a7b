"""Reductions, searches, cumulative operations and sorting: within each text, or over what exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from fnet.transforms._bucket._padded import NoRule, highest, lowest
from fnet.transforms._pack._moves import (
    IDENTITY,
    reduced,
)
from fnet.transforms._pack._rules import Call, _as, _kind, _widest, rule
from fnet.transforms._pack._values import (
    ROW,
    TEXT,
    Packed,
    along,
    masked,
    together,
)


@rule(*(f"reduce_{name}" for name in IDENTITY))
def _reduce(call: Call) -> list:
    kind = call.eqn.primitive.name.removeprefix("reduce_")
    value = call.values[0] if kind == "sum" else call.settled()[0]
    over = [k for axis in call.options.axes for k in value.axes_of(axis)]
    _say(call, value, over, f"the {kind} is taken")
    return [reduced(value, kind, over, call.rows)]


def _say(call: Call, value: Packed, over: Sequence[int], what: str) -> None:
    """Notes what is done over which axes, if they are those of texts or tokens."""
    kinds = {_kind(value.roles[k]) for k in over if not isinstance(value.roles[k], int)}
    if not kinds:
        return
    where = "within each text" if TEXT not in kinds else "over what exists"
    if kinds == {TEXT}:
        where = "over the texts that exist"
    call.note(f"{what} {where}")


@rule("argmax", "argmin")
def _arg(call: Call) -> list:
    (value,), rows = call.settled(), call.rows
    name = call.eqn.primitive.name
    (axis,) = call.options.axes
    over = value.axes_of(axis)
    dtype = call.eqn.outvars[0].aval.dtype
    if len(over) != 1:
        raise NoRule("it searches all tokens of the batch")
    role = value.roles[over[0]]
    if isinstance(role, int):
        groups = [value.groups[:axis] + value.groups[axis + 1 :]]
        return call.batched([value], groups)
    _say(call, value, over, "the search is")
    fill = (lowest if name == "argmax" else highest)(value.x.dtype)
    x = masked(value, over, fill, rows)
    kind = "max" if name == "argmax" else "min"
    peak = reduced(value.like(x), kind, over, rows)
    if role == TEXT:
        index = (jnp.argmax if kind == "max" else jnp.argmin)(x, over[0]).astype(dtype)
        return [peak.like(index)]
    position = _position(value, over[0], rows)
    best = _broadcast_back(peak, value, over[0], rows)
    equal = x == best
    if jnp.issubdtype(x.dtype, jnp.inexact):
        equal = equal | (jnp.isnan(x) & jnp.isnan(best))
    big = jnp.iinfo(jnp.int32).max
    where = jnp.where(equal & _inside(value, over, rows), position, big)
    found = reduced(value.like(where), "min", over, rows)
    return [found.like(jnp.where(found.x == big, 0, found.x).astype(dtype))]


def _inside(value: Packed, over: Sequence[int], rows: Any) -> Any:
    inside = together(value, over, rows)
    return True if inside is None else inside


def _position(value: Packed, axis: int, rows: Any) -> Any:
    """The position within its text of each element along an axis of places."""
    roles = value.roles
    layout = rows.layout(roles[axis].size)
    return along(layout.position, [roles.index(ROW), axis], value.x.ndim)


def _broadcast_back(small: Packed, value: Packed, axis: int, rows: Any) -> Any:
    """Returns a reduction's result at each element that was reduced."""
    if small.tokens:
        return jnp.expand_dims(small.x, axis)
    time, row = value.roles[axis], value.roles.index(ROW)
    at = small.roles.index(TEXT)
    x = jnp.moveaxis(small.x, at, 0)
    y = jnp.take(x, rows.layout(time.size).text, axis=0, mode="clip")
    return jnp.moveaxis(y, (0, 1), (row, axis))


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(call: Call) -> list:
    (value,), rows = call.settled(), call.rows
    axis, reverse = call.options.axis, bool(call.options.reverse)
    over = value.axes_of(axis)
    role = value.roles[over[-1]]
    if len(over) == 1 and isinstance(role, int):
        return call.batched([value], [value.groups])
    if len(over) != 1:
        raise NoRule("it runs over all tokens of the batch")
    if role == ROW:
        raise NoRule("it runs over the same position of all texts")
    kind = call.eqn.primitive.name.removeprefix("cum")
    fill = lowest(value.x.dtype) if kind == "logsumexp" else IDENTITY[kind](value.x.dtype)
    x, (k,) = masked(value, over, fill, rows), over
    if role == TEXT or len(value.times) > 1:
        _say(call, value, over, "it runs")
        return [value.like(_run(kind, x, k, reverse))]
    call.note("it begins anew with each text")
    layout = rows.layout(role.size)
    begins = along(layout.first(reverse), [value.roles.index(ROW), k], x.ndim)
    join = _JOIN[kind]

    def combine(a: tuple, b: tuple) -> tuple:
        return jnp.where(b[1], b[0], join(a[0], b[0])), a[1] | b[1]

    flags = jnp.broadcast_to(begins, x.shape)
    y, _ = lax.associative_scan(combine, (x, flags), axis=k, reverse=reverse)
    return [value.like(y)]


_JOIN: dict[str, Callable] = {
    "sum": jnp.add,
    "prod": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "logsumexp": jnp.logaddexp,
}


def _run(kind: str, x: Any, axis: int, reverse: bool) -> Any:
    return getattr(lax, f"cum{kind}")(x, axis=axis, reverse=reverse)


@rule("sort")
def _sort(call: Call) -> list:
    values, rows, axis = call.settled(), call.rows, call.options.dimension
    target = _widest(values)
    values = [_as(v, target, rows) for v in values]
    over = target.axes_of(axis)
    role = target.roles[over[-1]]
    if len(over) == 1 and isinstance(role, int):
        return call.batched(values, [target.groups] * len(values))
    if len(over) != 1 or role in (ROW, TEXT) or len(target.times) > 1:
        raise NoRule("it orders elements of different texts")
    call.note("sorted within each text")
    layout = rows.layout(role.size)
    place = lax.broadcasted_iota(jnp.int32, layout.text.shape, 1)
    key = jnp.where(layout.valid, layout.begin, place)
    key = jnp.broadcast_to(along(key, [target.roles.index(ROW), over[0]], target.x.ndim),
                           target.x.shape)  # fmt: skip
    outputs = lax.sort(
        [key, *(v.x for v in values)],
        dimension=over[0],
        num_keys=call.options.num_keys + 1,
        is_stable=True,
    )
    return [target.like(y) for y in outputs[1:]]


@rule("top_k")
def _top_k(call: Call) -> list:
    (value,) = call.settled()
    axis = call.options.axis
    if not isinstance(value.groups[axis][0], int):
        raise NoRule("it chooses among the positions of a text")
    groups = list(value.groups)
    groups[axis] = (int(call.options.k),)
    return call.batched([value], [tuple(groups)] * 2)
