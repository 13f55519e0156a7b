"""The combinations of a strategy and a mesh that `plan` compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fnet.parallel import _mesh
from fnet.parallel._strategies import Strategy
from fnet.parallel._targets import Target


class Combination(NamedTuple):
    """A strategy, and the axes of the mesh on which it is tried, as pairs (name, length)."""

    strategy: Strategy
    axes: tuple[tuple[str, int], ...]


def combinations(
    rungs: Sequence[Sequence[Strategy]],
    target: Target,
    asked: _mesh.Asked,
    depth: Callable[[], int],
    over_time: Callable[[int], list[dict[str, int]]],
    apart: Sequence[dict[str, int]] = (),
) -> list[list[Combination]]:
    """Returns the combinations to try, in the order of the strategies `rungs`. `depth` returns the
    number of the step's layers, and `over_time` the meshes on which time is split, for a number of
    microbatches. `apart` are the meshes on which experts lie apart."""
    return [
        [
            Combination(strategy, tuple(axes.items()))
            for each in rung
            for strategy, axes in meshes(each, target, asked, depth, over_time, apart)
        ]
        for rung in rungs
    ]


def meshes(
    strategy: Strategy,
    target: Target,
    asked: _mesh.Asked,
    depth: Callable[[], int],
    over_time: Callable[[int], list[dict[str, int]]],
    apart: Sequence[dict[str, int]] = (),
) -> list[tuple[Strategy, dict[str, int]]]:
    """Returns the meshes on which a strategy is tried, each as {axis: length}: the one that the
    user states, or all devices along "data". A strategy with an axis of its own returns the lengths
    to compare, and each with the form of the strategy for it."""
    sizes = _mesh.sizes(target, asked)
    if strategy.state == "pipeline":
        return _pipelines(strategy, sizes, asked is not None, depth)
    if strategy.state == "context" and asked is None:
        return [(strategy, each) for each in over_time(strategy.microbatches)]
    if strategy.state == "expert" and asked is None:
        return [(strategy, each) for each in apart]
    return [(strategy, sizes)]


def _pipelines(
    strategy: Strategy, sizes: dict[str, int], asked: bool, depth: Callable[[], int]
) -> list[tuple[Strategy, dict[str, int]]]:
    """Returns the numbers of stages and the schedules into which the layers and the rows can be
    divided. What the user states is kept, and if it does not fit, the plan says why."""
    if asked and sizes.get("stage", 1) == 1:
        raise ValueError(
            f"plan: strategy {str(strategy)!r} needs a mesh axis 'stage' longer than 1, such as "
            f"mesh={{'data': 2, 'stage': 4}}; got {sizes}"
        )
    layers = depth()
    lengths = [sizes["stage"]] if asked else _divisors(sizes["data"])
    rounds = [strategy.rounds] if strategy.rounds > 1 else [1, 2, 4]
    found = [
        (
            strategy._replace(rounds=each),
            {**sizes, "data": sizes["data"] // (1 if asked else n), "stage": n},
        )
        for n in lengths
        for each in rounds
        if layers % (n * each) == 0 and n > 1
    ]
    if found:
        return found
    if asked:
        return [(strategy, sizes)]
    raise ValueError(
        f"plan: {layers} layers cannot be divided into equal stages on {sizes['data']} devices; use "
        "a number of layers that has a common divisor with that of the devices"
    )


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
