"""Finds the chip of a JAX device, or of a device kind, in the catalog."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from fnet.hardware._chip import Chip, FrozenTable
from fnet.hardware._chips import chips, raw, split_mig
from fnet.hardware._cpu import CPU, read_cpu


def detect(device: Any = None) -> Chip:
    """Returns the chip of a JAX device.

    If only a part of a chip is available, the peaks are scaled to this part. For a MIG slice or a
    partition of a GPU, the peaks are scaled to the visible multiprocessors. For a CPU, the peaks
    are scaled to the physical cores that the affinity mask and the cgroup quota allow this process
    to use. `jax_devices_per_chip` is the number of JAX devices that share the chip. `detect` does
    not measure rates; for measured rates, use `measure`.

    Args:
        device: a `jax.Device`, or a device kind such as "TPU v5 lite". A device kind may also name
            a device that is not attached to this machine. If `device` is None (the default), the
            first local device is used.

    Returns:
        A `Chip`, from the catalog if possible. For a CPU that is not in the catalog, the peaks are
        estimated from its instruction set. For a device that is neither a CPU nor in the catalog,
        the `Chip` has `known=False` and no peaks.

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
    common = dict(jax_devices_per_chip=devices, memory_bytes=cpu.memory_bytes)
    flags = ", ".join(cpu.flags)
    for row in chips.values():
        if row.units.get("model_name") and row.units["model_name"] in cpu.model and cpu.cores:
            share = min(1.0, cpu.cores / row.units["cores"])
            units = FrozenTable({**row.units, "cores": cpu.cores, "flags": cpu.flags})
            note = f"{cpu.cores:g} of {row.units['cores']} cores are available to this process. {row.notes}"
            bases = FrozenTable({**row.bases, "memory_bytes": "measured"})
            return dataclasses.replace(
                row.scaled(share, 1), units=units, notes=note, bases=bases, **common
            )
    name = (
        cpu.model
        if cpu.cores is None
        else f"{cpu.model}, {cpu.cores:g} core{'s' if cpu.cores != 1 else ''}"
    )
    table = raw()["per_cycle"]["cpu_core"]
    if cpu.isa is None or cpu.clock_ghz is None or cpu.cores is None:
        missing = (
            "instruction set" if cpu.isa is None else "clock" if cpu.clock_ghz is None else "cores"
        )
        return Chip(
            name=name,
            kind="cpu",
            vendor=cpu.vendor,
            units=FrozenTable(flags=cpu.flags),
            **common,
            notes=f"The {missing} of this CPU could not be read, so its peak is unknown. Call measure().",
        )
    rates = dict(table[cpu.isa])
    if "amx_int8" in cpu.flags:
        rates |= {k: v for k, v in table["amx"].items() if f"amx_{k}" in cpu.flags}
    elif cpu.vendor != "AMD":
        rates = {k: v for k, v in rates.items() if k in ("fp32", "fp64")}
    peaks = {k: cpu.cores * v * cpu.clock_ghz * 1e9 for k, v in rates.items()}
    unsure = (
        " reported by a virtual machine, which may be wrong by a factor of two"
        if cpu.virtual
        else ""
    )
    note = (
        f"Estimated: {cpu.cores:g} cores x FLOP per cycle of {cpu.isa} x {cpu.clock_ghz:.2f} "
        f"GHz{unsure}. "
        f"Instruction sets: {flags}. measure() replaces the estimate by a measurement."
    )
    return Chip(
        name=name,
        kind="cpu",
        vendor=cpu.vendor,
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
        bases=FrozenTable({k: "estimated" for k in peaks} | {"memory_bytes": "measured"}),
        sources=(table["source"],),
        notes=note,
        **common,
    )


def _from_kind(kind: str, platform: str | None = None) -> Chip:
    try:
        return chips.find(kind)
    except KeyError as error:
        why = str(error.args[0])
    lower = kind.lower()
    if platform == "cpu" or lower == "cpu":
        return Chip(name=kind, kind="cpu", notes="A CPU about which nothing else is known.")
    if platform == "tpu" or lower.startswith("tpu"):
        return Chip(name=kind, kind="tpu", vendor="Google", notes=why)
    nvidia = any(word in lower for word in ("nvidia", "tesla", "geforce", "quadro", "titan", "rtx"))
    amd = any(word in lower for word in ("amd", "radeon", "instinct", "gfx"))
    gpu = nvidia or amd or platform in ("gpu", "cuda", "rocm")
    vendor = (
        "NVIDIA"
        if nvidia or platform == "cuda"
        else "AMD"
        if amd or platform == "rocm"
        else "unknown"
    )
    return Chip(name=kind, kind="gpu" if gpu else platform or "unknown", vendor=vendor, notes=why)


def _fit_gpu(chip: Chip, device: Any) -> Chip:
    """Adapts the catalog's description of a GPU to a JAX device. The device reports its
    architecture and the number of multiprocessors that it can use."""
    capability = getattr(device, "compute_capability", None)
    if capability:
        capability = str(capability).split(":")[0]  # "gfx942:sramecc+:xnack-"
        vendor = (
            "AMD"
            if capability.startswith("gfx")
            else "NVIDIA"
            if chip.vendor == "unknown"
            else chip.vendor
        )
        chip = dataclasses.replace(chip, architecture=capability, vendor=vendor)
    visible = getattr(device, "core_count", None)
    if not chip.known or not visible:
        return chip
    mig = split_mig(device.device_kind)[1] is not None
    if mig:
        whole = chips.find(split_mig(device.device_kind)[0])
        compute = visible / whole.units["multiprocessors"]
        peaks = FrozenTable({k: v * compute for k, v in whole.peaks.items()})
        note = (
            f"A slice: {visible} of {whole.units['multiprocessors']} multiprocessors. {whole.notes}"
        )
        return dataclasses.replace(
            chip,
            peaks=peaks,
            notes=note,
            units=FrozenTable({**chip.units, "multiprocessors": visible}),
        )
    # RDNA chips report work-group processors, each of which has two compute units. Therefore, only
    # Instinct chips are compared.
    key = "multiprocessors" if "multiprocessors" in chip.units else "compute_units"
    if key == "compute_units" and not str(chip.architecture).startswith("gfx9"):
        return chip
    whole = chip.units.get(key, 0) / chip.jax_devices_per_chip
    if whole and visible < 0.95 * whole:
        share = visible / whole
        note = f"A partition: {visible} of {whole:g} {key.replace('_', ' ')}, memory in proportion. {chip.notes}"
        units = FrozenTable({**chip.units, key: visible})
        return dataclasses.replace(
            chip.scaled(share, basis="estimated"),
            units=units,
            notes=note,
            name=f"{chip.name}, {visible} of {whole:g} {key.replace('_', ' ')}",
        )
    return chip


def _fit_tpu(chip: Chip, device: Any) -> Chip:
    """Sets the number of JAX devices per chip: the number of cores of the chip divided by the
    number of cores of a device. On a TPU v4, the number of JAX devices per chip depends on
    settings."""
    cores, per_device = chip.units.get("cores"), getattr(device, "num_cores", None)
    if cores and per_device and cores % per_device == 0:
        return dataclasses.replace(chip, jax_devices_per_chip=cores // per_device)
    return chip
