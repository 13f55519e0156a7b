"""Propagates the batch axis through equations, from the inputs to the outputs."""

from __future__ import annotations

import math

from fnet import _jax
from fnet.jaxpr._calls import bodies, scan
from fnet.jaxpr._equations import DOT, product
from fnet.jaxpr._primitives import description
from fnet.jaxpr._records import options, reduced_axes


def batch_axes(eqn, notes: list) -> list:
    """Returns the batch axis of each output of an equation. `notes` contains the batch axis of each
    input. None in `notes` or in the result means that a value has no batch axis, or that its batch
    axis is unknown."""
    if all(note is None for note in notes):
        return [None] * len(eqn.outvars)
    name = eqn.primitive.name
    if (rule := _RULES.get(name)) is not None:
        found = rule(eqn, notes)
    elif (multiplied := product(eqn)) is not None:
        found = _multiplied(multiplied, notes)
    elif (over := reduced_axes(eqn)) is not None:
        found = [_without(over, notes[0])] * len(eqn.outvars)
    elif description(eqn.primitive).batch_first:
        found = [next(note for note in notes if note is not None)] * len(eqn.outvars)
    elif name not in _UNKNOWN and len(inside := bodies(eqn)) == 1 and inside[0].kind == "call":
        found = _through(inside[0].jaxpr, notes)
    else:
        found = [None] * len(eqn.outvars) if name in _UNKNOWN else _alike(eqn, notes)
    return [
        note if note is not None and note < len(v.aval.shape) else None
        for note, v in zip(found, eqn.outvars)
    ]


def _through(jaxpr, notes: list) -> list:
    """Returns the batch axes of the outputs of a jaxpr, given the batch axes of its inputs."""
    axes = dict(zip(jaxpr.invars, notes))
    read = lambda v: None if isinstance(v, _jax.Literal) else axes.get(v)
    for eqn in jaxpr.eqns:
        axes.update(zip(eqn.outvars, batch_axes(eqn, list(map(read, eqn.invars)))))
    return list(map(read, jaxpr.outvars))


def _alike(eqn, notes):
    """The batch axis stays the same in elementwise operations, and in other operations that change
    neither the number of axes nor the length of the batch axis."""
    found = []
    for out in eqn.outvars:
        shape = out.aval.shape
        found.append(
            next(
                (
                    note
                    for note, v in zip(notes, eqn.invars)
                    if note is not None
                    and len(v.aval.shape) == len(shape)
                    and v.aval.shape[note] == shape[note]
                ),
                None,
            )
        )
    return found


def _without(removed, note):
    """Returns the batch axis of an array after some of its axes were removed."""
    return None if note is None or note in removed else note - sum(axis < note for axis in removed)


def _broadcast(eqn, notes):
    note = notes[0]
    if note is None:
        return [None]
    shape, axes = options(eqn)
    place = axes[note]
    return [place if shape[place] == eqn.invars[0].aval.shape[note] else None]


def _reshaped(eqn, notes):
    """Returns a list that contains the batch axis of the output of a reshape. The sizes of the axes
    before the batch axis must have the same product in the input and in the output. Otherwise, the
    batch axis of the output is unknown (None). A reshape may merge the batch axis with later axes,
    or split the batch axis, for example into microbatches. If a reshape splits the batch axis, the
    first part is the batch axis of the output."""
    note = notes[0]
    if note is None:
        return [None]
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    ahead = math.prod(before[:note])
    places = [
        i
        for i in range(len(after))
        if math.prod(after[:i]) == ahead
        and after[i] > 1
        and before[note] > 1
        and (after[i] % before[note] == 0 or before[note] % after[i] == 0)
    ]
    return places[-1:] or [None]


