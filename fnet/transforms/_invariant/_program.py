"""A program in phases: the equations of a phase are evaluated row by row, and sums over the rows are
known after it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from fnet import _jax, jaxpr
from fnet.jaxpr import Interpreter, Scope, Value
from fnet.transforms._invariant._equation import Part, State, Work, work
from fnet.transforms._invariant._layout import Rows, is_open

_LONGEST = 128  # turns of a loop that is written out
_OF_NOTHING = ("broadcast_in_dim", "iota", "empty", "empty2")


@dataclasses.dataclass
class Section:
    """Equations that are evaluated together.

    Attributes:
        eqns, works: the equations, and what they do.
        reads: the variables that they need from outside.
        writes: those of their results that are needed outside.
    """

    eqns: list = dataclasses.field(default_factory=list)
    works: list[Work] = dataclasses.field(default_factory=list)
    reads: list = dataclasses.field(default_factory=list)
    writes: list = dataclasses.field(default_factory=list)

    def add(self, eqn: Any, done: Work) -> None:
        self.eqns.append(eqn)
        self.works.append(done)


class Program:
    """A closed jaxpr whose sizes depend on the number of rows, in phases.

    Attributes:
        closed: the program; loops for which sums over rows are needed in each turn are written out.
        states: {variable: its `Rows`, or None if it is held whole}.
        phases: pairs of sections (what is done once, what is done for each row).
        works: (equation, what it does) for each equation.
    """

    def __init__(self, closed: Any, inputs: Sequence[State]):
        self.closed = _written_out(closed, inputs)
        program = self.closed.jaxpr
        self.states: dict[Any, State] = dict.fromkeys(program.constvars)
        self.states.update(zip(program.invars, inputs))
        self.works: list[tuple[Any, Work]] = []
        self._since = dict.fromkeys(self.states, 0)  # the phase in which a variable is known
        self._in_loop: set = set()  # rows that a loop computes
        self._made: dict[Any, tuple[Any, Work]] = {}  # rows that are made of nothing, where needed
        self._results = set(_variables(self.outputs))
        sections: dict = collections.defaultdict(Section)
        for eqn in program.eqns:
            done = work(eqn, [None if _is_literal(v) else self.states[v] for v in eqn.invars])
            self.works.append((eqn, done))
            self._place(eqn, done, sections)
        last = max((phase for phase, _ in sections), default=0)
        self.phases = [(sections[i, False], sections[i, True]) for i in range(last + 1)]
        self._connect()

    def _place(self, eqn: Any, done: Work, sections: dict) -> None:
        given = _variables(eqn.invars)
        in_loop = done.kind in ("row", "parts")
        of_nothing = eqn.primitive.name in _OF_NOTHING and not any(map(self.states.get, given))
        if done.kind == "row" and of_nothing and eqn.outvars[0] not in self._results:
            phase = max((self._since[v] for v in given), default=0)
            self._made[eqn.outvars[0]] = eqn, done
        else:
            after = (self._since[v] + (not in_loop and v in self._in_loop) for v in given)
            phase = max(after, default=0)
            sections[phase, in_loop].add(eqn, done)
        for v, at in zip(eqn.outvars, done.states):
            part = isinstance(at, Part)
            self.states[v], self._since[v] = None if part else at, phase + part
            if in_loop and not part and v not in self._made:
                self._in_loop.add(v)

    @property
    def outputs(self) -> list:
        return self.closed.jaxpr.outvars

    def _sections(self) -> Iterator[Section]:
        for pair in self.phases:
            yield from pair

    def _connect(self) -> None:
        """Determines what the sections read and write."""
        needed = set(self._results)
        for section in self._sections():
            self._make(section)
            made = {v for eqn in section.eqns for v in eqn.outvars}
            given = dict.fromkeys(v for eqn in section.eqns for v in _variables(eqn.invars))
            section.reads = [v for v in given if v not in made]
            needed.update(section.reads)
        for section in self._sections():
            results = (v for eqn in section.eqns for v in eqn.outvars)
            section.writes = [v for v in results if v in needed and v not in self._made]

    def _make(self, section: Section) -> None:
        """Adds the equations that make rows of nothing where a section reads them."""
        eqns, section.eqns, section.works = list(zip(section.eqns, section.works)), [], []
        done: set = set()
        for eqn, how in eqns:
            for v in _variables(eqn.invars):
                if v in self._made and v not in done:
                    done.add(v)
                    section.add(*self._made[v])
            section.add(eqn, how)


def _is_literal(v: Any) -> bool:
    return isinstance(v, _jax.Literal)


def _variables(atoms: Sequence) -> list:
    return [v for v in atoms if not _is_literal(v)]


def _written_out(closed: Any, inputs: Sequence[State]) -> Any:
    """Writes out the loops that need sums over rows, or the like, in each turn."""
    while loops := _loops(closed.jaxpr, inputs):
        writer, before = _Writer(loops), closed
        write = lambda *arrays, writer=writer, before=before: writer.outputs(before, arrays)
        with _jax.symbolic_trace():
            closed = _jax.make_jaxpr(write)(*closed.in_avals)
    return closed


def _loops(program: Any, inputs: Sequence[State]) -> set[int]:
    """Returns the ids of the loops of a program that are to be written out."""
    states: dict[Any, State] = dict.fromkeys(program.constvars)
    states.update(zip(program.invars, inputs))
    found = set()
    for eqn in program.eqns:
        done = work(eqn, [None if _is_literal(v) else states[v] for v in eqn.invars])
        for v, at in zip(eqn.outvars, done.states):
            states[v] = at if isinstance(at, Rows) else None
        if eqn.primitive.name == "scan" and done.kind == "all":
            length = jaxpr.scan(eqn).length
            if not is_open(length) and 0 < length <= _LONGEST:
                found.add(id(eqn))
    return found


class _Writer(Interpreter):
    def __init__(self, loops: set[int]):
        super().__init__()
        self._loops = loops

    def equation(self, eqn: Any, at: Scope, inputs: list[Value], plan: Any) -> Any:
        if id(eqn) not in self._loops:
            return NotImplemented
        loop = jaxpr.scan(eqn)
        consts, carry, slices = loop.split(inputs)
        turns, stacks = list(range(loop.length)), {}
        for i in reversed(turns) if loop.options.get("reverse") else turns:
            each = [Value(value.x[i]) for value in slices]
            given = [*consts, *carry, *each]
            found = self.evaluate(loop.jaxpr, loop.closed.consts, given, at)
            carry, stacks[i] = found[: loop.carry], found[loop.carry :]
        columns = zip(*(stacks[i] for i in turns))
        return [*carry, *(Value(jnp.stack([value.x for value in each])) for each in columns)]
