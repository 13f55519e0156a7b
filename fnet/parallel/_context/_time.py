"""Follows time through a step: which axis of each array is the time over which attention runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from fnet.axes import axis_map, batch_axes, mapped_axes, through
from fnet.jaxpr import DOT, equations, options, product
from fnet.layers._attend import attention_p, backward_p
from fnet.parallel._context._mapped import AXIS, Attention

Note = int | None
CHUNK = 64  # positions of a chunk on each device, from which on chunks are split and not shared out


class Span(NamedTuple):
    """A time over which attention runs. `size` is its length, and `by_hand` states whether the
    attention is not that of `nn.dot_product_attention`, but products of queries and keys."""

    size: int
    by_hand: bool = False


class Times:
    """Follows the time axis through equations.

    Unlike the batch axis, time remains time after a shift, `tokens[:, 1:]`, and after padding. Time
    that is cut into chunks, as for a loop over them, is split inside of each chunk.

    Attributes:
        sizes: the lengths of time axes that have occurred.
        spans: the times over which attention runs, as far as they have occurred.
    """

    def __init__(self, devices: int, sizes: Sequence[int] = ()):
        self.devices, self.sizes = devices, set(sizes)
        self.spans: dict[Span, None] = {}

    def outputs(self, eqn: Any, notes: Sequence[Note]) -> list[Note]:
        """Returns the time axis of each output of an equation."""
        return batch_axes(eqn, notes, 1, self.rule)

    def rule(self, eqn: Any, notes: Sequence[Note]) -> list[Note] | None:
        name = eqn.primitive.name
        if name == "shard_map":
            return mapped_axes(eqn, (AXIS,))
        if eqn.primitive in (attention_p, backward_p):
            return self._attention(eqn, notes)
        if (multiplied := product(eqn)) is not None and multiplied.op is DOT:
            self._by_hand(multiplied.dimensions, eqn, notes)
        if not notes or notes[0] is None or name not in ("slice", "pad", "reshape", "concatenate"):
            return self._joined(eqn, notes) if name == "concatenate" else None
        at = notes[0]
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        if name == "reshape":
            return self._reshaped(eqn, at)
        if name == "concatenate":
            return self._joined(eqn, notes)
        moved = options(eqn).strides if name == "slice" else options(eqn).padding_config
        even = moved is None or moved[at] == 1 if name == "slice" else moved[at][2] == 0
        stays = even and before[at] <= 2 * after[at]
        if stays:
            self.sizes.add(after[at])
        return [at if stays else None]

    def _joined(self, eqn: Any, notes: Sequence[Note]) -> list[Note] | None:
        """Concatenation along time, as of a class token and an image's patches."""
        at = options(eqn).dimension
        size = eqn.outvars[0].aval.shape[at]
        for note, v in zip(notes, eqn.invars):
            if note == at and 2 * v.aval.shape[at] >= size:
                self.sizes.add(size)
                return [at]
        return None

    def _attention(self, eqn: Any, notes: Sequence[Note]) -> list[Note]:
        found = Attention.of(eqn)
        if found is not None and (notes[0] == 1 or found.shape[1] in self.sizes):
            self.sizes.add(found.shape[1])
            self.spans[Span(found.shape[1])] = None
            notes = [1]
        by_rank = {4: 1, 3: 2}  # [b, t, h, d], and the statistics [b, h, t]
        return [by_rank[v.aval.ndim] if notes[0] == 1 else None for v in eqn.outvars]

    def _by_hand(self, dimensions: Any, eqn: Any, notes: Sequence[Note]) -> None:
        """A product whose result has the times of both operands is that of queries and keys."""
        used = [{*contracted, *batch} for contracted, batch in zip(*dimensions)]
        sizes = [v.aval.shape[at] for v, at in zip(eqn.invars, notes[:2]) if at is not None]
        if len(sizes) == 2 and sizes[0] == sizes[1] > 1:
            if all(at not in axes for at, axes in zip(notes, used)):
                self.spans[Span(sizes[0], by_hand=True)] = None

    def _reshaped(self, eqn: Any, at: int) -> list[Note] | None:
        axes = axis_map(eqn)
        assert axes is not None
        own = [letter for letter in axes.operands[0][at] if axes.sizes[letter] != 1]
        if not own:
            return None
        result = axes.results[0]
        size = lambda i: eqn.outvars[0].aval.shape[i]
        places = [i for i, axis in enumerate(result) if own[-1] in axis]
        if not places:
            return [None]
        minor, major = places[0], next(i for i, axis in enumerate(result) if own[0] in axis)
        if minor == major:
            whole = [letter for letter in result[minor] if axes.sizes[letter] != 1]
            # Joined with an axis before it: time again only if chunks become time.
            return [minor if whole[0] == own[0] or size(minor) in self.sizes else None]
        return [minor if size(minor) >= CHUNK * self.devices else major]


def time_axes(closed: Any, state: Any, batch: Any, devices: int) -> tuple[list[Note], list[Span]]:
    """Returns the time axis of each leaf of a batch, and the times over which attention runs.
    `closed` is the jaxpr of the step.

    The time axis of a leaf is the one that becomes that of queries. If no leaf has one, as images,
    whose patches a convolution cuts, time begins at the attention.
    """
    leaves = jax.tree.leaves(batch)
    before = len(jax.tree.leaves(state))
    found: list[Note] = [None] * len(leaves)
    for i, leaf in enumerate(leaves):
        for at in range(1, leaf.ndim):
            times = Times(devices)
            notes: list[Note] = [None] * len(closed.jaxpr.invars)
            notes[before + i] = at
            through(closed.jaxpr, notes, 1, times.rule)
            if times.spans:
                found[i] = at
                break
    sizes = {leaf.shape[at] for leaf, at in zip(leaves, found) if at is not None}
    if not sizes:
        attentions = map(Attention.of, equations(closed.jaxpr))
        sizes = {max((each.shape[1] for each in attentions if each), default=0)} - {0, 1}
    times = Times(devices, sizes)
    through(closed.jaxpr, [*[None] * before, *found], 1, times.rule)
    return found, list(times.spans)


def padding(time: int, devices: int) -> float:
    """The fraction by which padding makes a split time longer."""
    return devices * math.ceil(time / devices) / time - 1
