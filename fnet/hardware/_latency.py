"""What small programs cost on a chip, where the number of steps decides, not the amount of work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fnet.hardware._tables import FrozenTable


@dataclasses.dataclass(frozen=True)
class Latency:
    """The least times of a chip, in seconds: what a step costs however little it computes. And, for
    a CPU, the rates of work that stays in the caches of one core. None if unknown.

    Attributes:
        kernel: from the start of a kernel to that of the next one, which needs its result.
        turn: an iteration of a loop, besides its kernels.
        hop: sending a message to a neighbor over a link between chips.
        network: the same over the network between TPU slices or machines.
        collective: starting a collective, besides its hops.
        call: calling a compiled program from Python and waiting for its result.
        argument, result: what each array that is passed or returned adds to `call`.
        start: what the first matrix product or convolution adds, which wakes the threads of a CPU.
        update: writing a part of an array in a loop, such as the outputs of a scan.
        product, convolved: FLOP/s of small matrix products and convolutions.
        elementwise: elements/s of arithmetic in a fused kernel.
        transcendental: elements/s of functions such as tanh.
        compared: comparisons/s of a sort.
        cached: bytes/s that a kernel reads and writes.
        sources: {attribute: where the number comes from}.

    >>> hw.chips["TPU v5e"].latency.hop, hw.chips["TPU v5e"].basis("latency")
    (1e-06, 'estimated')
    """

    kernel: float | None = None
    turn: float | None = None
    hop: float | None = None
    network: float | None = None
    collective: float | None = None
    call: float | None = None
    argument: float | None = None
    result: float | None = None
    start: float | None = None
    update: float | None = None
    product: float | None = None
    convolved: float | None = None
    elementwise: float | None = None
    transcendental: float | None = None
    compared: float | None = None
    cached: float | None = None
    sources: Mapping[str, str] = FrozenTable()


def read_latency(table: Mapping[str, Mapping[str, Any]]) -> Latency:
    """Returns the `Latency` of a table of chips.json, {name: {"us": microseconds, "source": text}}."""
    return Latency(
        **{name: round(each["us"] * 1e-6, 12) for name, each in table.items()},
        sources=FrozenTable({name: each["source"] for name, each in table.items()}),
    )
