"""Colors of the nodes of programs: two nodes have the same color if they compute the same from the
same inputs.

A color is a number that stands for the form of a node and the colors of what it reads, so that it
depends neither on the names in a program nor on the order of its statements.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Mapping, Sequence

from fnet.introspect._lock._program import COMMUTATIVE, Node, Operand, Program, Ref, next_value

_MOST_PASSES = 8


class Palette:
    """Numbers for colors, common to the programs that are compared."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def __call__(self, what: Hashable) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def colors(
        self, programs: Sequence[Program], inputs: Sequence[Mapping[int, Hashable]]
    ) -> list[list[int]]:
        """Returns the color of each node of each program. `inputs` contains what identifies the
        inputs of each program.

        What a loop carries depends on its next value, whose color is that of an earlier pass. All
        programs have the same number of passes, so that their colors are comparable.
        """
        carries = [
            [i for i, node in enumerate(program.nodes) if node.op == "carry"]
            for program in programs
        ]
        following: list[dict[int, int]] = [{} for _ in programs]
        counts: list[int] = []
        for _ in range(min(max(map(len, carries)), _MOST_PASSES) + 1):
            colors = [self._pass(*each) for each in zip(programs, inputs, following)]
            following = [
                {i: self._color(of, next_value(program.nodes[i])) for i in loops}
                for program, of, loops in zip(programs, colors, carries)
            ]
            found = [len(set(each)) for each in colors]
            if found == counts:  # no color was divided further
                break
            counts = found
        return colors

    def _pass(
        self, program: Program, inputs: Mapping[int, Hashable], following: Mapping[int, int]
    ) -> list[int]:
        colors: list[int] = []
        for i, node in enumerate(program.nodes):
            if node.op == "input":
                colors.append(self(("input", inputs[i], node.types)))
                continue
            operands = node.operands[:2] if node.op == "carry" else node.operands
            read = [self._color(colors, each) for each in operands]
            if node.op in COMMUTATIVE:
                read.sort()
            colors.append(self((_form(node), tuple(read), following.get(i))))
        return colors

    def _color(self, colors: list[int], operand: Operand) -> int:
        if isinstance(operand, Ref):
            return self(("result", colors[operand.node], operand.output))
        return self(("number", operand))

    def uses(self, program: Program, colors: list[int]) -> list[int]:
        """Returns a second color for each node, which says how its results are used."""
        users: dict[int, list] = collections.defaultdict(list)
        uses = [0] * len(program.nodes)
        for operand in program.outputs.values():
            if isinstance(operand, Ref):
                users[operand.node].append((-1, operand.output))
        for i in reversed(range(len(program.nodes))):
            node = program.nodes[i]
            uses[i] = self(("uses", tuple(sorted(users[i]))))
            operands = node.operands[:2] if node.op == "carry" else node.operands
            for place, operand in enumerate(operands):
                if isinstance(operand, Ref):
                    at = 0 if node.op in COMMUTATIVE else place
                    users[operand.node].append((self((colors[i], uses[i], at)), operand.output))
        return uses


def _form(node: Node) -> tuple:
    return node.op, node.options, node.types, node.section.inside
