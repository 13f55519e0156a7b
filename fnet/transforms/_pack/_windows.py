"""Convolutions and pooling over the positions of texts: one operation for each position of the
window, on a text that is moved by so many places, with zeros, or -inf, beyond its borders."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from fnet import jaxpr
from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._padded import NoRule, highest, lowest
from fnet.transforms._pack._moves import Source, picked, reduced
from fnet.transforms._pack._rules import Call, rule
from fnet.transforms._pack._values import (
    ROW,
    TEXT,
    Packed,
    Time,
    group_of,
    masked,
    separated,
)


def _time_of(value: Packed, axis: int) -> Time | None:
    """The size of an axis of positions, or None for a fixed axis."""
    (role, *more) = value.groups[axis]
    if more or role in (TEXT, ROW):
        raise NoRule("its windows reach over several texts")
    return role if isinstance(role, Time) else None


def _number(size: Any, rows: Any) -> Any:
    return rows.value(size) if _sizes.is_open(size) else int(size)


@rule("conv_general_dilated")
def _convolution(call: Call) -> list:
    options = call.options
    image, weights, result = options.dimension_numbers
    x, kernel = call.settled()
    x, kernel = (dataclasses.replace(v, seed=None) for v in (x, kernel))
    spatial = [i for i, axis in enumerate(image[2:]) if _time_of(x, axis)]
    if len(spatial) > 1 or (
        spatial and kernel.tokens and not _time_of(kernel, weights[2:][spatial[0]])
    ):
        raise NoRule("its windows have two axes of positions")
    if kernel.tokens:
        if not spatial:
            raise NoRule("its kernel is made of tokens")
        return [_of_kernel(call, x, kernel, spatial[0])]
    if any(role in (TEXT, ROW) for role in (*x.groups[image[1]], *kernel.roles)):
        raise NoRule("it sums over texts")
    groups: list[Any] = [None] * len(call.result())
    for axis, size in enumerate(call.result()):
        groups[axis] = group_of(size, call.rows) if axis in result[2:] else None
    groups[result[0]] = x.groups[image[0]]
    groups[result[1]] = kernel.groups[weights[0]]
    if not spatial:
        return call.batched([x, kernel], [groups])
    (where,) = spatial
    axis, taps = image[2:][where], weights[2:][where]
    time = groups[result[2:][where]][0]
    low = _number(options.padding[where][0], call.rows)
    ones = _replaced_at(options, where)
    call.note("one product for each position of the window, which stops at a text's borders")
    total = None
    for k in range(int(call.shape(1)[taps])):
        source = Source(
            k * options.rhs_dilation[where] - low,
            options.window_strides[where],
            options.lhs_dilation[where],
        )
        (at,) = x.axes_of(axis)
        moved = picked(x, at, time, source, 0, call.rows)
        one = kernel.like(lax.slice_in_dim(kernel.x, k, k + 1, axis=kernel.axes_of(taps)[0]),
                          groups=_with(kernel.groups, taps, (1,)))  # fmt: skip
        (y,) = call.batched([moved, one], [groups], **ones)
        total = y if total is None else y.like(total.x + y.x)
    return [total]


def _with(groups: Sequence, axis: int, group: tuple) -> tuple:
    return (*groups[:axis], group, *groups[axis + 1 :])


def _replaced_at(options: Any, where: int) -> dict:
    """The parameters of a convolution with windows of one element along a spatial axis."""
    changes: dict[str, Any] = {}
    for name in ("window_strides", "lhs_dilation", "rhs_dilation"):
        changes[name] = _with(tuple(getattr(options, name)), where, 1)  # type: ignore[arg-type]
    changes["padding"] = _with(tuple(map(tuple, options.padding)), where, (0, 0))
    return changes


def _of_kernel(call: Call, x: Packed, ct: Packed, where: int) -> Packed:
    """The gradient of a kernel: for each position of its window the sum over all tokens."""
    options, rows = call.options, call.rows
    image, weights, result = options.dimension_numbers
    axis, taps, out = image[2:][where], weights[2:][where], result[2:][where]
    if x.groups[image[1]] != (ROW,) or ct.groups[weights[1]] != (ROW,) or x.lead or ct.lead:
        raise NoRule("its kernel is made of tokens")
    if not isinstance(call.result()[out], int):
        raise NoRule("its kernel is made of tokens")
    time = ct.groups[taps][0]
    low = _number(options.padding[where][0], rows)
    kernel = ct.like(masked(ct, [*ct.axes_of(taps), *ct.axes_of(weights[1])], 0, rows))
    ones = _replaced_at(options, where)
    groups = [(int(n),) for n in call.result()]
    groups[out] = (1,)
    call.note("what exists is summed, for each position of the window")
    parts = []
    for k in range(int(call.result()[out])):
        source = Source(
            k * options.window_strides[where] - low,
            options.rhs_dilation[where],
            options.lhs_dilation[where],
        )
        moved = picked(x, x.axes_of(axis)[0], time, source, 0, rows)
        parts.append(_summed(call, moved, kernel, ones, groups, where))
    y = lax.concatenate(parts, out)
    return separated(y, [(int(n),) for n in call.result()], None, rows)


def _summed(call: Call, x: Packed, kernel: Packed, ones: dict, groups: list, where: int) -> Any:
    options = call.options
    if (
        len(options.window_strides) > 1
        or options.feature_group_count != 1
        or (options.batch_group_count != 1)
    ):
        return call.batched([x, kernel], [groups], **ones)[0].x
    image, weights, result = options.dimension_numbers
    spelled = [dict(zip(spec, names)) for spec, names in ((image, "bft"), (weights, "oft"))]
    left, right = ("".join(names[i] for i in range(3)) for names in spelled)
    y = jnp.einsum(
        f"{left},{right}->bo",
        x.x,
        kernel.x,
        precision=options.precision,
        preferred_element_type=call.eqn.outvars[0].aval.dtype,
    )
    y = y[..., None]  # [b, o, 1]
    return jnp.transpose(y, [result.index(i) for i in range(3)])


_POOLS: dict[str, Callable | None] = {
    "reduce_window_max": lowest,
    "reduce_window_min": highest,
    "reduce_window_sum": None,
}
_JOIN: dict[str, Callable] = {
    "reduce_window_max": jnp.maximum,
    "reduce_window_min": jnp.minimum,
    "reduce_window_sum": jnp.add,
}


def _windowed(windows: Sequence, padding: Sequence, steps: Sequence) -> list[int]:
    """The axes along which a window is more than one element."""
    return [
        i
        for i, (n, pad, step) in enumerate(zip(windows, padding, steps))
        if (str(n), str(pad[0]), str(pad[1]), step) != ("1", "0", "0", 1)
    ]


@rule(*_POOLS)
def _pool(call: Call) -> list:
    (value,), options, rows = call.settled(), call.options, call.rows
    name = call.eqn.primitive.name
    value = dataclasses.replace(value, seed=None)
    identity = _POOLS[name]
    fill = identity(value.x.dtype) if identity else 0
    ones = (1,) * len(value.groups)
    inner, dilation = options.base_dilation or ones, options.window_dilation or ones
    windows, padding = list(options.window_dimensions), list(map(tuple, options.padding))
    steps = list(options.window_strides)
    for axis in _windowed(windows, padding, steps):
        time = _time_of(value, axis)
        if time is None:
            continue
        (at,) = value.axes_of(axis)
        if _sizes.is_open(windows[axis]):
            value = _whole_window(call, value, axis, windows[axis], padding[axis])
        else:
            low = _number(padding[axis][0], rows)
            new = group_of(call.result()[axis], rows)[0]
            if not isinstance(new, Time):
                raise NoRule("it has a fixed number of windows in texts of any length")
            call.note("each window stops at its text's borders")
            parts = [
                picked(value, at, new, Source(k * dilation[axis] - low, steps[axis], inner[axis]),
                       fill, rows)
                for k in range(int(windows[axis]))
            ]  # fmt: skip
            value = parts[0].like(functools.reduce(_JOIN[name], [part.x for part in parts]))
        windows[axis], padding[axis], steps[axis] = 1, (0, 0), 1
        inner, dilation = _with(tuple(inner), axis, 1), _with(tuple(dilation), axis, 1)
    if not _windowed(windows, padding, steps):
        return [value]
    groups = list(value.groups)
    for axis in _windowed(windows, padding, steps):
        groups[axis] = (int(call.result()[axis]),)
    return call.batched(
        [value],
        [tuple(groups)],
        window_dimensions=tuple(map(int, windows)),
        padding=tuple(padding),
        window_strides=tuple(steps),
        base_dilation=tuple(inner),
        window_dilation=tuple(dilation),
    )


def _whole_window(call: Call, value: Packed, axis: int, window: Any, padding: tuple) -> Packed:
    """A window that is the whole text."""
    if str(window) != str(call.shape(0)[axis]) or str(call.result()[axis]) != "1":
        raise NoRule("the size of its windows depends on a text's length")
    kind = call.eqn.primitive.name.removeprefix("reduce_window_")
    found = reduced(value, kind, value.axes_of(axis), call.rows)
    call.note(f"the {kind} is taken within each text")
    groups = (*found.groups[:axis], (1,), *found.groups[axis:])
    at = int(found.lead is not None) + sum(map(len, found.groups[:axis]))
    return found.like(jnp.expand_dims(found.x, at), groups=groups)


@rule("select_and_scatter_add")
def _pool_backward(call: Call) -> list:
    source, value = (dataclasses.replace(v, seed=None) for v in call.settled())
    options, rows = call.options, call.rows
    windows, steps = options.window_dimensions, options.window_strides
    axes = _windowed(windows, options.padding, steps)
    times = [axis for axis in axes if _time_of(value, axis)]
    if not times:
        return call.batched([source, value], [value.groups])
    if len(axes) > 1 or _sizes.is_open(windows[axes[0]]):
        raise NoRule("its windows have two axes")
    (axis,) = axes
    old, new = value.groups[axis][0], source.groups[axis][0]
    if not isinstance(new, Time) or source.lead != value.lead:
        raise NoRule("it has a fixed number of windows in texts of any length")
    call.note("each window stops at its text's borders")
    (at,) = value.axes_of(axis)
    largest = jaxpr.selects_largest(call.eqn)
    fill = (lowest if largest else highest)(value.x.dtype)
    low, step = _number(options.padding[axis][0], rows), steps[axis]
    parts = [
        picked(value, at, new, Source(k - low, step), fill, rows).x
        for k in range(int(windows[axis]))
    ]
    best = (jnp.argmax if largest else jnp.argmin)(jnp.stack(parts), 0)
    total: Any = 0
    for k in range(len(parts)):
        mine = source.like(jnp.where(best == k, source.x, jnp.zeros((), source.x.dtype)))
        total = total + picked(mine, at, old, Source(low - k, 1, step), 0, rows).x
    return [value.like(total)]
