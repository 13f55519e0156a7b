"""What is known of a scan over layers that runs as a pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fnet import jaxpr
from fnet.parallel._ledger import Transfer
from fnet.parallel._pipeline._by_rows import SUM
from fnet.parallel._pipeline._schedule import Schedule
from fnet.parallel._pipeline._stages import Layers


class Pipelined(NamedTuple):
    """A scan over layers that runs as a pipeline.

    Attributes:
        scope: its named scope.
        layers: the number of layers.
        backward: whether the layers run backward, as in a backward pass.
        rolled: whether the step has no loop over the layers, but repeats them, with parameters of
            their own, which are stacked for the pipeline.
        schedule: the schedule.
        waiting: the bytes on each chip of the microbatches that wait for the first stage, or have
            left the last one.
        transfers: a `Transfer` for each kind of transfer, estimated.

    >>> layers = lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
    >>> loss = lambda w, x: jnp.square(layers(w, x)).mean()
    >>> step = lambda state, x: ({"params": state["params"] - jax.grad(loss)(state["params"], x)}, {})
    >>> init = lambda key: {"params": jax.random.normal(key, (8, 4, 4))}
    >>> mesh = {"stage": 4}
    >>> plan = parallel.plan(step, init, jnp.ones((16, 4)), devices="v5e:2x2", mesh=mesh, compile=False)
    >>> [(each.layers, each.backward, each.schedule.stages) for each in plan.pipeline]
    [(8, False, 4), (8, True, 4)]
    """

    scope: str
    layers: int
    backward: bool
    rolled: bool
    schedule: Schedule
    waiting: int
    transfers: tuple[Transfer, ...]

    @property
    def sent(self) -> float:
        """The bytes that each chip sends in a step."""
        return sum(transfer.sent for transfer in self.transfers)


def recorded(
    layers: Layers,
    schedule: Schedule,
    mesh: Mapping[str, int],
    moved: Sequence[Any],
    *,
    rolled: bool,
) -> Pipelined:
    """Returns the record of a scan. `moved` are the arrays whose layers the stages exchange before
    it, for a circular schedule."""
    parts, scope, stages = layers.parts, layers.at.path, schedule.stages
    devices = math.prod(mesh.get(name, 1) for name in ("slice", "data"))
    outputs = [v.aval for v in parts.jaxpr.outvars]
    carry = list(zip(outputs, layers.carry))
    rows = sum(jaxpr.nbytes(aval) for aval, note in carry if isinstance(note, int)) // devices
    complete = sum(jaxpr.nbytes(aval) for aval, note in carry if note is None)
    sums = sum(jaxpr.nbytes(aval) for aval, note in carry if note == SUM)
    stacked = zip(outputs[parts.carry :], layers.stacked)
    held = parts.length // stages
    sums += sum(held * jaxpr.nbytes(aval) for aval, note in stacked if note == SUM)

    def transfer(kind: str, nbytes: int, group: int, times: int = 1) -> list[Transfer]:
        return [Transfer(kind, scope, nbytes, group, times)] if nbytes and group > 1 else []

    transfers = [
        *transfer("all-gather", rows, stages),
        *transfer(
            "collective-permute", rows // schedule.microbatches + complete, stages, schedule.turns
        ),
        *transfer("collective-permute", rows // stages, stages, stages - 1),
        *transfer("all-reduce", sums, devices),
    ]
    if schedule.rounds > 1:
        exchanged = sum(x.size * x.dtype.itemsize for x in moved) // stages + sums
        transfers += transfer(
            "collective-permute", exchanged // schedule.rounds, stages, schedule.rounds
        )
    backward = bool(parts.options.get("reverse"))
    return Pipelined(scope, parts.length, backward, rolled, schedule, rows, tuple(transfers))
