"""One chip: what it can do, and how each of those numbers is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

# What `Chip.basis` may say, from the firmest to the weakest.
BASES = ("exact", "measured", "published", "derived", "estimated", "unverified")

_NAMES = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16",
    "int8": "int8", "uint8": "int8", "int4": "int4", "uint4": "int4",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float8_e4m3": "fp8",
    "float8_e4m3fnuz": "fp8", "float8_e5m2fnuz": "fp8", "float4_e2m1fn": "fp4",
}


class FrozenTable(Mapping):
    """A mapping that cannot change, so that a chip can be hashed, compared, pickled and passed around."""

    __slots__ = ("_items",)

    def __init__(self, items: Any = (), /, **more: Any):
        self._items = tuple(dict(items, **more).items())

    def __getitem__(self, key):
        for name, value in self._items:
            if name == key:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator:
        return (name for name, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return repr(dict(self._items))


class Peak(NamedTuple):
    """The rate of a chip in one type: `flops` FLOP/s, the table's name for the type, how it is known, and a note."""

    flops: float
    dtype: str
    basis: str
    note: str = ""


class Price(NamedTuple):
    """A dated price: `usd` per "hour", per "chip" or per "system"."""

    usd: float
    per: str
    date: str
    source: str
    note: str = ""


class Quote(NamedTuple):
    """A figure that was printed somewhere, in FLOP/s, and why it differs from the computed one.

    `at_boost`: it was reckoned at the boost clock of a CPU, whose own peak is at the base clock.
    """

    dtype: str
    flops: float
    source: str
    explanation: str = ""
    at_boost: bool = False


