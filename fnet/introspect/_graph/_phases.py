"""Assigns each operation of a training step to a phase: forward pass, backward pass, or update of
the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fnet.jaxpr import Frame

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


def phases(
    frame: Frame, results: Sequence[str] | None, hidden: Mapping[int, Sequence[str]]
) -> list[tuple[str, tuple[str, ...] | None]]:
    """Returns the phase (forward pass, backward pass or parameter update) and the group of each
    operation of a jaxpr.

    The result is a list with a tuple (phase, parameter) for each operation, where `phase` is
    "forward", "backward" or "update". If an operation of the parameter update contributes to only
    one parameter, `parameter` is the name of this parameter as a tuple of segments, such as
    ("block", "kernel"). An operation that does not belong to the update of a single parameter has
    `parameter` None, and is grouped by the path of its scope.

    The parameter update consists of the operations that depend on the backward pass, but do not
    belong to it. An operation without a named scope, such as the computation of a learning rate,
    also belongs to the parameter update if its results are read only in the update.

    Args:
        results: the names of the results of the frame (jaxpr); None for the body of a loop.
        hidden: a dict {id of a value: names}. The value may be a copy of any parameter or constant
            whose name is in `names`.
    """
    backward = [op.at.phase != FORWARD for op in frame.ops]
    if not any(backward):
        return [(FORWARD, None)] * len(frame.ops)
    after, late = set(), []
    for op, is_backward in zip(frame.ops, backward):
        late.append(not is_backward and any(i in after for i in op.ins))
        if is_backward or late[-1]:
            after.update(op.outs)
    kinds = [BACKWARD if b else UPDATE if u else FORWARD for b, u in zip(backward, late)]
    readers: dict[int, set[str]] = {}
    for k in range(len(kinds) - 1, -1, -1):
        op = frame.ops[k]
        if kinds[k] == FORWARD and not op.scope:
            read_by = set().union(*(readers.get(out, ()) for out in op.outs))
            if read_by == {UPDATE}:
                kinds[k] = UPDATE
        for i in op.ins:
            if i is not None:
                readers.setdefault(i, set()).add(kinds[k])
    scopes = {op.scope.partition("/")[0] for op in frame.ops} - {""}
    ends = {
        _from_scope(name, scopes)
        for op, kind in zip(frame.ops, kinds)
        if kind != UPDATE
        for i in op.ins
        for name in hidden.get(i, ())
    }
    written: dict[int, set] = {}
    for name, i in zip(results or (), frame.results):
        if i is not None:
            written.setdefault(i, set()).add(_end(name, ends))
    below: list[tuple[str, ...] | None] = [None] * len(kinds)
    for k in range(len(kinds) - 1, -1, -1):
        if kinds[k] != UPDATE:
            continue
        op = frame.ops[k]
        owners = set().union(*(written.get(out, ()) for out in op.outs))
        for i in op.ins:
            if i is not None:
                written.setdefault(i, set()).update(owners)
        if len(owners) == 1 and (owner := next(iter(owners))):
            below[k] = tuple(owner.split("/"))
    return list(zip(kinds, below))


def _from_scope(name, scopes) -> str | None:
    """Shortens the name of a parameter so that it begins with a named scope. For example, if
    "block" is a named scope, the name "params/block/kernel" becomes "block/kernel". Returns None if
    the name contains no named scope."""
    parts = name.split("/")
    return next(("/".join(parts[n:]) for n, part in enumerate(parts) if part in scopes), None)


def _end(name, ends) -> str | None:
    """Returns the longest suffix of an output's name that is the name of a parameter, or None if
    there is none.

    For the output name "0/momentum/block/kernel", the function returns "block/kernel" if this is a
    parameter name.
    """
    parts = name.split("/")
    return next((end for n in range(len(parts)) if (end := "/".join(parts[n:])) in ends), None)
