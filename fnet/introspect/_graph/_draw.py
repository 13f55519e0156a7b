"""A program as SVG, with some scopes expanded. fold.js and graph.js draw such a picture in the browser,
where scopes can be folded."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from fnet.introspect._graph._arrange import Arrangement, neighbors, route
from fnet.introspect._graph._columns import columns
from fnet.introspect._graph._flow import Node, Value
from fnet.introspect._graph._label import value_text
from fnet.introspect._graph._place import (
    LIGHT,
    SIZES,
    STEPS,
    Placed,
    box,
    item_sizes,
    place,
    short,
)

_STYLE = """text{font:13px system-ui,sans-serif;fill:#1a2330}.l{font-size:11px;fill:#52606f}.b{font-weight:600}
.e{fill:none;stroke:#8593a3;stroke-width:1.3}.p{stroke-dasharray:5 4}.n{stroke:#8593a3}.g{fill:#fff;stroke:#b6c0cb}
.t{font-size:10.5px;fill:#52606f}
.t,.o{paint-order:stroke;stroke:#fff;stroke-width:6px}.w{fill:#fff}"""


class Drawing:
    """Computes the positions of the nodes of a program, and draws the program as SVG.

    Args:
        made: {scope: its `Arrangement`}.
        values: the values that edges carry.
        expanded: the scopes whose contents are drawn, not only their boxes.
        line: a function that returns the second line of text of a node.
        share: a function that returns a node's share of the total cost, which determines the node's
            color.
    """

    def __init__(
        self,
        made: dict[Node, Arrangement],
        values: list[Value],
        expanded: set[Node],
        line: Callable[[Node], str],
        share: Callable[[Node], float],
    ):
        self.made, self.values, self.expanded, self.line, self.share = (
            made,
            values,
            expanded,
            line,
            share,
        )
        self.placed: dict[Node, Placed] = {}
        self.sizes: dict[Node, tuple[float, float]] = {}
        self.parts: list[str] = []

    def svg(self, root: Node) -> str:
        pad = SIZES["pad"]
        if (phases := columns(root, self.made[root])) is not None:
            wide, high = self._columns(root, phases)
        else:
            self._measure(root)
            wide, high = self.placed[root].width, self.placed[root].height
            self._inside(root, pad, pad, 0, 0)
        wide, high = wide + 2 * pad, high + 2 * pad
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}" '
            f'height="{high:.0f}" role="img"><title>{escape(root.name)}</title><style>{_STYLE}</style><defs>'
            '<marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="#8593a3"/></marker></defs><rect width="100%" height="100%" '
            f'fill="#fff"/>{"".join(self.parts)}</svg>'
        )

    def size(self, node: Node) -> tuple[float, float]:
        if node not in self.sizes:
            self.sizes[node] = (
                self._measure(node) if node in self.expanded else box(node, self.line(node))
            )
        return self.sizes[node]

    def _measure(self, node) -> tuple[float, float]:
        made = self.made[node]
        sizes = item_sizes(made, [self.size(child) for child in node.children], self.values)
        placed = self.placed[node] = place(made, sizes)
        title = 8 * len(short(node.name)) + 7 * len(node.badge) + 60
        return max(placed.width + 2 * SIZES["pad"], title), placed.height + SIZES["header"] + SIZES[
            "pad"
        ]

    def _node(self, node, x, y, flip) -> None:
        wide, high = self.size(node)
        if node in self.expanded:
            self.parts.append(
                f'<rect class="g" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" '
                'rx="8"/>'
            )
            inner = x + (wide - self.placed[node].width) / 2
            self._inside(node, inner, y + SIZES["header"], y, y + high, flip)
            # On top.
            self.parts.append(
                f'<text class="b o" x="{x + 12:.1f}" y="{y + 20:.1f}">{escape(short(node.name))}'
                f'<tspan class="l" dx="8">{escape(node.badge)}</tspan></text>'
            )
            return
        step = sum(self.share(node) >= limit for limit in STEPS)
        white, line = (" w" if step >= 4 else ""), self.line(node)
        radius = high / 2 if node.kind in ("input", "result") else 6
        text = lambda of, level, words: (
            f'<text class="{of}{white}" text-anchor="middle" x="{x + wide / 2:.1f}" '
            f'y="{y + level:.1f}">{words}</text>'
        )
        name = escape(short(node.name)) + (
            f'<tspan class="l{white}" dx="6">{escape(node.badge)}</tspan>' if node.badge else ""
        )
        self.parts.append(
            f'<g><title>{escape(node.path or node.name)}</title><rect class="n" x="{x:.1f}" y="{y:.1f}" '
            f'width="{wide}" height="{high}" rx="{radius}" fill="{LIGHT[step]}"/>'
            + text("b" if node.children else "", 20, name)
            + (text("l", 36, escape(line)) if line else "")
            + "</g>"
        )

    def _inside(self, node, x, y, top, bottom, flip=False) -> None:
        """Draws the children of a scope. The upper left corner of the area that contains the
        children is (x, y), and the scope's box extends vertically from `top` to `bottom`."""
        made, placed = self.made[node], self.placed[node]
        layer, _ = neighbors(made)
        turn = (lambda v: y + placed.height - v) if flip else (lambda v: y + v)
        first_out = made.children + len(made.entering)
        is_open = lambda i: i < made.children and node.children[i] in self.expanded
        labels: dict[tuple, tuple[float, float, set]] = {}

        def end(i, value, leaving):
            """Returns the coordinates at which the line for `value` starts (if `leaving` is True)
            or ends. `i` is the index of the child node or port (point where values enter or leave
            the scope) at which the line starts or ends."""
            at, level = x + placed.x[i], turn(placed.y[i])
            if i >= made.children:
                return at, level
            high = self.size(node.children[i])[1]
            level = turn(placed.y[i] + high) if leaving else level
            return (at + self.port(node.children[i], value, leaving) if is_open(i) else at), level

        for a, b, carried in made.edges:
            through = route(made, layer, a, b)
            for value in carried if is_open(a) or is_open(b) else carried[:1]:
                (x0, y0), (x1, y1) = end(a, value, True), end(b, value, False)
                before = x0, turn(placed.bottoms[layer[a]] + SIZES["trunk"])  # space for the label
                path = f"M{x0:.1f} {y0:.1f}L{x0:.1f} {before[1]:.1f}"
                for i in through[1:]:
                    at = x1 if i == b else x + placed.x[i]
                    level = turn(placed.tops[layer[i]])
                    middle = (before[1] + level) / 2
                    path += (
                        f"C{before[0]:.1f} {middle:.1f} {at:.1f} {middle:.1f} {at:.1f} {level:.1f}"
                    )
                    before = at, turn(placed.bottoms[layer[i]])
                    final = y1 if i == b else before[1]
                    path += f"L{at:.1f} {final:.1f}" if abs(final - level) > 0.1 else ""
                arrow = ' marker-end="url(#a)"' if b < made.children else ""
                self.parts.append(f'<path class="e" d="{path}"{arrow}/>')
                named = made.children <= a < first_out or (
                    a < made.children and not is_open(a) and node.children[a].kind != "input"
                )
                if named:
                    label = labels.setdefault(
                        (a, round(x0)), (x0, y0 + (-8 if flip else 15), set())
                    )
                    label[2].update([value] if is_open(b) or is_open(a) else carried)
        for i in (
            range(made.children, first_out + len(made.leaving)) if node.parent is not None else ()
        ):
            at, outer = x + placed.x[i], top if (i < first_out) != flip else bottom
            self.parts.append(
                f'<path class="e" d="M{at:.1f} {outer:.1f}L{at:.1f} {turn(placed.y[i]):.1f}"/>'
            )
        for i, child in enumerate(node.children):
            wide, high = self.size(child)
            self._node(
                child, x + placed.x[i] - wide / 2, turn(placed.y[i] + (high if flip else 0)), flip
            )
        for at, level, carried in labels.values():
            self.parts.append(
                f'<text class="t" text-anchor="middle" x="{at:.1f}" y="{level:.1f}">'
                f"{escape(value_text(self.values, sorted(carried)))}</text>"
            )

    def port(self, node: Node, value: int, leaving: bool) -> float:
        """Returns the x coordinate at which a value enters or leaves an expanded scope, relative to
        the scope's center."""
        made, placed = self.made[node], self.placed[node]
        ports, first = (
            (made.leaving, made.children + len(made.entering))
            if leaving
            else (made.entering, made.children)
        )
        if not ports or (value not in ports and -1 not in ports):
            return 0.0
        return placed.x[first + (ports.index(value) if value in ports else 0)] - placed.width / 2

    def _columns(self, root, columns) -> tuple[float, float]:
        """Draws the phases of a training step side by side."""
        pad, apart = SIZES["pad"], SIZES["apart"]
        sizes = [self.size(child) for child in root.children]
        tall = lambda row: max((sizes[i][1] for i in row), default=0)
        top = pad + tall(columns.given) + SIZES["down"] + apart * columns.lanes[0]
        bottom = top + tall(columns.phases)
        at: dict[int, tuple[float, float]] = {}  # the upper left corner of each child
        left = float(pad)
        for i in columns.phases:
            at[i] = left, top
            left += sizes[i][0] + SIZES["aisle"]
        low = bottom + SIZES["down"] + apart * columns.lanes[1]
        for row, level, phase in (
            (columns.given, pad, columns.phases[0]),
            (columns.after, low, columns.phases[-1]),
        ):
            wide = sum(sizes[i][0] for i in row) + SIZES["across"] * (len(row) - 1)
            left = max(pad, at[phase][0] + (sizes[phase][0] - wide) / 2)
            for i in row:
                at[i] = left, level
                left += sizes[i][0] + SIZES["across"]

        def lane(n):
            return bottom + 14 + apart * ~n if n < 0 else top - 14 - apart * n

        for line in columns.lines:
            ends = []
            for k, i in enumerate((line.start, line.end)):
                node, (x, y) = root.children[i], at[i]
                port = 0.0
                if node in self.expanded and len(line.carried) == 1:
                    port = self.port(node, line.carried[0], k == 0)
                middle = x + sizes[i][0] / 2 + (port or line.apart[k])
                ends.append((middle, y + sizes[i][1] if line.below[k] else y))
            (x0, y0), (x1, y1) = ends
            first, last = map(lane, line.lanes)
            corners = [(x0, y0), (x0, first)]
            if first != last:
                column, right = line.aisle
                aisle = at[column][0] + sizes[column][0] + right
                corners += [(aisle, first), (aisle, last)]
            corners += [(x1, last), (x1, y1)]
            self.parts.append(f'<path class="e p" d="{rounded(corners)}" marker-end="url(#a)"/>')
            before = corners[-3][0]
            middle = (before + x1) / 2 if abs(x1 - before) > 60 else x1
            self.parts.append(
                f'<text class="t" text-anchor="middle" x="{middle:.1f}" y="{last - 4:.1f}">'
                f"{escape(value_text(self.values, line.carried))}</text>"
            )
        for i, (x, y) in at.items():
            self._node(root.children[i], x, y, i in columns.upward)
        right = max(x + sizes[i][0] for i, (x, _) in at.items())
        end = max(y + sizes[i][1] for i, (_, y) in at.items())
        return right - pad, max(end, low - SIZES["down"]) - pad


def rounded(corners: list[tuple[float, float]], radius: float = 9) -> str:
    """Returns the SVG path data of the lines that connect the points `corners`. Each point except
    the first and the last is replaced by a curve, which begins and ends at a distance of at most
    `radius` from the point. If the distance of such a point from the previous or the next point is
    less than 1, the point is omitted."""
    path = f"M{corners[0][0]:.1f} {corners[0][1]:.1f}"
    for (px, py), (x, y), (nx, ny) in zip(corners, corners[1:], corners[2:]):
        a, b = abs(px - x) + abs(py - y), abs(nx - x) + abs(ny - y)
        r = min(radius, a / 2, b / 2)
        if r < 0.5:
            continue
        sx, sy = x + (px - x) / a * r, y + (py - y) / a * r
        ex, ey = x + (nx - x) / b * r, y + (ny - y) / b * r
        path += f"L{sx:.1f} {sy:.1f}Q{x:.1f} {y:.1f} {ex:.1f} {ey:.1f}"
    return path + f"L{corners[-1][0]:.1f} {corners[-1][1]:.1f}"
