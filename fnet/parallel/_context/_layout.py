"""Which positions of time lie on which device, and how the devices' parts are exchanged."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LOGITS = 1 << 25  # of a block of queries and one of keys, on a device: 128 MiB in float32


class Layout(NamedTuple):
    """How time is divided over the devices of a mesh axis. All parts are equally long.

    Attributes:
        axis: the mesh axis.
        devices: its length n.
        time: the number of true positions. Behind them is padding, up to a multiple of n.
        zigzag: whether device i computes the parts i and 2n - 1 - i of 2n instead of two adjacent
            ones. A query at the end of a text sees more keys than one at its beginning, so that
            the work of all devices is only equal in zigzag.
        pieces: the number of blocks into which a device cuts each of its parts.
    """

    axis: str
    devices: int
    time: int
    zigzag: bool = False
    pieces: int = 1

    @property
    def local(self) -> int:
        """The number of positions on each device."""
        return -(-self.time // self.devices)

    @property
    def padded(self) -> int:
        return self.local * self.devices

    @property
    def blocks(self) -> int:
        """The number of blocks on each device."""
        return self.pieces * (2 if self.zigzag else 1)

    @property
    def size(self) -> int:
        return self.local // self.blocks

    def starts(self, device: Any) -> jax.Array:
        """Returns the positions [blocks] at which the blocks of a device begin."""
        inside = jnp.arange(self.pieces, dtype=jnp.int32) * self.size
        if not self.zigzag:
            return device * self.local + inside
        part = self.local // 2
        last = 2 * self.devices - 1 - device
        return jnp.concatenate([device * part + inside, last * part + inside])

    def turned(self, x: jax.Array, axis: int) -> jax.Array:
        """Moves the positions of an array from adjacent ones to those of zigzag."""
        if not self.zigzag:
            return x
        halves = jnp.split(x, 2, axis)
        sent = [
            lax.ppermute(half, self.axis, self._to_zigzag(parity))
            for parity, half in enumerate(halves)
        ]
        return jnp.concatenate(self._swapped(sent), axis)

    def returned(self, x: jax.Array, axis: int) -> jax.Array:
        """The inverse of `turned`."""
        if not self.zigzag:
            return x
        halves = self._swapped(jnp.split(x, 2, axis))
        sent = [
            lax.ppermute(half, self.axis, [(b, a) for a, b in self._to_zigzag(parity)])
            for parity, half in enumerate(halves)
        ]
        return jnp.concatenate(sent, axis)

    def _to_zigzag(self, parity: int) -> list[tuple[int, int]]:
        """Device i holds the parts 2i and 2i + 1. Returns where those of one parity go."""
        parts = [(i, 2 * i + parity) for i in range(self.devices)]
        return [(i, min(part, 2 * self.devices - 1 - part)) for i, part in parts]

    def _swapped(self, halves: list[jax.Array]) -> list[jax.Array]:
        """Of the parts i and 2n - 1 - i of device i, the first is the even one if i is even."""
        odd = lax.axis_index(self.axis) % 2 == 1
        first, second = halves
        return [jnp.where(odd, second, first), jnp.where(odd, first, second)]


class Tour(NamedTuple):
    """How keys travel around the ring: which of the other devices' keys a device sees.

    After `shift` hops, device i has the keys of device i - shift. The first shift may be negative:
    keys then start on a later device.
    """

    first: int
    hops: int

    @property
    def home(self) -> int:
        """The number of hops after which keys that have finished are where they began."""
        return -(self.first + self.hops)


def tour(layout: Layout, causal: bool, window: int | None, shifted: bool) -> Tour:
    """Returns the tour. A window leaves out the devices whose keys none of a device's queries sees,
    unless each text has its own first position (`shifted`)."""
    everywhere = Tour(0, layout.devices - 1)
    if window is None or shifted or layout.zigzag:
        return everywhere
    reach = -(-(window - 1) // layout.local)  # devices before or after
    found = Tour(0, reach) if causal else Tour(-reach, 2 * reach)
    return found if found.hops < everywhere.hops else everywhere


def ring_layout(
    axis: str, devices: int, time: int, heads: int, *, causal: bool, window: int | None
) -> Layout:
    """Returns the layout for ring attention. `heads` is the number of heads times that of rows on
    each device."""
    whole = Layout(axis, devices, time)
    far = window is None or window > whole.padded // 2
    zigzag = causal and far and whole.local % 2 == 0 and devices > 1
    return in_pieces(whole._replace(zigzag=zigzag), heads)


def in_pieces(layout: Layout, heads: int) -> Layout:
    """Returns a layout whose blocks have few enough logits."""
    whole = layout._replace(pieces=1)
    fits = lambda pieces: heads * (whole.size // pieces) ** 2 <= LOGITS
    pieces = [n for n in range(1, whole.size + 1) if whole.size % n == 0]
    return whole._replace(pieces=next(filter(fits, pieces), pieces[-1]))
