"""Measured energy: the counters of CPUs (RAPL) and of NVIDIA GPUs (NVML), where they can be read."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

_POWERCAP = "/sys/class/powercap"


class Counter(NamedTuple):
    """A counter of energy. `read` returns its joules, which begin again at 0 above `range`."""

    name: str
    read: Callable[[], float]
    range: float | None = None


class EnergyMeter:
    """Adds up the energy that counters have counted since it was created.

        meter = energy_meter()
        ...
        if meter is not None:
            print(meter.joules(), "J by", meter.source)

    A counter that begins again at 0 is followed, if `joules` is called at least once in each round;
    a RAPL counter's takes at least some minutes. A counter that can no longer be read stops.

    Attributes:
        source: the names of the counters, such as "RAPL package-0".

    >>> meter = hw.energy_meter()
    >>> meter is None or isinstance(meter, hw.EnergyMeter)
    True
    """

    def __init__(self, counters: Sequence[Counter]):
        self._counters = list(counters)
        self._last = {each.name: each.read() for each in self._counters}
        self._total = 0.0

    @property
    def source(self) -> str:
        return ", ".join(each.name for each in self._counters)

    def joules(self) -> float:
        """The joules since the meter was created."""
        for each in self._counters:
            with contextlib.suppress(OSError, ValueError):
                now = each.read()
                used = now - self._last[each.name]
                if used < 0:  # began again
                    used = used + each.range if each.range else 0.0
                self._total += used
                self._last[each.name] = now
        return self._total


def energy_meter(
    devices: Sequence[Any] | None = None, *, root: str | os.PathLike = _POWERCAP
) -> EnergyMeter | None:
    """Returns a meter of the energy of this machine's chips, or None if nothing can be read.

    CPUs are counted by RAPL (whole packages, memory and other programs included), which Linux often
    lets only root read. NVIDIA GPUs are counted by NVML, if the package nvidia-ml-py is installed.

    Args:
        devices: the `jax.Device`s whose energy counts. Default None: all local devices. GPUs count
            beside the CPUs that feed them.
        root: the folder of Linux' power capping framework.

    >>> meter = hw.energy_meter()
    >>> meter is None or meter.joules() >= 0
    True
    """
    devices = jax.local_devices() if devices is None else devices
    counters = [*_rapl(Path(root)), *_nvml([each for each in devices if each.platform != "cpu"])]
    return EnergyMeter(counters) if counters else None


def _rapl(root: Path) -> list[Counter]:
    """The counters of the CPU packages. Those of their parts, and of the whole platform, would count
    the same energy again."""
    counters = []
    for folder in sorted(root.glob("*rapl:*")):
        with contextlib.suppress(OSError, ValueError):
            name = (folder / "name").read_text().strip()
            if folder.name.count(":") != 1 or not name.startswith("package"):
                continue
            counter = Counter(f"RAPL {name}", _microjoules(folder / "energy_uj"), _range(folder))
            counter.read()  # raises an error without permission
            counters.append(counter)
    return list({each.name: each for each in counters}.values())


def _microjoules(file: Path) -> Callable[[], float]:
    return lambda: int(file.read_text()) * 1e-6


def _range(folder: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        return (int((folder / "max_energy_range_uj").read_text()) + 1) * 1e-6
    return None


def _nvml(devices: Sequence[Any]) -> list[Counter]:
    """The counters of NVIDIA GPUs since Volta. Nothing is said if NVML is missing or refuses."""
    if not devices or importlib.util.find_spec("pynvml") is None:
        return []
    import pynvml

    counters = []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    for device in devices:
        index = getattr(device, "local_hardware_id", None)
        with contextlib.suppress(pynvml.NVMLError, OSError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(device.id if index is None else index)
            counter = Counter(f"NVML GPU {index}", _millijoules(pynvml, handle))
            counter.read()
            counters.append(counter)
    return counters


def _millijoules(pynvml: Any, handle: Any) -> Callable[[], float]:
    def read() -> float:
        try:
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) * 1e-3
        except pynvml.NVMLError as error:
            raise OSError(str(error)) from error

    return read
