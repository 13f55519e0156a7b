"""The page of a graph: data for graph.js, and a table of all scopes, which is also shown without
JavaScript."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from fnet._util import _page
from fnet._util._units import si
from fnet.introspect._graph._arrange import Arrangement, neighbors, route
from fnet.introspect._graph._columns import columns
from fnet.introspect._graph._flow import Node, Value
from fnet.introspect._graph._label import second_line
from fnet.introspect._graph._place import SIZES, STEPS, box, item_sizes, place, short


def page(
    drawn: Any,
    expanded: set[Node],
    made: dict[Node, Arrangement],
    values: list[Value],
    color: str,
    title: str,
) -> str:
    """Returns the HTML page of a `Graph`."""
    root = drawn.root
    facts = [
        f"{_count(root.parameters)} parameters" if root.parameters else "",
        f"{_flops(root.cost.flops)}",
        f"{_bytes(root.kept_bytes)} kept for the backward pass" if root.kept_bytes else "",
        f"{len(drawn.nodes):,} boxes",
        *drawn.notes,
    ]
    metrics = [("flops", "FLOPs"), ("bytes", "Bytes")] + (
        [("time", f"Time on {drawn.chip.name}")] if root.seconds is not None else []
    )
    buttons = "".join(
        f'<button data-metric="{key}" aria-pressed="false">{escape(text)}</button>'
        for key, text in metrics
    )
    body = _page.fill(
        "fnet.introspect._graph/graph.html",
        title=escape(title),
        table=_table(drawn),
        metrics=buttons,
        facts=escape(" · ".join(filter(None, facts))),
    )
    return _page.page(
        f"{title}: graph",
        body,
        style="fnet._util/page.css fnet.introspect._graph/graph.css",
        script="fnet.introspect._graph/fold.js fnet.introspect._graph/graph.js",
        data=_data(drawn, expanded, made, values, color if color in dict(metrics) else "flops"),
    )


class _Strings(dict):
    """A dict {string: index} of the strings of a page, so that the page contains each string only
    once."""

    def __missing__(self, text):
        self[text] = len(self)
        return self[text]


def _data(drawn, expanded, made, values, color) -> dict:
    strings = _Strings()
    number = lambda value: (
        value if isinstance(value, int) else round(value, 9) if isinstance(value, float) else None
    )
    nodes, groups, layouts = [], {}, _Strings()
    for node in drawn.nodes:
        line = second_line(node)
        above = node.parent.path if node.parent is not None else ""
        derived = f"{above}/{node.name}" if above else node.name
        cost = node.cost
        nodes.append(
            [
                -1 if node.parent is None else node.parent.id,
                strings[node.name],
                strings[short(node.name)],
                strings[node.kind],
                -1 if node.path == derived else strings[node.path],
                strings[node.badge],
                node.times,
                strings[node.type],
                strings[line],
                *box(node, line),
                number(cost.flops),
                number(cost.fused_bytes),
                None if node.seconds is None else float(f"{node.seconds:.4g}"),
                number(node.parameters),
                number(node.parameter_bytes),
                number(node.kept_bytes),
                strings[node.phase],
                [strings[name] for name in dict.fromkeys(node.reads)],
            ]
        )
        if node in made:
            each = made[node]
            groups[node.id] = [
                layouts[_closed(node, each, values)],
                each.entering,
                each.leaving,
                [carried for _, _, carried in each.edges],
            ]
    index = {value: i for i, value in enumerate(values)}
    return {
        "nodes": nodes,
        "groups": groups,
        "layouts": [json.loads(layout) for layout in layouts],
        "columns": columns(drawn.root, made[drawn.root]),
        "values": [[value.source.id, strings[value.type]] for value in values],
        "edges": [n for value, reader in drawn.edges for n in (index[value], reader.id)],
        "expanded": sorted(node.id for node in expanded),
        "color": color,
        "sizes": SIZES,
        "steps": STEPS,
        "chip": drawn.chip.name,
        "strings": list(strings),
    }


def _closed(node: Node, made: Arrangement, values: list[Value]) -> str:
    """Returns the positions inside a scope whose children are all closed, as JSON: the horizontal
    position of each vertical line, from left to right; the line of each item; the items in each
    layer, and its upper end; and the items on the way of each edge. Many scopes have the same."""
    boxes = [box(child, second_line(child)) for child in node.children]
    placed = place(made, item_sizes(made, boxes, values))
    at = {made.lines[i]: placed.x[i] for items in made.layers for i in items}
    order = sorted(at, key=at.__getitem__)
    layer, _ = neighbors(made)
    return _page.as_json(
        [
            [round(at[line]) for line in order],
            [order.index(line) for line in made.lines],
            made.layers,
            [round(top) for top in placed.tops],
            [route(made, layer, a, b) for a, b, _ in made.edges],
        ]
    )


def _table(drawn) -> str:
    """Returns all scopes as an HTML table."""
    heads = ("scope", "output", "parameters", "FLOPs", "bytes", "kept", "time")
    rows = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for node in drawn.nodes:
        if not node.children and node.kind not in ("input", "result"):
            continue
        depth = -1
        above = node
        while above is not None:
            depth, above = depth + 1, above.parent
        cells = [
            f"{node.name} {node.badge}".strip(),
            node.type,
            _count(node.parameters) if node.parameters else "",
            _flops(node.cost.flops),
            _bytes(node.cost.fused_bytes),
            _bytes(node.kept_bytes) if node.kept_bytes else "",
            "" if node.seconds is None else f"{node.seconds * 1e3:.3g} ms",
        ]
        rows.append(
            "<tr>"
            + "".join(
                f"<td>{'&emsp;' * depth if i == 0 else ''}{escape(cell)}</td>"
                for i, cell in enumerate(cells)
            )
            + "</tr>"
        )
    return f"<table>{''.join(rows)}</table>"


def _count(value) -> str:
    return si(value, digits=3).strip() if isinstance(value, int | float) else str(value)


def _flops(value) -> str:
    return f"{si(value, digits=3)}FLOP" if isinstance(value, int | float) else f"{value} FLOP"


def _bytes(value) -> str:
    return f"{si(value, digits=3)}B" if isinstance(value, int | float) else f"{value} B"
