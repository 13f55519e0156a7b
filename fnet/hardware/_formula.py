"""Computes the peaks of a chip from its units and clock, compares the computed peaks with published
peaks, and computes FLOP per dollar."""

from __future__ import annotations

from typing import NamedTuple

from fnet.hardware._chip import Chip, Price
from fnet.hardware._chips import System, raw

YEAR_OF_USE = 365.25 * 24 * 3600
_GIGA = 1e9  # clocks are in GHz


class Computed(NamedTuple):
    """A peak computed from the figures of a chip: dtype, rate in FLOP/s, and the formula as text.

    >>> hw.computed(hw.chips["Titan RTX"])[0].formula
    '72 SM x 64 cores x 2 x 1.77 GHz'
    """

    dtype: str
    flops: float
    formula: str


class Check(NamedTuple):
    """A published peak next to the computed one, from `hardware.checks`.

    Attributes:
        dtype: the short name of the dtype, such as "bf16".
        quoted: the published peak in FLOP/s.
        source: where it was published.
        computed: the peak in FLOP/s from the units and the clock.
        formula: its formula with the numbers, such as "72 SM x 64 cores x 2 x 1.77 GHz".
        deviation: quoted / computed - 1.
        explanation: why the two differ, or "".

    >>> [round(check.deviation, 2) for check in hw.checks(hw.chips["Ryzen 3950X"])]
    [0.99]
    """

    dtype: str
    quoted: float
    source: str
    computed: float
    formula: str
    deviation: float
    explanation: str


class Value(NamedTuple):
    """What one price of a chip or system buys, from `hardware.flop_per_dollar`.

    Attributes:
        dtype: the dtype of the peak rate.
        flop_per_dollar: the FLOP that one dollar buys at this rate.
        price: the `Price`.
        assumption: how the chip is paid for and used, such as "rented by the hour".

    >>> {value.dtype for value in hw.flop_per_dollar(hw.chips["T4"], "fp16")}
    {'fp16'}
    """

    dtype: str
    flop_per_dollar: float
    price: Price
    assumption: str


def computed(chip: Chip | System, *, boost: bool = False) -> tuple[Computed, ...]:
    """Computes the peak rates of a chip from the number of its units, their FLOP per cycle and the
    clock.

        GPU, vector:  multiprocessors x FP32 cores x 2 x clock
        GPU, tensor:  multiprocessors x tensor cores x FLOP per cycle x clock
        TPU:          cores x matrix units x dim^2 x 2 x clock
        CPU:          cores x FLOP per cycle x clock
        GPU of a system on a chip:  cores x FP32 lanes x 2 x clock

    Args:
        chip: a `Chip` or `System` of the catalog.
        boost: whether to use the boost clock of a CPU instead of its base clock. Default False.

    Returns:
        A `Computed` for each dtype; none if the catalog lacks the units or the clock.

    >>> from fnet import hardware as hw
    >>> [c.formula for c in hw.computed(hw.chips["Titan RTX"])]
    ['72 SM x 64 cores x 2 x 1.77 GHz', '72 SM x 8 tensor cores x 128 x 1.77 GHz']
    """
    if isinstance(chip, System):
        return tuple(
            Computed(c.dtype, c.flops * chip.count, f"{chip.count} chips x {c.formula}")
            for c in computed(chip.chip)
        )
    units = chip.units
    clock = units.get("boost_ghz" if boost and "boost_ghz" in units else "clock_ghz")
    if not clock:
        return ()
    if "multiprocessors" in units:
        return _nvidia(chip, clock)
    if "compute_units" in units:
        n = units["compute_units"]
        rates = raw()["per_cycle"]["amd_compute_unit"].get(chip.architecture, {})
        return tuple(
            Computed(dtype, n * rate * clock * _GIGA, f"{n} CU x {rate} x {clock} GHz")
            for dtype, rate in rates.items()
        )
    if "mxu_dim" in units:
        n, mxus, dim = units["cores"], units["mxus_per_core"], units["mxu_dim"]
        cores = f"{n} core{'s' if n > 1 else ''}"
        formula = f"{cores} x {mxus} MXU x {dim} x {dim} x 2 x {clock} GHz"
        return (Computed("bf16", n * mxus * dim**2 * 2 * clock * _GIGA, formula),)
    if "fp32_lanes" in units:
        n, lanes = units["gpu_cores"], units["fp32_lanes"]
        formula = f"{n} cores x {lanes} lanes x 2 x {clock} GHz"
        return (Computed("fp32", n * lanes * 2 * clock * _GIGA, formula),)
    n = units.get("cores")
    return tuple(
        Computed(dtype, n * rate * clock * _GIGA, f"{n:g} cores x {rate} x {clock} GHz")
        for dtype, rate in units.get("flop_per_cycle", {}).items()
    )


