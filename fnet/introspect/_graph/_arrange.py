"""Arranges the contents of each scope in horizontal layers of a drawing, from top to bottom.

The layout follows Sugiyama's method for drawing directed graphs in layers. The layer of a node (a
scope or operation) is the length of the longest path that leads to the node. The order of the nodes
in a layer is improved by repeatedly sorting the nodes by the mean position of their neighbors. Each
node (scope or operation) is aligned with the median of its neighbors (Brandes and Köpf 2001). If an
edge skips layers of the drawing, each skipped layer contains a narrow dummy node for this edge.
Because of the dummy nodes, a residual connection is drawn beside its block, not across it. The
sizes of the boxes are computed later, because they depend on which scopes are expanded in the
drawing.
"""

from __future__ import annotations

import dataclasses
import itertools

from fnet.introspect._graph._flow import Flow, Node, Value

_PORTS = 16  # if more values enter or leave a scope, they share one line


@dataclasses.dataclass(eq=False)
class Arrangement:
    """The layout inside a scope.

    The layout contains three kinds of nodes: children, ports and dummy nodes. A child is a scope or
    an operation inside the scope. A port is a point at which values enter or leave the scope. If an
    edge connects nodes in layers of the drawing that are not adjacent, the edge passes through a
    dummy node in each layer in between. Nodes are numbered in this order: children of the scope,
    ports at which values enter the scope, ports at which values leave the scope, dummy nodes.

    Attributes:
        children: the number of children.
        entering, leaving: the indices of the values that enter the scope (`entering`) and that
            leave it (`leaving`). If more than 16 values enter the scope, they share one port (entry
            point), and `entering` is [-1]. If more than 16 values leave the scope, they share one
            port (exit point), and `leaving` is [-1].
        layers: for each horizontal layer of the drawing, the indices of its nodes from left to
            right.
        lines: for each node, the index of the vertical line on which the node is centered.
        edges: the edges between nodes, a list of (from node, to node, indices of the values that
            the edge carries).
        lanes: the dummy nodes of the edges that skip layers of the drawing. `lanes` maps the index
            of a node to a tuple (index of the first dummy node, layer of the first dummy node,
            number of dummy nodes). `lanes` contains a node if one or more of the edges that start
            at this node skip layers. If several edges of the drawing start at the same node and
            pass through the same layer, they share one dummy node (placeholder) in this layer.
    """

    children: int
    entering: list[int]
    leaving: list[int]
    layers: list[list[int]] = dataclasses.field(default_factory=list)
    lines: list[int] = dataclasses.field(default_factory=list)
    edges: list[tuple[int, int, list[int]]] = dataclasses.field(default_factory=list)
    lanes: dict[int, tuple[int, int, int]] = dataclasses.field(default_factory=dict)


def arrange(flow: Flow) -> tuple[dict[Node, Arrangement], list[Value]]:
    """Returns the layout of each scope, {scope: `Arrangement`}, and the list of all values that
    nodes of `flow` read. An `Arrangement` represents each value by its index in the returned
    list."""
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
    """The edges inside a scope, {(from, to): values}. Each end of an edge is a child of the scope,
    or a port (a point at which a value enters or leaves the scope). A port of a scope is ("in",
    value) for a value that enters the scope, or ("out", value) for a value that leaves the
    scope."""

    def __init__(self):
        self.edges: dict[tuple, set[int]] = {}

    def add(self, a, b, value):
        self.edges.setdefault((a, b), set()).add(value)


