"""Groups operations by named scope, and splits a scope into several groups to avoid cyclic
dependencies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

# Limits above which operations without a scope are grouped: beside scopes, alone.
_FEW, _MANY = (12, 160)


class Mark(str):
    """A name of a group of operations, such as "backward", that is not the name of a
    `jax.named_scope`."""

    __slots__ = ()


@dataclasses.dataclass(eq=False)
class Item:
    """An operation to be put into groups: its node, the names of the groups around the node, and
    the indices of the operations whose results the node reads."""

    node: Any
    segments: tuple[str, ...]
    needs: set[int]


def nest(items: list[Item], owner: Any, base: str, *, scope: Callable[[str, str], Any]) -> None:
    """Puts items (operations) into groups below the node `owner`, in the order of the items.

    A scope that is entered several times, for example because parameters are shared, is usually one
    group. However, if an operation outside of the scope depends on the scope, and the scope depends
    on this operation, the group and the operation would form a cycle of dependencies. If necessary
    to avoid cyclic dependencies, the function splits the operations of a scope into several groups,
    such as "embed" and "embed (2)".

    Args:
        base: the path of `owner`.
        scope: a function; `scope(name, path)` returns a new group.
    """
    _nest(items, range(len(items)), 0, owner, base, scope)


def _nest(items, members, level, owner, base, scope):
    members = list(members)
    loose = [i for i in members if len(items[i].segments) == level]
    gathered = len(loose) < len(members) and len(loose) > _FEW
    if gathered or len(loose) > _MANY:
        for n, i in enumerate(loose):
            first = n // 100 * 100
            items[i].segments += (
                Mark(
                    "operations" if gathered else f"{first + 1} to {min(first + 100, len(loose))}"
                ),
            )
    runs: list[tuple[str | None, list[int]]] = []
    for i in members:
        name = items[i].segments[level] if len(items[i].segments) > level else None
        if name is not None and runs and runs[-1][0] == name:
            runs[-1][1].append(i)
        else:
            runs.append((name, [i]))
    counts: dict[str, int] = {}
    for name, group in _merged(items, runs):
        if name is None or (
            gathered and isinstance(name, Mark) and name == "operations" and len(group) < 4
        ):
            for i in group:
                owner.add(items[i].node)
            continue
        counts[name] = counts.get(name, 0) + 1
        label = name if counts[name] == 1 else f"{name} ({counts[name]})"
        path = base if isinstance(name, Mark) else f"{base}/{name}" if base else name
        node = owner.add(scope(label, path))
        node.phase = items[group[0]].node.phase
        _nest(items, group, level + 1, node, path, scope)


def _merged(items, runs):
    """Merges groups of operations that have the same name, unless merging them creates a cycle of
    dependencies.

    `runs` is the list of groups before merging, and the result is the list of groups after merging.
    A group of operations is a tuple (name of the group, indices of its operations in the list
    `items`).
    """
    run_of = {i: r for r, (_, group) in enumerate(runs) for i in group}
    after: list[set[int]] = [set() for _ in runs]
    for i, r in run_of.items():
        for j in items[i].needs:
            if j in run_of and run_of[j] != r:
                after[run_of[j]].add(r)
    root = list(range(len(runs)))

    def find(r):
        while root[r] != r:
            root[r] = root[root[r]]
            r = root[r]
        return r

    def detour(a, b):
        """Whether a path of dependencies leads from group a to group b through another group."""
        seen, stack = {a}, [r for r in map(find, after[a]) if r not in (a, b)]
        while stack:
            r = stack.pop()
            if r in seen:
                continue
            seen.add(r)
            following = set(map(find, after[r]))
            if b in following:
                return True
            stack.extend(following - seen)
        return False

    groups: dict[str, list[int]] = {}
    for r, (name, _) in enumerate(runs):
        if name is None:
            continue
        for other in groups.get(name, ()):
            if not detour(other, r) and not detour(r, other):
                root[r] = other
                after[other] |= after[r]
                break
        else:
            groups.setdefault(name, []).append(r)
    joined: dict[int, list[int]] = {}
    for r in range(len(runs)):
        joined.setdefault(find(r), []).extend(runs[r][1])
    return [(runs[r][0], group) for r, group in joined.items()]
