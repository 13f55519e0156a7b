"""Pairs the equations of two programs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence

from fnet.introspect._lock._colors import Palette
from fnet.introspect._lock._common import common
from fnet.introspect._lock._program import COMMUTATIVE, Node, Program, Ref

Pair = tuple[int, int]
_LIKELY = "users", "operands", "form", "operation"
"""In which ways nodes are alike, the strictest first."""


@dataclasses.dataclass
class Alignment:
    """Which nodes of two programs correspond to each other.

    Attributes:
        twins: {number in the old program: number in the new one}.
        equal: the numbers, in the old program, of the nodes that compute the same in both.
        colors: the colors of the nodes of both programs: equal colors mean equal values.
        inputs: pairs (old path, new path) of the inputs.
        outputs: pairs (old path, new path) of the results.
    """

    twins: dict[int, int]
    equal: set[int]
    colors: list[list[int]]
    inputs: list[tuple[str, str]]
    outputs: list[tuple[str, str]]


def align(old: Program, new: Program) -> Alignment:
    """Pairs first what is equal, then what has equal forms in the same order, then what has at
    least the same operation, each where possible in the same layer.

    Inputs with the same path are pairs, and then those that are used in the same way. If the
    programs differ, that leaves some: they are paired by the nodes that read them.
    """
    palette = Palette()
    pairs = _inputs(old, new, palette)
    left = _without(old.inputs, (a for a, _ in pairs))
    right = _without(new.inputs, (b for _, b in pairs))
    if left and right:
        match, _ = _matched(old, new, palette, pairs, "renamed")
        pairs += _read_alike(old, new, match.twins, left, right)
    match, colors = _matched(old, new, palette, pairs, None)
    equal = {a for a, b in match.twins.items() if colors[0][a] == colors[1][b]}
    outputs = _outputs(old, new, colors, match.twins)
    return Alignment(match.twins, equal, colors, pairs, outputs)


def _matched(
    old: Program, new: Program, palette: Palette, pairs: list[tuple[str, str]], others: str | None
) -> tuple[_Match, list[list[int]]]:
    """Pairs the nodes of two programs, given pairs of inputs. Other inputs are called `others`, or
    are all different if that is None."""
    identity: tuple[dict[int, Hashable], dict[int, Hashable]] = (
        {number: others or ("old", number) for number in old.inputs.values()},
        {number: others or ("new", number) for number in new.inputs.values()},
    )
    for i, (a, b) in enumerate(pairs):
        identity[0][old.inputs[a]] = identity[1][new.inputs[b]] = i
    colors = palette.colors((old, new), identity)
    match = _Match(old, new)
    for a, b in pairs:
        match.twins[old.inputs[a]] = new.inputs[b]
    match.equal_colors(*colors)
    match.by_layer()
    match.anywhere()
    match.replaced(old, new)
    return match, colors


def _without(paths: Iterable[str], known: Iterable[str]) -> list[str]:
    taken = set(known)
    return [path for path in paths if path not in taken]


def _inputs(old: Program, new: Program, palette: Palette) -> list[tuple[str, str]]:
    """Pairs inputs with the same path, then those that are used in the same way."""
    pairs = [(path, path) for path in old.inputs if path in new.inputs]
    known = {path for path, _ in pairs}
    left, right = _without(old.inputs, known), _without(new.inputs, known)
    if not left or not right:
        return pairs
    identities: list[dict[int, Hashable]] = []
    for program in (old, new):
        identity: dict[int, Hashable] = dict.fromkeys(program.inputs.values(), "renamed")
        identities.append(identity | {program.inputs[path]: path for path in known})
    usage = []
    for program, colors in zip((old, new), palette.colors((old, new), identities)):
        uses = palette.uses(program, colors)
        usage.append({path: (colors[n], uses[n]) for path, n in program.inputs.items()})
    return pairs + _pairs(left, right, usage[0].__getitem__, usage[1].__getitem__)


def _read_alike(
    old: Program, new: Program, twins: dict[int, int], left: list[str], right: list[str]
) -> list[tuple[str, str]]:
    """Pairs inputs that many pairs of nodes read at the same place, and the rest by their types."""
    first, second = (
        {program.inputs[path]: path for path in paths}
        for program, paths in ((old, left), (new, right))
    )
    votes: collections.Counter = collections.Counter()
    for a, b in twins.items():
        for x, y in zip(old.nodes[a].operands, new.nodes[b].operands):
            if isinstance(x, Ref) and isinstance(y, Ref) and x.node in first and y.node in second:
                same_type = old.nodes[x.node].types == new.nodes[y.node].types
                votes[x.node, y.node] += 2 if same_type else 1
    pairs = []
    for (x, y), _ in votes.most_common():
        if x in first and y in second:
            pairs.append((first.pop(x), second.pop(y)))
    types = lambda program: lambda path: program.nodes[program.inputs[path]].types
    return pairs + _pairs(list(first.values()), list(second.values()), types(old), types(new))


def _outputs(
    old: Program, new: Program, colors: list[list[int]], twins: dict[int, int]
) -> list[tuple[str, str]]:
    pairs = [(path, path) for path in old.outputs if path in new.outputs]
    known = {path for path, _ in pairs}
    left = [path for path in old.outputs if path not in known]
    right = [path for path in new.outputs if path not in known]

    def value(program: Program, which: int) -> Callable[[str], Hashable]:
        def of(path: str) -> Hashable:
            each = program.outputs[path]
            return (colors[which][each.node], each.output) if isinstance(each, Ref) else each

        return of

    def place(program: Program, number: Callable[[int], int | None]) -> Callable[[str], Hashable]:
        def of(path: str) -> Hashable:
            each = program.outputs[path]
            return (number(each.node), each.output) if isinstance(each, Ref) else each

        return of

    for first, second in (
        (value(old, 0), value(new, 1)),
        (place(old, twins.get), place(new, lambda number: number)),
    ):
        found = _pairs(left, right, first, second)
        pairs += found
        left = [path for path in left if path not in {a for a, _ in found}]
        right = [path for path in right if path not in {b for _, b in found}]
    return pairs


def _pairs(left: Sequence, right: Sequence, first: Callable, second: Callable) -> list[tuple]:
    """Pairs elements of two lists with equal keys, in order."""
    waiting = collections.defaultdict(collections.deque)
    for each in right:
        waiting[second(each)].append(each)
    return [(each, waiting[first(each)].popleft()) for each in left if waiting.get(first(each))]


class _Match:
    """The pairs so far."""

    def __init__(self, old: Program, new: Program):
        self.old, self.new = old.nodes, new.nodes
        self.inputs = set(old.inputs.values()), set(new.inputs.values())
        self.twins: dict[int, int] = {}
        self.paths = {node.section.path for node in self.old} & {
            node.section.path for node in self.new
        }
        self.keys = {kind: (self.known_as(old, kind), self.known_as(new, kind)) for kind in _LIKELY}

    def known_as(self, program: Program, kind: str) -> list[Hashable]:
        """Returns a key for each node. Nodes are alike if their keys are equal: the operation
        alone, the form, or the form and the operations that read the node or that it reads."""
        if kind == "operation":
            return [(node.op, len(node.types)) for node in program.nodes]
        keys: list[Hashable] = [node.key for node in program.nodes]
        if kind == "form":
            return keys
        around: list[list] = [[] for _ in keys]
        for i, node in enumerate(program.nodes):
            for ref in node.refs:
                if kind == "users":
                    around[ref.node].append(self.label(node))
                else:
                    around[i].append(self.label(program.nodes[ref.node]))
        return [(key, tuple(sorted(each))) for key, each in zip(keys, around)]

    def label(self, node: Node) -> tuple:
        path = node.section.path if node.section.path in self.paths else "?"
        return node.op, path, node.section.phase

    def left(self) -> tuple[list[int], list[int]]:
        """The nodes without a counterpart."""
        taken = set(self.twins.values())
        return (
            [i for i in range(len(self.old)) if i not in self.twins and i not in self.inputs[0]],
            [i for i in range(len(self.new)) if i not in taken and i not in self.inputs[1]],
        )

    def equal_colors(self, old: list[int], new: list[int]) -> None:
        place = lambda nodes, colors: lambda i: (colors[i], *nodes[i].section[:2])
        phase = lambda nodes, colors: lambda i: (colors[i], nodes[i].section.phase)
        color = lambda nodes, colors: lambda i: colors[i]
        for key in (place, phase, color):
            self.twins.update(_pairs(*self.left(), key(self.old, old), key(self.new, new)))

    def by_layer(self) -> None:
        groups: dict[tuple, tuple[list[int], list[int]]] = collections.defaultdict(lambda: ([], []))
        for side, (nodes, numbers) in enumerate(zip((self.old, self.new), self.left())):
            for number in numbers:
                groups[nodes[number].section[:2]][side].append(number)
        for first, second in groups.values():
            self.sequence(first, second, _LIKELY)

    def anywhere(self) -> None:
        """Pairs the rest, of which only layers that the other program does not have may have other
        forms."""
        self.sequence(*self.left(), _LIKELY[:-1])
        left, right = self.left()
        self.sequence(
            [i for i in left if self.old[i].section.path not in self.paths],
            [i for i in right if self.new[i].section.path not in self.paths],
            _LIKELY,
        )

    def sequence(self, old: list[int], new: list[int], kinds: Sequence[str]) -> None:
        """Pairs nodes in order, first those that are alike in the strictest way, and between them
        those that are alike in the next way."""
        if not kinds or not old or not new:
            return
        first, second = self.keys[kinds[0]]
        pairs = common([first[i] for i in old], [second[i] for i in new])
        self.twins.update((old[i], new[j]) for i, j in pairs)
        i = j = 0
        for end_i, end_j in [*pairs, (len(old), len(new))]:
            self.sequence(old[i:end_i], new[j:end_j], kinds[1:])
            i, j = end_i + 1, end_j + 1

    def replaced(self, old: Program, new: Program) -> None:
        """Pairs nodes of different operations in one layer that the same node reads at the same
        place, or that are the same result."""
        free = tuple(map(set, self.left()))
        results = [(old.outputs[path], new.outputs.get(path)) for path in old.outputs]
        waiting = [
            (a.node, b.node) for a, b in results if isinstance(a, Ref) and isinstance(b, Ref)
        ]
        waiting += [pair for each in self.twins.items() for pair in self.read(*each, free)]
        while waiting:
            a, b = waiting.pop()
            same_layer = self.label(self.old[a])[1:] == self.label(self.new[b])[1:]
            if same_layer and a in free[0] and b in free[1]:
                self.twins[a] = b
                free[0].discard(a)
                free[1].discard(b)
                waiting += self.read(a, b, free)

    def read(self, a: int, b: int, free: tuple[set[int], ...]) -> list[Pair]:
        """Returns pairs of free nodes that two nodes read at the same place."""
        old, new = self.old[a], self.new[b]
        pairs = list(zip(old.operands, new.operands))
        if {old.op, new.op} & COMMUTATIVE or len(old.operands) != len(new.operands):
            pairs = list(
                zip(
                    [ref for ref in old.refs if ref.node in free[0]],
                    [ref for ref in new.refs if ref.node in free[1]],
                )
            )
        return [
            (first.node, second.node)
            for first, second in pairs
            if isinstance(first, Ref) and isinstance(second, Ref)
        ]
