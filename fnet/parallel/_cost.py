"""The minimum time of a step at the peak rates of the chips, the resource that limits this time,
and the cost of the step in dollars and watt-hours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fnet.cost._count import Count
from fnet.cost._latency import latency_seconds
from fnet.cost._roofline import compute_seconds
from fnet.hardware import Chip
from fnet.parallel._ledger import Transfer
from fnet.parallel._targets import Target


class Time(NamedTuple):
    """The times, in seconds, that a step needs for computation, for memory traffic, and for
    transfers over the links between chips, at the peak rates of the chips, and for its kernels,
    turns of loops and messages, which take time however small they are. A time is None if it is
    unknown. All of them are assumed to overlap perfectly, so the longest is the minimum time of the
    step."""

    compute: float | None
    memory: float | None
    links: float | None
    latency: float | None = None

    @property
    def seconds(self) -> float | None:
        return max((each for each in self if each is not None), default=None)

    @property
    def bound(self) -> str:
        """What takes longest: "compute", "memory", "links", "latency" or "unknown"."""
        known = {name: each for name, each in self._asdict().items() if each is not None}
        return max(known, key=known.__getitem__, default="unknown")


def time(
    counted: Count,
    target: Target,
    state: int,
    persistent: int,
    sent: float,
    between: float,
    *,
    alike: int = 1,
    messages: Sequence[Transfer] = (),
    messages_between: Sequence[Transfer] = (),
) -> Time:
    """Returns the minimum time of a step.

    Args:
        counted: FLOPs and bytes of the whole step.
        target: the devices.
        state: bytes of the state of one copy of the model.
        persistent: bytes of the state in each chip's memory. Each chip is assumed to read and write
            the state once in a step.
        sent, between: bytes that a chip sends within its group (a slice or a machine), and between
            groups.
        alike: the number of devices that repeat the same work. Devices along an axis of the mesh
            repeat the same work if neither the batch nor a parameter is split over this axis.
            Default 1.
        messages, messages_between: the transfers within and between groups.
    """
    chip, share = target.chip, target.chip.chips_of(target.count)
    by_scope = compute_seconds(counted, chip, share / alike, None)
    compute = sum(by_scope.values()) if by_scope is not None else None
    memory = None
    if chip.bandwidth:
        extra = 2 * max(0, persistent - alike * state / target.count) * target.count
        memory = (alike * counted.total.fused_bytes + extra) / (chip.bandwidth * share)
    rates = [(sent, target.sent), (between, target.sent_between)]
    links = (
        None
        if any(amount and not rate for amount, rate in rates)
        else sum(amount / rate for amount, rate in rates if amount)
    )
    steps = latency_seconds(counted.total, chip)
    if steps is not None:
        steps += waiting(messages, chip, network=False)
        steps += waiting(messages_between, chip, network=True)
    return Time(compute, memory, links, steps)


def waiting(transfers: Sequence[Transfer], chip: Chip, *, network: bool) -> float:
    """Returns the seconds that collectives take for their messages, however small these are."""
    known = chip.latency
    if known is None:
        return 0.0
    hop = (known.network if network else known.hop) or 0.0
    start = known.collective or 0.0
    return sum(
        each.times * (start + hop * hops(each.collective, each.group, chip, network=network))
        for each in transfers
        if each.group > 1
    )


def hops(collective: str, group: int, chip: Chip, *, network: bool = False) -> int:
    """Returns how many messages follow each other in a collective of `group` devices.

    GPUs, and slices over the network, pass messages around a ring. TPUs do so along each axis of
    their torus, in both directions at once (scaling-book, sharding, a note on ICI latency). An
    all-reduce is a reduce-scatter and an all-gather.
    """
    if collective in ("collective-permute", "collective-broadcast"):
        return 1
    once = group - 1
    if chip.kind == "tpu" and not network:
        axes = 3 if chip.links and "3D" in (chip.links.topology or "") else 2
        chips = max(1.0, chip.chips_of(group))
        once = axes * math.ceil(chips ** (1 / axes) / 2 - 1e-9) if chips > 2 else 1
    return 2 * once if collective == "all-reduce" else once


class Units(NamedTuple):
    """The size of a batch: the unit in which it is counted, and the number of units. For example,
    ("tokens", 4096), ("images", 32) or ("rows", 32)."""

    name: str
    count: int


def units(batch: Any) -> Units:
    """Returns the size of a batch. A batch that contains an integer array [rows, time] is counted
    in tokens. A batch that contains no tokens, but an array [rows, height, width, channels], is
    counted in images. A batch with neither tokens nor images is counted in rows."""
    leaves = jax.tree.leaves(batch)
    rows = max((x.shape[0] for x in leaves if x.ndim), default=1)
    tokens = max(
        (x.size for x in leaves if x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.integer)), default=0
    )
    images = any(x.ndim == 4 for x in leaves)
    return Units("tokens", tokens) if tokens else Units("images" if images else "rows", rows)


def price(target: Target, seconds: float, count: int) -> list[str]:
    """Returns lines with the price and energy of a step and of a million units (tokens, images or
    rows). Unknown values are omitted."""
    chip: Chip = target.chip
    chips = chip.chips_of(target.count)
    hours = seconds / 3600 * chips
    said = []
    hourly = next((each for each in chip.prices if each.per == "hour"), None)
    if hourly:
        dollars = hours * hourly.usd
        said.append(
            f"${dollars:.3g} a step, ${dollars / count * 1e6:.3g} a million UNITS (${hourly.usd:g} "
            f"an hour and chip, {hourly.date}, {hourly.source})"
        )
    if chip.power_watts:
        energy = hours * chip.power_watts
        said.append(
            f"{energy:.3g} Wh a step, {energy / count * 1e6:.3g} Wh a million UNITS "
            f"({chip.power_watts:g} W a chip)"
        )
    return said
