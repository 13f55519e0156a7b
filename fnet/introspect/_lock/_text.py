"""Lock files as text, for people to read and for `parse`.

The head has lines "name: value", and the inputs and results. Then each layer has a line with its
name and its cost, and one line for each equation:

    layer blocks/norm matmul=0 other=4096
    3 add %2 1e-05 : f32[8,1] ~ 1.2 1.3 -0.4 1e-06

that is: equation 3 of the layer adds 1e-05 to the result of equation 2, and the last numbers are a
`Sketch`. "head%2" is equation 2 of the layer "head", "$x" an input. "~b" and "~r" at a layer's name
mean backward and recomputed, and "{scan[12]}" the body of a loop. The last line is a checksum.
"""

from __future__ import annotations

import collections
import hashlib
import re
from collections.abc import Mapping, Sequence

from fnet.introspect._lock._program import (
    Node,
    Operand,
    Program,
    Ref,
    Section,
    Sketch,
    ordered,
)

VERSION = 1
_FIRST = "fnet lock "
_PHASES = {"forward": "", "backward": "~b", "recomputed": "~r"}
_NUMBER = r"-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf|nan)"
_SKETCH = rf" ~ ({_NUMBER}) ({_NUMBER}) ({_NUMBER}) ({_NUMBER})"
_EQUATION = re.compile(rf"(\d+) (\S+)((?: \S+)*?) : (\S+)(?:{_SKETCH})?")
_INPUT = re.compile(rf"input (\S+) (\S+)(?:{_SKETCH})?")
_OUTPUT = re.compile(r"(output) (\S+) = (\S+)")
_EFFECT = re.compile(r"(effect) (\S+)")
_LAYER = re.compile(r"layer (\S+) matmul=(\d+) other=(\d+)")
_HEAD = re.compile(r"([a-z]+): (.*)")
_LABEL = re.compile(r"(.*?)(?:\{(.*)\})?(~[br])?")
_REF = re.compile(r"(.*)%(\d+)(?:\.(\d+))?")


class Damaged(ValueError):
    """A lock file that cannot be read."""


def write(head: Mapping[str, Sequence[str]], program: Program) -> str:
    """Returns the text of a lock file. `head` contains the values of each name, one line each."""
    lines = [f"{_FIRST}{VERSION}"]
    lines += [f"{name}: {value}" for name, values in head.items() for value in values]
    names = _Names(program)
    for path, number in program.inputs.items():
        node = program.nodes[number]
        lines.append(f"input {path} {node.types[0]}{_sketched(node.sketch)}")
    lines += [f"output {path} = {names(each)}" for path, each in program.outputs.items()]
    lines += [f"effect {names(Ref(number))}" for number in program.effects]
    for section, numbers in names.sections.items():
        nodes = [program.nodes[number] for number in numbers]
        matmul, other = sum(node.matmul for node in nodes), sum(node.other for node in nodes)
        lines += ["", f"layer {label(section)} matmul={matmul} other={other}"]
        for i, node in enumerate(nodes, 1):
            operands = (names(each, section) for each in node.operands)
            words = " ".join(filter(None, (f"{i}", node.op, *operands, node.options)))
            types = "/".join(node.types) or "-"
            lines.append(f"{words} : {types}{_sketched(node.sketch)}")
    text = "\n".join([*lines, ""])
    return f"{text}\nend {_checksum(text)}\n"


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def label(section: Section) -> str:
    """Returns the name of a section in a file."""
    inside = f"{{{';'.join(section.inside)}}}" if section.inside else ""
    return f"{section.path or '.'}{inside}{_PHASES[section.phase]}"


def _sketched(sketch: Sketch | None) -> str:
    return "" if sketch is None else f" ~ {' '.join(f'{x:.6g}' for x in sketch)}"


class _Names:
    """The names of the nodes of a program in a file.

    Attributes:
        sections: the numbers of the nodes of each section.
    """

    def __init__(self, program: Program):
        self.sections: dict[Section, list[int]] = collections.defaultdict(list)
        self.inputs = {number: path for path, number in program.inputs.items()}
        self.places: dict[int, tuple[Section, int]] = {}
        for number, node in enumerate(program.nodes):
            if number not in self.inputs:
                members = self.sections[node.section]
                members.append(number)
                self.places[number] = node.section, len(members)

    def __call__(self, operand: Operand, within: Section | None = None) -> str:
        if isinstance(operand, str):
            return operand
        if operand.node in self.inputs:
            return f"${self.inputs[operand.node]}"
        section, number = self.places[operand.node]
        where = "" if section == within else label(section)
        return f"{where}%{number}{f'.{operand.output}' if operand.output else ''}"


