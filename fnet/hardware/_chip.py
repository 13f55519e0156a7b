"""The description of a chip: its peak rates, memory and links. Each number in the description of a
chip has a basis, which states how the number is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from fnet._util._units import si

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


class FrozenTable(Mapping):
    """An immutable mapping for the dictionaries of a `Chip`, so that the `Chip` can be hashed,
    compared and pickled.

    >>> table = hw.FrozenTable({"bf16": 197e12})
    >>> table["bf16"], len({table, hw.FrozenTable({"bf16": 197e12})})
    (197000000000000.0, 1)
    """

    __slots__ = ("_items",)

    def __init__(self, items: Any = (), /, **more: Any):
        self._items = tuple(dict(items, **more).items())

    def __getitem__(self, key: Any) -> Any:
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
    """The peak rate of a chip for one dtype.

    Attributes:
        flops: the rate in FLOP/s.
        dtype: the short name of the dtype, such as "bf16".
        basis: how the rate is known, such as "published" (see `Chip.bases`).
        note: a remark, such as "float32 in 6 bfloat16 passes", or an empty string.

    >>> hw.chips["TPU v5e"].peaks["bf16"]
    197000000000000.0
    """

    flops: float
    dtype: str
    basis: str
    note: str = ""


class Price(NamedTuple):
    """A price with its date and source. `usd` is the price in dollars. `per` states what the price
    is for: an "hour" of use in a cloud, a "chip" or a "system".

    >>> [price.per for price in hw.chips["TPU v5e"].prices][:1]
    ['hour']
    """

    usd: float
    per: str
    date: str
    source: str
    note: str = ""


class Quote(NamedTuple):
    """A published peak rate of a chip or system. `hardware.checks` compares the published peak with
    the peak that is computed from the chip's units and clock.

    Attributes:
        dtype: the short name of the dtype, such as "bf16".
        flops: the peak in FLOP/s.
        source: where the peak was published.
        explanation: why the published peak differs from the computed peak, or an empty string.
        at_boost: whether the peak refers to the boost clock of a CPU. The CPU peaks in `Chip.peaks`
            refer to the base clock.

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
    """The links (such as ICI or NVLink) that connect chips. Rates are in bytes/s.

    Attributes:
        type: the name of the link, such as "ICI".
        count: the number of links of one chip, or None if unknown.
        each_way: the rate of one link in one direction, or None if unknown.
        total: the rate of all links of one chip in both directions together, or None if unknown.
        topology: how the chips are connected, or None if unknown.
        network: the rate in one direction between a chip and the chips of other TPU slices or other
            machines, or None if unknown. The value of `network` is a rate that cloud providers
            commonly offer.
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
    """A chip of the catalog.

    Peaks, memory and bandwidth refer to the whole chip. `chip.per_device` is a `Chip` with the
    figures of one JAX device. For example, JAX represents a TPU v3 chip as two devices.

    Attributes:
        name: the name of the chip in fnet's catalog, or the name that the device reports.
        kind: "cpu", "gpu" or "tpu".
        vendor: "Google", "NVIDIA", "AMD", "Intel", or "unknown".
        known: whether the peak rates are known (from the catalog, the instruction set of a CPU, or
            `measure`). If they are unknown, `peaks` is empty. fnet never uses the peaks of a
            similar chip instead.
        year: the year in which the chip was introduced, or None if unknown.
        device_kinds: the names that JAX reports for devices of this chip
            (`jax.Device.device_kind`).
        aliases: further names with which the catalog finds the chip.
        architecture: the compute capability of an NVIDIA GPU ("9.0"), the gfx name of an AMD GPU
            ("gfx942"), or the instruction set of a CPU; None if unknown.
        peaks: the peak rate of matrix products for each dtype, {dtype: rate}, in FLOP/s (for
            integers, operations/s). The rates are for dense operands and float32 accumulation.
        memory_bytes: the size of the memory in bytes, or None if unknown.
        memory_kind: the type of the memory, such as "HBM3", "GDDR6" or "DDR5", or None if unknown.
        caches: the size of each level of cache, {name: bytes}, with names such as "L2". If each
            core has its own cache, the size is the sum over all cores of the chip.
        bandwidth: the rate between the chip and its memory in bytes/s, or None if unknown.
        links: how chips of this kind are connected, or None.
        jax_devices_per_chip: the number of JAX devices that share the chip.
        power_watts: the published thermal design power in watts, or None if unknown.
        power_source: where `power_watts` was published.
        prices: the prices of the chip, `Price` objects.
        quoted: further published peaks, `Quote` objects. The peak rates in `quoted` come from other
            sources than those in `peaks`, so the values may differ.
        explained: the reasons why some values of `peaks` differ from the peaks computed from
            `units`, {dtype: reason}.
        units: the hardware data from which peak rates are computed, {name: value}. For example,
            `units` contains the number of multiprocessors, matrix units or cores, and the clock
            rate in GHz.
        bases: how the values of the other attributes were obtained, a dict {name: basis}. A name is
            the name of an attribute, such as "memory_bytes", or a dtype in `peaks`, such as "bf16",
            or "clock" for the clock rate in `units`. The basis of a value is "exact", "measured",
            "published", "derived" (computed from the number of compute units and the clock),
            "estimated" or "unverified".
        sources: where the figures were published.
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
        """Returns how a number of the chip was obtained (the basis of the number), such as
        "measured". `field` is the name of a field of `Chip`, such as "memory_bytes", or, for a peak
        rate, the name of a dtype, such as "bf16"."""
        return self.bases.get(field, "published" if self.known else "unknown")

    def peak(self, dtype: Any, *, precision: Any = None) -> Peak | None:
        """Returns the peak rate at which JAX computes a matrix product whose operands have the
        dtype `dtype`.

        By default, JAX computes a float32 matrix product in one bfloat16 pass on a TPU, and in TF32
        on an NVIDIA chip that supports TF32. With `precision="high"`, a float32 matrix product
        takes three bfloat16 passes on a TPU. With `precision="highest"`, a float32 matrix product
        takes six bfloat16 passes on a TPU, and is computed in full float32 on a GPU.

        Args:
            dtype: a JAX or NumPy dtype, or the short name of a dtype ("bf16", "fp8", ...).
            precision: the `precision` argument of the matrix product. Default None: JAX's default
                precision.

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
        """The number of cores as the vendor counts them, or None if unknown. Depending on the chip,
        a core is a CUDA core, a stream processor, a core of a CPU, a GPU core of a system on a
        chip, or a TensorCore of a TPU."""
        units = self.units
        if "multiprocessors" in units:
            return units["multiprocessors"] * units["fp32_cores"]
        if "compute_units" in units:
            return 64 * units["compute_units"]
        return units.get("gpu_cores", units.get("cores"))

    @property
    def per_device(self) -> Chip:
        """The share of one JAX device: a `Chip` whose peaks, memory and bandwidth are divided by
        `jax_devices_per_chip`."""
        n = self.jax_devices_per_chip
        if n == 1:
            return self
        name = f"{self.name}, one of {n} devices"
        return dataclasses.replace(self.scaled(1 / n), name=name, jax_devices_per_chip=1)

    def chips_of(self, devices: int) -> float:
        """Returns the number of chips that have the same total peak rate as `devices` JAX devices.

        For example, one JAX device of a TPU v3 has half of the chip's rate, so the result is 0.5.
        On a CPU, the result is at least 1, because a single JAX device can use all threads of the
        CPU, even if JAX emulates several devices on it.
        """
        chips = devices / self.jax_devices_per_chip
        return max(1.0, chips) if self.kind == "cpu" else chips

    def scaled(
        self, compute: float, memory: float | None = None, *, basis: str | None = None
    ) -> Chip:
        """Returns the chip with its peak rates multiplied by `compute`, and its memory and
        bandwidth by `memory`.

        Args:
            compute: the factor by which the peak rates of the chip are multiplied.
            memory: the factor by which `memory_bytes` and `bandwidth` are multiplied. Default None:
                `compute`.
            basis: how the new peak rates, memory size and bandwidth were obtained, such as
                "estimated"; stored in `Chip.bases`. Default None: the entries in `Chip.bases` do
                not change.
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
