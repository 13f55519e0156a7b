"""Arranges the children of each scope in layers, from top to bottom.

The layout follows Sugiyama's method for drawing directed graphs in layers. The layer of an item (a scope or operation)
is the length of the longest path that leads to the item. The order of the items (scopes or operations) in a layer is
improved by repeatedly sorting the items by the mean position of their neighbors. Each item (scope or operation) is
aligned with the median of its neighbors (Brandes and Köpf 2001). If an edge skips layers, each skipped layer contains
a narrow item for the edge, called a lane, so that a residual connection is drawn beside its block, not across it. The
sizes of the boxes are computed later, because they depend on which scopes are expanded in the drawing.
"""

from __future__ import annotations

import dataclasses
import itertools

from fnet.introspect._flow import Flow, Node, Value

_PORTS = 16      # if more values enter or leave a scope, they share one line


@dataclasses.dataclass(eq=False)
class Arrangement:
    """The layout inside a scope.

    The items of a scope are numbered in this order: its children, the ports at which values enter, the ports at which
    values leave, and the lanes.

    Attributes:
        children: the number of children.
        entering, leaving: for each port (point at which values enter or leave the scope), the index of its value, or -1
            if several values share the port.
        layers: the items (children, ports and lanes) of each layer, from left to right.
        lines: for each item, the index of the vertical line on which the item is centered.
        edges: the edges between items, a list of (from item, to item, indices of the values that the edge carries).
        lanes: {item: (first lane, layer of the first lane, number of lanes)} for each item from which an edge skips
            layers; a lane is a narrow item for such an edge. An item has one lane in each layer that its edge skips.
    """

    children: int
    entering: list[int]
    leaving: list[int]
    layers: list[list[int]] = dataclasses.field(default_factory=list)
    lines: list[int] = dataclasses.field(default_factory=list)
    edges: list[tuple[int, int, list[int]]] = dataclasses.field(default_factory=list)
    lanes: dict[int, tuple[int, int, int]] = dataclasses.field(default_factory=dict)


def arrange(flow: Flow) -> tuple[dict[Node, Arrangement], list[Value]]:
    """Returns ({scope: its `Arrangement`}, the values that edges carry)."""
    values = list(dict.fromkeys(value for value, _ in flow.edges))
    number = {value: i for i, value in enumerate(values)}
    parts: dict[Node, _Part] = {node: _Part() for node in flow.nodes if node.children}
    for value, reader in flow.edges:
        _project(parts, value.source, reader, number[value])
    return {node: _arranged(node, part) for node, part in parts.items()}, values


def chain(node: Node) -> list[Node]:
    """Returns a node and the nodes that contain it, the innermost first."""
    around = [node]
    while around[-1].parent is not None:
        around.append(around[-1].parent)
    return around


class _Part:
    """The edges inside a scope, {(from, to): values}. Each end of an edge is a child of the scope, or a port (a point
    at which a value enters or leaves the scope). A port of a scope is ("in", value) for a value that enters the scope,
    or ("out", value) for a value that leaves the scope."""

    def __init__(self):
        self.edges: dict[tuple, set[int]] = {}

    def add(self, a, b, value):
        self.edges.setdefault((a, b), set()).add(value)


def _project(parts, source: Node, reader: Node, value: int) -> None:
    """Adds the edge from `source` to `reader` to the edges of each scope in which a segment of the edge is drawn."""
    up, down = chain(source), chain(reader)
    inside = set(map(id, down))
    top = next(i for i, node in enumerate(up) if id(node) in inside)
    shared = up[top]
    below = down.index(shared)
    if top == 0 or below == 0:      # one of the two nodes contains the other
        return
    parts[shared].add(up[top - 1], down[below - 1], value)
    kinds = up[top - 1].kind, down[below - 1].kind
    given = kinds[0] == "input" or up[top - 1].name == "inputs"
    if "phase" in kinds and not (given and down[below - 1].name == "forward"):
        return      # drawn only between the phases
    for i in range(1, top):
        parts[up[i]].add(up[i - 1], ("out", value), value)
    for i in range(1, below):
        parts[down[i]].add(("in", value), down[i - 1], value)


