"""Finds the results of a function that are the new values of its state, such as the statistics of a
batch normalization.

State is recognized by the structure of its tree and by the flow of data, never by shapes alone: a
metric may have the shape of a counter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fnet import _jax
from fnet.jaxpr import bodies, scan


class Place(NamedTuple):
    """A subtree of the results of a function: its path and the indices of its leaves."""

    path: str
    leaves: tuple[int, ...]


class Program(NamedTuple):
    """A traced function whose results may contain new state.

    Attributes:
        jaxpr: the open jaxpr, with one output for each leaf of the results.
        inputs: for each input of the jaxpr, the argument to which it belongs: (position of the
            argument, index of the leaf), "index" for the number of the slice, "module" for an array
            of a flax.nnx module, or "batch" for a slice of the batch.
        arguments: {position: tree} for the arguments that are not batched.
        results: the tree of the results, with a `jax.ShapeDtypeStruct` for each leaf.
    """

    jaxpr: Any
    inputs: Sequence[Any]
    arguments: dict[int, Any]
    results: Any


def declared_state(program: Program, positions: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Returns {position of an argument: indices of the results that are its new value} for the
    arguments in `positions`. Raises a ValueError if no result, or more than one, has the structure
    of the argument."""
    found, flow = {}, _Flow(program)
    for position in positions:
        argument = program.arguments[position]
        places = list(_alike(program, argument))
        if len(places) > 1:  # a gradient has the structure of its argument, too
            own = flow.of_argument(position, 0, len(jax.tree.leaves(argument)))
            places = [
                place
                for place in places
                if not flow.derivative(place) and any(own[i] for i in place.leaves)
            ]
        if len(places) != 1:
            what = (
                f"the results at {', '.join(place.path for place in places)} all have"
                if places
                else "no result has"
            )
            raise ValueError(
                f"microbatch: carry= names argument {position}, whose new value the function must "
                f"return with the same tree structure, shapes and dtypes; {what} those of the "
                f"argument: {_described(argument)}"
            )
        found[position] = places[0].leaves
    return found


def inferred_state(program: Program) -> dict[int, tuple[int, ...]]:
    """Returns {position of an argument: indices of the results that are its new value} for the
    arguments that are certainly state: their integers and keys come back with values that depend on
    the argument and not on the batch.

    Raises:
        ValueError: a result may be new state, or a metric to average.
    """
    found: dict[int, tuple[int, ...]] = {}
    claimed: set[int] = set()
    flow = _Flow(program)
    for position, argument in program.arguments.items():
        for path, part, first in _subtrees(argument):
            exact = [k for k, x in enumerate(jax.tree.leaves(part)) if not _inexact(x)]
            if (position, path) == (0, "") and not exact:
                continue  # parameters, whose gradients have the same structure
            for place in _alike(program, part):
                if not claimed.isdisjoint(place.leaves) or flow.derivative(place):
                    continue
                own = flow.of_argument(position, first, len(place.leaves))
                if not any(own[i] for i in place.leaves):
                    continue
                claimed.update(place.leaves)
                numbers = [place.leaves[k] for k in exact]
                certain = numbers and all(own[i] and not flow.of_batch[i] for i in numbers)
                if path or not certain or position in found:
                    raise _undeclared(place, position, path)
                found[position] = place.leaves
    _check_counts(program, flow, claimed)
    return found


def _undeclared(place, position, path) -> ValueError:
    carry = (
        "carry= and its position, after you made it an argument of its own"
        if path
        else f"carry={position}"
    )
    return ValueError(
        f"microbatch: the result{place.path} has the structure of argument {position}{path} and is "
        "computed from it. Is it the new value of state, such as statistics of a batch "
        f"normalization? Then pass {carry}: each slice starts with the state of the slice before. "
        "If it is a value to average or sum over the slices, pass carry=()"
    )


def _check_counts(program, flow, claimed) -> None:
    """Raises a ValueError if an integer result is computed from other integers, but not from the
    batch: a counter, whose sum over the slices would be wrong."""
    results = jax.tree.leaves_with_path(program.results)
    for i, (path, x) in enumerate(results):
        counts = i not in claimed and jnp.issubdtype(x.dtype, jnp.integer)
        if counts and flow.of_integers[i] and not flow.of_batch[i]:
            raise ValueError(
                f"microbatch: the result{jax.tree_util.keystr(path)} is an integer that is "
                "computed from another integer and not from the batch, such as a counter. Its sum "
                "over the slices would be wrong. Pass the state as an argument of its own, which "
                "is not in argnums=, return its new value with the same structure, and name its "
                "position in carry=. If the sum is right, pass carry=()"
            )


