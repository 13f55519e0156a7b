"""Follows an axis, such as the batch axis, through equations, from the inputs to the outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fnet import _jax
from fnet.axes._table import axis_map
from fnet.jaxpr._calls import bodies, scan
from fnet.jaxpr._primitives import description
from fnet.jaxpr._records import options

Note = int | None  # the position of the axis, if an array has it
Rule = Callable[[Any, Sequence[Note]], list[Note] | None]
_UNKNOWN = frozenset(("while", "shard_map"))


def batch_axes(
    eqn: Any, notes: Sequence[Note], pieces: int = 1, rule: Rule | None = None
) -> list[Note]:
    """Returns the batch axis of each output of an equation. `notes` contains the batch axis of each
    input. None in `notes` or in the result means that a value has no batch axis, or that its batch
    axis is unknown. The argument `pieces` is the number of devices over which the axis is split.

    To follow another axis than that of the batch, `rule(eqn, notes)` can return what is different
    for it, or else None. It is called for each equation, also for those inside of others.
    """
    name = eqn.primitive.name
    if rule is not None and (known := rule(eqn, notes)) is not None:
        return known
    nowhere = all(note is None for note in notes)
    if name in _UNKNOWN or (nowhere and (rule is None or not bodies(eqn))):
        return [None] * len(eqn.outvars)
    if name == "reshape" and _kept(eqn, notes[0]):
        found = [notes[0]]
    elif (axes := axis_map(eqn)) is not None:
        given = [(i, note) for i, note in enumerate(notes) if note is not None]
        if name == "gather":  # a row of the result is the row of its index, wherever it was found
            given.reverse()
        found = _first(axes.follow(i, note, pieces) for i, note in given)
    elif name == "scan":
        found = _scanned(eqn, notes, pieces, rule)
    elif name == "cond":
        found = _branched(eqn, notes, pieces, rule)
    elif description(eqn.primitive).batch_first:
        found = [_first_note(notes)] * len(eqn.outvars)
    elif len(inside := bodies(eqn)) == 1 and inside[0].kind == "call":
        found = through(inside[0].jaxpr, notes, pieces, rule)
    else:
        found = _alike(eqn, notes)
    return [
        note if note is not None and note < len(v.aval.shape) else None
        for note, v in zip(found, eqn.outvars)
    ]


def mapped_axes(eqn: Any, names: Iterable[str]) -> list[Note]:
    """Returns for each output of a shard_map the axis that it splits over exactly the mesh axes
    `names`, or None."""

    def axis(spec: Any) -> Note:
        over = [{*part} if isinstance(part, tuple) else {part} for part in spec]
        return over.index({*names}) if {*names} in over else None

    return list(map(axis, options(eqn).out_specs))


def _kept(eqn: Any, note: Note) -> bool:
    """Whether a reshape changes nothing up to an axis. The axis may have size 1, of which no letter
    tells."""
    if note is None:
        return False
    before, after = (v.aval.shape[: note + 1] for v in (eqn.invars[0], eqn.outvars[0]))
    return before == after


def _first_note(notes: Iterable[Note]) -> Note:
    return next((note for note in notes if note is not None), None)


def _first(found: Iterable[Sequence[Note]]) -> list[Note]:
    """Returns for each output the axis that the first operand gives it, of those that give one."""
    return [_first_note(notes) for notes in zip(*found)]


def through(
    jaxpr: Any, notes: Sequence[Note], pieces: int = 1, rule: Rule | None = None
) -> list[Note]:
    """Returns the batch axes of the outputs of a jaxpr, given the batch axes of its inputs."""
    axes = dict(zip(jaxpr.invars, notes))
    read = lambda v: None if isinstance(v, _jax.Literal) else axes.get(v)
    for eqn in jaxpr.eqns:
        axes.update(zip(eqn.outvars, batch_axes(eqn, list(map(read, eqn.invars)), pieces, rule)))
    return list(map(read, jaxpr.outvars))


def _alike(eqn: Any, notes: Sequence[Note]) -> list[Note]:
    """An operation without a rule keeps the batch axis if it changes neither the number of axes nor
    the length of the batch axis."""
    found = []
    for out in eqn.outvars:
        rank = len(out.aval.shape)
        kept = [
            note
            for note, v in zip(notes, eqn.invars)
            if note is not None
            and len(v.aval.shape) == rank
            and v.aval.shape[note] == out.aval.shape[note]
        ]
        found.append(_first_note(kept))
    return found


def before(note: Note) -> Note:
    """Returns the position of the batch axis in the slice x[0], given its position `note` in the
    array x. Returns None if x has no batch axis (`note` is None), or if the batch axis is axis 0,
    which the index in x[0] removes."""
    return note - 1 if note else None


def _after(note: Note) -> Note:
    return None if note is None else note + 1


def _scanned(eqn: Any, notes: Sequence[Note], pieces: int, rule: Rule | None) -> list[Note]:
    parts = scan(eqn)
    consts, carried, sliced = parts.split(notes)
    sliced = list(map(before, sliced))
    # A carry without a batch axis, such as initial zeros, may get one.
    for _ in range(parts.carry + 1):
        found = through(parts.jaxpr, [*consts, *carried, *sliced], pieces, rule)
        joined = [b if a is None else a for a, b in zip(carried, found)]
        if joined == carried:
            break
        carried = joined
    return [
        *(a if a == b else None for a, b in zip(carried, found)),
        *map(_after, found[parts.carry :]),
    ]


def _branched(eqn: Any, notes: Sequence[Note], pieces: int, rule: Rule | None) -> list[Note]:
    found = [through(branch.jaxpr, notes[1:], pieces, rule) for branch in bodies(eqn)]
    return [axes[0] if len(set(axes)) == 1 else None for axes in zip(*found)]