def _arranged(node: Node, part: _Part) -> Arrangement:
    ends = {end for edge in part.edges for end in edge if isinstance(end, tuple)}
    ports = {}
    for way in ("in", "out"):
        own = sorted(value for kind, value in ends if kind == way)
        ports[way] = own if len(own) <= _PORTS else [-1] if own else []
    made = Arrangement(len(node.children), ports["in"], ports["out"])
    index = {child: i for i, child in enumerate(node.children)}
    start = {"in": len(index), "out": len(index) + len(ports["in"])}

    def item(end):
        if not isinstance(end, tuple):
            return index[end]
        kind, value = end
        return start[kind] + (ports[kind].index(value) if value in ports[kind] else 0)

    edges: dict[tuple[int, int], set[int]] = {}
    for (a, b), carried in part.edges.items():
        edges.setdefault((item(a), item(b)), set()).update(carried)
    count = start["out"] + len(ports["out"])
    ranks = _ranks(node, made, count, list(edges))
    made.edges = [(a, b, sorted(carried)) for (a, b), carried in edges.items()]
    _layers(made, count, ranks)
    _order(made)
    _align(made, count)
    return made


def _ranks(node, made, count, edges) -> list[int]:
    """Returns the index of the layer in which each item (scope or operation) is drawn."""
    first, last = made.children, made.children + len(made.entering)
    if any(child.kind == "phase" for child in node.children):
        index = [0 if child.kind == "input" or child.name == "inputs" else
                 2 if child.kind == "result" or child.name == "results" else 1 for child in node.children]
        return [rank - min(index) for rank in index]
    after: list[list[int]] = [[] for _ in range(count)]
    before: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        after[a].append(b)
        before[b].append(a)
    order, waiting = [], [len(b) for b in before]
    ready = [i for i in range(count) if not waiting[i]]
    while ready:
        i = ready.pop()
        order.append(i)
        for j in after[i]:
            waiting[j] -= 1
            if not waiting[j]:
                ready.append(j)
    ranks = [0] * count
    for i in order:
        ranks[i] = max((ranks[j] + 1 for j in before[i]), default=int(bool(made.entering) and not first <= i < last))
    for i in reversed(order):      # items that read nothing are directly above their reader
        if after[i] and not before[i] and i < made.children:
            ranks[i] = min(ranks[j] for j in after[i]) - 1
    alone = [i for i in range(made.children) if not after[i] and not before[i]]
    columns = max(1, min(4, round(len(alone) ** 0.5)))
    for n, i in enumerate(alone):
        ranks[i] += n // columns
    bottom = max(ranks[:last], default=0) + 1
    for i in range(last, count):
        ranks[i] = bottom
    return ranks


def _layers(made, count, ranks) -> None:
    """Fills the layers. Adds lanes (narrow items in the skipped layers) for each item whose edges skip layers."""
    made.layers = [[] for _ in range(max(ranks, default=0) + 1)]
    for i, rank in enumerate(ranks):
        made.layers[rank].append(i)
    far: dict[int, int] = {}
    for a, b, _ in made.edges:
        if ranks[b] - ranks[a] > 1:
            far[a] = max(far.get(a, 0), ranks[b])
    for a, end in far.items():
        made.lanes[a] = count, ranks[a] + 1, end - ranks[a] - 1
        for rank in range(ranks[a] + 1, end):
            made.layers[rank].append(count)
            count += 1


def route(made: Arrangement, layer: dict[int, int], a: int, b: int) -> list[int]:
    """Returns the items through which the edge from item a to item b goes, including a and b."""
    first, rank, count = made.lanes.get(a, (0, 0, 0))
    return [a, *(first + k for k in range(count) if rank + k < layer[b]), b]