def _nvidia(chip: Chip, clock: float) -> tuple[Computed, ...]:
    """Returns the peaks of the CUDA cores and, if the chip has any, of the tensor cores."""
    units = chip.units
    sm, cores, tensor = units["multiprocessors"], units["fp32_cores"], units["tensor_cores"]
    vector = Computed(
        "fp32", sm * cores * 2 * clock * _GIGA, f"{sm} SM x {cores} cores x 2 x {clock} GHz"
    )
    rate = raw()["per_cycle"]["nvidia_tensor_core_fp16"].get(chip.architecture, 0)
    if not tensor or not rate:
        return (vector,)
    if units.get("half_rate_fp32_accumulate"):
        rate //= 2
    clock = units.get("tensor_clock_ghz", clock)
    formula = f"{sm} SM x {tensor} tensor cores x {rate} x {clock} GHz"
    return vector, Computed("fp16", sm * tensor * rate * clock * _GIGA, formula)


def checks(chip: Chip | System) -> tuple[Check, ...]:
    """Compares the published peaks of a chip or system with those computed from its units and
    clock.

    Published are those in `chip.quoted`, and those in `chip.peaks` that fnet did not compute,
    estimate or measure.

    Returns:
        A `Check` for each published peak that can also be computed, with an explanation where the
        two differ.

    >>> (check,) = hw.checks(hw.systems["TPU v3-8"])
    >>> check.quoted / 1e12, round(check.computed / 1e12, 1)
    (420.0, 492.8)
    """
    formulas = {c.dtype: c for c in computed(chip)}
    boosted = {c.dtype: c for c in computed(chip, boost=True)}
    rows = []
    if isinstance(chip, Chip):
        for dtype, formula in formulas.items():
            if dtype in chip.peaks and chip.basis(dtype) not in (
                "derived",
                "estimated",
                "measured",
            ):
                rows.append(
                    (
                        dtype,
                        chip.peaks[dtype],
                        "the catalog",
                        chip.explained.get(dtype, ""),
                        formula,
                    )
                )
    for quote in chip.quoted:
        if quote.dtype in formulas:
            rows.append(
                (
                    quote.dtype,
                    quote.flops,
                    quote.source,
                    quote.explanation,
                    (boosted if quote.at_boost else formulas)[quote.dtype],
                )
            )
    return tuple(
        Check(
            dtype, quoted, source, formula.flops, formula.formula, quoted / formula.flops - 1, why
        )
        for dtype, quoted, source, why, formula in rows
    )


def flop_per_dollar(
    chip: Chip | System, dtype: str | None = None, *, years: float = 3.0
) -> tuple[Value, ...]:
    """Computes how many FLOP a dollar buys at the peak rate.

        rented:  peak x 3600 s / price of an hour
        bought:  peak x years x 31.56e6 s / launch price      (no electricity, no host, no resale)

    A chip that was bought is assumed to run continuously.

    Args:
        chip: a `Chip` or `System` of the catalog.
        dtype: the dtype of the peak. Default None: the fastest of bf16, fp16 and fp32.
        years: the years of use after a purchase. Default 3.

    Returns:
        A `Value` for each price in the catalog; none if the chip has no peak for the dtype.

    >>> [value.assumption for value in hw.flop_per_dollar(hw.chips["Titan RTX"], "fp32", years=3)]
    ['bought, 3 years of use, without electricity or host']
    """
    one = chip.chip if isinstance(chip, System) else chip
    count = chip.count if isinstance(chip, System) else 1
    if dtype is None:
        present = [name for name in ("bf16", "fp16", "fp32") if name in one.peaks]
        if not present:
            return ()
        dtype = max(present, key=one.peaks.__getitem__)
    if dtype not in one.peaks:
        return ()
    flops = one.peaks[dtype] * count
    rows = []
    for price in chip.prices:
        if price.per == "hour":
            rows.append(Value(dtype, flops * 3600 / price.usd, price, "rented by the hour"))
        else:
            rows.append(
                Value(
                    dtype,
                    flops * years * YEAR_OF_USE / price.usd,
                    price,
                    f"bought, {years:g} years of use, without electricity"
                    + (" or host" if price.per == "chip" else ""),
                )
            )
    return tuple(rows)
