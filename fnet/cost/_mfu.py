"""Computes model FLOPs utilization (MFU), or states the reason why it is unknown."""

from __future__ import annotations

import dataclasses
from typing import Any

from fnet._util._units import si
from fnet.hardware._chip import Chip


@dataclasses.dataclass(frozen=True)
class MFU:
    """The FLOP/s of a model as a fraction of the peak rate of its devices.

    Attributes:
        value: the utilization, between 0 and 1, or None if it is unknown.
        why: the reason if it is unknown; otherwise a remark about the peak, or "".
        peak: the peak rate of all devices together in FLOP/s, or None if it is unknown.
        dtype: the dtype of `peak`.
        basis: how the peak is known, such as "published" (see `Chip.bases`).

    >>> print(cost.mfu(1e12, 0.01, hw.chips["TPU v5e"], "bfloat16"))
    MFU 50.8% of 197 TFLOP/s (bf16, published)
    """

    value: float | None
    why: str = ""
    peak: float | None = None
    dtype: str = ""
    basis: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return f"MFU unknown: {self.why}"
        if self.peak is None:
            return f"MFU {self.value:.1%}"
        return f"MFU {self.value:.1%} of {si(self.peak)}FLOP/s ({self.dtype}, {self.basis})"


def mfu(
    flops_per_step: float,
    seconds_per_step: float,
    chip: Chip,
    dtype: Any = "float32",
    devices: int = 1,
    *,
    precision: Any = None,
) -> MFU:
    """Computes model FLOPs utilization: the model's FLOP/s divided by the peak of the devices.

        MFU = flops_per_step / seconds_per_step / (peak of the chip x devices / JAX devices per chip)

    Args:
        flops_per_step: the FLOPs of the model without recomputation:
            `count(step, ...).model_flops`.
        seconds_per_step: the time of one step in seconds, without compilation.
        chip: the `Chip` that ran the step. One without peak rates has no MFU; pass the result of
            `measure()` instead.
        dtype: the operand dtype of the matrix products. Default "float32".
        devices: the number of JAX devices that share the work. Default 1.
        precision: the `precision` argument of the matrix products, as for `Chip.peak`. Default
            None.

    Returns:
        An `MFU`. Its `value` is None if the chip has no peak for the dtype, or if the result is
        greater than 1. In that case the peak, the FLOPs or the time is wrong, and `why` states the
        FLOP/s and the peak.

    Raises:
        ValueError: `seconds_per_step` or `devices` is not positive.

    Source: Chowdhery et al., PaLM, appendix B, 2022.

    >>> from fnet import hardware as hw
    >>> print(cost.mfu(1e14, 1.0, hw.chips["TPU v5e"], "bfloat16"))
    MFU 50.8% of 197 TFLOP/s (bf16, published)
    """
    if seconds_per_step <= 0 or devices < 1:
        raise ValueError(
            f"mfu: expected a positive time and devices >= 1, got {seconds_per_step} s on {devices}"
        )
    if not chip.known:
        return MFU(None, f"the catalog has no peak of {chip.name}; call hardware.measure()")
    peak = chip.peak(dtype, precision=precision)
    if peak is None:
        return MFU(None, f"the peak of {chip.name} for {dtype} is unknown")
    total = peak.flops * chip.chips_of(devices)
    value = flops_per_step / seconds_per_step / total
    if value > 1:
        rate = f"{si(flops_per_step / seconds_per_step)}FLOP/s"
        hint = ": the FLOP count or the time is wrong, or the step did not do all of its work"
        if peak.basis == "measured":
            hint = ": the chip was busier during its measurement, or the FLOP count or the time is wrong"
        if peak.basis in ("estimated", "unverified", "derived"):
            hint = ", so the peak is too low; call hardware.measure()"
        why = f"{rate} is above the {peak.basis} peak of {si(total)}FLOP/s ({peak.dtype}, {chip.name}){hint}"
        return MFU(None, why, total, peak.dtype, peak.basis)
    return MFU(value, peak.note, total, peak.dtype, peak.basis)