def _project(parts, source: Node, reader: Node, value: int) -> None:
    """Adds an edge from the node that computes a value (`source`) to the node that reads the value
    (`reader`). If the two nodes are in different scopes, the edge is split at the boundaries of the
    scopes, so that each part of the edge is inside one scope."""
    up, down = chain(source), chain(reader)
    inside = set(map(id, down))
    top = next(i for i, node in enumerate(up) if id(node) in inside)
    shared = up[top]
    below = down.index(shared)
    if top == 0 or below == 0:  # one of the two nodes contains the other
        return
    parts[shared].add(up[top - 1], down[below - 1], value)
    kinds = up[top - 1].kind, down[below - 1].kind
    given = kinds[0] == "input" or up[top - 1].name == "inputs"
    if "phase" in kinds and not (given and down[below - 1].name == "forward"):
        return  # drawn only between the phases
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
    """Returns the index of the horizontal layer in which each node (scope, operation or port) is
    drawn. The top layer has the index 0."""
    first, last = made.children, made.children + len(made.entering)
    if any(child.kind == "phase" for child in node.children):
        index = [
            0
            if child.kind == "input" or child.name == "inputs"
            else 2
            if child.kind == "result" or child.name == "results"
            else 1
            for child in node.children
        ]
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
        ranks[i] = max(
            (ranks[j] + 1 for j in before[i]),
            default=int(bool(made.entering) and not first <= i < last),
        )
    for i in reversed(order):  # items that read nothing are directly above their reader
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
    """Assigns the nodes to the horizontal layers of the drawing. If an edge skips a layer, a dummy
    node (a placeholder for the edge) is added to this layer."""
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
    """Returns the list of the nodes through which the edge from node `a` to node `b` passes: first
    the node `a`, then the dummy nodes in the layers between the two nodes, and finally the node
    `b`."""
    first, rank, count = made.lanes.get(a, (0, 0, 0))
    return [a, *(first + k for k in range(count) if rank + k < layer[b]), b]


def neighbors(made: Arrangement) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Returns two results: the layer of each node of the drawing, and the edges between adjacent
    layers.

    The first result is a dict that maps the index of each node of the drawing to the index of its
    horizontal layer. The second result is a list of edges, which are pairs (node, node in the next
    layer). If an edge skips layers of the drawing, the edge is split into several edges at its
    dummy nodes. A dummy node is the placeholder of an edge in a skipped layer.
    """
    layer = {i: r for r, items in enumerate(made.layers) for i in items}
    pieces = {}
    for a, b, _ in made.edges:
        through = route(made, layer, a, b)
        pieces |= dict.fromkeys(
            p for p in itertools.pairwise(through) if layer[p[1]] == layer[p[0]] + 1
        )
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
        nearer, rows = (
            (up, range(1, len(made.layers)))
            if sweep % 2 == 0
            else (down, range(len(made.layers) - 2, -1, -1))
        )
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
    """Returns the number of crossings of the edges `pieces`, which connect nodes in adjacent layers
    of the drawing."""
    at = {i: n for items in layers for n, i in enumerate(items)}
    layer = {i: r for r, items in enumerate(layers) for i in items}
    rows: list[list[tuple[int, int]]] = [[] for _ in layers]
    for a, b in pieces:
        rows[layer[a]].append((at[a], at[b]))
    total = 0
    for r, row in enumerate(rows[:-1]):
        row.sort()
        size = len(layers[r + 1])
        tree = [0] * (size + 1)  # a Fenwick tree, which counts the ends at positions up to n
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
    """Assigns each node of the drawing (child, port or dummy node) to the vertical line on which
    the node is centered.

    The dummy nodes of an edge are aligned on one vertical line of the drawing. The median neighbor
    of a node is the middle one, from left to right, of the nodes in an adjacent layer that are
    connected to the node. Two nodes in adjacent layers are aligned if each of the two nodes is the
    median neighbor of the other node. Two nodes are not aligned if their edge would cross the edge
    between two nodes that are already aligned.
    """
    layer, pieces = neighbors(made)
    at = {i: n for items in made.layers for n, i in enumerate(items)}
    up: dict[int, list[int]] = {}
    down: dict[int, list[int]] = {}
    for a, b in pieces:
        down.setdefault(a, []).append(b)
        up.setdefault(b, []).append(a)

    def middle(
        found,
    ):  # prefers items to lanes, so that an edge that skips layers does not bend a chain
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
