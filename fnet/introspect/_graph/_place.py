"""Computes the sizes and positions of the visible nodes of a graph.

An image is placed for the scopes that it shows expanded. On the HTML page the reader expands scopes:
it has the positions for the case that all scopes are closed, and fold.js makes room for open ones.
"""

from __future__ import annotations

import dataclasses
import itertools

from fnet.introspect._graph._arrange import Arrangement, neighbors
from fnet.introspect._graph._flow import Node, Value
from fnet.introspect._graph._label import value_text

SIZES = {
    "across": 24,
    "down": 50,
    "trunk": 20,
    "pad": 16,
    "header": 32,
    "lane": 12,
    "port": 14,
    "tall": 46,
    "low": 30,
    "aisle": 64,
    "apart": 13,
}
"""Sizes in pixels.

Distances: "across" between neighbors in a layer, "down" between layers, "trunk" from a box to the
point where its lines diverge, "aisle" between the phases of a training step, "apart" between the
lines that join phases.
Expanded scopes: "pad" inside the frame, "header" for the title. Widths: "lane", "port".
Heights of boxes: "tall" with a second line of text, "low" without it.
"""
STEPS = (0.003, 0.01, 0.03, 0.1, 0.3)  # shares of the whole at which the color changes
LIGHT = ("#ffffff", "#eaf2fb", "#cfe2f5", "#9cc4e8", "#4f94cf", "#17568f")
DARK = ("#1d222b", "#1f2f44", "#204268", "#265f97", "#4390d0", "#9fd0f7")
_MOST = 30  # maximum number of characters of a displayed name


def short(name: str) -> str:
    return name if len(name) <= _MOST else name[: _MOST // 2 - 1] + "…" + name[-_MOST // 2 :]


def box(node: Node, line: str) -> tuple[int, int]:
    """Returns (width, height) of the box of a node that is not expanded. `line` is the text below
    the node's name in the box, or "" if the box shows only the name."""
    badge = 6.2 * len(node.badge) + 14 if node.badge else 0
    wide = (
        max(7.6 * len(short(node.name)) + badge + (18 if node.children else 0), 5.9 * len(line))
        + 26
    )
    wide = max(wide, 5.7 * len(node.type) + 8 if node.kind == "operation" else 0)
    return round(max(wide, 64)), SIZES["tall"] if line else SIZES["low"]


def item_sizes(
    made: Arrangement, children: list[tuple[float, float]], values: list[Value]
) -> list[tuple[float, float]]:
    """Returns (width, height) of all items of a scope: of its children, which are given, of ports,
    which are as wide as the labels of the values that enter, and of lanes."""
    sizes = list(children)
    sizes += [(SIZES["port"] + 5.7 * len(value_text(values, [v])), 0) for v in made.entering]
    sizes += [(SIZES["port"], 0)] * len(made.leaving)
    return sizes + [(SIZES["lane"], 0)] * (len(made.lines) - len(sizes))


@dataclasses.dataclass(eq=False)
class Placed:
    """The positions inside a scope of the drawing: the horizontal center (x) and the top (y) of
    each item, and the top and the bottom of each horizontal layer of items. `width` and `height`
    are the size of all layers together."""

    x: list[float]
    y: list[float]
    tops: list[float]
    bottoms: list[float]
    width: float
    height: float


def place(made: Arrangement, sizes: list[tuple[float, float]]) -> Placed:
    """Returns the positions of the items (such as boxes) in a scope of the drawing, given their
    sizes (width, height).

    Neighboring items of the drawing do not overlap, and edges are kept short. Items with the same
    index in `made.lines` are centered on the same vertical line.
    """
    layers, line = made.layers, made.lines
    count = max(line, default=-1) + 1
    left: list[dict[int, float]] = [{} for _ in range(count)]
    right: list[dict[int, float]] = [{} for _ in range(count)]
    for items in layers:
        for a, b in itertools.pairwise(items):
            need = (sizes[a][0] + sizes[b][0]) / 2 + SIZES["across"]
            left[line[b]][line[a]] = max(need, left[line[b]].get(line[a], 0))
            right[line[a]][line[b]] = left[line[b]][line[a]]
    x = [0.0] * count
    for _ in range(count):
        moved = False
        for b in range(count):
            for a, need in left[b].items():
                if x[a] + need > x[b] + 1e-6:
                    x[b], moved = x[a] + need, True
        if not moved:
            break
    near: list[list[int]] = [[] for _ in range(count)]
    for a, b in neighbors(made)[1]:
        if line[a] != line[b]:
            near[line[a]].append(line[b])
            near[line[b]].append(line[a])
    for sweep in range(8):
        for n in range(count - 1, -1, -1) if sweep % 2 == 0 else range(count):
            if not near[n]:
                continue
            wanted = sum(x[m] for m in near[n]) / len(near[n])
            low = max((x[m] + need for m, need in left[n].items()), default=wanted)
            high = min((x[m] - need for m, need in right[n].items()), default=wanted)
            if low <= high:
                x[n] = min(max(wanted, low), high)
    edges = [
        (x[line[i]] - sizes[i][0] / 2, x[line[i]] + sizes[i][0] / 2)
        for items in layers
        for i in items
    ]
    start = min((low for low, _ in edges), default=0)
    at = [x[n] - start for n in line]
    y, tops, bottoms, top = [0.0] * len(line), [], [], 0.0
    first, last = (
        made.children + len(made.entering),
        made.children + len(made.entering) + len(made.leaving),
    )
    for items in layers:
        if items and all(
            first <= i < last for i in items
        ):  # only ports, whose labels are above them
            top -= SIZES["down"] - SIZES["trunk"] - 6
        height = max((sizes[i][1] for i in items), default=0)
        tops.append(top)
        bottoms.append(top + height)
        for i in items:
            y[i] = top + (height - sizes[i][1]) / 2
        top += height + SIZES["down"]
    return Placed(
        at,
        y,
        tops,
        bottoms,
        max((high for _, high in edges), default=0) - start,
        bottoms[-1] if bottoms else 0,
    )
