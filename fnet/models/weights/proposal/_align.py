"""Which layer of the model is which layer of the file: those whose shapes fit, aligned by their
names and by their order.

Layers of one kind and shape are interchangeable as far as shapes tell. Among those, the order in
which both programs call their layers is the best evidence, and names decide where it is not the
same, such as for the two branches of a block.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fnet.models.weights.proposal._layers import Unit
from fnet.models.weights.proposal._lines import Line, fitting
from fnet.models.weights.proposal._source import Group

_WORDS = {  # other words for the same layer
    "query": "q key_q q_lin wq",
    "key": "k k_lin wk",
    "value": "v v_lin wv",
    "out": "o output proj projection wo",
    "dense": "fc linear lin",
    "norm": "ln bn layernorm batchnorm layer_norm batch_norm rmsnorm groupnorm gn",
    "embed": "embedding embeddings emb wte",
    "position": "pos wpe positional",
    "token": "tokens tok word",
    "attention": "attn self mha",
    "shortcut": "downsample skip residual",
    "head": "classifier cls logits score",
    "encoder": "enc encode",
    "decoder": "dec decode",
    "up": "upsample",
    "mlp": "ffn ff feedforward",
    "stem": "conv1 first",
}
_MEANING = {other: word for word, others in _WORDS.items() for other in others.split()}
_ROUNDS = 2  # in which the pairs of layers tell which of their blocks are the same


@dataclasses.dataclass
class Alignment:
    """The layers of a model and those of a file, and which of them are the same.

    Attributes:
        units: the layers of the model, in the order of their calls.
        groups: the layers of the file, in the order of their calls or else of their definition.
        lines: {(number of a unit, number of a group): the line}, for all that fit in shape.
        pairs: {number of a unit: number of its group}.
        scores: {(unit, group): how well name and order fit}.
        likeness: {(unit, group): how well the names fit}.
    """

    units: Sequence[Unit]
    groups: Sequence[Group]
    lines: Mapping[tuple[int, int], Line]
    scores: Mapping[tuple[int, int], float]
    likeness: Mapping[tuple[int, int], float]
    pairs: dict[int, int]

    def line(self, unit: int) -> Line:
        return self.lines[unit, self.pairs[unit]]

    def others(self, unit: int) -> list[int]:
        """The other groups that fit a unit, best first."""
        found = [g for u, g in self.lines if u == unit and g != self.pairs.get(unit)]
        return sorted(found, key=lambda group: -self.scores[unit, group])

    def exchanged(self, unit: int, group: int) -> dict[int, int] | None:
        """The pairs after `unit` gets `group`, and the unit that had it gets the one of `unit`; None
        if that does not fit."""
        pairs, old = dict(self.pairs), self.pairs.get(unit)
        owner = next((u for u, g in pairs.items() if g == group), None)
        pairs[unit] = group
        if owner is not None:
            if old is None or (owner, old) not in self.lines:
                return None
            pairs[owner] = old
        return pairs

    def unclear(self) -> list[tuple[int, int]]:
        """The pairs of units whose names do not say which of the two groups belongs to which."""
        likeness, found = self.likeness, []
        for unit, group in self.pairs.items():
            for other, its in self.pairs.items():
                if other <= unit or (unit, its) not in likeness or (other, group) not in likeness:
                    continue
                now = likeness[unit, group] + likeness[other, its]
                if now <= likeness[unit, its] + likeness[other, group]:
                    found.append((unit, other))
        return found


def align(
    units: Sequence[Unit],
    groups: Sequence[Group],
    shapes: Mapping[str, tuple],
    called: Mapping[str, int],
) -> Alignment:
    """Finds the pairs of layers.

    Args:
        units: the layers of the model.
        groups: the layers of the file, in the order of their definition.
        shapes: {key: shape} of the file.
        called: {name of a group: when PyTorch calls it}, or {}.
    """
    order = _order(groups, called)
    lines = _fits(units, groups, shapes)
    scores: dict[tuple[int, int], float] = {}
    likeness: dict[tuple[int, int], float] = {}
    components = []
    for members, choices in _components(lines):
        choices = sorted(choices, key=lambda g: order[g])
        components.append((members, choices))
        places = {g: place for place, g in enumerate(choices)}
        stretch = (len(choices) - 1) / max(1, len(members) - 1)
        ours = dict(zip(members, _named(units[u].site for u in members)))
        theirs = dict(zip(choices, _named(groups[g].name for g in choices)))
        for place, u in enumerate(members):
            for g in choices:
                if (u, g) in lines:
                    apart = abs(place * stretch - places[g])
                    near = 1 - min(apart, 8) / 8
                    likeness[u, g] = _likeness(ours[u], theirs[g])
                    scores[u, g] = near + likeness[u, g]
    pairs: dict[int, int] = {}
    total = scores
    for _ in range(1 + _ROUNDS):
        pairs = {}
        for members, choices in components:
            pairs |= _assigned(members, choices, total)
        blocks = _Blocks(units, groups, components, pairs)
        total = {(u, g): score + 1.5 * blocks.likeness(u, g) for (u, g), score in scores.items()}
    return Alignment(units, groups, lines, total, likeness, pairs)


def _fits(units, groups, shapes) -> dict[tuple[int, int], Line]:
    """The lines of all pairs whose shapes fit, each kind of pair looked at once."""
    known: dict[tuple, Line | None] = {}
    lines = {}
    theirs = [_form_of_group(group, shapes) for group in groups]
    for u, unit in enumerate(units):
        ours = _form_of_unit(unit)
        for g, group in enumerate(groups):
            if unit.size() != group.size and unit.kind != "attention":
                continue
            form = ours, theirs[g]
            if form not in known:
                known[form] = fitting(unit, group, shapes)
            if (line := known[form]) is not None:
                paths = unit.paths[0] if len(unit.paths) == 1 else unit.paths
                name = group.name if line.method else group.keys[0]
                lines[u, g] = dataclasses.replace(line, ours=paths, theirs=name)
    return lines


def _form_of_unit(unit):
    """What of a layer of the model decides whether another fits: all but its place."""
    leaves = tuple((path.removeprefix(unit.path), s.shape) for path, s in unit.leaves.items())
    if len(unit.paths) > 1:
        leaves = tuple(spec.shape for spec in unit.leaves.values())
    kernel = next(iter(unit.leaves.values()))
    last = unit.path.rpartition("/")[2] if unit.kind == "array" else ""
    groups = getattr(unit.layer, "groups", 1)
    return unit.kind, last, leaves, groups, kernel.layer, kernel.roles


def _form_of_group(group, shapes):
    keys = tuple((key.removeprefix(group.name), shapes[key]) for key in group.keys)
    return group.kind, keys, group.layer, group.norms, group.module


class _Blocks:
    """Which block of the model is which of the file, as the pairs of their layers suggest."""

    def __init__(self, units, groups, components, pairs):
        alone = {u for members, choices in components if len(choices) == 1 for u in members}
        self._units = [unit.site.rpartition("/")[0] for unit in units]
        self._groups = [_above(group.name) for group in groups]
        self._both: dict = collections.Counter()
        self._ours: dict = collections.Counter()
        self._theirs: dict = collections.Counter()
        for u, g in pairs.items():
            weight = 1.0 if u in alone else 0.5  # a layer whose shape is unique is certain
            self._ours[self._units[u]] += weight
            for block in self._groups[g]:
                self._theirs[block] += weight
                self._both[self._units[u], block] += weight

    def likeness(self, unit, group):
        ours = self._units[unit]
        if not ours:
            return 0.0
        shared = (
            self._both[ours, block] / (self._ours[ours] * self._theirs[block]) ** 0.5
            for block in self._groups[group]
            if self._both[ours, block]
        )
        return max(shared, default=0.0)


def _above(name):
    """The prefixes of a key: a.b.c is in a.b and in a."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _order(groups, called):
    """When each group is called: those that PyTorch never calls stay next to their neighbors."""
    order, last = [], -1.0
    for number, group in enumerate(groups):
        last = called.get(group.name, last)
        order.append((last, number))
    return order


