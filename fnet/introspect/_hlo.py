"""The operations of a compiled program: their paths and phases, from the HLO that a profile
contains."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from fnet.introspect._protobuf import fields, numbers, text
from fnet.jaxpr import scope_of_operation

FORWARD, BACKWARD, RECOMPUTED, OPTIMIZER, OTHER = PHASES = (
    "forward",
    "backward",
    "recomputed",
    "optimizer",
    "other",
)
# Operations that do no work themselves. They contain other operations, or only pass values on.
CONTAINERS = frozenset(
    ("while", "conditional", "call", "async-start", "async-update", "async-done")
)
_FREE = frozenset(
    (
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "iota",
        "broadcast",
        "copy",
        "convert",
        "reshape",
        "transpose",
    )
)
_DIFFERENTIATED = re.compile(r"(^|/|\()(jvp|transpose|linearize)\(")
_INPUTS = ("parameter", "constant")  # opcodes of operations that compute nothing


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a compiled program that appears in a profile.

    Attributes:
        name: the name of the HLO instruction.
        opcode: the operation code of the instruction, such as "fusion" or "dot".
        path, phase: the path and phase (such as "forward") of the operation. For a fusion, `path`
            and `phase` are those of its root operation.
        paths: the paths of all operations inside a fusion, except operations without arithmetic,
            such as reshapes.
    """

    name: str
    opcode: str
    path: str
    phase: str
    paths: frozenset[str]

    @property
    def container(self) -> bool:
        """Whether this operation does no work itself. For example, a while loop only runs the
        operations inside it."""
        return self.opcode in CONTAINERS


@dataclasses.dataclass
class _Instruction:
    name: str
    opcode: str
    op_name: str
    id: int
    operands: list[int]
    called: list[int]
    phase: str | None = None


def operations(module: memoryview) -> dict[str, Operation]:
    """Returns {name of an instruction: its `Operation`} for a serialized HloModuleProto."""
    entry, computations, roots = 0, {}, {}
    for number, value in fields(module):
        if number == 3:
            identity, root, instructions = _computation(value)
            computations[identity], roots[identity] = instructions, root
        elif number == 6:
            entry = value
    every = {each.id: each for instructions in computations.values() for each in instructions}
    _name_the_nameless(computations, every, roots)
    _phases(computations, every, entry)
    found = {}
    for each in every.values():
        parts = [each, *_inside(each, computations)] if each.opcode == "fusion" else [each]
        paths = {
            scope_of_operation(part.op_name).path
            for part in parts
            if part.op_name and part.opcode not in (*_FREE, "fusion")
        }
        path = scope_of_operation(each.op_name).path if each.op_name else ""
        found[each.name] = Operation(
            each.name, each.opcode, path, each.phase or OTHER, frozenset(paths or (path,))
        )
    return found


def _computation(data) -> tuple[int, int, list[_Instruction]]:
    identity = root = 0
    instructions = []
    for number, value in fields(data):
        if number == 2:
            instructions.append(_instruction(value))
        elif number == 5:
            identity = value
        elif number == 6:
            root = value
    return identity, root, instructions


def _instruction(data) -> _Instruction:
    made = _Instruction("", "", "", 0, [], [])
    for number, value in fields(data):
        if number == 1:
            made.name = text(value)
        elif number == 2:
            made.opcode = text(value)
        elif number == 7:
            made.op_name = next((text(part) for key, part in fields(value) if key == 2), "")
        elif number == 35:
            made.id = value
        elif number == 36:
            made.operands += numbers(value)
        elif number == 38:
            made.called += numbers(value)
    return made


def _inside(each, computations) -> Iterable[_Instruction]:
    for called in each.called:
        for part in computations.get(called, ()):
            yield part
            yield from _inside(part, computations)


def _name_the_nameless(computations, every, roots) -> None:
    """Assigns a name to each HLO operation that has none, for example because the compiler inserted
    the operation.

    A fusion without a name gets the name of its root operation. An unnamed operation that is not a
    fusion gets the name of an operation that reads its result. If no operation with a name reads
    the result of an unnamed operation, the unnamed operation gets the name of one of its operands.
    """
    for each in every.values():
        if each.opcode == "fusion":
            for called in each.called:
                if not each.op_name and roots.get(called) in every:
                    each.op_name = every[roots[called]].op_name
                    break
    for instructions in computations.values():
        users = _users(instructions)
        # Readers come later in the list than operands. In reverse order, each operation gets its
        # reader's name, even if the reader itself was nameless. In forward order, the same applies
        # to names of operands.
        for each in reversed(instructions):
            each.op_name = each.op_name or _first_name(users.get(each.id, ()))
        for each in instructions:
            operands = [every[i] for i in each.operands if i in every]
            each.op_name = each.op_name or _first_name(operands)


def _first_name(instructions: Iterable[_Instruction]) -> str:
    return next((each.op_name for each in instructions if each.op_name), "")


def _users(instructions: Iterable[_Instruction]) -> dict[int, list[_Instruction]]:
    """Returns {id of an operation: the operations that read its result}."""
    users: dict[int, list[_Instruction]] = {}
    for each in instructions:
        for i in each.operands:
            users.setdefault(i, []).append(each)
    return users


def _phases(computations, every, entry) -> None:
    """Sets the phase (forward, backward, ...) of every operation.

    In a program without derivatives, every operation has the phase "forward". In a program with
    derivatives, an operation outside of the differentiated function has the phase "optimizer" if it
    depends on the result of a backward pass. An operation whose result is read only by the
    optimizer, such as a learning rate schedule, also has the phase "optimizer". Outside of the
    differentiated function and the optimizer, operations in a named scope have the phase "forward",
    and operations without a scope have the phase "other".
    """
    trained = any(_DIFFERENTIATED.search(each.op_name) for each in every.values())

    def walk(identity: int, inherited: str | None) -> None:
        instructions = computations.get(identity, ())
        after: set[int] = set()  # operations that depend on the result of a backward pass
        for each in instructions:
            late = not after.isdisjoint(each.operands)
            if each.opcode in _INPUTS:
                each.phase = None
            else:
                each.phase = _own_phase(each)
                if each.phase is None and (late or inherited == OPTIMIZER):
                    each.phase = OPTIMIZER
            if late or each.phase in (BACKWARD, OPTIMIZER):
                after.add(each.id)
        _only_read_by(instructions, OPTIMIZER)
        for each in instructions:
            if each.phase is None and inherited:
                each.phase = inherited
            elif each.phase is None:
                forward = not trained or scope_of_operation(each.op_name).path
                each.phase = FORWARD if forward else OTHER
            for called in each.called:
                walk(called, each.phase)

    walk(entry, None)


def _own_phase(each: _Instruction) -> str | None:
    """Returns the phase of an operation that its name states, or None."""
    scope = scope_of_operation(each.op_name)
    if _DIFFERENTIATED.search(each.op_name) or scope.phase != FORWARD:
        return scope.phase
    return None


def _only_read_by(instructions, phase: str) -> None:
    """Assigns `phase` to an operation without a phase if all operations that read its result have
    the phase `phase`."""
    users = _users(instructions)
    for each in reversed(instructions):
        readers = users.get(each.id, ())
        if each.phase is not None or each.opcode in _INPUTS or not readers:
            continue
        if all(reader.phase == phase for reader in readers):
            each.phase = phase
