"""Finds the chip of a JAX device, or of a device kind, in the catalog."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fnet.hardware._chip import Chip, FrozenTable
from fnet.hardware._chips import chips, latency_of, raw, split_mig
from fnet.hardware._cpu import CPU, read_cpu


def detect(device: Any = None) -> Chip:
    """Returns the chip of a JAX device.

    A part of a chip gets its part of the peaks: a MIG slice or partition of a GPU that of its
    visible multiprocessors, a CPU that of the physical cores which the affinity mask and the cgroup
    quota allow this process. Nothing is measured here; see `measure` for that.

    Args:
        device: a `jax.Device`, or a device kind such as "TPU v5 lite", which need not be attached.
            Default None: the first local device.

    Returns:
        A `Chip`, from the catalog if possible. A CPU outside it gets estimates from its instruction
        set, any other device `known=False` and no peaks.

    >>> from fnet import hardware as hw
    >>> hw.detect("TPU v5 lite").name
    'TPU v5e'
    """
    if isinstance(device, Chip):
        return device
    if isinstance(device, str):
        return _from_kind(device)
    if device is None:
        device = jax.local_devices()[0]
    if not hasattr(device, "platform"):
        raise TypeError(
            f"hardware: expected a device, a hardware.Chip or the name of a chip; got {device!r}"
        )
    if device.platform == "cpu":
        return cpu_chip(read_cpu(), devices=len(jax.local_devices(backend="cpu")))
    chip = _from_kind(device.device_kind, platform=device.platform)
    if chip.kind == "gpu":
        return _fit_gpu(chip, device)
    if chip.kind == "tpu":
        return _fit_tpu(chip, device)
    return chip


def cpu_chip(cpu: CPU, *, devices: int = 1) -> Chip:
    """Returns a `Chip` object, which contains the peak rates and the memory size of a CPU. If the
    CPU is in the catalog, its entry is scaled to the available cores. If the CPU is not in the
    catalog, the peaks are estimated from the instruction set if possible; otherwise the peaks are
    unknown."""
    return _listed(cpu, devices) or _estimated(cpu, devices)


def _listed(cpu: CPU, devices: int) -> Chip | None:
    """Returns the available share of a CPU of the catalog, or None if the CPU is not in it."""
    for row in chips.values():
        model = row.units.get("model_name")
        if not model or model not in cpu.model or not cpu.cores:
            continue
        cores = row.units["cores"]
        return dataclasses.replace(
            row.scaled(min(1.0, cpu.cores / cores), 1),
            units=FrozenTable({**row.units, "cores": cpu.cores, "flags": cpu.flags}),
            notes=f"{cpu.cores:g} of {cores} cores are available to this process. {row.notes}",
            bases=FrozenTable({**row.bases, "memory_bytes": "measured"}),
            jax_devices_per_chip=devices,
            memory_bytes=cpu.memory_bytes,
        )
    return None


def _estimated(cpu: CPU, devices: int) -> Chip:
    """Estimates the peaks from the instruction set, the clock and the number of cores, if these are
    known."""
    name = cpu.model
    if cpu.cores is not None:
        name += f", {cpu.cores:g} core{'s' if cpu.cores != 1 else ''}"
    chip = Chip(
        name=name,
        kind="cpu",
        vendor=cpu.vendor,
        units=FrozenTable(flags=cpu.flags),
        jax_devices_per_chip=devices,
        memory_bytes=cpu.memory_bytes,
        latency=latency_of("cpu", cpu.vendor),
        bases=FrozenTable(latency="estimated"),
    )

    def without_peaks(missing: str) -> Chip:
        note = (
            f"The {missing} of this CPU could not be read, so its peak is unknown. Call measure()."
        )
        return dataclasses.replace(chip, notes=note)

    if cpu.isa is None:
        return without_peaks("instruction set")
    if cpu.clock_ghz is None:
        return without_peaks("clock")
    if cpu.cores is None:
        return without_peaks("cores")

    rates = _flop_per_cycle(cpu, cpu.isa)
    peaks = {dtype: cpu.cores * rate * cpu.clock_ghz * 1e9 for dtype, rate in rates.items()}
    clock = f"{cpu.clock_ghz:.2f} GHz"
    if cpu.virtual:
        clock += " reported by a virtual machine, which may be wrong by a factor of two"
    return dataclasses.replace(
        chip,
        known=True,
        architecture=cpu.isa,
        peaks=FrozenTable(peaks),
        units=FrozenTable(
            cores=cpu.cores,
            clock_ghz=cpu.clock_ghz,
            isa=cpu.isa,
            flags=cpu.flags,
            flop_per_cycle=FrozenTable(rates),
        ),
        bases=FrozenTable(
            {**chip.bases, **dict.fromkeys(peaks, "estimated"), "memory_bytes": "measured"}
        ),
        sources=(raw()["per_cycle"]["cpu_core"]["source"],),
        notes=(
            f"Estimated: {cpu.cores:g} cores x FLOP per cycle of {cpu.isa} x {clock}. Instruction "
            f"sets: {', '.join(cpu.flags)}. measure() replaces the estimate by a measurement."
        ),
    )


def _flop_per_cycle(cpu: CPU, isa: str) -> dict[str, float]:
    table = raw()["per_cycle"]["cpu_core"]
    rates = dict(table[isa])
    if "amx_int8" in cpu.flags:
        return rates | {k: v for k, v in table["amx"].items() if f"amx_{k}" in cpu.flags}
    if cpu.vendor == "AMD":
        return rates
    return {dtype: rate for dtype, rate in rates.items() if dtype in ("fp32", "fp64")}


def _from_kind(kind: str, platform: str | None = None) -> Chip:
    try:
        return chips.find(kind)
    except KeyError as error:
        why = str(error.args[0])

    words = kind.lower()
    if platform == "cpu" or words == "cpu":
        return Chip(name=kind, kind="cpu", notes="A CPU about which nothing else is known.")
    if platform == "tpu" or words.startswith("tpu"):
        return Chip(name=kind, kind="tpu", vendor="Google", notes=why)

    # The name says more than the platform, which JAX may call "gpu" for both vendors.
    if any(word in words for word in ("nvidia", "tesla", "geforce", "quadro", "titan", "rtx")):
        return Chip(name=kind, kind="gpu", vendor="NVIDIA", notes=why)
    if platform == "cuda":
        return Chip(name=kind, kind="gpu", vendor="NVIDIA", notes=why)
    if platform == "rocm" or any(word in words for word in ("amd", "radeon", "instinct", "gfx")):
        return Chip(name=kind, kind="gpu", vendor="AMD", notes=why)
    return Chip(name=kind, kind=platform or "unknown", notes=why)


def _fit_gpu(chip: Chip, device: Any) -> Chip:
    """Adapts the catalog's description of a GPU to a JAX device. The device reports its
    architecture and the number of multiprocessors that it can use."""
    capability = getattr(device, "compute_capability", None)
    if capability:
        chip = _with_architecture(chip, str(capability).split(":")[0])  # "gfx942:sramecc+:xnack-"
    visible = getattr(device, "core_count", None)
    if not chip.known or not visible:
        return chip
    whole_name, slice_ = split_mig(device.device_kind)
    if slice_ is not None:
        return _mig_slice(chip, chips.find(whole_name), visible)
    return _partition(chip, visible)


def _with_architecture(chip: Chip, architecture: str) -> Chip:
    vendor = chip.vendor
    if architecture.startswith("gfx"):
        vendor = "AMD"
    elif vendor == "unknown":
        vendor = "NVIDIA"
    return dataclasses.replace(chip, architecture=architecture, vendor=vendor)


def _mig_slice(chip: Chip, whole: Chip, visible: int) -> Chip:
    """Returns a slice of a GPU with `visible` multiprocessors. Its entry in the catalog has the
    memory of the slice already."""
    multiprocessors = whole.units["multiprocessors"]
    share = visible / multiprocessors
    return dataclasses.replace(
        chip,
        peaks=FrozenTable({dtype: peak * share for dtype, peak in whole.peaks.items()}),
        notes=f"A slice: {visible} of {multiprocessors} multiprocessors. {whole.notes}",
        units=FrozenTable({**chip.units, "multiprocessors": visible}),
    )


def _partition(chip: Chip, visible: int) -> Chip:
    """Returns the share of a GPU of which this process sees only some multiprocessors."""
    key = "multiprocessors" if "multiprocessors" in chip.units else "compute_units"
    # RDNA chips report work-group processors, each of which has two compute units. Therefore, only
    # Instinct chips are compared.
    if key == "compute_units" and not str(chip.architecture).startswith("gfx9"):
        return chip
    whole = chip.units.get(key, 0) / chip.jax_devices_per_chip
    if not whole or visible >= 0.95 * whole:
        return chip
    part = f"{visible} of {whole:g} {key.replace('_', ' ')}"
    return dataclasses.replace(
        chip.scaled(visible / whole, basis="estimated"),
        units=FrozenTable({**chip.units, key: visible}),
        notes=f"A partition: {part}, memory in proportion. {chip.notes}",
        name=f"{chip.name}, {part}",
    )


def _fit_tpu(chip: Chip, device: Any) -> Chip:
    """Sets the number of JAX devices per chip: the number of cores of the chip divided by the
    number of cores of a device. On a TPU v4, the number of JAX devices per chip depends on
    settings."""
    cores, per_device = chip.units.get("cores"), getattr(device, "num_cores", None)
    if cores and per_device and cores % per_device == 0:
        return dataclasses.replace(chip, jax_devices_per_chip=cores // per_device)
    return chip