@dataclasses.dataclass(frozen=True)
class Links:
    """How chips of a kind talk to each other: rates in bytes/s, `total` over all links and both directions.

    `network` is what a chip sends, each way, to chips of another slice or machine, as they are usually sold
    (`network_source` says whose figure).
    """

    type: str
    count: int | None = None
    each_way: float | None = None
    total: float | None = None
    topology: str | None = None
    network: float | None = None
    network_source: str = ""


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip as a row of data.

    Peaks, memory and bandwidth are those of the whole chip; one JAX device has `chip.per_device` of them (a TPU v3
    chip is two JAX devices, eight emulated CPU devices are one CPU).

    Attributes:
      name: the catalogue's name, or what the device calls itself.
      kind: "cpu", "gpu" or "tpu".
      vendor: "Google", "NVIDIA", "AMD", "Intel", or "unknown".
      known: whether its peaks come from the catalogue or from what its instruction set does per cycle. False: there
        are no peaks, and nothing that needs one is computed from another chip's.
      architecture: compute capability ("9.0"), gfx name ("gfx942"), or the instruction set of a CPU.
      peaks: FLOP/s (operations/s for integers) by type, dense, with FP32 accumulation.
      memory_bytes: bytes of memory; bandwidth: bytes/s to it. None: unknown.
      links: how chips of this kind are connected, or None.
      jax_devices_per_chip: how many JAX devices share the chip.
      power_watts: thermal design power where it is public (`power_source` says whose figure).
      prices, quoted, explained: what the catalogue knows beside the peaks.
      units: what the peaks are made of (multiprocessors, matrix units, cores, clocks in GHz).
      bases: how each number is known, by field or type: one of "exact", "measured", "published", "derived" (computed
        from units and clock), "estimated", "unverified".
      sources, notes: where it comes from, and what one should know.
    """

    name: str
    kind: str
    vendor: str = "unknown"
    known: bool = False
    year: int | None = None
    device_kinds: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    architecture: str | None = None
    peaks: Mapping[str, float] = FrozenTable()
    memory_bytes: float | None = None
    bandwidth: float | None = None
    links: Links | None = None
    jax_devices_per_chip: int = 1
    power_watts: float | None = None
    power_source: str = ""
    prices: tuple[Price, ...] = ()
    quoted: tuple[Quote, ...] = ()
    explained: Mapping[str, str] = FrozenTable()
    units: Mapping[str, Any] = FrozenTable()
    bases: Mapping[str, str] = FrozenTable()
    sources: tuple[str, ...] = ()
    notes: str = ""

    def basis(self, field: str) -> str:
        """How a number is known: `field` is a type of `peaks`, "memory_bytes", "bandwidth" or "links"."""
        return self.bases.get(field, "published" if self.known else "unknown")

    def peak(self, dtype: Any, *, precision: Any = None) -> Peak | None:
        """The rate of a matrix product whose operands have `dtype`, as JAX runs it.

        A float32 product runs in bfloat16 passes on a TPU and in TF32 on an NVIDIA chip that has it, unless its
        `precision` is "high" (three passes on a TPU) or "highest" (six on a TPU, true float32 on a GPU).

        Args:
          dtype: a JAX or NumPy type, or one of the table's names ("bf16", "fp8", ...).
          precision: what was passed to the product as `precision=`; None is JAX's default.

        Returns:
          The rate of the whole chip, or None where the chip has none for that type.
        """
        name = dtype_name(dtype)
        level = _precision_level(precision)
        if name == "fp32":
            if self.kind == "tpu" and "bf16" in self.peaks:
                passes = {"high": 3, "highest": 6}.get(level, 1)
                note = f"float32 in {passes} bfloat16 pass{'es' if passes > 1 else ''}"
                return Peak(self.peaks["bf16"] / passes, "bf16", self.basis("bf16"), note)
            if self.vendor == "NVIDIA" and "tf32" in self.peaks and level != "highest":
                return Peak(self.peaks["tf32"], "tf32", self.basis("tf32"), "float32 products run in TF32 by default")
        if name in ("fp32", "fp64") and f"{name}_matrix" in self.peaks:
            return Peak(self.peaks[f"{name}_matrix"], f"{name}_matrix", self.basis(f"{name}_matrix"))
        if name not in self.peaks:
            return None
        return Peak(self.peaks[name], name, self.basis(name))

    @property
    def per_device(self) -> Chip:
        """The share of one JAX device: peaks, memory and bandwidth divided by `jax_devices_per_chip`."""
        n = self.jax_devices_per_chip
        if n == 1:
            return self
        name = f"{self.name}, one of {n} devices"
        return dataclasses.replace(self.scaled(1 / n), name=name, jax_devices_per_chip=1)

    def chips_of(self, devices: int) -> float:
        """How many chips' worth of peak `devices` JAX devices have: half a chip for one core of a TPU v3.

        Emulated CPU devices share one pool of threads, of which a single one may use all.
        """
        chips = devices / self.jax_devices_per_chip
        return max(1.0, chips) if self.kind == "cpu" else chips

    def scaled(self, compute: float, memory: float | None = None, *, basis: str | None = None) -> Chip:
        """The chip with `compute` times its peaks and `memory` (the same by default) times its memory and bandwidth."""
        memory = compute if memory is None else memory
        bases = self.bases
        if basis is not None:
            bases = FrozenTable({**bases, **{k: basis for k in (*self.peaks, "memory_bytes", "bandwidth")}})
        return dataclasses.replace(
            self,
            peaks=FrozenTable({k: v * compute for k, v in self.peaks.items()}),
            memory_bytes=self.memory_bytes and self.memory_bytes * memory,
            bandwidth=self.bandwidth and self.bandwidth * memory,
            bases=bases,
        )

    def __str__(self) -> str:
        if not self.known:
            return f"{self.name} ({self.kind}, unknown to the catalogue: no peak rates)"
        best = max((k for k in ("bf16", "fp16", "fp32") if k in self.peaks), key=self.peaks.__getitem__, default=None)
        rate = f"{si(self.peaks[best])}FLOP/s {best}, {self.basis(best)}" if best else "no peak rates"
        return f"{self.name} ({self.kind}, {rate})"


def dtype_name(dtype: Any) -> str:
    """The catalogue's name of a type: "bf16" for `jnp.bfloat16`, "bfloat16" or "bf16"."""
    if isinstance(dtype, str) and dtype not in _NAMES:
        if dtype in _NAMES.values() or dtype.split("_")[0] in (*_NAMES.values(), "tf32"):
            return dtype
    return _NAMES.get(str(jnp.dtype(dtype)), str(jnp.dtype(dtype)))


def si(value: float, *, digits: int = 4) -> str:
    """A number with its decimal prefix and a space: 197e12 is "197 T"."""
    for factor, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.9995:
            return f"{value / factor:.{digits}g} {prefix}"
    return f"{value:.{digits}g} "


def _precision_level(precision: Any) -> str:
    if isinstance(precision, tuple):
        precision = max(precision, key=lambda p: ("default", "high", "highest").index(_precision_level(p)))
    name = getattr(precision, "name", precision)
    text = str(name).lower() if name is not None else "default"
    return {"float32": "highest", "bfloat16_3x": "high", "tensorfloat32": "high"}.get(
        text, text if text in ("high", "highest") else "default")
