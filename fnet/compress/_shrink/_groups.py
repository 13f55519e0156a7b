"""Finds parameter axes that must be pruned at the same indices, and calls functions with pruned
parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, SequenceKey, keystr, tree_flatten_with_path

from fnet.axes import TiedProgram, remaining_indices
from fnet.jaxpr import Traced, is_array

Factors = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The indices that remain in the axes of an array after pruning.

    Attributes:
        shape: the original shape of the array.
        factors: for each axis, a tuple of sizes (factors) whose product is the size of the axis.
            For example, the tuple is (num_heads, head_dim) for an axis of size num_heads *
            head_dim, which a reshape can split into two axes.
        kept: for each axis of the array, a tuple of arrays with the indices that remain after
            pruning. If a reshape splits the axis into several axes, the tuple contains one array
            for each of these axes. For example, the tuple for an axis of size num_heads * head_dim
            contains the indices of the remaining attention heads, and of the remaining features in
            each head. None instead of an array means that all indices remain.
    """

    shape: tuple[int, ...]
    factors: tuple[Factors, ...]
    kept: tuple[tuple[np.ndarray | None, ...], ...]

    def apply(self, x: Any) -> Any:
        """Removes from an array all indices that are not in `kept`."""
        for axis, (factors, kept) in enumerate(zip(self.factors, self.kept)):
            if any(each is not None for each in kept):
                x = x.take(remaining_indices(factors, kept), axis=axis)
        return x

    def type(self, x: Any) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the result of `apply`."""
        sizes = (
            math.prod(n if each is None else len(each) for n, each in zip(factors, kept))
            for factors, kept in zip(self.factors, self.kept)
        )
        return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)

    def original(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that an array had before pruning. `shape` is the shape after pruning,
        and may have any size along the axes that were not pruned."""
        if len(shape) != len(self.shape):
            return shape
        return tuple(
            full if any(each is not None for each in kept) else n
            for n, full, kept in zip(shape, self.shape, self.kept)
        )


class _Output:
    def __init__(self, number):
        self.number = number


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """An array in the arguments of a traced function. `key` is the position of the array in (args,
    kwargs), as text, and `path` is the path of the array in the parameters or in the state."""

    key: str
    path: str
    role: str  # "params", "state" or "other"
    array: Any


class Call:
    """A traced call f(params, *args, **kwargs). Pruning can remove indices along the axes of the
    arrays in `params` and in the keyword argument `state`.

    Args:
        cuts: {key of a leaf: `Cut`} for the arrays that have already been pruned. A `Cut` states
            the indices that remain in an array. `Call` traces f with the original shapes of the
            pruned arrays. Default None.

    Attributes:
        program: the `TiedProgram`, which states the axes that must have equal sizes.
        leaves: the inputs of the program.
    """

    def __init__(
        self, f: Callable, args: tuple, kwargs: dict, cuts: Mapping[str, Cut] | None = None
    ):
        cuts = cuts or {}
        paths, structure = tree_flatten_with_path((args, kwargs))
        inputs, known = [], {}
        for path, x in paths:
            if is_array(x):
                key, role = keystr(path), _role(path)
                leaf = _Leaf(key, keystr(path[2:], simple=True, separator="/"), role, x)
                if role != "other":
                    x = jax.ShapeDtypeStruct(
                        cuts[key].original(x.shape) if key in cuts else x.shape, x.dtype
                    )
                known[id(x)] = leaf
            inputs.append(x)
        args, kwargs = jax.tree.unflatten(structure, inputs)
        self.traced = traced = Traced(f, args, kwargs)
        self.leaves = [known[id(x)] for x in traced.arrays]
        hints = {
            i: cuts[leaf.key].factors for i, leaf in enumerate(self.leaves) if leaf.key in cuts
        }
        self.program = TiedProgram(
            traced.closed,
            [leaf.role != "other" for leaf in self.leaves],
            [leaf.role == "params" for leaf in self.leaves],
            _returned(traced, kwargs.get("state")),
            hints,
        )

    def evaluate(self, cuts: Mapping[str, Cut]) -> Any:
        """Returns the result of the traced function f for pruned arguments. `cuts` states which
        indices remain in each pruned array."""
        kept: dict[int, np.ndarray] = {}
        for i, leaf in enumerate(self.leaves):
            if leaf.key in cuts:
                self._read(i, cuts[leaf.key], kept)
        for i, leaf in enumerate(self.leaves):
            if (expected := self.program.shape(i, kept)) != tuple(leaf.array.shape):
                raise ValueError(
                    f"shrunk function: {leaf.path or leaf.key!r} in {leaf.role}: expected shape "
                    f"{expected}, got {tuple(leaf.array.shape)}; pass the parameters and the state "
                    "that shrink returned"
                )
        return self.traced.result(self.program.evaluate([leaf.array for leaf in self.leaves], kept))

    def _read(self, i, cut, kept):
        for axis, (atoms, wanted) in enumerate(zip(self.program.factors(i), cut.kept)):
            if all(each is None for each in wanted):
                continue
            sizes = tuple(map(self.program.atoms.size, atoms))
            why = (
                "it splits the axis in another way"
                if sizes != cut.factors[axis]
                else next(
                    (
                        reason
                        for atom, each in zip(atoms, wanted)
                        if each is not None and (reason := self.program.atoms.reason(atom))
                    ),
                    None,
                )
            )
            if why:
                raise ValueError(
                    f"shrunk function: axis {axis} of {self.leaves[i].path!r} was cut, but with "
                    f"these arguments the function needs all of it ({why}). Call shrink with such "
                    "arguments, or exclude the parameter with keep="
                )
            kept.update((atom, each) for atom, each in zip(atoms, wanted) if each is not None)


