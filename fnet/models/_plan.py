"""Rules applied to the arrays of one model: which key stands for which array."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fnet.models._rules import Names, Rule, Spare, Tied

_FIELD = re.compile(r"\{(\w+)([+-]\d+)?(:letter)?\}")


class Entry(NamedTuple):
    """A rule at one place of one model.

    paths, specs: our arrays. copies: the sizes of the axes in front that their keys count out. keys: one, or one for
    each copy, the last axis fastest.
    """

    rule: Rule | Spare | Tied
    paths: tuple[str, ...]
    specs: tuple
    copies: tuple[int, ...]
    keys: tuple[str, ...]

    def shape(self) -> tuple[int, ...]:
        """The shape that each of their arrays must have."""
        shapes = [spec.shape[len(self.copies):] for spec in self.specs]
        whole = (*shapes[0][:-1], sum(shape[-1] for shape in shapes)) if len(shapes) > 1 else shapes[0]
        return self.rule.layout.theirs(np.broadcast_to(np.int8(0), whole)).shape


class Plan(NamedTuple):
    """Every array of one model with its keys: what is read and written, and what may stand beside it."""

    reads: list[Entry]
    beside: list[Entry]

    def keys(self) -> dict[str, Entry]:
        return {key: entry for entry in self.reads for key in entry.keys}


def plan(names: Names, prefix: str, leaves: Mapping[str, Any], who: str) -> Plan:
    """The rules applied to the arrays of a model.

    Args:
        names: the rules.
        prefix: one of their prefixes.
        leaves: {path: spec} of parameters and state.
        who: whose rules these are, for errors.

    Raises:
        ValueError: where an array has no rule, or two of them have one key.
    """
    reads, beside, taken = [], [], set()
    for rule in names.flat():
        if rule.ours is None:
            beside.append(Entry(rule, (), (), (), (prefix + rule.theirs,)))
            continue
        for place in _places(rule, leaves, who):
            if not isinstance(rule, Rule):
                beside.append(_entry(rule, prefix, *place))
            elif place[0][0] not in taken:
                taken.update(place[0])
                reads.append(_entry(rule, prefix, *place))
                beside += [_entry(spare, prefix, *place) for spare in rule.beside]
    lacking = [path for path in leaves if path not in taken]
    if lacking:
        raise ValueError(f"{who}: no rule names {', '.join(map(repr, lacking[:4]))}"
                         + (f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""))
    owners = {}
    for entry in reads:
        for key in entry.keys:
            if owners.setdefault(key, entry) is not entry:
                raise ValueError(f"{who}: the rules name {key!r} for {owners[key].paths[0]!r} and {entry.paths[0]!r}")
    if prefix:    # what stands beside the part that has the prefix may come without it
        bare = [dataclasses.replace(entry.rule, write=None) for entry in beside]
        beside += [entry._replace(rule=rule, keys=tuple(key.removeprefix(prefix) for key in entry.keys))
                   for entry, rule in zip(beside, bare)]
    return Plan(reads, [entry for entry in beside if owners.keys().isdisjoint(entry.keys)])


def _places(rule, leaves, who):
    """(paths, their specs, the numbers in them) of every place of a model that a rule's paths name."""
    first, *others = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
    pattern = _pattern(first)
    for path in leaves:
        if found := pattern.fullmatch(path):
            numbers = {name: int(number) for name, number in found.groupdict().items()}
            paths = (path, *(_written(other, numbers) for other in others))
            lacking = [each for each in paths if each not in leaves]
            if lacking:
                raise ValueError(f"{who}: the rule for {rule.theirs!r} wants {lacking[0]!r} beside {path!r}, and the "
                                 "model has no such array")
            yield paths, tuple(leaves[each] for each in paths), numbers


def _entry(rule, prefix, paths, specs, numbers):
    free = list(dict.fromkeys(name for name, *_ in _FIELD.findall(rule.theirs) if name not in numbers))
    copies = specs[0].shape[:len(free)]
    keys = (prefix + _written(rule.theirs, numbers | dict(zip(free, each)))
            for each in itertools.product(*map(range, copies)))
    return Entry(rule, paths, specs, copies, tuple(keys))


def _pattern(ours):
    """A path of ours as a regular expression with a group for each number."""
    parts, at = [], 0
    for field in _FIELD.finditer(ours):
        parts += [re.escape(ours[at:field.start()]), rf"(?P<{field[1]}>\d+)"]
        at = field.end()
    return re.compile("".join(parts) + re.escape(ours[at:]))


def _written(theirs, numbers):
    def one(field):
        number = numbers[field[1]] + int(field[2] or 0)
        return chr(ord("a") + number) if field[3] else str(number)

    return _FIELD.sub(one, theirs)
