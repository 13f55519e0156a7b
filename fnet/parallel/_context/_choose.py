"""Chooses between ring and Ulysses attention, from estimates of a pass over all layers' inputs: by
the heads, the length of time, the links between the devices and the kernels that they have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import ShapeDtypeStruct

from fnet.cost._roofline import seconds_text
from fnet.layers import _attend_flash as flash
from fnet.layers._attend_xla import widened
from fnet.parallel._context._layout import Layout, in_pieces, ring_layout, tour
from fnet.parallel._context._mapped import AXIS, Attention
from fnet.parallel._cost import waiting
from fnet.parallel._ledger import Transfer
from fnet.parallel._targets import Target

PASSES = 4  # how often XLA writes or reads the logits of a block: they are too large for registers
FULL = 4 << 30  # bytes of logits on a device above which Ulysses without a kernel is ruled out


class Cost(NamedTuple):
    """The estimated cost of an attention in one form, on each device.

    Attributes:
        transfers: what it sends.
        seconds: the time at the peak rates of the chips, or None if they are unknown.
        memory: the seconds of the memory traffic of its logits, which a kernel does not have.
        held: the bytes of its blocks of logits, and of what travels.
    """

    transfers: tuple[Transfer, ...]
    seconds: float | None
    memory: float = 0.0
    held: int = 0

    @property
    def sent(self) -> float:
        return sum(each.sent for each in self.transfers)


class Choice(NamedTuple):
    """How an attention is computed on the parts of time.

    Attributes:
        form: "ring" or "ulysses".
        layout: how time is divided.
        cost: the cost of this form.
        why: the reason, for `plan.explain()`.
    """

    form: str
    layout: Layout
    cost: Cost
    why: str


class Chooser:
    """Chooses a form for each attention of a step.

    Args:
        target: the devices.
        mesh: the lengths of the mesh axes.
        rows: the mesh axes over which the batch is split.
        forms: the forms to choose from.
    """

    def __init__(
        self,
        target: Target,
        mesh: Any,
        rows: Sequence[str],
        forms: Sequence[str] = ("ring", "ulysses"),
    ):
        self.target, self.forms = target, tuple(forms)
        self.devices = mesh[AXIS]
        self.rows = math.prod(mesh[name] for name in rows)
        self.whole = all(n == 1 for name, n in mesh.items() if name not in (*rows, AXIS))
        self._found: dict[Attention, Choice] = {}

    def __call__(self, attention: Attention) -> Choice:
        if attention not in self._found:
            self._found[attention] = self._choose(attention)
        return self._found[attention]

    def _choose(self, attention: Attention) -> Choice:
        work = _Work(attention, self)
        ring, turning = work.ring_layout()
        layouts = {"ring": ring, "ulysses": Layout(AXIS, self.devices, attention.shape[1])}
        costs = {"ring": work.ring(ring), "ulysses": work.ulysses()}
        refused = {"ulysses": work.no_ulysses()} if "ulysses" in self.forms else {}
        able = [form for form in self.forms if not refused.get(form)]
        if not able:
            raise ValueError(f"plan: context={self.devices}: {refused['ulysses']}; use a ring")
        best = min(able, key=lambda form: (costs[form].seconds or costs[form].sent, form))
        other = next((form for form in self.forms if form != best), None)
        why = f"{best} ({_text(costs[best])}"
        if other and refused.get(other):
            why += f"; no {other}: {refused[other]}"
        elif other:
            why += f"; {other}: {_text(costs[other])}"
        why += ")" + (turning if best == "ring" else "")
        return Choice(best, layouts[best], costs[best], why)


class _Work:
    """The work of one attention on one device."""

    def __init__(self, attention: Attention, chooser: Chooser):
        self.attention, self.chooser, self.n = attention, chooser, chooser.devices
        b, t, _, d = attention.shape
        self.batch = b // chooser.rows if b % chooser.rows == 0 else b
        self.local = -(-t // self.n)
        self.one = self.batch * self.local * d  # elements of a head
        self.item = attention.compute.itemsize
        self.wide = widened(attention.compute).itemsize

    def ring_layout(self) -> tuple[Layout, str]:
        """Returns the layout of the ring, and what is to be said about zigzag."""
        form, (_, t, h, _) = self.attention.form, self.attention.shape
        layout = ring_layout(
            AXIS, self.n, t, self.batch * h, causal=form.causal, window=form.window
        )
        if not layout.zigzag:
            return layout, ""
        plain = in_pieces(layout._replace(zigzag=False), self.batch * h)
        turned, straight = self.ring(layout), self.ring(plain)
        if turned.seconds and straight.seconds and turned.seconds > straight.seconds:
            costs = f"{seconds_text(turned.seconds)} instead of {seconds_text(straight.seconds)}"
            return plain, f", not in zigzag, which would cost more than it gives: {costs}"
        return layout, ", in zigzag, so that all devices have equal work"

    def ring(self, layout: Layout) -> Cost:
        form, g = self.attention.form, self.attention.groups
        hops = tour(layout, form.causal, form.window, "starts" in form.given).hops
        keys = 2 * g * self.one
        sent = [("collective-permute", keys * self.item, hops)]
        if self.attention.backward:
            sent.append(("collective-permute", keys * self.wide, hops + 1))
        if layout.zigzag:
            sent.append(("collective-permute", self._exchanged() * self.item, 1))
        busiest = 2 - 1 / self.n if form.causal and not layout.zigzag else 1
        if form.window is not None and hops < self.n - 1:
            busiest = 1
        compute = self._compute(busiest)
        transfers = tuple(
            Transfer(kind, "", int(size), self.n, times) for kind, size, times in sent
        )
        links = self._links(transfers)
        memory = self._memory(busiest)
        seconds = None if None in (compute, links, memory) else max(compute, links, memory)
        return Cost(transfers, seconds, memory or 0.0, self._held(layout))

    def ulysses(self) -> Cost:
        size = int(self._exchanged() * self.item)
        transfers = (Transfer("all-to-all", "", size, self.n, 1),)
        compute, links = self._compute(1), self._links(transfers)
        memory, held = (0.0, 0) if self._has_kernel() else (self._memory(1), self._whole())
        seconds = None if None in (compute, links, memory) else max(compute, memory) + links
        return Cost(transfers, seconds, memory or 0.0, held)

    def no_ulysses(self) -> str | None:
        """Why heads cannot be exchanged for time, or None."""
        h, g = self.attention.shape[2], self.attention.groups
        for count, name in ((h, "heads"), (g, "key/value heads")):
            if count % self.n:
                return f"{count} {name} are not a multiple of {self.n}"
        if not self._has_kernel() and self._whole() > FULL:
            size = self._whole() / 2**30
            return f"without a kernel, it has {size:,.0f} GiB of logits on each device"
        return None

    def _whole(self) -> int:
        """The bytes of the logits of a device's heads over all of time."""
        return (
            self.batch
            * self.attention.shape[2]
            // self.n
            * self.attention.shape[1] ** 2
            * self.wide
        )

    def _held(self, layout: Layout) -> int:
        """A block of logits and its weights, and what keys and values add up to."""
        h, g = self.attention.shape[2], self.attention.groups
        logits = 2 * self.batch * h * layout.size**2 * self.wide
        return logits + (h + 4 * g) * self.one * self.wide

    def _exchanged(self) -> int:
        """Elements of the arrays with heads that enter and leave an attention."""
        h, g = self.attention.shape[2], self.attention.groups
        each = 4 if self.attention.backward else 2
        return each * (h + g) * self.one

    def _logits(self, busiest: float) -> float:
        """The number of logits that the busiest device computes."""
        form, (_, t, h, _) = self.attention.form, self.attention.shape
        share = 1 / 2 if form.causal else 1.0
        if form.window is not None:
            share = min(share, form.window / t * (1 if form.causal else 2))
        return self.batch * h * self.local * t * share * busiest

    def _compute(self, busiest: float) -> float | None:
        chip = self.chooser.target.chip.per_device
        products = 5 if self.attention.backward else 2
        peak = chip.peak(self.attention.compute, precision=self.attention.form.precision)
        flops = 2 * products * self._logits(busiest) * self.attention.shape[3]
        return flops / peak.flops if peak else None

    def _memory(self, busiest: float) -> float | None:
        bandwidth = self.chooser.target.chip.per_device.bandwidth
        return PASSES * self._logits(busiest) * self.wide / bandwidth if bandwidth else None

    def _links(self, transfers: tuple[Transfer, ...]) -> float | None:
        target = self.chooser.target
        near = self.n <= target.count // target.groups
        rate = target.sent if near else target.sent_between
        sent = sum(each.sent for each in transfers)
        hops = waiting(transfers, target.chip, network=not near)
        return sent / rate + hops if rate else None

    def _has_kernel(self) -> bool:
        chip, form = self.chooser.target.chip, self.attention.form
        platform = {"tpu": "tpu", "gpu": "cuda"}.get(chip.kind)
        if platform is None or not self.chooser.whole:
            return False
        if platform == "cuda" and (chip.vendor != "NVIDIA" or float(chip.architecture or 0) < 8):
            return False
        q: Any = ShapeDtypeStruct(self.attention.shape, self.attention.compute)
        return flash.refusal(platform, form, self.attention.compute, q, q) is None


def _text(cost: Cost) -> str:
    sent = f"{cost.sent / 2**20:,.1f} MiB sent"
    return f"{seconds_text(cost.seconds)}, {sent}" if cost.seconds else sent
