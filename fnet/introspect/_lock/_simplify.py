"""Writes equations that mean the same in one form: those that only move elements, and scalars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from fnet.introspect._lock._program import Node, Operand, Ref, Section
from fnet.jaxpr import POINTWISE, options

_MOVES = ("reshape", "broadcast_in_dim", "transpose")
_SCALARS = POINTWISE | {"select_n", "clamp", "add_any"}
Written = tuple[str, tuple[Operand, ...], str]
"""An operation: its name, operands and parameters."""


class Nodes(Protocol):
    """What a `Simplifier` needs of the nodes so far: the nodes, the types of their results, and a
    function that adds one."""

    nodes: list[Node]
    avals: list[tuple]

    def add(
        self, op: str, operand: Operand, options: str, aval: Any, section: Section, /
    ) -> Ref: ...


class Simplifier:
    """Rewrites an equation, given its operands: to other results, a list, or to an operation."""

    def __init__(self, nodes: Nodes):
        self.all = nodes

    def __call__(
        self, eqn: Any, name: str, operands: tuple[Operand, ...], written: str, section: Section
    ) -> list[Operand] | Written:
        if name == "convert_element_type":
            return self.converted(eqn, operands[0], section)
        if name in _MOVES:
            return [self.moved(eqn, name, operands[0], section)]
        if name == "integer_pow" and options(eqn).y == 2:
            return "mul", operands * 2, ""
        if name == "reduce_precision" and _keeps(eqn.outvars[0].aval.dtype, **eqn.params):
            return [operands[0]]  # JAX marks values that jax.checkpoint saves with it
        if name in _SCALARS:
            return name, self.scalars(eqn, operands, section), written
        return name, operands, written

    def scalars(
        self, eqn: Any, operands: tuple[Operand, ...], section: Section
    ) -> tuple[Operand, ...]:
        """Writes operands that are one number as that number, if another one has the shape of the
        result, and the broadcasts that an elementwise operation implies."""
        numbers = [self.number(each) for each in operands]
        if all(number is not None for number in numbers):
            return operands
        target = eqn.outvars[0].aval
        whole = []
        for operand, number, v in zip(operands, numbers, eqn.invars):
            if number is None and v.aval.shape != target.shape:
                axes = range(len(target.shape) - len(v.aval.shape), len(target.shape))
                move = _Move(self.all, operand, v.aval, section)
                whole.append(move.spread(target.shape, list(axes)))
            else:
                whole.append(operand if number is None else number)
        return tuple(whole)

    def number(self, operand: Operand) -> str | None:
        """Returns the number that all elements of an operand have, or None."""
        if isinstance(operand, str):
            return operand
        node = self.all.nodes[operand.node]
        (number,) = node.operands if node.op == "fill" else (None,)
        return number if isinstance(number, str) else None

    def converted(self, eqn: Any, operand: Operand, section: Section) -> list[Operand] | Written:
        source, target = eqn.invars[0].aval, eqn.outvars[0].aval
        if source.dtype == target.dtype:
            return [operand]
        number = self.number(operand)
        if number is None or jax.dtypes.issubdtype(target.dtype, jax.dtypes.extended):
            return "convert", (operand,), ""
        return [self.filled(_cast(number, target.dtype), target, section)]

    def filled(self, number: str, aval: Any, section: Section) -> Operand:
        return self.all.add("fill", number, "", aval, section) if aval.shape else number

    def moved(self, eqn: Any, name: str, operand: Operand, section: Section) -> Operand:
        source, target = eqn.invars[0].aval, eqn.outvars[0].aval
        number = self.number(operand)
        if number is not None:
            return self.filled(number, target, section)
        move = _Move(self.all, operand, source, section)
        if name == "reshape":
            return move.reshape(target.shape)
        if name == "broadcast_in_dim":
            return move.spread(target.shape, options(eqn).broadcast_dimensions)
        return move.permuted(target.shape, options(eqn).permutation)


class _Move:
    """A value whose elements are moved, in as few steps as possible.

    Axes of size 1 are removed before a transpose or broadcast, and added after it, so that it does
    not matter where they were.
    """

    def __init__(self, nodes: Nodes, operand: Operand, aval: Any, section: Section):
        self.all, self.operand, self.section = nodes, operand, section
        self.dtype, self.shape = aval.dtype, tuple(aval.shape)

    def before(self, op: str) -> Node | None:
        """The node of the value, if it is an operation called `op`."""
        node = self.all.nodes[self.operand.node] if isinstance(self.operand, Ref) else None
        return node if node and node.op == op else None

    def undo(self, node: Node) -> None:
        self.operand = node.operands[0]
        if isinstance(self.operand, Ref):
            self.shape = tuple(self.all.avals[self.operand.node][self.operand.output].shape)

    def put(self, op: str, axes: Sequence[int] | None, shape: Sequence[Any]) -> None:
        written = "" if axes is None else f"axes=[{','.join(map(str, axes))}]"
        aval = jax.ShapeDtypeStruct(tuple(shape), self.dtype)
        self.operand = self.all.add(op, self.operand, written, aval, self.section)
        self.shape = aval.shape

    def reshape(self, shape: Sequence[Any]) -> Operand:
        if (node := self.before("reshape")) and self.shape != tuple(shape):
            self.undo(node)
        if self.shape != tuple(shape):
            self.put("reshape", None, shape)
        return self.operand

    def without_ones(self) -> list[int]:
        """Removes the axes of size 1, and returns the other ones."""
        wide = [axis for axis, size in enumerate(self.shape) if size != 1]
        self.reshape([self.shape[axis] for axis in wide])
        return wide

    def permuted(self, target: Sequence[Any], order: Sequence[int]) -> Operand:
        wide = self.without_ones()
        self.transpose([wide.index(axis) for axis in order if axis in wide])
        return self.reshape(target)

    def spread(self, target: Sequence[Any], axes: Sequence[int]) -> Operand:
        """Broadcasts the value; its axes become `axes` of the target."""
        wide = self.without_ones()
        if math.prod(self.shape) != math.prod(target):
            kept = [axis for axis, size in enumerate(target) if size != 1]
            places = [kept.index(axes[axis]) for axis in wide]
            self.broadcast([target[axis] for axis in kept], places)
        return self.reshape(target)

    def transpose(self, order: Sequence[int]) -> None:
        shape = [self.shape[axis] for axis in order]
        if node := self.before("transpose"):
            order = [_axes(node)[axis] for axis in order]
            self.undo(node)
        if list(order) != sorted(order):
            self.put("transpose", order, shape)

    def broadcast(self, shape: Sequence[Any], axes: Sequence[int]) -> None:
        if node := self.before("broadcast"):
            axes = [axes[axis] for axis in _axes(node)]
            self.undo(node)
        self.put("broadcast", axes, shape)


def _keeps(dtype: Any, *, exponent_bits: int, mantissa_bits: int, **_: Any) -> bool:
    """Whether a dtype has no more bits than these."""
    info = jax.numpy.finfo(dtype)
    return exponent_bits >= info.nexp and mantissa_bits >= info.nmant


def _axes(node: Node) -> list[int]:
    inside = node.options.removeprefix("axes=[").removesuffix("]")
    return [int(axis) for axis in inside.split(",") if axis]


def _cast(number: str, dtype: Any) -> str:
    """Returns a number as text in another dtype."""
    value: Any = {"true": True, "false": False}.get(number)
    if value is None:
        value = int(number) if number.lstrip("-").isdigit() else complex(number)
    if isinstance(value, complex) and not jax.numpy.issubdtype(dtype, np.complexfloating):
        value = value.real
    with np.errstate(all="ignore"):
        return str(np.asarray(value).astype(dtype)[()]).replace(" ", "").lower()
