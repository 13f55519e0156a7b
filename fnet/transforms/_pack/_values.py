"""Values of a packed program: arrays whose axes are those of the packed rows, and what they stand
for."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._padded import NoRule


class Time(NamedTuple):
    """An axis of the places of a row. `size` is that of a text, such as "t - 1"."""

    size: str


class Flat(NamedTuple):
    """An axis of all tokens of the batch, one after another, or one whose size is another expression
    of their number, such as "2*n*t"."""

    size: str


ROW = "row"
"""An axis of the packed rows, together with one of places: that of the texts, at each place."""
TEXT = "text"
"""An axis of the texts."""
Role = Any  # ROW, TEXT, Time, or the size of any other axis
Group = tuple[Role, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """A value of the function, packed.

    Attributes:
        x: its array, with an axis for each of the `roles`.
        groups: for each axis of the value the axes of `x` of which it consists: `n*t` of two.
        lead: ROW or TEXT if the value differs from text to text, but has no axis of texts, as a
            position [t] has not, or the length t itself. It is then the first axis of `x`.
        pending: whether the sum over the texts of the lead axis is still to be taken.
        seed: a scalar of which the value consists, or None.
        lengths: whether these are the lengths of the texts.
        shared: whether it is what all texts have at each position, such as a statistic over them.
    """

    x: Any
    groups: tuple[Group, ...]
    lead: str | None = None
    pending: bool = False
    seed: Any = None
    lengths: bool = False
    shared: bool = False

    @property
    def roles(self) -> tuple[Role, ...]:
        lead = () if self.lead is None else (self.lead,)
        return (*lead, *itertools.chain.from_iterable(self.groups))

    @property
    def is_global(self) -> bool:
        return all(isinstance(role, int) for role in self.roles)

    @property
    def is_flat(self) -> bool:
        return any(isinstance(role, Flat) for role in self.roles)

    @property
    def times(self) -> list[int]:
        """The axes of `x` that are places."""
        return [i for i, role in enumerate(self.roles) if isinstance(role, Time)]

    @property
    def tokens(self) -> bool:
        return ROW in self.roles

    @property
    def texts(self) -> bool:
        return TEXT in self.roles and ROW not in self.roles

    def axes_of(self, axis: int) -> list[int]:
        """The axes of `x` that belong to an axis of the value."""
        first = (self.lead is not None) + sum(map(len, self.groups[:axis]))
        return list(range(first, first + len(self.groups[axis])))

    def like(self, x: Any, **changes: Any) -> Packed:
        changes = {"seed": None, "lengths": False, **changes}
        return dataclasses.replace(self, x=x, **changes)


def whole(x: Any) -> Packed:
    """A value that is the same for all texts."""
    return Packed(x, tuple((int(n),) for n in x.shape))


def group_of(size: Any, rows: Any) -> Group:
    """Returns the axes of which an axis of a size consists."""
    if not _sizes.is_open(size):
        return (int(size),)
    names = _sizes.letters(str(size))
    if names == [rows.time]:
        return (Time(str(size)),)
    one, two = (_rest(size, rows.letter, k) for k in (1, 2))
    if one is None or two is None or str(2 * one) != str(two):
        raise NoRule(f"the size {size} is no multiple of the number of texts")
    if isinstance(one, int):
        return (TEXT,) if one == 1 else (TEXT, one)
    return (TEXT, Time(str(one)))


def _rest(size: Any, letter: str, k: int) -> Any:
    """Returns a size with a number in place of a letter."""
    names = _sizes.letters(str(size))
    if names == [letter]:
        return int(_sizes.value(str(size), {letter: k}))
    symbols = {str(x): x for x in _symbols(size)}
    return _sizes.value(str(size), {**symbols, letter: k})


def _symbols(size: Any) -> list:
    from jax import export

    scope = size.scope
    return list(export.symbolic_shape(",".join(_sizes.letters(str(size))), scope=scope))


def groups_of(shape: Sequence, rows: Any) -> tuple[Group, ...]:
    """Returns the axes of a new value of a shape. With places, the first axis of texts is ROW."""
    groups = [group_of(size, rows) for size in shape]
    if any(isinstance(role, Time) for group in groups for role in group):
        for i, group in enumerate(groups):
            if TEXT in group:
                groups[i] = tuple(ROW if role == TEXT else role for role in group)
                break
    return tuple(groups)


def size_of(role: Role, rows: Any) -> int:
    if role == ROW:
        return int(rows.shape[0])
    if role == TEXT:
        return int(rows.texts)
    if isinstance(role, Flat):
        most = {rows.letter: 1, rows.time: rows.shape[0] * rows.shape[1]}
        return int(_sizes.value(role.size, most))
    return rows.layout(role.size).length if isinstance(role, Time) else int(role)


def lead_of(groups: Sequence[Group], lead: str | None = None) -> str | None:
    """Returns the lead axis of a value with some groups: ROW if it has places without rows."""
    roles = list(itertools.chain.from_iterable(groups))
    if ROW in roles:
        return None
    return ROW if any(isinstance(role, Time) for role in roles) else lead


def arranged(x: Any, have: Sequence, want: Sequence, sizes: Sequence[int]) -> Any:
    """Returns an array whose axes, labelled `have`, are in the order `want`; labels that `have`
    lacks are new axes, with the given sizes."""
    order = [have.index(label) for label in want if label in have]
    if order != list(range(x.ndim)):
        x = lax.transpose(x, order)
    dims = [i for i, label in enumerate(want) if label in have]
    shape = tuple(sizes)
    return x if x.shape == shape else lax.broadcast_in_dim(x, shape, dims)


def spread(value: Packed, groups: Sequence[Group], lead: str | None, rows: Any) -> Packed:
    """Returns a scalar as a value with some groups."""
    roles = (*(() if lead is None else (lead,)), *itertools.chain.from_iterable(groups))
    shape = tuple(size_of(role, rows) for role in roles)
    seed = value if value.lead is None and not value.pending else None
    if value.lead is None:
        return Packed(lax.broadcast_in_dim(value.x, shape, ()), tuple(groups), lead, seed=seed)
    if value.lead == TEXT and ROW in roles:
        axes = list(roles)
        times = [i for i, role in enumerate(axes) if isinstance(role, Time)]
        row, time = axes.index(ROW), times[0]
        y = per_place(value, axes[time], rows).x
        y = arranged(y, [row, time], list(range(len(axes))), shape)
        return Packed(y, tuple(groups), lead)
    if value.lead == TEXT and roles.count(TEXT) == 1:
        y = lax.broadcast_in_dim(value.x, shape, (roles.index(TEXT),))
        return Packed(y, tuple(groups), lead)
    if value.lead == TEXT and TEXT not in roles:
        y = lax.broadcast_in_dim(value.x, (rows.texts, *shape), (0,))
        return Packed(y, tuple(groups), TEXT)
    raise NoRule("its operands belong to different texts")


def per_place(value: Packed, time: Time, rows: Any) -> Packed:
    """Returns the value of each place's text: texts become tokens, with the axis of places behind
    that of the rows, as `lead` or in the group of the texts."""
    axis = value.roles.index(TEXT)
    layout = rows.layout(time.size)
    x = jnp.moveaxis(value.x, axis, 0)
    y = jnp.take(x, layout.text.reshape(-1), axis=0, mode="clip")
    y = y.reshape(*layout.text.shape, *x.shape[1:])
    y = jnp.moveaxis(y, (0, 1), (axis, axis + 1))
    if value.lead == TEXT:
        return Packed(y, ((time,), *value.groups), ROW)
    groups = tuple(
        tuple(r for role in group for r in ((ROW, time) if role == TEXT else (role,)))
        for group in value.groups
    )
    return Packed(y, groups)


def merged(value: Packed) -> Any:
    """Returns the array of a value with one axis for each of its own, behind the lead axis."""
    lead = value.x.shape[: value.lead is not None]
    shape = value.x.shape[len(lead) :]
    sizes, i = [], 0
    for group in value.groups:
        sizes.append(math.prod(shape[i : i + len(group)]))
        i += len(group)
    return value.x.reshape(*lead, *sizes)


def separated(x: Any, groups: Sequence[Group], lead: str | None, rows: Any) -> Packed:
    """The inverse of `merged`."""
    roles = (*(() if lead is None else (lead,)), *itertools.chain.from_iterable(groups))
    return Packed(x.reshape([size_of(role, rows) for role in roles]), tuple(groups), lead)


def along(index: Any, axes: Sequence[int], ndim: int) -> Any:
    """Returns an array over the given axes, which are in ascending or any order, so that it may be
    broadcast to an array with `ndim` axes."""
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    index = lax.transpose(index, order)
    shape = [1] * ndim
    for i in order:
        shape[axes[i]] = index.shape[order.index(i)]
    return index.reshape(shape)


def together(value: Packed, over: Sequence[int], rows: Any) -> Any:
    """Returns which elements exist along some axes of the array, in the form of a mask that may be
    broadcast to it, or None for all. Places of two axes exist together in one text alone."""
    roles, ndim = value.roles, value.x.ndim
    parts = []
    for i in over:
        if roles[i] == TEXT:
            parts.append(along(rows.exists, [i], ndim))
    times = value.times
    inside = [i for i in times if i in over]
    if times and ROW in roles:
        row = roles.index(ROW)
        for i in inside:
            parts.append(along(rows.layout(roles[i].size).valid, [row, i], ndim))
        for i in inside:
            other = next((j for j in times if j not in over), inside[0])
            if other != i:
                here, there = (rows.layout(roles[k].size) for k in (i, other))
                for mine, its in here.same(there):
                    parts.append(along(mine, [row, i], ndim) == along(its, [row, other], ndim))
    found = None
    for part in parts:
        found = part if found is None else found & part
    return found


def masked(value: Packed, over: Sequence[int], fill: Any, rows: Any) -> Any:
    """Returns the array with `fill` where no element exists along some axes."""
    inside = together(value, over, rows)
    if inside is None:
        return value.x
    return jnp.where(inside, value.x, jnp.asarray(fill, value.x.dtype))
