"""The data flow of a program: its operations as a tree of scopes, loops and branches, and the
readers of each value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from fnet import jaxpr
from fnet.cost import Cost
from fnet.cost._count import count_frame
from fnet.cost._fusion import fused_traffic
from fnet.introspect._graph._nest import Item, Mark, nest
from fnet.introspect._graph._phases import BACKWARD, FORWARD, UPDATE, phases
from fnet.jaxpr import Frame, Op

_LOOPS = {"scan": "scan", "while": "while", "cond": "cond", "shard_map": "shard_map"}
_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


@dataclasses.dataclass(eq=False)
class Node:
    """A node of the data flow: a scope, an operation, a loop, a branch, an argument or a result.

    Attributes:
        name: the last segment of the path of the node, or the name of the primitive.
        kind: "scope", "operation", "scan", "while", "cond", "shard_map", "input" or "result". The
            kind is "body" for each branch of a conditional, for the condition of a while loop, and
            for the body of a while loop. The forward pass, backward pass and update of a training
            step have the kind "phase".
        path: the named scopes.
        phase: the phase of the node: "forward", "backward", "recomputed" or "update".
        badge: a label, such as "× 12" for the body of a scan over 12 layers.
        times: how often the node runs; a while loop counts once.
        parent: the node that contains this node, or None.
        children: the nodes inside this node, in the order of the program.
        cost: FLOPs and bytes of all runs of an operation, or of all operations inside the node.
        seconds: the lower bound of the node's time (see `cost.roofline`), or None if it is
            unknown.
        parameters, parameter_bytes: number of parameters of the scope, and their bytes.
        kept_bytes: bytes of the activations that the node stores for the backward pass.
        reads: names of the parameters that the node reads.
        type: the dtype and shape of an argument or a result, as text. If the node is an operation,
            `type` is the dtype and shape of its first output.
        id: the index of the node in `Flow.nodes`.
    """

    name: str
    kind: str
    path: str = ""
    phase: str = FORWARD
    badge: str = ""
    times: int = 1
    parent: Node | None = None
    children: list[Node] = dataclasses.field(default_factory=list)
    cost: Cost = dataclasses.field(default_factory=Cost)
    seconds: float | None = None
    parameters: int = 0
    parameter_bytes: int = 0
    kept_bytes: int = 0
    reads: tuple[str, ...] = ()
    type: str = ""
    id: int = -1

    def add(self, node: Node) -> Node:
        node.parent = self
        self.children.append(node)
        return node

    def __repr__(self) -> str:
        return f"{self.kind} {self.path or self.name}"


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
    """A value of a program: an output of an operation, or an argument. `type` is the dtype and
    shape that the readers of the value receive. In a scan, `type` is the dtype and shape of the
    value in one iteration."""

    source: Node
    output: int
    type: str
    nbytes: int = 0


@dataclasses.dataclass(eq=False)
class Flow:
    """The data flow of a program.

    Attributes:
        root: the whole program.
        nodes: all nodes; a node precedes the nodes that it contains.
        edges: the pairs (value, node that reads the value), in order.
        two_passes: whether the program contains a backward pass.
        counted: the `Count` of the program. Each scope path in `counted` begins with the index of
            an operation in `ops`.
        ops: all operations.
        hidden: a dict {name of a parameter or constant: (type, reader)}, where `reader` is the
            first node that reads the parameter or constant, or None if no node reads it. Parameters
            and constants are not drawn as inputs.
        notes: the reasons why some costs are not exact.
    """

    root: Node
    nodes: list[Node]
    edges: dict[tuple[Value, Node], None]
    two_passes: bool
    hidden: dict[str, tuple[Any, Node | None]]
    counted: Any
    ops: list[Node]
    notes: tuple[str, ...]


def type_of(aval: Any) -> str:
    """Returns a type as short text, such as "f32[8, 10]"."""
    name = (
        getattr(getattr(aval, "dtype", None), "name", None)
        or str(getattr(aval, "dtype", ""))
        or type(aval).__name__
    )
    for long, short in _DTYPES.items():
        if name.startswith(long) and name[len(long) :].isdigit():
            name = short + name[len(long) :]
            break
    return f"{name}[{', '.join(map(str, getattr(aval, 'shape', ())))}]"


def read_flow(
    traced: jaxpr.Traced, names: Sequence[str], hidden: Sequence[bool], results: Sequence[str]
) -> Flow:
    """Returns the data flow of a traced call.

    Args:
        traced: the call.
        names: the names of the arrays among the arguments of the call.
        hidden: for each array, a bool that is True if the array (for example a parameter) is not
            drawn as an input of the program.
        results: the names of the call's results.
    """
    program, frame = traced.closed.jaxpr, jaxpr.read(traced.closed.jaxpr)
    reader = _Reader()
    root = Node("program", "scope")
    env: dict[int, tuple[tuple, tuple]] = {}
    consts = len(program.constvars)
    for i, v in enumerate((*program.constvars, *program.invars)):
        name = f"constant {i}" if i < consts else names[i - consts]
        if i < consts or hidden[i - consts]:
            reader.hidden[name] = v.aval, None
            env[i] = (), (name,)
        else:
            env[i] = ((Node(name, "input", type=type_of(v.aval)), 0),), ()
    copied, two_passes = reader.frame(frame, env, root, "", 1, outermost=results)
    top = list(root.children)
    inputs = list(
        {
            source: None
            for value, _ in reader.edges
            for source in (value.source,)
            if source.kind == "input"
        }
    )
    outputs = []
    for name, i, v in zip(results, frame.results, program.outvars):
        found = env.get(i, ((), ())) if i is not None else ((), ())
        if found[0]:  # not a parameter that is returned unchanged, and not a literal
            outputs.append(Node(name, "result", type=type_of(v.aval)))
            reader.connect(found[0], outputs[-1], v.aval)
            inputs += [
                source for source, _ in found[0] if source.kind == "input" and source not in inputs
            ]
    root.children = []
    for node in (*_group("inputs", inputs), *top, *_group("results", outputs)):
        root.add(node)
    _name_parts(root)
    _join_loops(root, {node for value, reader_ in reader.edges for node in (value.source, reader_)})
    nodes: list[Node] = []
    _number(root, nodes)
    counted = count_frame(copied)
    flow = Flow(
        root,
        nodes,
        reader.edges,
        two_passes,
        reader.hidden,
        counted,
        reader.ops,
        _notes(counted.notes, reader.ops),
    )
    _add_costs(flow, reader)
    return flow


def _notes(notes, ops) -> tuple[str, ...]:
    """Replaces the indices of operations in the texts `notes` by the scope paths of the operations.
    The texts `notes` state why the counted FLOPs and bytes are not exact (see `Count.notes`)."""

    def readable(note):
        before, quote, rest = note.partition(" in '")
        index, _, after = rest.partition("'")
        if not quote:
            return note
        path = ops[int(index.partition("/")[0])].path
        return before + (f" in '{path}'" if path else "") + after

    return tuple(dict.fromkeys(map(readable, notes)))


def _group(name, nodes):
    """Groups the inputs or the results of a program by the prefixes of their names ("block" for
    "block/kernel").

    If the program has at most four inputs (or at most four results), the function returns their
    nodes without grouping them.
    """
    if len(nodes) <= 4:
        return nodes
    group = Node(name, "scope")
    items = [Item(node, tuple(node.name.split("/")[:-1]), set()) for node in nodes]
    nest(items, group, "", scope=lambda name, path: Node(name, "scope"))
    return [group]


def _name_parts(node) -> None:
    """Simplifies the nodes of a scope that `nest` has split into several nodes.

    If `nest` has split a scope, and one of the resulting nodes contains only one inner scope, the
    inner scope replaces this node. For example, if the second node of the scope "stem" contains
    only the scope "pool", the second node is drawn as the scope "stem/pool".
    """
    paths, names = [child.path for child in node.children], {child.name for child in node.children}
    for i, child in enumerate(node.children):
        if child.kind == "scope" and paths.count(child.path) > 1 and len(child.children) == 1:
            inner = child.children[0]
            name = f"{child.path.rpartition('/')[2]}/{inner.name}"
            if inner.children and inner.path.startswith(f"{child.path}/") and name not in names:
                inner.name, inner.parent = name, node
                node.children[i] = inner
                names.add(name)
    for child in node.children:
        _name_parts(child)


def _join_loops(node, ends) -> None:
    """Merges a scope and the loop, cond or shard_map inside it into one node, if the scope contains
    no other node, and no edge starts or ends at the loop, cond or shard_map itself. For example,
    the scope of a `Stack` contains only a scan."""
    for child in node.children:
        _join_loops(child, ends)
    if len(node.children) == 1 and node.kind == "scope" and node.parent is not None:
        loop = node.children[0]
        if loop.kind in _LOOPS and loop.children and loop not in ends:
            node.kind, node.badge, node.type = loop.kind, loop.badge, loop.type
            node.children = []
            for inner in loop.children:
                node.add(inner)


def _number(node, nodes):
    node.id = len(nodes)
    nodes.append(node)
    for child in node.children:
        _number(child, nodes)


def _add_costs(flow, reader):
    for key, cost in flow.counted.scopes.items():
        node = reader.ops[int(key.partition("/")[0])]
        node.cost += dataclasses.replace(cost, fused_bytes=0)
    counted = {id(reader.ops[int(key.partition("/")[0])]) for key in flow.counted.scopes}
    for node, size in reader.traffic:
        if id(node) in counted:  # only one branch of a cond is counted
            node.cost += Cost(fused_bytes=size)


class _Reader:
    """Collects the nodes and edges of a program.

    Attributes:
        ops: the nodes of all operations of the program. To count the cost of each operation
            separately, the scope path of each operation is replaced by the operation's index in the
            list `ops`.
        values: {(node that computes the value, index of its output, type): `Value`}.
    """

    def __init__(self):
        self.ops: list[Node] = []
        self.edges: dict[tuple[Value, Node], None] = {}
        self.values: dict[tuple, Value] = {}
        self.hidden: dict[str, tuple[Any, Node | None]] = {}
        self.traffic: list[tuple[Node, int]] = []

    def connect(self, sources, node, aval) -> None:
        text = type_of(aval)
        for source, output in sources:
            key = source, output, text
            if key not in self.values:
                self.values[key] = Value(*key, jaxpr.nbytes(aval))
            self.edges[self.values[key], node] = None

    def frame(
        self,
        frame: Frame,
        env: dict,
        owner: Node,
        base: str,
        times: int,
        outermost: Sequence[str] | None = None,
    ) -> tuple[Frame, bool]:
        """Adds the operations of `frame` (a jaxpr) to the children of the node `owner`, whose scope
        path is `base`.

        Args:
            env: a dict {id of a value: (sources, names)}. The tuple `sources` contains a tuple
                (node, index of the node's output) for each node that computes the value. The value
                may be a copy of any parameter or constant whose name is in `names`. For each value
                that the jaxpr computes, the method `frame` adds a key to the dict `env`.
            outermost: the names of the program's results if `frame` is the jaxpr of the whole
                program, or None if `frame` is an inner jaxpr, such as the body of a loop.

        Returns:
            A tuple (copy of `frame`, mixed). In the copy of `frame` (a jaxpr as a list of
            operations), the scope path of each operation is replaced by the operation's index in
            the list `self.ops`. `mixed` is True if the jaxpr contains operations of the backward
            pass and also other operations.
        """
        of_op = phases(frame, outermost, {i: names for i, (_, names) in env.items() if names})
        mixed = any(phase == BACKWARD for phase, _ in of_op) and any(
            phase != BACKWARD for phase, _ in of_op
        )
        items, copies, made = [], [], {}
        for i, (op, (phase, below)) in enumerate(zip(frame.ops, of_op)):
            node = Node(
                op.eqn.primitive.name,
                _LOOPS.get(op.eqn.primitive.name, "operation"),
                op.scope,
                op.at.phase if phase != UPDATE else UPDATE,
                times=times,
            )
            if op.outs:
                node.type = type_of(op.eqn.outvars[0].aval)
            segments = _segments(op, base) if below is None else below
            if op.recomputed:
                segments = (Mark("recomputed"), *segments)
            needs = {made[j] for j in op.ins if j in made}
            items.append(Item(node, ((Mark(phase),) if mixed else ()) + segments, needs))
            made |= dict.fromkeys(op.outs, i)
            self.ops.append(node)
            copies.append(self.op(op, node, env, len(self.ops) - 1))
        here = {id(op): item.node for op, item in zip(frame.ops, items)}
        self.traffic += [(here[id(op)], size * times) for op, size in fused_traffic(frame)]
        nest(items, owner, base, scope=lambda name, path: Node(name, "scope", path, times=times))
        if mixed and outermost is not None:
            for child in owner.children:
                child.kind = "phase"
            owner.children.sort(
                key=lambda child: (FORWARD, BACKWARD, UPDATE).index(child.name.partition(" ")[0])
            )
        return Frame(copies, frame.results), mixed

    def op(self, op: Op, node: Node, env, index) -> Op:
        """Connects an operation with the nodes that compute its inputs, and reads the jaxprs inside
        it."""
        inside = set()
        bodies = []
        whole = all(body.inputs is not None for body, _ in op.bodies)
        for n, (body, frame) in enumerate(op.bodies):
            inner = {}
            if whole:
                for k, i in enumerate(body.inputs):
                    if op.ins[i] is not None:
                        inner[len(body.jaxpr.constvars) + k] = env[op.ins[i]]
                    inside.add(i)
            for k in range(len(body.jaxpr.constvars) + len(body.jaxpr.invars)):
                inner.setdefault(k, ((), ()))
            place = node
            if len(op.bodies) > 1:
                name = {"while_cond": "condition", "while_body": "body"}.get(
                    body.kind, f"branch {n}"
                )
                place = node.add(Node(name, "body", op.scope, node.phase, times=node.times))
            copy, _ = self.frame(frame, inner, place, op.scope, node.times * (body.times or 1))
            bodies.append((body, copy))
            if whole and body.kind != "while_cond":
                for out, i in zip(op.outs, frame.results):
                    found = inner.get(i, ((), ())) if i is not None else ((), ())
                    before = env.get(out, ((), ()))
                    env[out] = tuple({*before[0], *found[0]}), tuple({*before[1], *found[1]})
        for i, (id_, v) in enumerate(zip(op.ins, op.eqn.invars)):
            if id_ is None or i in inside:
                continue
            sources, names = env[id_]
            self.connect(sources, node, v.aval)
            node.reads += names
            for name in names:
                if self.hidden[name][1] is None:
                    self.hidden[name] = self.hidden[name][0], node
        for k, out in enumerate(op.outs):
            if not any(env.get(out, ((), ()))):
                env[out] = ((node, k),), ()
        times = op.bodies[0][0].times if op.bodies else 1
        if node.kind == "while":
            node.badge = "loop"
        elif node.kind == "cond":
            node.badge = f"{len(op.bodies)} branches"
        elif op.bodies and times and times > 1:
            node.badge = f"× {times}"
        return dataclasses.replace(op, at=op.at._replace(path=str(index)), bodies=tuple(bodies))


def _segments(op: Op, base: str) -> tuple[str, ...]:
    path = op.scope
    if base:
        path = (
            path[len(base) :].lstrip("/") if path == base or path.startswith(base + "/") else path
        )
    return tuple(path.split("/")) if path else ()


def argument_names(args: tuple, kwargs: dict, count: int) -> list[str]:
    """Returns a name for each array in the arguments of a call, such as "0/image" for the key
    "image" of argument 0."""
    leaves = [
        (path, leaf)
        for path, leaf in jax.tree.leaves_with_path((args, kwargs))
        if jaxpr.is_array(leaf)
    ]
    if len(leaves) != count:  # some arguments are modules with further arrays
        return [f"argument {i}" for i in range(count)]
    return [path_text(path[1:]) for path, _ in leaves]


def path_text(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
