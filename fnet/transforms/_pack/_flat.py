"""All tokens of a batch, one after another, for what puts them in an order of their own, such as a
mixture of experts: axes whose size is an expression of n*t.

Such an array has the existing tokens in front, and then it is one with a padded axis, as
`ft.bucket` has it. Its rules compute with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._padded import Lengths, NoRule
from fnet.transforms._bucket._rules import RULES as BUCKET
from fnet.transforms._bucket._rules import Call as BucketCall
from fnet.transforms._bucket._rules import _regrouped as regrouped
from fnet.transforms._pack._moves import resolved
from fnet.transforms._pack._rows import Rows
from fnet.transforms._pack._values import ROW, Flat, Packed, Time


def flat_lengths(rows: Rows) -> Lengths:
    """The number of all tokens, and the most there may be: n*t, for n = 1."""
    values = {rows.letter: 1, rows.time: rows.layout(rows.time).valid.sum(dtype=jnp.int32)}
    ranges = {rows.letter: (1, 1), rows.time: (0, math.prod(rows.shape))}
    return Lengths(values, ranges)


def of_all_tokens(sizes: Sequence, rows: Any) -> bool:
    """Whether all sizes are numbers or expressions of n*t, and at least one is the latter."""
    opened = [str(size) for size in sizes if _sizes.is_open(size)]

    def alike(size: str) -> bool:
        pairs = [(1, 3600), (3600, 1), (60, 60), (45, 80)]
        return len({_sizes.value(size, {rows.letter: n, rows.time: t}) for n, t in pairs}) == 1

    return bool(opened) and all(map(alike, opened))


def flattened(value: Packed, shape: Sequence, rows: Rows, lengths: Lengths) -> Any:
    """Returns the array of a value with all tokens in front along each axis of them."""
    value = resolved(value, rows)
    if value.seed is not None:
        return lax.broadcast_in_dim(value.seed.x, lengths.shape(shape), ())
    if value.lead is not None:
        raise NoRule("it mixes all tokens with a value for each text")
    x = value.x
    for axis, group in enumerate(value.groups):
        if not any(role == ROW or isinstance(role, Time) for role in group):
            continue
        where = next(i for i, role in enumerate(group) if role == ROW)
        if group[where + 1 : where + 2] != (Time(rows.time),):
            raise NoRule("all tokens are put in an order in which their texts are apart")
        first = axis  # the axes before are merged already
        at = first + where
        x = x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])
        x = jnp.take(x, _order(rows), axis=at, mode="clip")
        old: list[Any] = [r for r in (*group[:where], rows.time, *group[where + 2 :])]
        rest = math.prod(r for r in old if isinstance(r, int))
        sizes = [_symbol(shape[axis], rest) if r == rows.time else r for r in old]
        if len(sizes) > 1:
            x = regrouped(_Moving(lengths), x, first, sizes, [shape[axis]])
    return x


def _symbol(size: Any, times: int) -> Any:
    return size // times if times != 1 else size


class _Moving:
    """What moving elements needs of an equation."""

    def __init__(self, lengths: Lengths):
        self.lengths = lengths

    def padded(self, sizes: Sequence) -> tuple[int, ...]:
        return self.lengths.shape(sizes)

    def note(self, *_: Any) -> None:
        pass


def _order(rows: Rows) -> Any:
    """The place of each existing token, in order, and any for the rest, int32 [tokens]."""
    valid = rows.layout(rows.time).valid.reshape(-1)
    number = jnp.cumsum(valid, dtype=jnp.int32) - 1
    places = lax.iota(jnp.int32, valid.shape[0])
    empty = jnp.zeros_like(places)
    return empty.at[jnp.where(valid, number, valid.shape[0])].set(places, mode="drop")


def back(value: Packed, rows: Rows) -> Packed:
    """Returns a value with its axes of all tokens as those of rows and places."""
    if not value.is_flat:
        return value
    valid = rows.layout(rows.time).valid.reshape(-1)
    number = jnp.maximum(jnp.cumsum(valid, dtype=jnp.int32) - 1, 0)
    x, groups = value.x, []
    at = int(value.lead is not None)
    for group in value.groups:
        if not isinstance(group[0], Flat):
            groups.append(group)
            at += len(group)
            continue
        if sorted(group[0].size.replace(" ", "").split("*")) != sorted((rows.letter, rows.time)):
            raise NoRule(f"{group[0].size} elements for all tokens become those of texts")
        x = jnp.take(x, number, axis=at, mode="clip")
        x = x.reshape(*x.shape[:at], *rows.shape, *x.shape[at + 1 :])
        groups.append((ROW, Time(rows.time)))
        at += 2
    return value.like(x, groups=tuple(groups))


def flat_outputs(
    eqn: Any, values: Sequence[Packed], rows: Any, note: Callable, evaluate: Callable
) -> list[Packed]:
    """Evaluates an equation on all tokens, one after another."""
    name = eqn.primitive.name
    if name not in BUCKET or not isinstance(rows, Rows):
        raise NoRule("it needs all tokens of the batch in one order")
    lengths = flat_lengths(rows)
    arrays = [
        jnp.asarray(flattened(value, v.aval.shape, rows, lengths))
        for value, v in zip(values, eqn.invars)
    ]

    def inner(closed: Any, arrays: Sequence) -> list:
        given = [_made(x, v.aval.shape) for x, v in zip(arrays, closed.jaxpr.invars)]
        outputs = evaluate(closed, given, rows)
        return [
            flattened(y, v.aval.shape, rows, lengths) for y, v in zip(outputs, closed.jaxpr.outvars)
        ]

    note(eqn, "done for all tokens of the batch, one after another")
    call = BucketCall(eqn, arrays, lengths, lambda *_: None, inner)
    return [_made(y, v.aval.shape) for y, v in zip(BUCKET[name](call), eqn.outvars)]


def _made(x: Any, shape: Sequence) -> Packed:
    groups = tuple((Flat(str(n)),) if _sizes.is_open(n) else (int(n),) for n in shape)
    return Packed(x, groups)


def sizes_of(eqn: Any) -> list:
    """All sizes in the types of an equation, and in its parameters."""
    atoms = (*eqn.invars, *eqn.outvars)
    found = [n for v in atoms for n in getattr(v.aval, "shape", ())]
    return found + _numbers(tuple(eqn.params.values()))


def _numbers(value: Any) -> list:
    if isinstance(value, (tuple, list)):
        return [n for each in value for n in _numbers(each)]
    return [value] if _sizes.is_open(value) else []
