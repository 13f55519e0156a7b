"""What a plan with the mesh axis "context" knows about a step: which axes are time, and how each
attention is computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from fnet.jaxpr import Frame, read
from fnet.parallel._context._choose import Chooser
from fnet.parallel._context._mapped import AXIS, Attention
from fnet.parallel._context._rewrite import split_time
from fnet.parallel._context._time import Note, Span, padding, time_axes
from fnet.parallel._cost import Time
from fnet.parallel._ledger import Transfer
from fnet.parallel._targets import Target

MOST = 1 / 8  # of a split time may be padding


@dataclasses.dataclass(frozen=True)
class Context:
    """How a step is split along time.

    Attributes:
        times: the time axis of each leaf of the batch, or None.
        spans: the times over which attention runs.
        choose: chooses the form of an attention.
        devices: the length of the mesh axis "context".
        attentions: each kind of attention over these times.
    """

    times: tuple[Note, ...]
    spans: tuple[Span, ...]
    choose: Chooser
    devices: int
    attentions: tuple[Attention, ...] = ()

    @classmethod
    def of(
        cls, closed: Any, state: Any, batch: Any, target: Target, mesh: Any, rows: Sequence[str]
    ) -> Context:
        """Analyzes the jaxpr of a step.

        Raises:
            ValueError: the step has no attention of a text on itself, a time is so short that many
                devices would have padding alone, or the mesh has stages.
        """
        devices = mesh[AXIS]
        if mesh.get("stage", 1) > 1:
            raise ValueError(
                f"plan: the mesh axes {AXIS!r} and 'stage' cannot be combined, because a stage works "
                "on rows with all of their time; leave one of them out"
            )
        times, spans = attended(closed, state, batch, devices)
        check(times, spans, batch, devices)
        made = cls(tuple(times), tuple(spans), Chooser(target, mesh, rows), devices)
        found = dict.fromkeys(each for each, _, _ in made._attentions(read(closed.jaxpr), 1))
        return dataclasses.replace(made, attentions=tuple(found))

    def applied(self, step: Callable, mesh: Any, rows: Sequence[str]) -> Callable:
        """Returns the step, rewritten so that it is split along time."""
        sizes = [span.size for span in self.spans]
        return split_time(step, mesh, rows, self.times, sizes, self.choose)

    def batch(self, rows: tuple[str, ...] | str, batch: Any) -> Any:
        """Returns the partition specs of a batch. Leaves whose time is not a multiple of the number
        of devices, such as [rows, 1025] tokens, are not split along time."""
        leaves, structure = jax.tree.flatten(batch)
        return structure.unflatten(
            self._spec(rows, leaf, at) for leaf, at in zip(leaves, self.times)
        )

    def _spec(self, rows: Any, leaf: Any, at: Note) -> P:
        if not leaf.ndim:
            return P()
        if at is None or leaf.shape[at] % self.devices:
            return P(rows)
        return P(rows, *[None] * (at - 1), AXIS)

    def transfers(self, closed: Any) -> list[Transfer]:
        """The estimated transfers of the attention of a step."""
        return [
            each._replace(scope=scope, times=each.times * times)
            for attention, scope, times in self._attentions(read(closed.jaxpr), 1)
            for each in self.choose(attention).cost.transfers
        ]

    def held(self, eqn: Any) -> int | None:
        """The estimated bytes of the blocks of an attention over these times, on each device, or
        None for another equation."""
        found = Attention.of(eqn)
        if found is None or found.shape[1] not in {span.size for span in self.spans}:
            return None
        return self.choose(found).cost.held

    def slowed(self, time: Time, closed: Any) -> Time:
        """Returns the time of a step with the memory traffic of the blocks of logits."""
        if time.memory is None:
            return time
        found = self._attentions(read(closed.jaxpr), 1)
        more = sum(self.choose(each).cost.memory * times for each, _, times in found)
        return time._replace(memory=time.memory + more)

    def _attentions(self, frame: Frame, times: int):
        sizes = {span.size for span in self.spans}
        for op in frame.ops:
            found = Attention.of(op.eqn)
            if found is not None and found.shape[1] in sizes:
                yield found, op.scope, times
            for body, inside in op.bodies:
                yield from self._attentions(inside, times * (body.times or 1))

    def lines(self, batch: Any) -> list[str]:
        """What `plan.explain()` says."""
        said = []
        for attention in self.attentions:
            which = "backward" if attention.backward else "forward"
            time = attention.shape[1]
            said.append(
                f"{which} attention over {time:,} positions in {self.devices} parts"
                f"{_padded(time, self.devices)}: {self.choose(attention).why}"
            )
        by_hand = [span.size for span in self.spans if span.by_hand]
        for time in by_hand:
            said.append(
                f"attention over {time:,} positions is written by hand, so XLA gathers the keys, and "
                f"each device has the logits of {math.ceil(time / self.devices):,} queries and all "
                "keys; nn.dot_product_attention would need far less memory"
            )
        for (path, leaf), at in zip(jax.tree.leaves_with_path(batch), self.times):
            if at is not None and leaf.shape[at] % self.devices:
                said.append(
                    f"batch{jax.tree_util.keystr(path)} {list(leaf.shape)} is not split along time: "
                    f"{leaf.shape[at]} is not a multiple of {self.devices}"
                )
        return said


def attended(closed: Any, state: Any, batch: Any, devices: int) -> tuple[list[Note], list[Span]]:
    """Returns what `time_axes` does, or raises a ValueError if the step has no attention."""
    times, spans = time_axes(closed, state, batch, devices)
    if not spans:
        raise ValueError(
            f"plan: the mesh axis {AXIS!r} splits the time over which attention runs, and this step "
            "has no attention of a text on itself; leave the axis out"
        )
    return times, spans


def check(times: Sequence[Note], spans: Sequence[Span], batch: Any, devices: int) -> None:
    """Raises a ValueError if a time is so short that many devices would have padding alone."""
    for span in spans:
        _check(span.size, devices, _where(times, batch, span.size))


def _where(times: Sequence[Note], batch: Any, time: int) -> str:
    """Names the leaf of the batch whose time has this length, or nearly."""
    for (path, leaf), at in zip(jax.tree.leaves_with_path(batch), times):
        if at is not None and 0 <= leaf.shape[at] - time <= 1:
            return f" (axis {at} of batch{jax.tree_util.keystr(path)})"
    return ""


def _check(time: int, devices: int, where: str) -> None:
    if padding(time, devices) <= MOST:
        return
    whole = devices * math.ceil(time / devices)
    divisors = [n for n in range(devices, 0, -1) if devices % n == 0]
    fewer = next(n for n in divisors if padding(time, n) <= MOST)
    raise ValueError(
        f"plan: the mesh axis {AXIS!r} has {devices} devices, but attention runs over {time} "
        f"positions{where}, which is not a multiple; use {whole} positions"
        + (f", or {AXIS}={fewer}" if fewer > 1 else "")
    )


def _padded(time: int, devices: int) -> str:
    if time % devices == 0:
        return ""
    return f" (padded to {devices * math.ceil(time / devices):,})"
