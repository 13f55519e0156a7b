"""Exchanges layers of equal shape until a model computes what the PyTorch module computes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from fnet.models.weights.proposal import _lines
from fnet.models.weights.proposal._align import Alignment
from fnet.models.weights.proposal._lines import Line

_TRIES = 100  # runs of the model, of which most models need one


@dataclasses.dataclass(frozen=True)
class Settled:
    """The pairs that were found.

    Attributes:
        pairs: {unit: group}.
        lines: {(unit, group): line}.
    """

    pairs: Mapping[int, int]
    lines: Mapping[tuple[int, int], Line]


def settle(
    trial: Any, aligned: Alignment, tolerance: float, images: Collection[tuple] = ()
) -> Settled:
    """Finds the first layer that differs, gives it another layer of the file, and repeats.

    The layers before it agree, so its input is right, and the right layer shows at its output. If
    none does, two layers before it are exchanged that agree by chance, such as query and key, which
    have the same input. Layers with rules of the user are not changed: if one of them differs, the
    search ends.

    Args:
        trial: runs the model with pairs and lines, and compares all layers. Its method `own`
            compares one layer of the last run on the input that PyTorch's layer got.
        aligned: the pairs to start from.
        tolerance: the largest relative difference that counts as equal.
        images: (height, width, channels) of the images that PyTorch's layers return.
    """
    pairs, lines = dict(aligned.pairs), dict(aligned.lines)
    numbers = {(unit.paths, unit.index): u for u, unit in enumerate(aligned.units)}
    left = _TRIES
    while True:
        left -= 1
        found = trial(aligned, pairs, lines)
        failing = None if found is None else _failing(found, tolerance)
        if failing is None or left <= 0 or found[failing].fixed:
            return Settled(pairs, lines)
        better = None
        own = trial.own(found[failing]) if failing < len(found) - 1 else None
        if own is not None and own > tolerance:  # no other input or layer mends this one
            unit = numbers[found[failing].unit.paths, found[failing].unit.index]
            changes = _flattened(aligned, pairs, lines, unit, images)
        else:
            changes = _changes(aligned, pairs, lines, found, failing, numbers, images)
        for changed in changes:
            left -= 1
            if left <= 0:
                break
            seen = trial(aligned, *changed)
            if seen is None:
                continue
            after = _failing(seen, tolerance)
            if after is None or after > failing:
                better = changed
                break
        if better is None:
            return Settled(pairs, lines)
        pairs, lines = better


def _failing(found: list, tolerance: float) -> int | None:
    """The place of the first layer that differs, the output being the last."""
    for place, each in enumerate(found):
        if each.plain and each.whole is not None and not each.whole <= tolerance:
            return place
    return None


def _changes(aligned, pairs, lines, found, failing, numbers, images) -> Any:
    """Yields (pairs, lines) that may make the layer at the place `failing` agree, the likeliest
    first."""
    now = dataclasses.replace(aligned, pairs=pairs, lines=lines)
    unit_of = lambda each: numbers.get((each.unit.paths, each.unit.index))
    unit = unit_of(found[failing])
    before = [each for each in found[:failing] if unit_of(each) in pairs]
    if unit is not None:
        seen = {pairs[unit_of(each)] for each in before if each.whole is not None and each.plain}
        for group in now.others(unit):
            if group not in seen and (new := now.exchanged(unit, group)) is not None:
                yield new, lines
        yield from _flattened(aligned, pairs, lines, unit, images)
    earlier = [unit_of(each) for each in before]
    hidden = [unit_of(each) for each in before if each.whole is None or not each.plain]
    for one in reversed(hidden):  # nothing shows whether these are right
        for group in now.others(one):
            if (new := now.exchanged(one, group)) is not None:
                yield new, lines
    for at, one in reversed(list(enumerate(earlier))):
        for other in reversed(earlier[:at]):
            if (one, pairs[other]) in lines and (new := now.exchanged(one, pairs[other])):
                yield new, lines


def _flattened(aligned, pairs, lines, unit, images):
    """The line of a Dense that reads a flattened image, whose channels come last in fnet."""
    line = lines[unit, pairs[unit]]
    if line.method != "dense" or line.options or len(aligned.units[unit].paths) > 1:
        return
    (kernel,) = (s for p, s in aligned.units[unit].leaves.items() if p.endswith("kernel"))
    for changed in _lines.flattenings(line, _sizes(kernel.shape[0], images)):
        yield pairs, {**lines, (unit, pairs[unit]): changed}


def _sizes(inputs, images):
    """The (height, width) of images that may have been flattened to `inputs` features: first those
    that occur, then one for each number of positions, since only that matters."""
    there = [size for *size, channels in images if math.prod(size) * channels == inputs]
    counts = [count for count in range(2, inputs) if inputs % count == 0]
    squarest = lambda count: max(i for i in range(1, math.isqrt(count) + 1) if count % i == 0)
    others = ((squarest(count), count // squarest(count)) for count in counts)
    return dict.fromkeys([*map(tuple, there), *others])
