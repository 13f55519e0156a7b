"""The combinations of a strategy and a mesh that `plan` compares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fnet.parallel import _mesh
from fnet.parallel._strategies import Strategy
from fnet.parallel._targets import Target


class Combination(NamedTuple):
    """A strategy, and the axes of the mesh on which it is tried, as pairs (name, length)."""

    strategy: Strategy
    axes: tuple[tuple[str, int], ...]


def combinations(
    rungs: Sequence[Sequence[Strategy]], target: Target, asked: _mesh.Asked
) -> list[list[Combination]]:
    """Returns the combinations to try, in the order of the strategies `rungs`."""
    return [
        [
            Combination(strategy, tuple(axes.items()))
            for strategy in rung
            for axes in meshes(strategy, target, asked)
        ]
        for rung in rungs
    ]


def meshes(strategy: Strategy, target: Target, asked: _mesh.Asked) -> list[dict[str, int]]:
    """Returns the meshes on which a strategy is tried, each as {axis: length}: the one that the
    user states, or all devices along "data". A strategy with an axis of its own returns the lengths
    to compare."""
    return [_mesh.sizes(target, asked)]
