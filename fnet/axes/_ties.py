"""Determines which axes of the values of a program must have equal sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fnet import _jax
from fnet.axes._atoms import Atoms, Axis
from fnet.axes._axis_map import Array, AxisMap
from fnet.axes._table import axis_map
from fnet.jaxpr._calls import CALLS, bodies, scan

Axes = tuple[Axis, ...]
_OPAQUE = {
    "while": "a while loop",
    "custom_vjp_call": "a custom_vjp",
    "custom_vmap_call": "a custom_vmap",
    "shard_map": "shard_map",
}


@dataclasses.dataclass(eq=False)
class Frame:
    """Maps each variable of a jaxpr to its axes, which are represented by ids (see `Atoms`).

    If several calls share a jaxpr, there is a separate `Frame` (a map from variables to axes) for
    each call.

    Attributes:
        jaxpr: the open jaxpr.
        axes: {variable: its axes}.
        inner: {id of an equation: the `Frame`s of the jaxprs inside the equation}.
        maps: {id of an equation: its `AxisMap`, whose letters are atoms}.
    """

    jaxpr: Any
    axes: dict
    inner: dict = dataclasses.field(default_factory=dict)
    maps: dict[int, AxisMap] = dataclasses.field(default_factory=dict)

    def of(self, v: Any) -> Axes:
        return () if isinstance(v, _jax.Literal) else self.axes[v]


def tie_axes(jaxpr: Any, inputs: Sequence[Axes], atoms: Atoms) -> Frame:
    """Determines the axes of each value of a jaxpr, and which of these axes must have equal sizes.

    Args:
        jaxpr: an open jaxpr.
        inputs: the axes of each input of the jaxpr.
        atoms: an `Atoms` object, which records constraints on the sizes of axes. The function calls
            `atoms.tie` for axes that must have equal sizes, and `atoms.freeze` for axes whose sizes
            cannot change.

    Returns:
        A `Frame` with the axes of all values of the jaxpr, including the values inside scans,
        branches and calls.
    """
    frame = Frame(jaxpr, dict(zip(jaxpr.invars, inputs)))
    for v in jaxpr.constvars:
        frame.axes[v] = atoms.axes(_shape(v))
    for eqn in jaxpr.eqns:
        ins, name = [frame.of(v) for v in eqn.invars], eqn.primitive.name
        if (axes := axis_map(eqn)) is not None:
            outs = _mapped(frame, eqn, ins, atoms, axes)
        elif name == "scan":
            outs = _scanned(frame, eqn, ins, atoms)
        elif name == "cond":
            outs = _branched(frame, eqn, ins, atoms)
        elif name in CALLS and name not in _OPAQUE:
            frame.inner[id(eqn)] = ((inner := tie_axes(bodies(eqn)[0].jaxpr, ins, atoms)),)
            outs = _results(inner, eqn, atoms)
        else:
            outs = _unknown(
                eqn, ins, atoms, _OPAQUE.get(name, f"an operation without a rule ({name})")
            )
        frame.axes.update(zip(eqn.outvars, outs))
    return frame


def _shape(v: Any) -> tuple[int, ...]:
    return tuple(getattr(v.aval, "shape", ()))


def _results(inner: Frame, eqn: Any, atoms: Atoms) -> list[Axes]:
    """Returns the axes of each output of a call or of a branch of a `lax.cond`.

    For an output that is a literal (a constant in the jaxpr), the function creates new axes without
    constraints on their sizes.
    """
    return [
        atoms.axes(_shape(v)) if isinstance(out, _jax.Literal) else inner.of(out)
        for out, v in zip(inner.jaxpr.outvars, eqn.outvars)
    ]


def _mapped(
    frame: Frame, eqn: Any, ins: Sequence[Axes], atoms: Atoms, axes: AxisMap
) -> Sequence[Axes]:
    """Replaces the letters of an equation's `AxisMap` by atoms, and ties them to the operands."""
    atom = {letter: atoms.new(size) for letter, size in axes.sizes.items()}

    def named(array: Array) -> Axes:
        return tuple(tuple(atom[letter] for letter in axis) for axis in array)

    found = AxisMap(
        {atom[letter]: size for letter, size in axes.sizes.items()},
        list(map(named, axes.operands)),
        list(map(named, axes.results)),
        {atom[letter]: why for letter, why in axes.fixed.items()},
    )
    for given, array in zip(ins, map(named, axes.operands)):
        atoms.tie_all(given, array)
    for each, why in found.fixed.items():
        atoms.freeze(why, (each,))
    frame.maps[id(eqn)] = found
    return [named(array) for array in axes.results]


def _unknown(eqn: Any, ins: Sequence[Axes], atoms: Atoms, why: str) -> list[Axes]:
    outs = [atoms.axes(_shape(v)) for v in eqn.outvars]
    for axes in (*ins, *outs):
        atoms.freeze(why, *axes)
    return outs


def _scanned(frame: Frame, eqn: Any, ins: Sequence[Axes], atoms: Atoms) -> list[Axes]:
    parts = scan(eqn)
    consts, carry, slices = parts.split(ins)
    for axes in slices:
        atoms.freeze("scanned over", axes[0])
    inner = tie_axes(parts.jaxpr, [*consts, *carry, *(axes[1:] for axes in slices)], atoms)
    frame.inner[id(eqn)] = (inner,)
    outs = [inner.of(v) for v in parts.jaxpr.outvars]
    for before, after in zip(carry, outs):
        atoms.tie_all(before, after)
    length = atoms.axes((parts.length,))[0]
    atoms.freeze("scanned over", length)
    stacked = [
        (length, *(axes or atoms.axes(_shape(v)[1:])))
        for axes, v in zip(outs[parts.carry :], eqn.outvars[parts.carry :])
    ]
    return [*carry, *stacked]


def _branched(frame: Frame, eqn: Any, ins: Sequence[Axes], atoms: Atoms) -> list[Axes]:
    frames = tuple(tie_axes(branch.jaxpr, ins[1:], atoms) for branch in bodies(eqn))
    frame.inner[id(eqn)] = frames
    outs = [_results(inner, eqn, atoms) for inner in frames]
    for other in outs[1:]:
        for x, y in zip(outs[0], other):
            atoms.tie_all(x, y)
    return outs[0]
