"""`graph` draws a program as a graph of its named scopes, as HTML, SVG or DOT."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from fnet import hardware as hw
from fnet import jaxpr
from fnet._util import _files
from fnet.cost._roofline import compute_seconds
from fnet.introspect._graph import _draw, _page
from fnet.introspect._graph._arrange import Arrangement, arrange
from fnet.introspect._graph._dot import dot
from fnet.introspect._graph._flow import Flow, Node, Value, argument_names, path_text, read_flow
from fnet.introspect._graph._kept import kept_activations
from fnet.introspect._graph._label import second_line
from fnet.introspect._summary import as_function
from fnet.layers import Layer

_VISIBLE = 28  # maximum number of boxes in the first view, if no depth is given
COLORS = ("flops", "bytes", "time")


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """The result of `graph`; Jupyter shows it as SVG.

    Attributes:
        root: the whole program as a tree of nodes: scopes, operations, loops, branches, arguments
            and results. A node has `name`, `path`, `kind`, `children`, `cost`, `parameters`,
            `kept_bytes` and `seconds`.
        nodes: all nodes, each before those that it contains.
        edges: pairs (value, node that reads it); `value.source` is the node that computes it.
        chip: the chip of `seconds`, the roofline time.
        notes: the reasons why some figures are not exact.

    >>> graph = introspect.graph(nn.Sequential(hidden=nn.Dense(4), head=nn.Dense(2)), jnp.ones((3, 5)))
    >>> "hidden" in [node.name for node in graph.nodes]
    True
    """

    root: Node
    nodes: tuple[Node, ...]
    edges: tuple[tuple[Value, Node], ...]
    chip: hw.Chip
    notes: tuple[str, ...]
    _flow: Flow = dataclasses.field(repr=False)
    _made: dict[Node, Arrangement] = dataclasses.field(repr=False)
    _values: list[Value] = dataclasses.field(repr=False)
    _depth: int | None
    _color: str
    _title: str

    def __repr__(self) -> str:
        return f"<graph of {self._title}: {len(self.nodes)} nodes, {len(self.edges)} edges>"

    def html(self) -> str:
        """Returns an HTML page that loads no other files, with the outer scopes expanded."""
        return _page.page(
            self, self._expanded(), self._made, self._values, self._color, self._title
        )

    def svg(self) -> str:
        """Returns an SVG image, with the outer scopes expanded."""
        share = lambda node: share_of(self, node, self._color)
        return _draw.Drawing(self._made, self._values, self._expanded(), second_line, share).svg(
            self.root
        )

    _repr_svg_ = svg

    def dot(self) -> str:
        """Returns the graph in Graphviz's language DOT, with the outer scopes expanded."""
        return dot(
            self._flow,
            self._expanded(),
            second_line,
            lambda node: share_of(self, node, self._color),
        )

    def save(self, path: str | os.PathLike) -> Path:
        """Writes the graph to a .html, .svg or .dot file, and returns its path.

        Raises:
            ValueError: the path does not end in .html, .svg or .dot.
        """
        path = Path(path)
        forms = {".html": self.html, ".svg": self.svg, ".dot": self.dot}
        if path.suffix.lower() not in forms:
            raise ValueError(
                f"graph: '{path}' has the ending '{path.suffix}', expected .html, .svg or .dot"
            )
        _files.write(path, forms[path.suffix.lower()]())
        return path

    def _expanded(self) -> set[Node]:
        return first_view(self.root, self._depth)


