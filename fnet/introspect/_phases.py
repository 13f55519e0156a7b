"""The phases of a program that contains its derivative: forward pass, backward pass, update of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fnet.jaxpr import Frame

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


def phases(frame: Frame, results: Sequence[str] | None, hidden: Mapping[int, Sequence[str]]
           ) -> list[tuple[str, tuple[str, ...] | None]]:
    """Returns (phase, segments) for each operation of a frame (one jaxpr). Unless the segments are None, they replace
    the segments of the path of the operation's scope.

    The update of the parameters consists of the operations after the backward pass that depend on the backward pass. An
    operation outside any scope, such as the computation of a learning rate, also belongs to the update of the
    parameters if only the update reads its result. Operations of the update that contribute to only one parameter are
    grouped by the parameter.

    Args:
        results: the names of the results of the frame (jaxpr); None for the body of a loop.
        hidden: the names of the parameters that each value holds, {id of a value: names of parameters}.
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
    ends = {_from_scope(name, scopes) for op, kind in zip(frame.ops, kinds) if kind != UPDATE
            for i in op.ins for name in hidden.get(i, ())}
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
    """Returns the part of a parameter's name that begins with an outermost scope, such as "block/kernel" of
    "params/block/kernel", or None."""
    parts = name.split("/")
    return next(("/".join(parts[n:]) for n, part in enumerate(parts) if part in scopes), None)


def _end(name, ends) -> str | None:
    """Returns the name of the parameter with which the name of a result ends ("block/kernel" for
    "0/momentum/block/kernel"), or None if the name does not end with a parameter."""
    parts = name.split("/")
    return next((end for n in range(len(parts)) if (end := "/".join(parts[n:])) in ends), None)
