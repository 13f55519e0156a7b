"""A program in Graphviz's language DOT, with scopes as clusters."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from fnet.introspect._graph._arrange import chain
from fnet.introspect._graph._flow import Flow, Node
from fnet.introspect._graph._place import LIGHT, STEPS


def dot(
    flow: Flow, expanded: set[Node], line: Callable[[Node], str], share: Callable[[Node], float]
) -> str:
    """Returns the program in DOT, with the given scopes expanded."""
    lines = [
        "digraph program {",
        "  rankdir=TB; compound=true;",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=11, color="#8593a3"];',
        '  edge [color="#8593a3", fontname="Helvetica", fontsize=9, fontcolor="#52606f"];',
    ]

    def write(node, indent):
        space = "  " * indent
        for child in node.children:
            if child in expanded:
                lines.append(f"{space}subgraph cluster_{child.id} {{")
                lines.append(
                    f"{space}  label={_quoted(f'{child.name} {child.badge}'.strip())}; "
                    'fontname="Helvetica"; color="#b6c0cb";'
                )
                write(child, indent + 1)
                lines.append(f"{space}}}")
                continue
            step = sum(share(child) >= limit for limit in STEPS)
            text = "\n".join(
                part for part in (f"{child.name} {child.badge}".strip(), line(child)) if part
            )
            lines.append(
                f'{space}n{child.id} [label={_quoted(text)}, fillcolor="{LIGHT[step]}"'
                + (', fontcolor="white"' if step >= 4 else "")
                + "];"
            )

    write(flow.root, 1)
    edges: dict[tuple[Node, Node], set[str]] = {}
    for value, reader in flow.edges:
        a, b = (
            next(
                node
                for node, outer in itertools.pairwise(around)
                if all(above in expanded for above in chain(outer))
            )
            for around in (chain(value.source), chain(reader))
        )
        if a is not b:
            edges.setdefault((a, b), set()).add(value.type)
    for (a, b), types in edges.items():
        if a in expanded or b in expanded:  # the edge begins or ends at an expanded loop itself
            continue
        label = next(iter(types)) if len(types) == 1 else f"{len(types)} types"
        lines.append(f"  n{a.id} -> n{b.id} [label={_quoted(label)}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{"".join(c for c in text if c.isprintable())}"'