class _Flow:
    """What the results of a program are computed from: for each result a bool."""

    def __init__(self, program: Program):
        self._program = program

    def of_argument(self, position: int, first: int, count: int) -> list[bool]:
        """From the leaves number first, ..., first + count - 1 of an argument."""
        chosen = {(position, k) for k in range(first, first + count)}
        return self._reached([source in chosen for source in self._program.inputs])

    def derivative(self, place: Place) -> bool:
        """Whether a backward pass computes a part of a place in the results."""
        return any(self._backward[i] for i in place.leaves)

    @functools.cached_property
    def of_batch(self) -> list[bool]:
        return self._reached([source == "batch" for source in self._program.inputs])

    @functools.cached_property
    def of_integers(self) -> list[bool]:
        """From integers, bools and keys outside of the batch."""
        jaxpr = self._program.jaxpr
        given = [
            source not in ("batch", "index") and not _inexact(v.aval)
            for v, source in zip(jaxpr.invars, self._program.inputs)
        ]
        return self._reached(given, [not _inexact(v.aval) for v in jaxpr.constvars])

    @functools.cached_property
    def _backward(self) -> list[bool]:
        transposed = lambda eqn: "transpose(" in _jax.name_stack(eqn)
        return reached(self._program.jaxpr, [False] * len(self._program.inputs), transposed)

    def _reached(self, inputs, constants=()) -> list[bool]:
        return reached(self._program.jaxpr, inputs, lambda eqn: False, constants)


def reached(
    jaxpr: Any,
    inputs: Sequence[bool],
    starts: Callable[[Any], bool],
    constants: Sequence[bool] = (),
) -> list[bool]:
    """Returns for each output of an open jaxpr whether it is computed from an input for which
    `inputs` is True, or from a result of an equation for which `starts(equation)` is True."""
    marked = {**dict(zip(jaxpr.constvars, constants)), **dict(zip(jaxpr.invars, inputs))}
    read = lambda v: not isinstance(v, _jax.Literal) and marked.get(v, False)
    for eqn in jaxpr.eqns:
        marked.update(zip(eqn.outvars, _outputs(eqn, [read(v) for v in eqn.invars], starts)))
    return [read(v) for v in jaxpr.outvars]


def _outputs(eqn, inputs, starts) -> list[bool]:
    if starts(eqn):
        return [True] * len(eqn.outvars)
    inside = bodies(eqn)
    kinds = [body.kind for body in inside]
    if kinds == ["call"] or kinds == ["shard_map"]:
        return reached(inside[0].jaxpr, inputs, starts)
    if kinds == ["scan"]:
        consts, carry, slices = scan(eqn).split(inputs)
        while True:
            outputs = reached(inside[0].jaxpr, [*consts, *carry, *slices], starts)
            after = [before or now for before, now in zip(carry, outputs)]
            if after == carry:
                return [*after, *outputs[len(carry) :]]
            carry = after
    if kinds and set(kinds) == {"branch"}:
        branches = [reached(body.jaxpr, inputs[1:], starts) for body in inside]
        return [inputs[0] or any(branch) for branch in zip(*branches)]
    nested = any(
        any(reached(body.jaxpr, [False] * len(body.jaxpr.invars), starts)) for body in inside
    )
    return [any(inputs) or nested] * len(eqn.outvars)


def _alike(program, tree) -> Iterator[Place]:
    """Yields the places in the results that have the structure, shapes and dtypes of a tree."""
    structure, types = jax.tree.structure(tree), [_type(x) for x in jax.tree.leaves(tree)]
    if jax.tree_util.treedef_is_leaf(structure) or not types:
        places = (
            [
                (jax.tree_util.keystr(path), x, i)
                for i, (path, x) in enumerate(jax.tree.leaves_with_path(program.results))
            ]
            if types
            else []
        )
    else:
        places = _subtrees(program.results)
    for path, part, first in places:
        leaves = jax.tree.leaves(part)
        if (
            len(leaves) == len(types)
            and jax.tree.structure(part) == structure
            and [_type(x) for x in leaves] == types
        ):
            yield Place(path, tuple(range(first, first + len(leaves))))


def _subtrees(tree, path="", first=0) -> Iterator[tuple[str, Any, int]]:
    """Yields (path, subtree, index of its first leaf) for each subtree that is no leaf, the outer
    ones first."""
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(tree)):
        return
    if jax.tree.leaves(tree):
        yield path, tree, first
    for key, child in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)[
        0
    ]:
        yield from _subtrees(child, path + jax.tree_util.keystr(key), first)
        first += len(jax.tree.leaves(child))


def _type(x) -> tuple:
    return tuple(x.shape), x.dtype


def _inexact(x) -> bool:
    # A jax.Ref is not followed.
    return jnp.issubdtype(getattr(x, "dtype", jnp.float32), jnp.inexact)


def _described(tree) -> str:
    return ", ".join(
        f"{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}".strip()
        for path, x in jax.tree.leaves_with_path(tree)
    )