def _role(path) -> str:
    if path[:2] == (SequenceKey(0), SequenceKey(0)):
        return "params"
    return "state" if path[:2] == (SequenceKey(1), DictKey("state")) else "other"


def _returned(traced, state) -> dict[int, int]:
    """Returns {index of an output: index of an input} for each output of the program that is the
    new value of an input. If the function returns (y, new state), each array of the new state is
    the new value of an array of the old state. For each variable of a flax.nnx module in the
    arguments, the program has one input (the value before the call) and one output (the value after
    the call). This output is the new value of this input."""
    jaxpr = traced.closed.jaxpr
    result, modules = traced.tree([_Output(i) for i in range(len(jaxpr.outvars))])
    arrays, found = [] if modules is None else modules.arrays, {}
    for output, i in zip(arrays, range(len(traced.arrays) - len(arrays), len(traced.arrays))):
        if jaxpr.outvars[output.number] is not jaxpr.invars[i]:
            raise TypeError(
                "shrink: the function updates flax.nnx variables in place. Split the module, and "
                "return the new state: f(params, x, state=state) -> (y, new state)"
            )
        found[output.number] = i
    if (
        state is None
        or not isinstance(result, tuple)
        or len(result) != 2
        or jax.tree.structure(result[1]) != jax.tree.structure(state)
    ):
        return found
    inputs = {id(x): i for i, x in enumerate(traced.arrays)}
    pairs = zip(jax.tree.leaves(result[1]), jax.tree.leaves(state))
    return found | {
        output.number: inputs[id(x)]
        for output, x in pairs
        if isinstance(output, _Output) and id(x) in inputs
    }


@dataclasses.dataclass(frozen=True)
class Group:
    """A set of parameter axes that must be pruned at the same indices.

    For example, a group can contain the axis of output channels of a convolution, the axis of its
    bias, and the axis of input channels of the next convolution. If a reshape splits a parameter
    axis into several axes, these axes can belong to different groups. For example, a parameter axis
    of size num_heads * head_dim can be split into an axis of attention heads and an axis of
    features.

    Attributes:
        atom: an integer that identifies the group of parameter axes in the traced program.
        size: the number of indices.
        members: the parameter axes of the group, as tuples (index of the parameter in
            `Call.leaves`, axis, position). If a reshape splits a parameter axis into several axes,
            such as [num_heads, head_dim], `position` is the index of one of these axes: 0 for
            num_heads, 1 for head_dim. If no reshape splits the parameter axis, `position` is 0.
        reason: the reason why no index can be removed, or "" if indices can be removed.
    """

    atom: int
    size: int
    members: tuple[tuple[int, int, int], ...]
    reason: str


def groups(call: Call) -> list[Group]:
    """Returns the groups of parameter axes that must be pruned at the same indices, for a traced
    call.

    If a reshape splits a parameter axis into several axes, at most one of them is pruned: the first
    that can be pruned. For example, an axis of size num_heads * head_dim can be split into an axis
    of attention heads and an axis of features. If the axis of attention heads can be pruned, the
    axis of features is not pruned, and the attribute `reason` of its `Group` states why.
    """
    program, members, second = call.program, {}, set()
    for i, leaf in enumerate(call.leaves):
        if leaf.role == "params":
            for axis, atoms in enumerate(program.factors(i)):
                free = [atom for atom in atoms if program.atoms.reason(atom) is None]
                second.update(free[1:])
                for position, atom in enumerate(atoms):
                    members.setdefault(atom, []).append((i, axis, position))
    return [
        Group(
            atom,
            program.atoms.size(atom),
            tuple(each),
            program.atoms.reason(atom)
            or ("another factor of its axis is reduced" if atom in second else ""),
        )
        for atom, each in members.items()
    ]


def cuts(call: Call, kept: Mapping[int, np.ndarray]) -> dict[str, Cut]:
    """Returns {key of a leaf: `Cut`} for the pruned leaves of the parameters and the state."""
    found = {}
    for i, leaf in enumerate(call.leaves):
        factors = call.program.factors(i)
        if leaf.role != "other" and any(atom in kept for atoms in factors for atom in atoms):
            found[leaf.key] = Cut(
                tuple(leaf.array.shape),
                tuple(tuple(map(call.program.atoms.size, atoms)) for atoms in factors),
                tuple(tuple(kept.get(atom) for atom in atoms) for atoms in factors),
            )
    return found


def apply_cuts(args: tuple, kwargs: dict, found: Mapping[str, Cut]) -> tuple[tuple, dict]:
    """Prunes the arrays in the arguments of a call, and returns the new arguments. `found` contains
    a `Cut` for each array to prune."""
    return jax.tree.map_with_path(
        lambda path, x: found[keystr(path)].apply(x) if keystr(path) in found else x, (args, kwargs)
    )