def _product(contract, batched, ranks, notes):
    """Returns the batch axis of the output of a dot_general. The axes of the output of a
    dot_general are the axes in `batched`, followed by the remaining axes of the left operand and
    the remaining axes of the right operand. Contracted axes are omitted."""
    for side, note in enumerate(notes[:2]):
        if note is None:
            continue
        if note in batched[side]:
            return batched[side].index(note)
        if note not in contract[side]:
            own = [
                i for i in range(ranks[side]) if i not in contract[side] and i not in batched[side]
            ]
            skipped = ranks[0] - len(contract[0]) - len(batched[0]) if side else 0
            return len(batched[0]) + skipped + own.index(note)
    return None


def _multiplied(found, notes):
    if found.op is DOT:
        contract, batched = found.dimensions
        ranks = [len(v.aval.shape) for v in found.eqn.invars[:2]]
        return [_product(contract, [list(axes) for axes in batched], ranks, notes)]
    rows = (
        notes[0] is not None and notes[0] == found.dimensions.lhs_spec[0] and found.groups[1] == 1
    )
    return [found.dimensions.out_spec[0] if rows else None]


def _gathered(eqn, notes):
    """Returns the batch axis of the output of a gather.

    If the indices of a gather have a batch axis, the output has the same batch axis. If only the
    operand of a gather has a batch axis, the output keeps this axis in two cases: each gathered
    slice contains the whole axis, or the axis is one of the gather's `operand_batching_dims`. If
    neither the indices nor the operand determines the batch axis of the output, the function
    returns [None] (batch axis unknown).
    """
    numbers, (operand, indices) = options(eqn).dimension_numbers, notes[:2]
    rank = len(eqn.outvars[0].aval.shape)
    batch = [i for i in range(rank) if i not in numbers.offset_dims]
    if indices is None and operand in numbers.operand_batching_dims:
        indices = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(operand)]
    if indices is not None and indices < len(batch):
        return [batch[indices]]
    whole = options(eqn).slice_sizes
    kept = [
        i
        for i in range(len(whole))
        if i not in numbers.collapsed_slice_dims and i not in numbers.operand_batching_dims
    ]
    if operand in kept and whole[operand] == eqn.invars[0].aval.shape[operand]:
        return [numbers.offset_dims[kept.index(operand)]]
    return [None]


def _scattered(eqn, notes):
    numbers, (operand, indices) = options(eqn).dimension_numbers, notes[:2]
    if operand is None and indices in numbers.scatter_indices_batching_dims:
        operand = numbers.operand_batching_dims[
            numbers.scatter_indices_batching_dims.index(indices)
        ]
    return [operand]


def before(note):
    """Returns the position of the batch axis in the slice x[0], given its position `note` in the
    array x. Returns None if x has no batch axis (`note` is None), or if the batch axis is axis 0,
    which the index in x[0] removes."""
    return note - 1 if note else None


def _after(note):
    return None if note is None else note + 1


def _scanned(eqn, notes):
    parts = scan(eqn)
    consts, carried, sliced = parts.split(notes)
    sliced = list(map(before, sliced))
    for _ in range(
        parts.carry + 1
    ):  # a carry without a batch axis, such as initial zeros, may get one
        found = _through(parts.jaxpr, [*consts, *carried, *sliced])
        joined = [b if a is None else a for a, b in zip(carried, found)]
        if joined == carried:
            break
        carried = joined
    return [
        *(a if a == b else None for a, b in zip(carried, found)),
        *map(_after, found[parts.carry :]),
    ]


def _branched(eqn, notes):
    found = [_through(branch.jaxpr, notes[1:]) for branch in bodies(eqn)]
    return [axes[0] if len(set(axes)) == 1 else None for axes in zip(*found)]


_UNKNOWN = frozenset(("while", "shard_map"))
_RULES = {
    "transpose": lambda eqn, notes: [
        None if notes[0] is None else options(eqn).permutation.index(notes[0])
    ],
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "gather": _gathered,
    "squeeze": lambda eqn, notes: [_without(options(eqn).dimensions, notes[0])],
    "scatter-add": _scattered,
    "scatter": _scattered,
    "scan": _scanned,
    "cond": _branched,
}
