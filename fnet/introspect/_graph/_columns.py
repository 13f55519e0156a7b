"""Lays out the phases (forward, backward, update) of a training step as columns.

The forward pass and the update run from top to bottom, the backward pass from bottom to top. Inputs
are in a row above the phases, results in a row below. The lines between phases run in lanes of
their own, above and below the phases, and change from one to the other in the aisle right of a
phase.
"""

from __future__ import annotations

from typing import NamedTuple

from fnet.introspect._graph._arrange import Arrangement
from fnet.introspect._graph._flow import Node
from fnet.introspect._graph._place import SIZES

_BESIDE = 14  # pixels between lines that meet the same side of a box


class Crossing(NamedTuple):
    """A line between two children of the program.

    Fields:
        start, end: the indices of the children.
        carried: the indices of the values.
        apart: the distances of its two ends from the centers of the children, in pixels.
        below: whether the line leaves its start below, and meets its end below.
        lanes: the lanes in which it leaves its start and reaches its end: 0, 1, ... are above the
            phases, -1, -2, ... below, each from the phases outward.
        aisle: the phase right of which it changes its lane, and how far right of it in pixels.
    """

    start: int
    end: int
    carried: list[int]
    apart: tuple[int, int]
    below: tuple[bool, bool]
    lanes: tuple[int, int]
    aisle: tuple[int, int]


class Columns(NamedTuple):
    """Fields: the indices of the children in the row of `phases`, in the row above (`given`) and in
    the row below (`after`), each from left to right; `upward`: the phases that run from bottom to
    top; `lanes`: the numbers of lanes above and below the phases; and the lines."""

    given: list[int]
    phases: list[int]
    after: list[int]
    upward: list[int]
    lanes: tuple[int, int]
    lines: list[Crossing]


def columns(root: Node, made: Arrangement) -> Columns | None:
    """Returns the columns of a program, or None if it has no phases."""
    phases = [i for i, child in enumerate(root.children) if child.kind == "phase"]
    if not phases:
        return None
    layer = {i: r for r, items in enumerate(made.layers) for i in items}
    others = [i for i in range(made.children) if i not in phases]
    given = [i for i in others if layer[i] < layer[phases[0]]]
    after = [i for i in others if i not in given]
    upward = [i for i in phases if root.children[i].name.startswith("backward")]

    def below(i: int, leaving: bool) -> bool:
        """Whether lines leave (or reach) a child at its lower side."""
        return leaving != (i in upward)

    def outside(i: int, leaving: bool) -> bool:
        """Whether the lane at this end of a line is below the phases."""
        return i in after or (i in phases and below(i, leaving))

    used = {True: 0, False: 0}  # lanes below, and above
    meeting: dict[tuple[int, bool], int] = {}
    lines = []
    for start, end, carried in made.edges:
        ends = (start, True), (end, False)
        sides = [outside(*each) for each in ends]
        lanes = [~used[side] if side else used[side] for side in sides]
        for side in set(sides):
            used[side] += 1
        apart = []
        for each in ends:
            n = meeting[each] = meeting.get(each, 0) + 1
            apart.append((n // 2 if n % 2 else -n // 2) * _BESIDE)
        column = start if start in phases else phases[0]
        aisle = SIZES["aisle"] // 2 - 7 * (len(lines) % 5) + _BESIDE
        lines.append(
            Crossing(
                start,
                end,
                carried,
                (apart[0], apart[1]),
                (below(*ends[0]), below(*ends[1])),
                (lanes[0], lanes[1]),
                (column, aisle),
            )
        )
    return Columns(given, phases, after, upward, (used[False], used[True]), lines)