def neighbors(made: Arrangement) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Returns ({item: its layer}, pieces). The result contains the pairs of items in adjacent layers that edges connect
    (pieces of edges)."""
    layer = {i: r for r, items in enumerate(made.layers) for i in items}
    pieces = {}
    for a, b, _ in made.edges:
        through = route(made, layer, a, b)
        pieces |= dict.fromkeys(p for p in itertools.pairwise(through) if layer[p[1]] == layer[p[0]] + 1)
    return layer, list(pieces)


def _order(made) -> None:
    _, pieces = neighbors(made)
    up: dict[int, list[int]] = {}
    down: dict[int, list[int]] = {}
    for a, b in pieces:
        down.setdefault(a, []).append(b)
        up.setdefault(b, []).append(a)
    lane = made.children + len(made.entering) + len(made.leaving)
    best, fewest = [list(items) for items in made.layers], None
    for sweep in range(12):
        nearer, rows = (up, range(1, len(made.layers))) if sweep % 2 == 0 else (
            down, range(len(made.layers) - 2, -1, -1))
        at = {i: n for items in made.layers for n, i in enumerate(items)}
        for r in rows:
            items = made.layers[r]

            def key(i, at=at, nearer=nearer):
                found = [at[j] for j in nearer.get(i, ())]
                return (sum(found) / len(found) if found else at[i]), i >= lane, at[i]

            items.sort(key=key)
            for n, i in enumerate(items):
                at[i] = n
        crossings = count_crossings(made.layers, pieces)
        if fewest is None or crossings < fewest:
            best, fewest = [list(items) for items in made.layers], crossings
        if not fewest:
            break
    made.layers = best


def count_crossings(layers: list[list[int]], pieces: list[tuple[int, int]]) -> int:
    """Returns the number of crossings between the pieces of edges, which connect items in adjacent layers."""
    at = {i: n for items in layers for n, i in enumerate(items)}
    layer = {i: r for r, items in enumerate(layers) for i in items}
    rows: list[list[tuple[int, int]]] = [[] for _ in layers]
    for a, b in pieces:
        rows[layer[a]].append((at[a], at[b]))
    total = 0
    for r, row in enumerate(rows[:-1]):
        row.sort()
        size = len(layers[r + 1])
        tree = [0] * (size + 1)      # a Fenwick tree, which counts the ends at positions up to n
        for seen, (_, b) in enumerate(row):
            left, n = 0, b + 1
            while n:
                left += tree[n]
                n &= n - 1
            total += seen - left
            n = b + 1
            while n <= size:
                tree[n] += 1
                n += n & -n
    return total


def _align(made, count) -> None:
    """Puts the lanes (narrow items) of an edge on one vertical line, and also two items if each item is the median
    neighbor of the other. Lines do not cross."""
    layer, pieces = neighbors(made)
    at = {i: n for items in made.layers for n, i in enumerate(items)}
    up: dict[int, list[int]] = {}
    down: dict[int, list[int]] = {}
    for a, b in pieces:
        down.setdefault(a, []).append(b)
        up.setdefault(b, []).append(a)

    def middle(found):      # prefers items to lanes, so that an edge that skips layers does not bend a chain
        found = sorted([i for i in found if i < count] or found, key=at.get)
        return found[(len(found) - 1) // 2]

    total = sum(map(len, made.layers))
    line = list(range(total))
    taken: list[list[tuple[int, int]]] = [[] for _ in made.layers]
    ordered = sorted(pieces, key=lambda p: not (p[0] >= count and p[1] >= count))
    for a, b in ordered:
        lanes = a >= count and b >= count
        if not lanes and (middle(down[a]) != b or middle(up[b]) != a):
            continue
        row = taken[layer[a]]
        if any((at[a] - x) * (at[b] - y) <= 0 for x, y in row):
            continue
        row.append((at[a], at[b]))
    for r, row in enumerate(taken[:-1]):
        for x, y in sorted(row):
            line[made.layers[r + 1][y]] = line[made.layers[r][x]]
    numbers = {root: n for n, root in enumerate(dict.fromkeys(line))}
    made.lines = [numbers[root] for root in line]