def _components(lines):
    """The units and groups that are connected by a fit, as ([units], [groups])."""
    of_group = collections.defaultdict(list)
    of_unit = collections.defaultdict(list)
    for u, g in lines:
        of_unit[u].append(g)
        of_group[g].append(u)
    seen: set[int] = set()
    for start in sorted(of_unit):
        if start in seen:
            continue
        members, choices, waiting = set(), set(), [start]
        while waiting:
            u = waiting.pop()
            if u in members:
                continue
            members.add(u)
            for g in of_unit[u]:
                if g not in choices:
                    choices.add(g)
                    waiting += of_group[g]
        seen |= members
        yield sorted(members), sorted(choices)


def _assigned(members, choices, scores):
    from scipy.optimize import linear_sum_assignment

    never = -1e6
    table = np.array([[scores.get((u, g), never) for g in choices] for u in members])
    rows, columns = linear_sum_assignment(table, maximize=True)
    return {
        members[row]: choices[column]
        for row, column in zip(rows, columns)
        if table[row, column] > never
    }


def _named(names: Iterable[str]) -> list[tuple[list[str], list[int]]]:
    """(words, numbers) of each name. Numbers are counted from the least that occurs in their place:
    one program may count its layers from 0, and the other from 1."""
    parsed = [_parsed(name) for name in names]
    least: dict[tuple[int, int], int] = {}
    for _, numbers in parsed:
        for place, number in enumerate(numbers):
            key = len(numbers), place
            least[key] = min(number, least.get(key, number))
    return [
        (words, [number - least[len(numbers), place] for place, number in enumerate(numbers)])
        for words, numbers in parsed
    ]


def _likeness(ours: tuple, theirs: tuple) -> float:
    """How alike two names are, from 0 to 2.5: the last word counts most, and so do numbers."""
    (our_words, our_numbers), (their_words, their_numbers) = ours, theirs
    common = set(our_words) & set(their_words)
    every = set(our_words) | set(their_words)
    likeness = len(common) / max(1, len(every))
    if our_words and their_words and our_words[-1] == their_words[-1]:
        likeness += 1
    if our_numbers and our_numbers == their_numbers:
        likeness += 0.5
    return likeness


def _parsed(name):
    """The words of a name, in one form, and its numbers."""
    name = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    name = re.sub(r"\bdownsample[._]\d+$", "downsample", name)
    words = []
    for part in re.split(r"[./\[\]]+", name):
        if part in _MEANING:
            words.append(_MEANING[part])
            continue
        for word in re.split(r"[_\W]+", part):
            word = re.sub(r"\d+$", "", _MEANING.get(word, word))
            if word and not word.isdigit():
                words.append(_MEANING.get(word, word))
    if len(words) > 1 and words[-1] == "out" and words[-2] in ("query", "key", "value"):
        words = words[:-1]  # q_proj
    return words, [int(number) for number in re.findall(r"\d+", name)]