def graph(
    f: Callable,
    *args: Any,
    depth: int | None = None,
    color: str = "flops",
    chip: Any = None,
    train: bool = False,
    **options: Any,
) -> Graph:
    """Draws a program as a graph of its named scopes. The program is neither run nor compiled.

        introspect.graph(model, x, "graph.html")                       # a layer, or a flax.nnx module, and its inputs
        introspect.graph(step, state, batch, "step.html")              # a complete training step
        introspect.graph(model, x, "model.svg", depth=2)

    On the HTML page, a scope is a box that expands by click or key, down to single operations. Its
    color shows its share of the cost, and edges carry shapes and dtypes. A scan, such as a `Stack`,
    is drawn once, with the number of iterations, such as "× 12". Of a training step, the forward
    pass runs from top to bottom, the backward pass beside it from bottom to top, and the update
    follows.

    Parameters and constants have no boxes; each box lists those that it reads. The first argument
    of a function counts as its parameters if it contains several arrays and there are further
    arguments.

    Args:
        f: a layer, a `flax.nnx.Module`, or a function, whose scopes come from models of fnet, Flax,
            Equinox or Haiku, or from `jax.named_scope`.
        args: the arguments of f (arrays or `jax.ShapeDtypeStruct`s), and at the end, if you like, a
            file to write, which ends in .html, .svg or .dot.
        depth: the number of levels that are expanded at first. Default: the largest number for
            which at most 28 boxes are shown.
        color: what the color of a box shows: "flops" (default), "bytes" (after fusion) or "time"
            (the roofline time, see `cost.roofline`).
        chip: the chip of the roofline time, as in `cost.roofline`. Default: this machine's chip.
        train: whether a layer is called with train=True. Default False.
        options: keyword arguments of f.

    Returns:
        A `Graph`.

    Raises:
        ValueError: `color` or `depth` is invalid, or the file does not end in .html, .svg or .dot.

    >>> model = nn.Sequential(hidden=nn.Dense(4), head=nn.Dense(2))
    >>> drawn = graph(model, jnp.ones((3, 5)))
    >>> [node.name for node in drawn.root.children], drawn.root.cost.matmul
    (['input', 'hidden', 'head', 'result'], 168)
    """
    path = None
    if args and isinstance(args[-1], str | os.PathLike):
        *args, path = args
    if color not in COLORS:
        raise ValueError(f"graph: color={color!r}: expected one of {', '.join(map(repr, COLORS))}")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise ValueError(
            f"graph: depth={depth!r}: expected the number of levels to expand, 0 or more, or None"
        )
    if path is not None and Path(path).suffix.lower() not in (".html", ".svg", ".dot"):
        raise ValueError(
            f"graph: '{path}' has the ending '{Path(path).suffix}', expected .html, .svg or .dot"
        )
    chip = hw.detect(chip)
    run, params, inputs = as_function(f, tuple(args), train, options, "graph")
    own = not isinstance(f, Layer)
    first = jax.tree.leaves(params)
    drawn_first = own and not _module(f) and (not inputs or len(first) <= 1)
    paths: list[str] = []
    if _module(f):  # the module's variables become a list of arrays
        paths = [path_text(path) for path, _ in jax.tree.leaves_with_path(params)]
        leaves, structure = jax.tree.flatten(params)
        params, of_variables = leaves, run
        run = lambda leaves, *inputs: of_variables(jax.tree.unflatten(structure, leaves), *inputs)
    traced = jaxpr.Traced(run, (params, *inputs), {})
    names = argument_names((params, *inputs), {}, len(traced.arrays))
    hidden = [
        not drawn_first
        and (
            name == "0"
            or name.startswith("0/")
            or (not own and (name == "1" or name.startswith("1/")))
        )
        for name in names
    ]
    words = _argument_words(f, len(inputs) + 1)
    names = [
        paths[i] if i < len(paths) else _argument(words, name, hide)
        for i, (name, hide) in enumerate(zip(names, hidden))
    ]
    flow = read_flow(traced, names, hidden, _results(traced, isinstance(f, Layer)))
    _add_parameters(flow)
    notes = [*flow.notes, *_add_kept(flow, run, params, inputs)]
    notes += _add_seconds(flow, chip)
    _add_up(flow.root)
    made, values = arrange(flow)
    title = (
        type(f).__name__
        if isinstance(f, Layer) or _module(f)
        else getattr(f, "__name__", type(f).__name__)
    )
    flow.root.name = title
    drawn = Graph(
        flow.root,
        tuple(flow.nodes),
        tuple(flow.edges),
        chip,
        tuple(dict.fromkeys(notes)),
        flow,
        made,
        values,
        depth,
        color,
        title,
    )
    if path is not None:
        drawn.save(path)
    return drawn


def _module(f) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(f, nnx.Module)


