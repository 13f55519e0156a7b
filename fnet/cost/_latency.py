"""The time that steps take however small they are: kernels one after another, and turns of loops."""

from __future__ import annotations

import jax.numpy as jnp

from fnet.cost._count import Cost, Count, Matmul
from fnet.hardware._chip import Chip

LARGE = 2**23  # FLOPs of a product that a CPU divides over its threads
CACHED = 2**22  # bytes of arguments and results that stay in the caches of a CPU


def latency_seconds(cost: Cost, chip: Chip) -> float | None:
    """Returns the seconds that the kernels and the loops of a scope need at least, or None if they
    are unknown for the chip. All devices that share the work take as many steps."""
    known = chip.latency
    if known is None or known.kernel is None:
        return None
    return _kernels(cost, chip) * known.kernel + cost.turns * (known.turn or 0.0)


def _kernels(cost: Cost, chip: Chip) -> int:
    # XLA compiles a loop without products for a CPU into a single kernel.
    return cost.kernels - cost.light if chip.kind == "cpu" else cost.kernels


def expected_seconds(counted: Count, chip: Chip, arguments: int, results: int) -> float | None:
    """Returns the time of a call that a small program is expected to take on a CPU, or None if the
    program is large or the rates of small work were not measured.

    Args:
        counted: the FLOPs, bytes and kernels of the program.
        chip: a chip with measured latencies, from `hardware.measure`.
        arguments, results: the number of arrays that are passed and returned.
    """
    known, total = chip.latency, counted.total
    if known is None or known.product is None or counted.io_bytes > CACHED:
        return None
    call = (known.call or 0.0) + arguments * (known.argument or 0.0)
    call += results * (known.result or 0.0)
    if counted.matmuls:
        call += known.start or 0.0
    steps = (latency_seconds(total, chip) or 0.0) + total.updates * (known.update or 0.0)
    products = sum(_product_seconds(matmul, chip) for matmul in counted.matmuls)
    arithmetic = total.elementwise + total.reduction - total.compared
    # What loops carry stays near the core.
    moved = 0.0 if total.turns else total.fused_bytes - sum(map(_operand_bytes, counted.matmuls))
    other = sum(
        amount / rate
        for amount, rate in (
            (arithmetic, known.elementwise),
            (total.transcendental, known.transcendental),
            (total.compared, known.compared),
        )
        if rate
    )
    return call + steps + products + max(other, moved / known.cached if known.cached else 0.0)


def _product_seconds(matmul: Matmul, chip: Chip) -> float:
    known, peak = chip.latency, chip.peak(matmul.dtype)
    assert known is not None
    rate = known.convolved if matmul.op == "conv" else known.product
    if peak and (rate is None or matmul.flops / matmul.times > LARGE):
        rate = max(rate or 0.0, peak.flops)
    return matmul.flops / rate if rate else 0.0


def _operand_bytes(matmul: Matmul) -> float:
    batch, m, n, k = matmul.shape
    return batch * (m * k + k * n + m * n) * jnp.dtype(matmul.dtype).itemsize * matmul.times
