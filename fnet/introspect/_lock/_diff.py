"""Compares two locks: the first equation whose form, value or cost changed, and the layers around
it."""

from __future__ import annotations

import collections
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator

from fnet._util._text_table import aligned
from fnet._util._units import si
from fnet.introspect._lock._align import Alignment, align
from fnet.introspect._lock._lock import Lock, read_lock
from fnet.introspect._lock._program import (
    COMMUTATIVE,
    Node,
    Operand,
    Program,
    Ref,
    Sketch,
    forward_refs,
)
from fnet.introspect._lock._sketch import alike

_PHASES = ("forward", "recomputed", "backward")
_ESTIMATED = 0.05  # a change of an estimate that says nothing
_MOST_LINES = 12
_OF_EQUATIONS = "equation", "added", "removed", "value"


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference between two locks.

    Attributes:
        kind: "equation" (of another form, or with other operands), "added" or "removed" (an
            equation), "input", "result", "value", "cost" or "plan".
        layer: the path of the named scopes of the equation, "" outside of all layers.
        phase: "forward", "backward" or "recomputed".
        was, now: the equation, type or number in the old and in the new lock, "" if there is none.
        follows: whether an earlier change explains this one, because the equation reads from it.

    >>> before, after = (introspect.lock(f, jnp.ones(3)) for f in (jnp.sin, jnp.cos))
    >>> print(introspect.diff(before, after).first)
    outside of all layers: `sin f32[3] : f32[3]` is now `cos f32[3] : f32[3]`
    """

    kind: str
    layer: str
    phase: str
    was: str
    now: str
    follows: bool = False

    def __str__(self) -> str:
        where = self.layer or "outside of all layers"
        where += "" if self.phase == "forward" else f" ({self.phase})"
        if self.kind in ("added", "removed"):
            return f"{where}: {self.kind} `{self.was or self.now}`"
        if self.kind == "equation":
            return f"{where}: `{self.was}` is now `{self.now}`"
        if self.kind == "value":
            return f"{where}: {self.was}, now {self.now}"
        return f"{self.kind}: {self.was or 'nothing'}, now {self.now or 'nothing'}"


@dataclasses.dataclass(frozen=True)
class Changes:
    """What changed between two locks: the result of `diff`. It is false if nothing did, and prints
    as the first change, a table of the layers with changes, and the changed costs.

    Attributes:
        changes: all changes, the first in the order of the program first. Those of costs and of
            the plan are at the end.
        costs: a line for each layer with other costs: {layer: (old FLOPs, new FLOPs)}.
        notes: what differs but changes nothing, such as renamed parameters and versions.

    >>> x = jnp.ones(3)
    >>> print(introspect.diff(introspect.lock(jnp.sin, x), introspect.lock(jnp.cos, x)).first)
    outside of all layers: `sin f32[3] : f32[3]` is now `cos f32[3] : f32[3]`
    """

    changes: tuple[Change, ...]
    costs: dict[str, tuple[int, int]]
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    @property
    def same(self) -> bool:
        return not self.changes

    @property
    def first(self) -> Change | None:
        """The first change in the order of the program, or None."""
        return next(iter(self.changes), None)

    def __str__(self) -> str:
        if self.first is None:
            return "\n".join(["nothing changed", *_lines(self.notes)])
        equations = [each for each in self.changes if each.kind in _OF_EQUATIONS]
        lines = [f"first change: {self.first}"]
        lines += _counted(_short(str(each)) for each in self.changes[1:] if not each.follows)
        following = sum(each.follows for each in self.changes)
        if following:
            lines.append(f"and {following} that follow{'s' * (following == 1)} from these")
        return "\n".join([*lines, *_table(equations, self.costs), *_lines(self.notes)])


def diff(old: Lock | str | os.PathLike, new: Lock | str | os.PathLike) -> Changes:
    """Compares two locks.

    The equations of both are paired along the flow of data: what computes the same from the same
    inputs is the same equation, whatever its name and place. The others are paired in their order,
    in the same layer where possible. So a change is named once, and not again in all equations
    after it: those that only follow from it have `Change.follows`.

    Values are compared where all equations before them are the same, up to rounding: a tolerance of
    1e-3 of the root mean square for float32 (0.06 for bfloat16), or 8 times what a change of the
    last digits of all inputs does to the value, if that is more. Estimates of memory count as
    changed from 5 % on.

    Args:
        old: a `Lock`, or the path of its file.
        new: what to compare with it.

    Returns:
        The `Changes`, which are false if there are none.

    Raises:
        ValueError: a file is no lock file.
        OSError: a file cannot be read.

    >>> f = lambda x, epsilon: x / jnp.sqrt(jnp.square(x).mean() + epsilon)
    >>> old, new = (introspect.lock(lambda x: f(x, each), jnp.ones(8)) for each in (1e-5, 1e-6))
    >>> str(introspect.diff(old, new).first)
    'outside of all layers: `add f32[] 1e-05 : f32[]` is now `add f32[] 1e-06 : f32[]`'
    """
    old, new = (each if isinstance(each, Lock) else read_lock(each) for each in (old, new))
    alignment = align(old.program, new.program)
    comparison = _Comparison(old.program, new.program, alignment)
    equations = comparison.changes()
    changes = (*equations, *_costs(old, new, any(each.kind != "value" for each in equations)))
    return Changes(changes, _layers(old.program, new.program), tuple(_notes(old, new, alignment)))


class _Comparison:
    """The changes between two aligned programs."""

    def __init__(self, old: Program, new: Program, alignment: Alignment):
        self.old, self.new, self.alignment = old, new, alignment
        self.twins = alignment.twins
        self.back = {b: a for a, b in self.twins.items()}
        self.common = set(alignment.colors[0]) & set(alignment.colors[1])
        self.first: dict[int, int] = {}  # the first node of the new program of each color
        for number, color in enumerate(alignment.colors[1]):
            self.first.setdefault(color, number)
        self.marked: tuple[set[int], set[int]] = set(), set()  # the changed nodes of both programs

    def changes(self) -> list[Change]:
        found = [*self.inputs(), *self.nodes(), *self.results(), *self.values()]
        hidden = [
            _constant_parts(
                program,
                {
                    number
                    for _, change, which, number in found
                    if which == side and change.kind in ("added", "removed")
                },
            )
            for side, program in enumerate((self.old, self.new))
        ]
        tainted = [
            _below(program, marked - parts)
            for program, marked, parts in zip((self.old, self.new), self.marked, hidden)
        ]
        ranked = []
        for place, change, side, number in found:
            follows = number is not None and number in tainted[side] | hidden[side]
            rank = follows, change.kind == "value", _PHASES.index(change.phase), place
            ranked.append((rank, dataclasses.replace(change, follows=follows)))
        ranked.sort(key=lambda each: each[0])
        return [change for _, change in ranked]

    def change(self, kind: str, a: int | None, b: int | None, was: str, now: str) -> tuple:
        """Returns (place, change, which program, number of the node)."""
        side, number = (0, a) if b is None else (1, b)
        if a is not None:
            self.marked[0].add(a)
        if b is not None:
            self.marked[1].add(b)
        section = (self.old, self.new)[side].nodes[number].section
        place = float(b) if b is not None else self.place(a)
        return place, Change(kind, section.path, section.phase, was, now), side, number

    def place(self, removed: int | None) -> float:
        """Returns where a removed node would be in the new program."""
        for number in range(removed or 0, -1, -1):
            if number in self.twins:
                return self.twins[number] + 0.5
        return -1.0

    def inputs(self) -> Iterator[tuple]:
        old, new = self.old.inputs, self.new.inputs
        paired = self.alignment.inputs
        for a, b in paired:
            types = self.old.nodes[old[a]].types[0], self.new.nodes[new[b]].types[0]
            if types[0] != types[1]:
                yield self.change("input", old[a], new[b], f"{a} {types[0]}", f"{b} {types[1]}")
        for a in sorted(set(old) - {a for a, _ in paired}):
            yield self.change("input", old[a], None, f"{a} {self.old.nodes[old[a]].types[0]}", "")
        for b in sorted(set(new) - {b for _, b in paired}):
            yield self.change("input", None, new[b], "", f"{b} {self.new.nodes[new[b]].types[0]}")

    def nodes(self) -> Iterator[tuple]:
        inputs = set(self.old.inputs.values()), set(self.new.inputs.values())
        for a, node in enumerate(self.old.nodes):
            if a not in self.twins and a not in inputs[0] and not self.repeats(0, a):
                yield self.change("removed", a, None, shown(self.old, node), "")
        for b, node in enumerate(self.new.nodes):
            if b in inputs[1]:
                continue
            if b not in self.back and self.repeats(1, b):
                continue
            if b not in self.back:
                yield self.change("added", None, b, "", shown(self.new, node))
                continue
            a = self.back[b]
            before = self.old.nodes[a]
            if a in self.alignment.equal:
                continue
            if before.key != node.key:
                texts = shown(self.old, before), shown(self.new, node)
                yield self.change("equation", a, b, *texts)
            elif not self.reads_the_same(before, node):
                texts = (
                    shown(program, each, names=True)
                    for program, each in ((self.old, before), (self.new, node))
                )
                yield self.change("equation", a, b, *texts)

    def repeats(self, side: int, number: int) -> bool:
        """Whether a node computes again what both programs compute, which a compiler merges, unless
        it is a recomputation."""
        colors = self.alignment.colors
        recomputed = (self.old, self.new)[side].nodes[number].section.phase == "recomputed"
        return not recomputed and colors[side][number] in self.common

    def reads_the_same(self, old: Node, new: Node) -> bool:
        """Whether a node reads the counterparts of what it read. True as well if that is an added
        or removed node, which is a change of its own."""
        seen = [self.old_value(each) for each in old.operands]
        read = [self.new_value(each) for each in new.operands]
        if None in seen or None in read:
            return True
        if old.op in COMMUTATIVE:
            seen, read = sorted(seen, key=str), sorted(read, key=str)
        return seen == read

    def old_value(self, operand: Operand) -> Operand | None:
        """Returns the first node of the new program with the value of an operand of the old one, or
        that takes its place, or None."""
        if not isinstance(operand, Ref):
            return operand
        number = self.first.get(self.alignment.colors[0][operand.node])
        if number is None and operand.node in self.twins:
            number = self.first[self.alignment.colors[1][self.twins[operand.node]]]
        return None if number is None else Ref(number, operand.output)

    def new_value(self, operand: Operand) -> Operand | None:
        """The same for an operand of the new program."""
        if not isinstance(operand, Ref):
            return operand
        color = self.alignment.colors[1][operand.node]
        known = operand.node in self.back or color in self.common
        return Ref(self.first[color], operand.output) if known else None

    def results(self) -> Iterator[tuple]:
        old, new = self.old.outputs, self.new.outputs
        for path in sorted(set(old) - {a for a, _ in self.alignment.outputs}):
            yield self.result(path, old[path], None)
        for path in sorted(set(new) - {b for _, b in self.alignment.outputs}):
            yield self.result(path, None, new[path])
        for a, b in self.alignment.outputs:
            was, now = self.old_value(old[a]), self.new_value(new[b])
            if None not in (was, now) and was != now:
                yield self.result(b, old[a], new[b])

    def result(self, path: str, was: Operand | None, now: Operand | None) -> tuple:
        texts = [
            "" if each is None else f"{path} {named(program, each)}"
            for program, each in ((self.old, was), (self.new, now))
        ]
        return float(len(self.new.nodes)), Change("result", "", "forward", *texts), 1, None

    def values(self) -> Iterator[tuple]:
        for a, b in self.twins.items():
            first, second = self.old.nodes[a], self.new.nodes[b]
            equal = a in self.alignment.equal
            if not equal or first.sketch is None or second.sketch is None:
                continue
            if not alike(first.sketch, second.sketch, first.types[0]):
                name = named(self.new, Ref(b))
                texts = f"{name} {_numbers(first.sketch)}", _numbers(second.sketch)
                yield self.change("value", a, b, *texts)


def _below(program: Program, marked: set[int]) -> set[int]:
    """Returns the nodes that read a marked node, directly or through other nodes."""
    tainted: set[int] = set()
    for number, node in enumerate(program.nodes):
        if any(ref.node in marked or ref.node in tainted for ref in forward_refs(node)):
            tainted.add(number)
    return tainted


def _constant_parts(program: Program, changed: set[int]) -> set[int]:
    """Returns those of the added or removed nodes that depend on no input, such as a mask, and that
    only other such nodes read: what reads them says more."""
    fixed: set[int] = set()
    for number, node in enumerate(program.nodes):
        if node.op not in ("input", "carry") and all(ref.node in fixed for ref in node.refs):
            fixed.add(number)
    read_elsewhere = {
        ref.node
        for number, node in enumerate(program.nodes)
        if number not in changed
        for ref in node.refs
    }
    read = {ref.node for number in changed for ref in program.nodes[number].refs}
    return (fixed & changed & read) - read_elsewhere


def shown(program: Program, node: Node, *, names: bool = False) -> str:
    """Returns a node as text, with the types of what it reads, or with `names`, where that comes
    from."""
    operands = [named(program, each) if names else _type(program, each) for each in node.operands]
    return f"{' '.join(filter(None, (node.op, *operands, node.options)))} : {'/'.join(node.types)}"


def _type(program: Program, operand: Operand) -> str:
    return (
        program.nodes[operand.node].types[operand.output] if isinstance(operand, Ref) else operand
    )


def named(program: Program, operand: Operand) -> str:
    """Returns where an operand comes from: the path of an input, or an operation and its layer."""
    if not isinstance(operand, Ref):
        return operand
    for path, number in program.inputs.items():
        if number == operand.node:
            return path
    node = program.nodes[operand.node]
    return f"{node.op}{f' of {node.section.path}' if node.section.path else ''}"


def _numbers(sketch: Sketch) -> str:
    return f"mean {sketch.mean:.4g}, rms {sketch.rms:.4g}, projection {sketch.projection:.4g}"


def _layers(old: Program, new: Program) -> dict[str, tuple[int, int]]:
    """Returns the FLOPs of each layer in both programs, if they differ."""
    totals: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for side, program in enumerate((old, new)):
        for node in program.nodes:
            totals[node.section.path][side] += node.matmul + node.other
    return {path: (a, b) for path, (a, b) in totals.items() if a != b}


def _costs(old: Lock, new: Lock, changed: bool) -> Iterator[Change]:
    """Without other changes, only unused or repeated work can change an estimate, which a compiler
    removes."""
    changed = changed or old.plan != new.plan or old.shardings != new.shardings
    for what, a, b in (
        ("peak memory", old.peak, new.peak),
        ("memory traffic", old.moved, new.moved),
        ("sent to other devices", old.sent, new.sent),
    ):
        if changed and abs(a - b) > _ESTIMATED * max(a, b):
            yield Change("cost", "", "forward", f"{what} {si(a)}B", f"{si(b)}B")
    for kind, first, second in (
        ("plan", old.plan, new.plan),
        ("plan", old.shardings, new.shardings),
    ):
        gone = [line for line in first if line not in second]
        come = [line for line in second if line not in first]
        for i in range(max(len(gone), len(come))):
            was, now = (each[i] if i < len(each) else "" for each in (gone, come))
            yield Change(kind, "", "forward", was, now)


def _notes(old: Lock, new: Lock, alignment: Alignment) -> Iterator[str]:
    if old.made != new.made:
        yield f"made with {old.made}, and with {new.made}"
    pairs = [(a, b) for a, b in (*alignment.inputs, *alignment.outputs) if a != b]
    renamed = collections.Counter(each for pair in pairs for each in _renamed(*pair))
    yield from (f"renamed: {each}" for each in list(renamed)[:_MOST_LINES])
    if len(renamed) > _MOST_LINES:
        yield f"{len(renamed) - _MOST_LINES} other names of inputs and results"
    yield from dict.fromkeys((*old.notes, *new.notes))


def _renamed(old: str, new: str) -> list[str]:
    """Returns the parts in which two paths differ, such as "attn -> attention"."""
    first, second = old.split("/"), new.split("/")
    if len(first) != len(second):
        return [f"{old} -> {new}"]
    return [f"{a} -> {b}" for a, b in zip(first, second) if a != b]


def _table(changes: Iterable[Change], costs: dict[str, tuple[int, int]]) -> list[str]:
    """Returns a table with a row for each layer with changed equations."""
    counts: dict[str, collections.Counter] = {}
    for change in changes:
        counts.setdefault(change.layer, collections.Counter())[change.kind] += 1
    rows = [("layer", *_OF_EQUATIONS, "FLOPs")]
    for layer, kinds in counts.items():
        flops = " -> ".join(si(each).strip() for each in costs[layer]) if layer in costs else "same"
        rows.append(
            (layer or "(no scope)", *(str(kinds[kind] or "") for kind in _OF_EQUATIONS), flops)
        )
    if len(rows) == 1:
        return []
    lines = aligned(rows)
    if len(lines) > _MOST_LINES + 1:
        lines[_MOST_LINES + 1 :] = [f"and {len(rows) - 1 - _MOST_LINES} more layers"]
    return lines


def _counted(lines: Iterable[str]) -> list[str]:
    """Returns the first of several lines, each once, with the number of its copies."""
    counts = collections.Counter(lines)
    copies = lambda n: f" ({n} times)" if n > 1 else ""
    shown = [f"  also: {line}{copies(n)}" for line, n in list(counts.items())[:_MOST_LINES]]
    if len(counts) > _MOST_LINES:
        shown.append(f"  also: {len(counts) - _MOST_LINES} more")
    return shown


def _short(line: str) -> str:
    """Returns a line without the types of equations."""
    return re.sub(r" : [^`]*(?=`)|(?<=`)[^`]*(?= : )", lambda found: _without_types(found[0]), line)


def _without_types(equation: str) -> str:
    return (
        "" if equation.startswith(" : ") else re.sub(r" [a-z]+\d*\[[\w,]*\](?= |$)", "", equation)
    )


def _lines(notes: Iterable[str]) -> list[str]:
    return [f"note: {note}" for note in notes]
