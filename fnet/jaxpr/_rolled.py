"""Rolls repeated equations of a program, such as the blocks of a model without loops, into scans.

Blocks are found by what they compute, not by names: a run of equations that repeats, each repetition
of which reads values of the one before. In a training step, the backward pass repeats like the
forward pass, and what it reads of block k is what the forward pass has stacked for block k.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import _jax
from fnet.jaxpr._calls import RECURRENCES
from fnet.jaxpr._pieces import Piece
from fnet.jaxpr._rewrite import Interpreter
from fnet.jaxpr._scopes import TOP
from fnet.jaxpr._values import Value, arrays_of

_WORK = frozenset(("dot_general", "conv_general_dilated", "scan", "while", *RECURRENCES))
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclasses.dataclass(frozen=True)
class Run:
    """Equations that repeat.

    Attributes:
        start, period, count: the index of the first equation, the number of equations of a
            repetition, and the number of repetitions.
        consts: the variables that all repetitions read.
        carry: {(index of an equation, index of its output): initial variable} for the values that
            a repetition reads of the one before.
        slices: for each value that is different in each repetition, its variable in each.
        places: for each equation of a repetition and each of its inputs, where it comes from:
            ("in", equation, output), ("carry", (equation, output)), ("const", variable),
            ("slice", index) or ("literal",).
    """

    start: int
    period: int
    count: int
    consts: tuple
    carry: dict[tuple[int, int], Any]
    slices: tuple[tuple, ...]
    places: tuple[tuple[tuple, ...], ...]

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count

    @property
    def carried(self) -> int:
        """The number of elements that are carried."""
        return sum(v.aval.size for v in self.carry.values())


def rolled(closed: Any) -> Any:
    """Returns a closed jaxpr in which repeated equations that form a chain, such as the blocks of a
    transformer, are scans over stacked values.

    Values do not change. Stacking costs a copy of the parameters that a scan reads. Only repetitions
    with a matrix product, convolution or loop are rolled. Calls should be inlined before (see
    `inlined`); calls with custom derivatives count as equal if their functions are, so the program
    should not be differentiated afterwards.
    """
    runs = _runs(closed.jaxpr)
    if not runs:
        return closed
    roll = _Roll(closed, runs)
    return _jax.make_jaxpr(lambda *arrays: roll(arrays))(*closed.in_avals)


# Finding repetitions.


def _runs(jaxpr: Any) -> list[Run]:
    """Returns the runs of a jaxpr, disjoint and in their order, those that save most equations."""
    kinds: dict[Any, int] = {}
    known: dict[int, str] = {}
    tokens = np.array(
        [kinds.setdefault(_token(eqn, i, known), len(kinds)) for i, eqn in enumerate(jaxpr.eqns)]
    )
    found: list[Run] = []
    free: Any = np.ones(len(tokens), bool)
    for start, period, length in _repetitions(tokens):
        if not free[start : start + length + period].all():
            continue
        run = _best(jaxpr, start, period, length)
        if run is not None:
            found.append(run)
            free[run.start : run.stop] = False
    return sorted(found, key=lambda run: run.start)


def _token(eqn: Any, index: int, known: dict[int, str]) -> Any:
    """What an equation computes, up to the names of its variables."""
    if eqn.effects:
        return index
    inputs = tuple(
        ("literal", str(v.val), str(v.aval)) if isinstance(v, _jax.Literal) else str(v.aval)
        for v in eqn.invars
    )
    return (
        eqn.primitive.name,
        _key(eqn.params, known),
        inputs,
        tuple(str(v.aval) for v in eqn.outvars),
    )


def _key(value: Any, known: dict[int, str]) -> Any:
    """A hashable form of a parameter of an equation, equal for equal parameters."""
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        if id(value) not in known:
            known[id(value)] = str(value)
        consts = tuple(
            id(x) if not isinstance(x, np.ndarray) else (x.shape, x.tobytes())
            for x in getattr(value, "consts", ())
        )
        return known[id(value)], consts
    if isinstance(value, dict):
        return tuple((name, _key(each, known)) for name, each in value.items())
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(_key(each, known) for each in value)
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if callable(value) and not isinstance(value, type):
        return "function"
    return _ADDRESS.sub("", repr(value))


def _repetitions(tokens: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields (start, period, length) such that tokens[start + i] == tokens[start + i + period] for i
    < length, where length >= period, those that save most first."""
    found = []
    for period in range(1, len(tokens) // 2 + 1):
        same = tokens[:-period] == tokens[period:]
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
        for start, stop in edges.reshape(-1, 2):
            if stop - start >= period:
                saved = (stop - start) // period * period
                found.append((-saved, period, int(start), int(stop - start)))
    for _, period, start, length in sorted(found):
        yield start, period, length


def _best(jaxpr: Any, start: int, period: int, length: int) -> Run | None:
    """Of the ways to cut a repetition into groups, the one with the most groups that carries the
    fewest values from one group to the next."""
    eqns = jaxpr.eqns[start : start + period]
    if not any(eqn.primitive.name in _WORK for eqn in eqns):
        return None
    for count in (1 + length // period, length // period):
        phases = range(length + period - count * period + 1)
        runs = [_run(jaxpr, start + phase, period, count) for phase in phases if count > 1]
        chains = [run for run in runs if run is not None and run.carry]
        if chains:
            return min(chains, key=lambda run: run.carried)
    return None


def _run(jaxpr: Any, start: int, period: int, count: int) -> Run | None:
    """Returns the run of `count` groups, or None if they do not form a loop."""
    made: dict[Any, tuple[int, int, int]] = {}
    for i, eqn in enumerate(jaxpr.eqns[start : start + period * count]):
        for k, v in enumerate(eqn.outvars):
            made[v] = i // period, i % period, k
    consts: dict[Any, None] = {}
    carry: dict[tuple[int, int], Any] = {}
    slices: dict[tuple, int] = {}
    places = []
    for j in range(period):
        eqns = [jaxpr.eqns[start + k * period + j] for k in range(count)]
        mine: list[tuple] = []
        for atoms in zip(*(eqn.invars for eqn in eqns)):
            place = _place(atoms, made)
            if place is None:
                return None
            if place[0] == "carry" and carry.setdefault(place[1], atoms[0]) is not atoms[0]:
                return None  # the same value, but another one at first
            if place[0] == "const":
                consts[atoms[0]] = None
            if place[0] == "slice":
                place = "slice", slices.setdefault(atoms, len(slices))
            mine.append(place)
        places.append(tuple(mine))
    return Run(start, period, count, tuple(consts), carry, tuple(slices), tuple(places))


def _place(atoms: Sequence[Any], made: dict[Any, tuple[int, int, int]]) -> tuple | None:
    """Where an input of an equation comes from, given its variable in each repetition."""
    if isinstance(atoms[0], _jax.Literal):
        return ("literal",)
    sources = [made.get(v) for v in atoms]
    if all(source is None for source in sources):
        return ("const", atoms[0]) if len(set(atoms)) == 1 else ("slice", -1)
    if None not in sources:
        same = {(k - i, j, o) for i, (k, j, o) in enumerate(s for s in sources if s is not None)}
        if len(same) == 1 and next(iter(same))[0] == 0:
            return ("in", *next(iter(same))[1:])
        return None
    if sources[0] is None and None not in sources[1:]:
        same = {(k - i, j, o) for i, (k, j, o) in enumerate((s for s in sources[1:] if s), 1)}
        if len(same) == 1 and next(iter(same))[0] == -1:
            return ("carry", next(iter(same))[1:])
    return None


# Evaluation.


@dataclasses.dataclass(frozen=True)
class _Item:
    """An item of stacked values."""

    stacked: Any
    index: int


class _Roll:
    """Evaluates a jaxpr with scans in the places of its runs."""

    def __init__(self, closed: Any, runs: list[Run]):
        self.closed, self.runs = closed, runs
        slices = [each for run in runs for each in run.slices]
        self.wanted = {*slices, *(each[::-1] for each in slices)}
        self.readers: dict[Any, int] = {}  # the last equation that reads a variable
        for i, eqn in enumerate(closed.jaxpr.eqns):
            self.readers.update((v, i) for v in eqn.invars if not isinstance(v, _jax.Literal))
        last = len(closed.jaxpr.eqns)
        self.readers.update(
            (v, last) for v in closed.jaxpr.outvars if not isinstance(v, _jax.Literal)
        )

    def __call__(self, arrays: Sequence[Any]) -> list:
        jaxpr = self.closed.jaxpr
        self.env: dict[Any, Any] = dict(zip(jaxpr.constvars, self.closed.consts))
        self.env.update(zip(jaxpr.invars, arrays))
        self.stacks: dict[tuple, Any] = {}
        at = 0
        for run in self.runs:
            self.plainly(at, run.start)
            self.loop(run)
            at = run.stop
        self.plainly(at, len(jaxpr.eqns))
        return [
            v.val if isinstance(v, _jax.Literal) else jnp.asarray(self.read(v))
            for v in jaxpr.outvars
        ]

    def read(self, v: Any) -> Any:
        value = self.env[v]
        if isinstance(value, _Item):
            value = self.env[v] = value.stacked[value.index]
        return value

    def plainly(self, start: int, stop: int) -> None:
        """Evaluates equations one after another."""
        eqns = self.closed.jaxpr.eqns[start:stop]
        made = {v: None for eqn in eqns for v in eqn.outvars}
        given = {
            v: None
            for eqn in eqns
            for v in eqn.invars
            if not isinstance(v, _jax.Literal) and v not in made
        }
        wanted = [v for v in made if self.readers.get(v, -1) >= stop]
        outputs = _evaluated(eqns, list(given), wanted, [self.read(v) for v in given])
        self.env.update(zip(wanted, outputs))

    def loop(self, run: Run) -> None:
        """Evaluates a run as a scan."""
        eqns = self.closed.jaxpr.eqns
        groups = [
            eqns[run.start + k * run.period : run.start + (k + 1) * run.period]
            for k in range(run.count)
        ]
        reverse = self.backward(run)
        inner = _Renamed(run, groups[0])
        kept = self.kept(run, groups, inner)
        consts = [self.read(v) for v in run.consts]
        ends = [groups[0][j].outvars[o] for j, o in run.carry]
        outputs = [*ends, *(v for v, _ in kept)]

        def turn(carry: list, slices: list) -> tuple[list, list]:
            ys = _evaluated(inner.eqns, inner.inputs, outputs, [*consts, *carry, *slices])
            return ys[: len(carry)], ys[len(carry) :]

        start = [self.read(v) for v in run.carry.values()]
        slices = [self.stacked(each, reverse) for each in run.slices]
        ends, stacked = lax.scan(turn, start, slices, length=run.count, reverse=reverse)
        for (j, o), x in zip(run.carry, ends):
            self.env[groups[-1][j].outvars[o]] = x
        for (_, names), xs in zip(kept, stacked):
            self.stacks[names[::-1] if reverse else names] = xs
            for k, v in enumerate(names):
                if v not in self.env:
                    self.env[v] = _Item(xs, run.count - 1 - k if reverse else k)

    def kept(self, run: Run, groups: list, inner: _Renamed) -> list[tuple[Any, tuple]]:
        """What a loop stacks, because equations after it read it: pairs of a variable of its body,
        and the variable in each group that it stands for."""
        found = []
        read = lambda names: any(self.readers.get(v, -1) >= run.stop for v in names)
        for j in range(run.period):
            for o, v in enumerate(groups[0][j].outvars):
                names = tuple(group[j].outvars[o] for group in groups)
                if (j, o) not in run.carry:
                    found += [(v, names)] * read(names)
                    continue
                # The last one is carried out. A backward pass reads what came in, or what came out.
                came = run.carry[j, o], *names[:-1]
                if names in self.wanted:
                    found.append((v, names))
                if came in self.wanted or (names not in self.wanted and read(names[:-1])):
                    found.append((inner.names["carry", (j, o)], came))
        return found

    def backward(self, run: Run) -> bool:
        """Whether what a run slices is stacked in the opposite order, as for a backward pass."""
        order = sum(self.has(each) - self.has(each[::-1]) for each in run.slices)
        return order < 0

    def has(self, names: tuple) -> bool:
        return names in self.stacks

    def stacked(self, names: tuple, reverse: bool) -> Any:
        names = names[::-1] if reverse else names
        if names not in self.stacks:
            self.stacks[names] = jnp.stack([jnp.asarray(self.read(v)) for v in names])
        return self.stacks[names]


class _Renamed:
    """The equations of the first group of a run, with a variable of its own for each input."""

    def __init__(self, run: Run, body: Sequence[Any]):
        places: list[tuple] = [
            *(("const", v) for v in run.consts),
            *(("carry", place) for place in run.carry),
            *(("slice", i) for i in range(len(run.slices))),
        ]
        types = [*run.consts, *run.carry.values(), *(each[0] for each in run.slices)]
        names = {place: _Name(v) for place, v in zip(places, types)}
        self.names, self.inputs = names, list(names.values())
        self.eqns = [
            eqn.replace(invars=[names.get(place, v) for place, v in zip(sources, eqn.invars)])
            for eqn, sources in zip(body, run.places)
        ]


class _Name:
    """A variable."""

    def __init__(self, v: Any):
        self.aval = v.aval


def _evaluated(eqns: Sequence[Any], inputs: list, outputs: list, arrays: Sequence[Any]) -> list:
    piece = Piece(list(eqns), inputs, outputs)
    values = Interpreter().evaluate(piece, (), list(map(Value, arrays)), TOP)
    return arrays_of(values)
