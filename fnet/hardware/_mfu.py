"""Model FLOPs utilisation, or why it cannot be told."""

from __future__ import annotations

import dataclasses
from typing import Any

from fnet.hardware._chip import Chip, si


@dataclasses.dataclass(frozen=True)
class MFU:
    """The share of a chip's peak that a model's own FLOPs take.

    Attributes:
      value: between 0 and 1, or None where it is unknown; then `why` says why.
      why: the reason in words, or "".
      peak: FLOP/s of all devices together, the denominator. dtype: the type it holds for. basis: how it is known.
    """

    value: float | None
    why: str = ""
    peak: float | None = None
    dtype: str = ""
    basis: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return f"MFU unknown: {self.why}"
        return f"MFU {self.value:.1%} of {si(self.peak)}FLOP/s ({self.dtype}, {self.basis})"


def mfu(flops_per_step: float, seconds_per_step: float, chip: Chip, dtype: Any = "float32", devices: int = 1, *,
        precision: Any = None) -> MFU:
    """FLOPs of the model per second, over the peak of the devices it runs on.

        MFU = flops_per_step / seconds_per_step / (peak of the chip x devices / JAX devices per chip)

    Args:
      flops_per_step: FLOPs of the model without recomputation: `count(step, ...).model_flops`.
      seconds_per_step: seconds, compile time left out.
      chip: what it runs on. An unknown chip has no MFU; `measure()` gives it a measured peak.
      dtype: the type of the matmuls' operands.
      devices: how many JAX devices share the work.
      precision: what the products are asked for, see `Chip.peak`.

    Returns:
      An `MFU`. Its value is None where the chip has no peak for the type, and where the ratio comes out above one:
      then the peak, the count or the time is wrong, and `why` names the numbers.

    Source: Chowdhery et al., PaLM, appendix B, 2022.

    >>> from fnet import hardware as hw
    >>> print(hw.mfu(1e14, 1.0, hw.chips["TPU v5e"], "bfloat16"))
    MFU 50.8% of 197 TFLOP/s (bf16, published)
    """
    if seconds_per_step <= 0 or devices < 1:
        raise ValueError(f"mfu needs a positive time and at least one device, not {seconds_per_step} s on {devices}")
    if not chip.known:
        return MFU(None, f"the peak of {chip.name} is not known to the catalogue; hardware.measure() measures it")
    peak = chip.peak(dtype, precision=precision)
    if peak is None:
        return MFU(None, f"no peak of {chip.name} is known for {dtype}")
    total = peak.flops * chip.chips_of(devices)
    value = flops_per_step / seconds_per_step / total
    if value > 1:
        rate = f"{si(flops_per_step / seconds_per_step)}FLOP/s"
        hint = ": the FLOP count or the time is wrong, or the work was not done"
        if peak.basis == "measured":
            hint = ": the chip was busier when it was measured, or the FLOP count or the time is wrong"
        if peak.basis in ("estimated", "unverified", "derived"):
            hint = ", which is therefore too low; hardware.measure() measures it"
        why = f"{rate} is above the {peak.basis} peak of {si(total)}FLOP/s ({peak.dtype}, {chip.name}){hint}"
        return MFU(None, why, total, peak.dtype, peak.basis)
    return MFU(value, peak.note, total, peak.dtype, peak.basis)