def parse(text: str, name: str) -> tuple[dict[str, list[str]], Program]:
    """Returns the head and the program of the text of a lock file called `name`.

    Raises:
        Damaged: the text is no lock file, of an unknown version, or not as it was written.
    """
    lines = text.split("\n")
    if not lines[0].startswith(_FIRST):
        raise Damaged(f"{name} is no lock file: its first line must begin with {_FIRST.strip()!r}")
    version = lines[0].removeprefix(_FIRST)
    if version != str(VERSION):
        raise Damaged(
            f"{name} has version {version} of the format, and this fnet reads version {VERSION}; "
            "write it again with `fnet lock`, or read it with a later fnet"
        )
    body, end, checksum = text.rpartition("\nend ")
    if not end or checksum != f"{_checksum(body)}\n":
        raise Damaged(
            f"{name} is damaged, or was edited by hand: its checksum is not that of its lines. "
            "Restore it from version control, or write it again with `fnet lock`"
        )
    try:
        return _Parser(body.split("\n")[1:]).parsed()
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise Damaged(f"{name} cannot be read: {error}") from error


class _Parser:
    def __init__(self, lines: Sequence[str]):
        self.lines = lines
        self.head: dict[str, list[str]] = collections.defaultdict(list)
        self.nodes: list[Node] = []
        self.inputs: dict[str, int] = {}
        self.places: dict[tuple[str, int], int] = {}
        self.words: list[tuple[int, str, list[str]]] = []  # read when all nodes are known
        self.results: dict[str, str] = {}
        self.effects: list[str] = []
        self.section = Section()
        self.cost = 0, 0

    def parsed(self) -> tuple[dict[str, list[str]], Program]:
        for line in filter(None, self.lines):
            self.line(line)
        for number, within, words in self.words:
            self.nodes[number].operands = tuple(self.operand(word, within) for word in words)
        outputs = {path: self.operand(word, "") for path, word in self.results.items()}
        effects = [self.operand(word, "") for word in self.effects]
        numbers = [each.node for each in effects if isinstance(each, Ref)]
        program, _ = ordered(Program(self.nodes, self.inputs, outputs, numbers))
        return dict(self.head), program

    def line(self, line: str) -> None:
        if found := _EQUATION.fullmatch(line):
            self.equation(*found.groups())
        elif found := _LAYER.fullmatch(line):
            self.section = _section(found[1])
            self.cost = int(found[2]), int(found[3])
        elif found := _INPUT.fullmatch(line):
            path, kind, *sketch = found.groups()
            self.inputs[path] = len(self.nodes)
            self.nodes.append(Node("input", (), "", (kind,), Section(), sketch=_sketch(sketch)))
        elif found := _OUTPUT.fullmatch(line):
            self.results[found[2]] = found[3]
        elif found := _EFFECT.fullmatch(line):
            self.effects.append(found[2])
        elif found := _HEAD.fullmatch(line):
            self.head[found[1]].append(found[2])
        else:
            raise ValueError(f"the line {line!r} has no known form")

    def equation(self, number: str, op: str, rest: str, types: str, *sketch: str) -> None:
        words = rest.split()
        operands = [word for word in words if "=" not in word]
        options = " ".join(word for word in words if "=" in word)
        within = label(self.section)
        self.places[within, int(number)] = len(self.nodes)
        self.words.append((len(self.nodes), within, operands))
        kinds = () if types == "-" else tuple(types.split("/"))
        self.nodes.append(Node(op, (), options, kinds, self.section, *self.cost, _sketch(sketch)))
        self.cost = 0, 0  # that of a layer is kept with its first equation

    def operand(self, word: str, within: str) -> Operand:
        if word.startswith("$"):
            return Ref(self.inputs[word[1:]])
        found = _REF.fullmatch(word)
        if not found:
            return word
        return Ref(self.places[found[1] or within, int(found[2])], int(found[3] or 0))


def _section(written: str) -> Section:
    found = _LABEL.fullmatch(written)
    assert found is not None  # the pattern matches every text
    phases = {mark: phase for phase, mark in _PHASES.items()}
    inside = tuple(found[2].split(";")) if found[2] else ()
    return Section("" if found[1] == "." else found[1], phases[found[3] or ""], inside)


def _sketch(numbers: Sequence[str | None]) -> Sketch | None:
    return None if numbers[0] is None else Sketch(*(float(x or 0) for x in numbers))
