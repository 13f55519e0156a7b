"""A program as a graph of equations, without the names of variables and the order of statements."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Ref(NamedTuple):
    """The result number `output` of the node number `node`."""

    node: int
    output: int = 0


Operand = Ref | str  # a number is its text
COMMUTATIVE = frozenset(("add", "sum", "mul", "max", "min", "and", "or", "xor", "eq", "ne"))


class Section(NamedTuple):
    """Where an equation is: the path of its named scopes, its pass (forward, backward or
    recomputed), and the loops, branches and shard_maps around it, outermost first."""

    path: str = ""
    phase: str = "forward"
    inside: tuple[str, ...] = ()


class Sketch(NamedTuple):
    """A few numbers that say which values an array has.

    Attributes:
        mean, rms: of the elements.
        projection: the sum of the elements with fixed random signs, divided by the square root of
            their number.
        noise: how much these numbers change if the inputs of the program change in their last
            digits.
    """

    mean: float
    rms: float
    projection: float
    noise: float


@dataclasses.dataclass
class Node:
    """One equation, input or constant of a program.

    Attributes:
        op: the operation, such as "dot_general". Inputs are called "input", array constants
            "constant", a scalar as an array "fill". A loop is a node of its own, the first operand
            of all that belongs to it: "carry" is a carried value, with its first value and its next
            one as operands, "each" a slice of an array that a scan loops over, and "last", "stack"
            and "end" are its results.
        operands: what it reads.
        options: its parameters as text.
        types: the dtypes and shapes of its results, such as "f32[8,128]".
        section: where it is.
        matmul, other: its FLOPs in matrix products, and its other operations, in all iterations.
        sketch: its values, if they were computed.
    """

    op: str
    operands: tuple[Operand, ...]
    options: str
    types: tuple[str, ...]
    section: Section
    matmul: int = 0
    other: int = 0
    sketch: Sketch | None = None

    @property
    def key(self) -> tuple:
        """What a node is without the nodes that it reads: two nodes have equal forms if their keys
        are equal."""
        literals = tuple(each if isinstance(each, str) else "%" for each in self.operands)
        if self.op in COMMUTATIVE:
            literals = tuple(sorted(literals))
        return self.op, self.options, self.types, literals, self.section.inside

    @property
    def refs(self) -> list[Ref]:
        return [each for each in self.operands if isinstance(each, Ref)]


@dataclasses.dataclass
class Program:
    """A program: its nodes, each after those that it reads (except the next value of a carry).

    Attributes:
        nodes: the nodes.
        inputs: {path of an input: number of its node}.
        outputs: {path of a result: what it is}.
        effects: the numbers of nodes with side effects, in order.
    """

    nodes: list[Node]
    inputs: dict[str, int]
    outputs: dict[str, Operand]
    effects: list[int]

    @property
    def roots(self) -> list[int]:
        return [
            *(each.node for each in self.outputs.values() if isinstance(each, Ref)),
            *self.effects,
        ]


LOOP_RESULTS = frozenset(("last", "stack", "end"))
_NEXT = 2  # of a carry: its operands are the loop, the first value and the next value


def forward_refs(node: Node) -> list[Ref]:
    """Returns what a node reads, without the next value of a carry, which comes after the node."""
    operands = node.operands[:_NEXT] if node.op == "carry" else node.operands
    return [each for each in operands if isinstance(each, Ref)]


def next_value(node: Node) -> Operand:
    """Returns the next value of a carry."""
    return node.operands[_NEXT]


def ordered(program: Program) -> tuple[Program, list[int]]:
    """Returns a program without the nodes on which no result depends, in an order that follows
    from its graph alone, and the old number of each node.

    A node comes after its operands, which come in the order in which it reads them. All that a loop
    carries comes before the results of the loop.
    """
    nodes = program.nodes
    nexts = _nexts(nodes, program.roots)
    order: list[int] = list(program.inputs.values())
    placed = set(order)

    def before(number: int) -> Iterator[int]:
        node = nodes[number]
        yield from (ref.node for ref in forward_refs(node))
        if node.op in LOOP_RESULTS:
            yield from nexts.get(node.refs[0].node, ())

    left = [number for loop in nexts.values() for number in loop]  # of loops without results
    for root in (*program.roots, *left):
        stack = [(root, before(root))]
        while stack:
            number, rest = stack[-1]
            following = next((each for each in rest if each not in placed), None)
            if following is not None:
                stack.append((following, before(following)))
                continue
            stack.pop()
            if number not in placed:
                placed.add(number)
                order.append(number)
    return _renumbered(program, order), order


def _nexts(nodes: list[Node], roots: Iterable[int]) -> dict[int, list[int]]:
    """Returns, for each loop, the next values of those of its carries that a root depends on."""
    seen: dict[int, None] = {}
    stack, nexts = list(roots), collections.defaultdict(list)
    while stack:
        number = stack.pop()
        if number not in seen:
            seen[number] = None
            stack += (ref.node for ref in nodes[number].refs)
    for number in seen:
        node = nodes[number]
        if node.op == "carry" and isinstance(following := next_value(node), Ref):
            nexts[node.refs[0].node].append(following.node)
    return nexts


def _renumbered(program: Program, order: list[int]) -> Program:
    number = {old: new for new, old in enumerate(order)}
    moved = lambda each: Ref(number[each.node], each.output) if isinstance(each, Ref) else each
    nodes = [
        dataclasses.replace(
            program.nodes[old], operands=tuple(map(moved, program.nodes[old].operands))
        )
        for old in order
    ]
    return Program(
        nodes,
        {name: number[old] for name, old in program.inputs.items()},
        {name: moved(each) for name, each in program.outputs.items()},
        [number[old] for old in program.effects],
    )
