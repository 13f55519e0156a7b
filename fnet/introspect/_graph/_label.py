"""The second line of a box in the graph of a program."""

from __future__ import annotations

from collections.abc import Sequence

from fnet._util._units import si
from fnet.introspect._graph._flow import Node, Value

_SHORT = {
    "dot_general": "matmul",
    "conv_general_dilated": "conv",
    "reduce_window_max": "max pool",
    "reduce_window_sum": "pool",
    "ragged_dot_general": "ragged matmul",
}


def second_line(node: Node) -> str:
    """Returns the second line of a box in the drawn graph: text such as "3 matmul · 1.2 GFLOP" for
    a scope, or the type of an argument or result."""
    if node.kind in ("input", "result"):
        return node.type
    if not node.children:
        return ""
    flops = node.cost.flops
    text = f"{si(flops, digits=3)}FLOP" if isinstance(flops, int | float) else "symbolic FLOPs"
    kind = _main(node)
    return f"{kind} · {text}" if kind else text


def _main(node: Node) -> str:
    counts: dict[str, int] = {}
    stack = [node]
    while stack:
        each = stack.pop()
        stack += each.children
        if not each.children and each.cost.matmul:
            name = _SHORT.get(each.name, each.name)
            counts[name] = counts.get(name, 0) + 1
    if not counts:
        return ""
    name = max(counts, key=counts.get)
    return name if counts[name] == 1 else f"{counts[name]} {name}"


def value_text(values: Sequence[Value], carried: Sequence[int]) -> str:
    """Returns the label of a line: the type of the value that it carries, or their number."""
    if len(carried) > 1:
        return f"{len(carried)} values"
    return values[carried[0]].type if carried[0] >= 0 else "several values"
