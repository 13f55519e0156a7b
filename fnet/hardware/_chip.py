"""The description of a chip: its peak rates, memory and links. Each number in the description of a
chip has a basis, which states how the number is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from fnet._util._units import si
from fnet.hardware._latency import Latency
from fnet.hardware._tables import FrozenTable

# The values of `Chip.basis`, from the most to the least reliable.
BASES = ("exact", "measured", "published", "derived", "estimated", "unverified")

_NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "int8",
    "uint8": "int8",
    "int4": "int4",
    "uint4": "int4",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float8_e4m3": "fp8",
    "float8_e4m3fnuz": "fp8",
    "float8_e5m2fnuz": "fp8",
    "float4_e2m1fn": "fp4",
}


class Peak(NamedTuple):
    """The peak rate of a chip for one dtype, the result of `Chip.peak`.

    Attributes:
        flops: the rate in FLOP/s.
        dtype: the short name of the dtype, such as "bf16".
        basis: how the rate is known, such as "published" (see `Chip.bases`).
        note: a remark, such as "float32 in 6 bfloat16 passes", or "".

    >>> peak = hw.chips["TPU v5e"].peak("bfloat16")
    >>> peak.flops, peak.basis
    (197000000000000.0, 'published')
    """

    flops: float
    dtype: str
    basis: str
    note: str = ""


class Price(NamedTuple):
    """A price in dollars (`usd`) with its date and source. `per` says for what: an "hour" in a
    cloud, a "chip" or a "system".

    >>> [price.per for price in hw.chips["TPU v5e"].prices][:1]
    ['hour']
    """

    usd: float
    per: str
    date: str
    source: str
    note: str = ""


class Quote(NamedTuple):
    """A published peak rate, which `hardware.checks` compares with the one computed from units and
    clock.

    Attributes:
        dtype: the short name of the dtype, such as "bf16".
        flops: the peak in FLOP/s.
        source: where it was published.
        explanation: why it differs from the computed peak, or "".
        at_boost: whether it is for the boost clock of a CPU. `Chip.peaks` are for the base clock.

    >>> [quote.dtype for quote in hw.chips["Titan RTX"].quoted][:1]
    ['fp32']
    """

    dtype: str
    flops: float
    source: str
    explanation: str = ""
    at_boost: bool = False


@dataclasses.dataclass(frozen=True)
class Links:
    """The links (such as ICI or NVLink) that connect chips. Rates are in bytes/s, None if unknown.

    Attributes:
        type: the name of the link, such as "ICI".
        count: the number of links of one chip, or None if unknown.
        each_way: the rate of one link in one direction.
        total: the rate of all links of one chip, both directions together.
        topology: how the chips are connected, or None if unknown.
        network: the rate in one direction to the chips of other TPU slices or machines, as cloud
            providers commonly offer it.
        network_source: where `network` was published.

    >>> hw.chips["TPU v5e"].links.type
    'ICI'
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
    """A chip: its peak rates, memory, links, power and prices, and how each number is known.

    The numbers are for the whole chip. `chip.per_device` is the part of one JAX device, such as
    half a TPU v3. A number that is not known is None, or absent from its table.

    Attributes:
        name: the name in the catalog, or the name that the device reports.
        kind: "cpu", "gpu" or "tpu".
        vendor: "Google", "NVIDIA", "AMD", "Intel", or "unknown".
        known: whether there are peak rates, from the catalog, the instruction set of a CPU, or
            `measure`. Otherwise `peaks` is empty; fnet never uses the peaks of a similar chip.
        year: the year of its introduction.
        device_kinds: the names that JAX reports for it (`jax.Device.device_kind`).
        aliases: further names with which the catalog finds it.
        architecture: the compute capability of an NVIDIA GPU ("9.0"), the gfx name of an AMD GPU
            ("gfx942"), or the instruction set of a CPU.
        peaks: the peak rates of matrix products, {dtype: rate}, in FLOP/s (for integers,
            operations/s), for dense operands and float32 accumulation. Keys are short names such as
            "bf16", "fp32" or "int8"; `peak` takes a dtype of JAX.
        memory_bytes: the size of the memory in bytes.
        memory_kind: "HBM3", "GDDR6", "DDR5" and so on.
        caches: {level of cache: bytes}, with names such as "L2". If each core has its own, the sum
            over the cores.
        bandwidth: the rate between the chip and its memory in bytes/s.
        links: how chips of this kind are connected, `Links`.
        latency: what kernels, loops and messages cost however small they are, `Latency`, or None if
            unknown.
        jax_devices_per_chip: the number of JAX devices that share the chip.
        power_watts: the published thermal design power in watts.
        power_source: where `power_watts` was published.
        prices: `Price` objects.
        quoted: `Quote` objects, published peaks from other sources than `peaks`, whose values may
            differ.
        explained: the reasons why values in `peaks` differ from the peaks computed from `units`,
            {dtype: reason}.
        units: what peak rates are computed from, {name: value}: the number of multiprocessors,
            matrix units or cores, the clock in GHz and so on.
        bases: how the numbers were obtained, {name: basis}. A name is an attribute, such as
            "memory_bytes", a dtype of `peaks`, such as "bf16", or "clock". A basis is "exact",
            "measured", "published", "derived" (computed from the number of units and the clock),
            "estimated" or "unverified".
        sources: where the numbers were published.
        notes: remarks.

    >>> chip = hw.chips["TPU v5e"]
    >>> chip.kind, chip.per_device.memory_bytes / 2 ** 30
    ('tpu', 16.0)
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
    memory_kind: str | None = None
    caches: Mapping[str, float] = FrozenTable()
    bandwidth: float | None = None
    links: Links | None = None
    latency: Latency | None = None
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
        """Returns how a number was obtained, such as "measured". `field` is an attribute, such as
        "memory_bytes", or the dtype of a peak rate, such as "bf16".
        """
        return self.bases.get(field, "published" if self.known else "unknown")

    def peak(self, dtype: Any, *, precision: Any = None) -> Peak | None:
        """Returns the peak rate of JAX's matrix products with operands of a dtype.

        That is not always the rate of the dtype: by default, a float32 product is one bfloat16 pass
        on a TPU, and TF32 on an NVIDIA chip that has it. On a TPU, `precision="high"` takes three
        passes and "highest" six; on a GPU, "highest" computes in full float32.

        Args:
            dtype: a JAX or NumPy dtype, or the short name of a dtype ("bf16", "fp8", ...).
            precision: the `precision` argument of the matrix product. Default None, JAX's default.

        Returns:
            A `Peak` of the whole chip, or None if the chip has no rate for `dtype`.
        """
        name = dtype_name(dtype)
        level = _precision_level(precision)
        if name == "fp32":
            if self.kind == "tpu" and "bf16" in self.peaks:
                passes = {"high": 3, "highest": 6}.get(level, 1)
                note = f"float32 in {passes} bfloat16 pass{'es' if passes > 1 else ''}"
                return Peak(self.peaks["bf16"] / passes, "bf16", self.basis("bf16"), note)
            if self.vendor == "NVIDIA" and "tf32" in self.peaks and level != "highest":
                return Peak(
                    self.peaks["tf32"],
                    "tf32",
                    self.basis("tf32"),
                    "float32 products run in TF32 by default",
                )
        name = f"{name}_matrix" if f"{name}_matrix" in self.peaks else name
        return Peak(self.peaks[name], name, self.basis(name)) if name in self.peaks else None

    @property
    def cores(self) -> int | None:
        """The number of cores as the vendor counts them, or None if unknown: CUDA cores, stream
        processors, cores of a CPU, GPU cores of a system on a chip, or TensorCores of a TPU.
        """
        units = self.units
        if "multiprocessors" in units:
            return units["multiprocessors"] * units["fp32_cores"]
        if "compute_units" in units:
            return 64 * units["compute_units"]
        return units.get("gpu_cores", units.get("cores"))

    @property
    def per_device(self) -> Chip:
        """The share of one JAX device: peaks, memory and bandwidth are divided by
        `jax_devices_per_chip`.
        """
        n = self.jax_devices_per_chip
        if n == 1:
            return self
        name = f"{self.name}, one of {n} devices"
        return dataclasses.replace(self.scaled(1 / n), name=name, jax_devices_per_chip=1)

    def chips_of(self, devices: int) -> float:
        """Returns how many chips have the rate of `devices` JAX devices.

        One device of a TPU v3 is 0.5 chips. On a CPU the result is at least 1, because a single JAX
        device can use all threads, even if JAX emulates several.
        """
        chips = devices / self.jax_devices_per_chip
        return max(1.0, chips) if self.kind == "cpu" else chips

    def scaled(
        self, compute: float, memory: float | None = None, *, basis: str | None = None
    ) -> Chip:
        """Returns the chip with its peak rates multiplied by `compute`, its memory and bandwidth by
        `memory`.

        Args:
            compute: the factor for the peak rates.
            memory: the factor for `memory_bytes` and `bandwidth`. Default None: `compute`.
            basis: how the new numbers were obtained, such as "estimated", for `Chip.bases`. Default
                None: its entries stay.
        """
        memory = compute if memory is None else memory
        bases = self.bases
        if basis is not None:
            bases = FrozenTable(
                {**bases, **{k: basis for k in (*self.peaks, "memory_bytes", "bandwidth")}}
            )
        return dataclasses.replace(
            self,
            peaks=FrozenTable({k: v * compute for k, v in self.peaks.items()}),
            memory_bytes=self.memory_bytes and self.memory_bytes * memory,
            bandwidth=self.bandwidth and self.bandwidth * memory,
            bases=bases,
        )

    def __str__(self) -> str:
        if not self.known:
            return f"{self.name} ({self.kind}, not in the catalog: no peak rates)"
        best = max(
            (k for k in ("bf16", "fp16", "fp32") if k in self.peaks),
            key=self.peaks.__getitem__,
            default=None,
        )
        rate = (
            f"{si(self.peaks[best])}FLOP/s {best}, {self.basis(best)}" if best else "no peak rates"
        )
        return f"{self.name} ({self.kind}, {rate})"


def dtype_name(dtype: Any) -> str:
    """Returns the short name of a dtype. For example, `jnp.bfloat16`, "bfloat16" and "bf16" all
    give "bf16"."""
    if isinstance(dtype, str) and dtype not in _NAMES:
        if dtype in _NAMES.values() or dtype.split("_")[0] in (*_NAMES.values(), "tf32"):
            return dtype
    return _NAMES.get(str(jnp.dtype(dtype)), str(jnp.dtype(dtype)))


def _precision_level(precision: Any) -> str:
    if isinstance(precision, tuple):
        precision = max(
            precision, key=lambda p: ("default", "high", "highest").index(_precision_level(p))
        )
    name = getattr(precision, "name", precision)
    text = str(name).lower() if name is not None else "default"
    return {"float32": "highest", "bfloat16_3x": "high", "tensorfloat32": "high"}.get(
        text, text if text in ("high", "highest") else "default"
    )
