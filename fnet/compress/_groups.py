"""Finds the axes of parameters from which the same indices must be removed together. Also calls a function with
parameters from which indices have been removed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, SequenceKey, keystr, tree_flatten_with_path

from fnet.jaxpr import TiedProgram, Traced, is_array, remaining_indices

Factors = tuple[int, ...]



@dataclasses.dataclass(frozen=True)
class Cut:
    """The indices that remain in the axes of an array after pruning.

    Attributes:
        shape: the original shape of the array.
        factors: for each axis, the sizes of its factors. For example, an axis that combines heads and the features of
            each head has two factors.
        kept: for each axis and factor, the indices that remain, or None for all indices.
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
        sizes = (math.prod(n if each is None else len(each) for n, each in zip(factors, kept))
                 for factors, kept in zip(self.factors, self.kept))
        return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)

    def original(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of an array before indices were removed. An axis without removed indices may have any
        size."""
        if len(shape) != len(self.shape):
            return shape
        return tuple(full if any(each is not None for each in kept) else n
                     for n, full, kept in zip(shape, self.shape, self.kept))


class _Output:
    def __init__(self, number):
        self.number = number


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """An array in the arguments of a call. `key` is the position of the array in (args, kwargs), as text, and `path` is
    the path of the array in the parameters or in the state."""

    key: str
    path: str
    role: str    # "params", "state" or "other"
    array: Any


class Call:
    """A traced call f(params, *args, **kwargs), and the axes of its arrays that must have equal sizes. Pruning can
    remove indices along the axes of the arrays in `params` and in the keyword argument `state`.

    Args:
        cuts: {key of a leaf: `Cut`}, for the arrays from which indices have already been removed. `Call` traces f with
            the original shapes of these arrays. The default is none.

    Attributes:
        program: the `TiedProgram`, which states the axes that must have equal sizes.
        leaves: the inputs of the program.
    """

    def __init__(self, f: Callable, args: tuple, kwargs: dict, cuts: Mapping[str, Cut] | None = None):
        cuts = cuts or {}
        paths, structure = tree_flatten_with_path((args, kwargs))
        inputs, known = [], {}
        for path, x in paths:
            if is_array(x):
                key, role = keystr(path), _role(path)
                leaf = _Leaf(key, keystr(path[2:], simple=True, separator="/"), role, x)
                if role != "other":
                    x = jax.ShapeDtypeStruct(cuts[key].original(x.shape) if key in cuts else x.shape, x.dtype)
                known[id(x)] = leaf
            inputs.append(x)
        args, kwargs = jax.tree.unflatten(structure, inputs)
        self.traced = traced = Traced(f, args, kwargs)
        self.leaves = [known[id(x)] for x in traced.arrays]
        hints = {i: cuts[leaf.key].factors for i, leaf in enumerate(self.leaves) if leaf.key in cuts}
        self.program = TiedProgram(traced.closed, [leaf.role != "other" for leaf in self.leaves],
                                   [leaf.role == "params" for leaf in self.leaves],
                                   _returned(traced, kwargs.get("state")), hints)

    def evaluate(self, cuts: Mapping[str, Cut]) -> Any:
        """Returns f's result for arrays from which the indices have already been removed, as described by `cuts`."""
        kept: dict[int, np.ndarray] = {}
        for i, leaf in enumerate(self.leaves):
            if leaf.key in cuts:
                self._read(i, cuts[leaf.key], kept)
        for i, leaf in enumerate(self.leaves):
            if (expected := self.program.shape(i, kept)) != tuple(leaf.array.shape):
                raise ValueError(f"shrunk function: {leaf.path or leaf.key!r} in {leaf.role}: expected shape "
                                 f"{expected}, got {tuple(leaf.array.shape)}; pass the parameters and the state that "
                                 "shrink returned")
        return self.traced.result(self.program.evaluate([leaf.array for leaf in self.leaves], kept))

    def _read(self, i, cut, kept):
        for axis, (atoms, wanted) in enumerate(zip(self.program.factors(i), cut.kept)):
            if all(each is None for each in wanted):
                continue
            sizes = tuple(map(self.program.atoms.size, atoms))
            why = "it splits the axis in another way" if sizes != cut.factors[axis] else next(
                (reason for atom, each in zip(atoms, wanted)
                 if each is not None and (reason := self.program.atoms.reason(atom))), None)
            if why:
                raise ValueError(f"shrunk function: axis {axis} of {self.leaves[i].path!r} was cut, but with these "
                                 f"arguments the function needs all of it ({why}). Call shrink with such arguments, or "
                                 "exclude the parameter with keep=")
            kept.update((atom, each) for atom, each in zip(atoms, wanted) if each is not None)


def _role(path) -> str:
    if path[:2] == (SequenceKey(0), SequenceKey(0)):
        return "params"
    return "state" if path[:2] == (SequenceKey(1), DictKey("state")) else "other"


def _returned(traced, state) -> dict[int, int]:
    """Finds the outputs of the program that are new values of inputs: the state in a result (y, state), and the values
    of flax.nnx variables. Returns {index of the output: index of the input}."""
    jaxpr = traced.closed.jaxpr
    result, modules = traced.tree([_Output(i) for i in range(len(jaxpr.outvars))])
    arrays, found = [] if modules is None else modules.arrays, {}
    for output, i in zip(arrays, range(len(traced.arrays) - len(arrays), len(traced.arrays))):
        if jaxpr.outvars[output.number] is not jaxpr.invars[i]:
            raise TypeError("shrink: the function updates flax.nnx variables in place. Split the module, and return "
                            "the new state: f(params, x, state=state) -> (y, new state)")
        found[output.number] = i
    if (state is None or not isinstance(result, tuple) or len(result) != 2
            or jax.tree.structure(result[1]) != jax.tree.structure(state)):
        return found
    inputs = {id(x): i for i, x in enumerate(traced.arrays)}
    pairs = zip(jax.tree.leaves(result[1]), jax.tree.leaves(state))
    return found | {output.number: inputs[id(x)] for output, x in pairs
                    if isinstance(output, _Output) and id(x) in inputs}


@dataclasses.dataclass(frozen=True)
class Group:
    """Axes of parameters, or factors of axes, from which the same indices must be removed.

    For example, a group can contain the axis of output channels of a convolution, the axis of its bias, and the axis of
    input channels of the next convolution.

    Attributes:
        atom: the number that identifies the group in the program.
        size: the number of indices.
        members: the axes of the group, as tuples (index of the leaf, axis, position of the factor in the axis).
        reason: the reason why no index can be removed, or "" if indices can be removed.
    """

    atom: int
    size: int
    members: tuple[tuple[int, int, int], ...]
    reason: str


def groups(call: Call) -> list[Group]:
    """Returns the groups of axes from which the same indices must be removed, for the parameters of a call.

    An axis can be the product of several factors. For example, an axis of size heads * head_dim has the factors heads
    and head_dim. Each factor of an axis belongs to one group of axes. Indices are removed from only one factor of each
    axis, the first factor whose size can change. If indices could be removed from several factors of an axis, indices
    are removed only from the first of these factors. The groups of the other factors keep all indices, and the
    attribute `reason` of these groups states the reason.
    """
    program, members, second = call.program, {}, set()
    for i, leaf in enumerate(call.leaves):
        if leaf.role == "params":
            for axis, atoms in enumerate(program.factors(i)):
                free = [atom for atom in atoms if program.atoms.reason(atom) is None]
                second.update(free[1:])
                for position, atom in enumerate(atoms):
                    members.setdefault(atom, []).append((i, axis, position))
    return [Group(atom, program.atoms.size(atom), tuple(each), program.atoms.reason(atom) or (
        "another factor of its axis is reduced" if atom in second else "")) for atom, each in members.items()]


def cuts(call: Call, kept: Mapping[int, np.ndarray]) -> dict[str, Cut]:
    """Returns {key of a leaf: `Cut`} for the leaves of the parameters and the state from which indices are removed."""
    found = {}
    for i, leaf in enumerate(call.leaves):
        factors = call.program.factors(i)
        if leaf.role != "other" and any(atom in kept for atoms in factors for atom in atoms):
            found[leaf.key] = Cut(tuple(leaf.array.shape),
                                  tuple(tuple(map(call.program.atoms.size, atoms)) for atoms in factors),
                                  tuple(tuple(kept.get(atom) for atom in atoms) for atoms in factors))
    return found


def apply_cuts(args: tuple, kwargs: dict, found: Mapping[str, Cut]) -> tuple[tuple, dict]:
    """Returns the arguments of a call without the removed indices."""
    return jax.tree.map_with_path(lambda path, x: found[keystr(path)].apply(x) if keystr(path) in found else x,
                                  (args, kwargs))