def _argument_words(f, count) -> list[str]:
    """Returns names for the arguments of a function, from its signature if possible."""
    if isinstance(f, Layer) or _module(f):
        inputs = (
            ["input"]
            if count - (3 if isinstance(f, Layer) else 1) == 1
            else [f"input {i}" for i in range(count)]
        )
        return [
            *(("parameters", "state", "key") if isinstance(f, Layer) else ("parameters",)),
            *inputs,
        ]
    try:
        found = [
            name
            for name, each in inspect.signature(f).parameters.items()
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        found = []
    return [*found, *(f"argument {i}" for i in range(len(found), count))]


def _argument(words, name, hide) -> str:
    """Returns a readable name of an argument, from its position and path."""
    number, _, rest = name.partition("/")
    if hide:
        return rest or name
    word = words[int(number)] if number.isdigit() and int(number) < len(words) else number
    return f"{word}/{rest}" if rest else word


class _Result:
    """A placeholder for an array in a tree of results."""


def _results(traced, of_layer) -> list[str]:
    slots = [_Result() for _ in traced.closed.jaxpr.outvars]
    tree, _ = traced.tree(list(slots))
    paths = {
        id(leaf): path_text(path)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if isinstance(leaf, _Result)
    }
    names = [
        paths.get(id(slot)) or (f"result {i}" if len(slots) > 1 else "result")
        for i, slot in enumerate(slots)
    ]
    if of_layer and isinstance(tree, tuple) and len(tree) == 2:  # (outputs, state)
        names = [
            {"0": "result", "1": "state"}[name[:1]] + name[1:] if name[:1] in "01" else name
            for name in names
        ]
    return names


def _add_parameters(flow: Flow) -> None:
    """Adds each parameter to the parameter count of its named scope. For example, the parameter
    "params/block/kernel" is counted in the scope "block". A parameter that belongs to no scope is
    counted in the first node that reads it."""
    by_path: dict[str, Node] = {}
    for node in flow.nodes:
        if node.children and node.path:
            by_path.setdefault(node.path, node)
    for name, (aval, reader) in flow.hidden.items():
        parts = [part for part in name.split("/") if part not in ("~", "value")]
        owners = ["/".join(parts[start:-1]) for start in range(len(parts) - 1)]
        node = next((by_path[owner] for owner in owners if owner in by_path), reader)
        if reader is None or reader.phase == "update":  # unused, or read first by the update
            continue
        size = 1
        for n in getattr(aval, "shape", ()):
            size = size * n
        node.parameters += size
        node.parameter_bytes += jaxpr.nbytes(aval)


def _add_kept(flow: Flow, run, params, inputs) -> list[str]:
    if flow.two_passes:
        for value in {
            (value.source, value.output): value
            for value, reader in flow.edges
            if value.source.phase == "forward"
            and reader.phase in ("backward", "recomputed")
            and value.source.kind != "input"
        }.values():
            value.source.kept_bytes += value.nbytes * value.source.times
        return []
    if not any(
        jnp.issubdtype(leaf.dtype, jnp.inexact)
        for leaf in jax.tree.leaves(params)
        if jaxpr.is_array(leaf)
    ):
        return []
    by_path: dict[str, Node] = {}
    for node in flow.nodes:
        if node.children or node.kind not in ("input", "result"):
            by_path.setdefault(node.path, node)
    try:
        found = kept_activations(run, params, *inputs)
    except (TypeError, ValueError, NotImplementedError):
        return [
            "kept activations: the function has no derivative with respect to its first argument"
        ]
    for each in found:
        by_path.get(each.path, flow.root).kept_bytes += each.nbytes
    return []


def _add_seconds(flow: Flow, chip) -> list[str]:
    symbolic = not isinstance(flow.counted.total.flops, int)
    seconds = None if symbolic else compute_seconds(flow.counted, chip, 1, None)
    if seconds is None or not chip.bandwidth:
        return [
            f"no time at the roofline: the peaks of {chip.name} are unknown, or sizes are symbolic"
        ]
    by_op: dict[int, float] = {}
    for key, value in seconds.items():
        index = int(key.partition("/")[0])
        by_op[index] = by_op.get(index, 0.0) + value
    for i, node in enumerate(flow.ops):
        if not node.children:
            node.seconds = max(by_op.get(i, 0.0), node.cost.fused_bytes / chip.bandwidth)
    return []


def _add_up(node: Node) -> None:
    for child in node.children:
        _add_up(child)
        node.cost += child.cost
        node.parameters += child.parameters
        node.parameter_bytes += child.parameter_bytes
        node.kept_bytes += child.kept_bytes
        if child.seconds is not None:
            node.seconds = (node.seconds or 0.0) + child.seconds


def amount(node: Node, color: str) -> float:
    """Returns the number (such as the FLOPs) that determines the color of a node."""
    value = {"flops": node.cost.flops, "bytes": node.cost.fused_bytes, "time": node.seconds or 0.0}[
        color
    ]
    return value if isinstance(value, int | float) else 0.0


def share_of(drawn: Graph, node: Node, color: str) -> float:
    total = amount(drawn.root, color)
    return amount(node, color) / total if total else 0.0


def first_view(root: Node, depth: int | None) -> set[Node]:
    """Returns the scopes that are expanded in the initial view of a graph: all scopes down to the
    level `depth`. If `depth` is None, scopes are expanded level by level, as long as the drawing
    shows at most `_VISIBLE` boxes."""
    expanded, level, visible = {root}, [root], len(root.children)
    for _ in range(200 if depth is None else depth):
        level = [child for node in level for child in node.children if child.children]
        if depth is None:
            level = [
                node
                for node in level
                if node.kind == "phase" or any(child.children for child in node.children)
            ]
            lone = [
                node for node in level if node.kind == "phase" or len(node.parent.children) == 1
            ]
            visible += sum(len(node.children) for node in level)
            if visible > _VISIBLE:
                level = lone
        if not level:
            break
        expanded.update(level)
    return expanded
