"""Lines that differ only in their numbers, written as one line with placeholders."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fnet.models.weights import _key_map
from fnet.models.weights._weight_names import Names
from fnet.models.weights.proposal._layers import Unit
from fnet.models.weights.proposal._lines import Line

_LETTERS = "ijkmn"
_BETWEEN = "\n"  # joins several paths


def folded(
    placed: Sequence[tuple[Unit, Line]], leaves: Mapping[str, Any]
) -> tuple[list[Line], list[Unit]]:
    """Returns the lines with placeholders, and the units whose stack the file does not number.

    Args:
        placed: the line of each layer, and of each copy of a stacked layer.
        leaves: {path: spec} of the model.
    """
    stacked: dict[tuple, list] = collections.defaultdict(list)
    for unit, line in placed:
        stacked[unit.paths].append((unit, line))
    lines, lost = [], []
    for members in stacked.values():
        line = _one(members, stack=True)
        if line is None:
            lost.append(members[0][0])
        else:
            lines.append((members[0][0], line))
    return _shortest(lines, leaves), lost


def _shortest(lines, leaves):
    """The lines, folded where the rules stay the same."""
    alike: dict[tuple, list] = collections.defaultdict(list)
    for place, (unit, line) in enumerate(lines):
        text_of = lambda value: re.sub(r"(?<!\{)\d+", "#", value)
        options = tuple(text for text, _ in line.options)
        key = line.method, text_of(_joined(line.ours)), text_of(line.theirs), options, line.norm
        alike[key].append((place, dataclasses.replace(unit, index=()), line))
    short: list = []
    for members in alike.values():
        plain_lines = [(place, line) for place, _, line in members]
        fewest = _fewest(members)
        same = _mapping(fewest, leaves) == _mapping(plain_lines, leaves)
        short += fewest if same else plain_lines
    return [line for _, line in sorted(short, key=lambda placed: placed[0])]


def _fewest(members):
    """[(place, line)]: the members as one line, or as few as their numbers allow."""
    line = _one([each[1:] for each in members], stack=False) if len(members) > 1 else None
    if line is not None:
        return [(members[0][0], line)]
    best = [(place, line) for place, _, line in members]
    if len(members) < 3:
        return best
    numbers = [_numbers(_joined(line.ours))[1] for _, _, line in members]
    for at in range(len(numbers[0])):
        parts = collections.defaultdict(list)
        for member, row in zip(members, numbers):
            parts[row[at]].append(member)
        if 1 < len(parts) < len(members):
            found = [each for part in parts.values() for each in _fewest(part)]
            best = min(best, found, key=len)
    return best


def _mapping(placed, leaves):
    """{(paths, keys)} of the entries that lines make."""
    rules = tuple(line.rules() for _, line in placed)
    try:
        entries = _key_map.key_map(Names(rules), "", leaves, "", whole=False).reads
    except ValueError:
        return None
    return {(entry.paths, entry.keys) for entry in entries}


def _one(members, stack):
    """One line for several, or None if their numbers follow no rule.

    With `stack`, the layers are copies of one, whose numbers stand in the file alone. Otherwise
    the numbers of the file follow those of the paths.
    """
    first = members[0][1]
    if stack and not members[0][0].index:
        return first
    ours = [_numbers(_joined(line.ours)) for _, line in members]
    theirs = [_numbers(line.theirs) for _, line in members]
    if len({texts for texts, _ in theirs}) > 1 or len({texts for texts, _ in ours}) > 1:
        return None
    used = set(re.findall(r"\{(\w)", first.theirs))
    letters = [letter for letter in _LETTERS if letter not in used]
    if stack:
        sources = [unit.index for unit, _ in members]
    else:
        sources = [numbers for _, numbers in ours]
    varying = [at for at in range(len(sources[0])) if len({row[at] for row in sources}) > 1]
    if stack:
        varying = list(range(len(sources[0])))
    if len(varying) > len(letters):
        return None
    letter = dict(zip(varying, letters))
    written, named = [], []
    for at, number in enumerate(theirs[0][1]):
        column = [numbers[at] for _, numbers in theirs]
        if len(set(column)) == 1 and not (stack and len(members) == 1):
            written.append(str(number))
            continue
        match = next((s for s in varying if s not in named and _offset(column, sources, s)), None)
        if match is None:
            if len(set(column)) == 1:
                written.append(str(number))
                continue
            return None
        named.append(match)
        shift = column[0] - sources[0][match]
        written.append(f"{{{letter[match]}{f'{shift:+d}' if shift else ''}}}")
    if sorted(named) != varying or (stack and named != varying):
        return None
    name = _filled(theirs[0][0], written)
    if stack:
        return dataclasses.replace(first, theirs=name)
    parts = [f"{{{letter[at]}}}" if at in letter else str(n) for at, n in enumerate(ours[0][1])]
    paths = tuple(_filled(ours[0][0], parts).split(_BETWEEN))
    return dataclasses.replace(first, ours=paths if len(paths) > 1 else paths[0], theirs=name)


def _offset(column, sources, at):
    return len({number - row[at] for number, row in zip(column, sources)}) == 1


def _joined(ours):
    return ours if isinstance(ours, str) else _BETWEEN.join(ours)


def _numbers(text):
    """(texts between the numbers, numbers), placeholders aside."""
    parts = re.split(r"(\{[^}]*\}|\d+)", text)
    texts, numbers = [""], []
    for part in parts:
        if part.isdigit():
            numbers.append(int(part))
            texts.append("")
        else:
            texts[-1] += part
    return tuple(texts), numbers


def _filled(texts, numbers):
    return "".join(text + number for text, number in zip(texts, [*numbers, ""]))
