"""The CPU resources that are available to this process: cores, instruction set, clock and memory.
Only Linux reports them."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Collection, Iterator
from pathlib import Path

_SHOWN_FLAGS = (
    "amx_fp16",
    "amx_bf16",
    "amx_int8",
    "avx512_fp16",
    "avx512_bf16",
    "avx512_vnni",
    "avx512f",
    "avx_vnni",
    "avx2",
    "fma",
    "avx",
    "sse4_2",
    "asimd",
    "sve",
    "sve2",
    "bf16",
    "i8mm",
)
BFLOAT16 = frozenset(("amx_bf16", "avx512_bf16"))  # x86 instructions for products of bfloat16


@dataclasses.dataclass(frozen=True)
class CPU:
    """The CPU resources available to this process.

    Attributes:
        model: the name that the CPU reports.
        vendor: "Intel", "AMD", "ARM" or "unknown".
        cores: the number of physical cores in the affinity mask of this process, or `quota` if
            `quota` is smaller; None if unknown. `cores` may be a fraction, because `quota` may be a
            fraction.
        threads: the number of hardware threads in the affinity mask, or None.
        quota: CPU seconds per second that the cgroup allows, or None if there is no limit.
        isa: the instruction set, such as "avx2", or None. A table in chips.json contains the FLOP
            per cycle of each instruction set.
        flags: the vector and matrix extensions of the CPU, such as "amx_bf16".
        clock_ghz: the clock that the system reports, or None.
        virtual: whether the machine is a virtual machine. In a virtual machine, the reported clock
            may be wrong by a factor of two.
        memory_bytes: the memory of the machine in bytes, or the limit of the cgroup if it is
            smaller; None if unknown.
    """

    model: str
    vendor: str
    cores: float | None
    threads: int | None
    quota: float | None
    isa: str | None
    flags: tuple[str, ...]
    clock_ghz: float | None
    virtual: bool
    memory_bytes: float | None


def read_cpu(root: str | os.PathLike = "/", affinity: Collection[int] | None = None) -> CPU:
    """Reads the CPU resources from /proc and /sys under `root`, for the logical CPUs in `affinity`
    (default: this process's affinity mask)."""
    root = Path(root)
    if affinity is None:
        affinity = (
            os.sched_getaffinity(0)
            if hasattr(os, "sched_getaffinity")
            else range(os.cpu_count() or 1)
        )
    blocks = _blocks(_text(root / "proc/cpuinfo"))
    mine = [b for b in blocks if int(b.get("processor", -1)) in affinity] or blocks
    first = mine[0] if mine else {}
    flags = set(
        (first.get("flags") or first.get("Features") or "")
        .replace("avx512bf16", "avx512_bf16")
        .split()
    )
    quota = _quota(root)
    cores = _physical(mine) if mine else None
    if cores is not None and quota is not None:
        cores = min(float(cores), quota)
    vendor = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}.get(
        first.get("vendor_id", ""), "ARM" if "CPU implementer" in first else "unknown"
    )
    isa = _isa(first, flags, vendor)
    kept = tuple(f for f in _SHOWN_FLAGS if f in flags)
    return CPU(
        model=first.get("model name")
        or platform.processor()
        or platform.machine()
        or "unknown CPU",
        vendor=vendor,
        cores=cores,
        threads=len(mine) or None,
        quota=quota,
        isa=isa,
        flags=kept,
        clock_ghz=_clock(root, first),
        virtual="hypervisor" in flags,
        memory_bytes=_memory(root),
    )


def _blocks(text: str) -> list[dict[str, str]]:
    pairs = [
        [line.split(":", 1) for line in part.splitlines() if ":" in line]
        for part in text.strip().split("\n\n")
    ]
    blocks = [{key.strip(): value.strip() for key, value in each} for each in pairs]
    return [block for block in blocks if "processor" in block]


def _physical(blocks: list[dict[str, str]]) -> int:
    """Returns the number of physical cores in the entries of /proc/cpuinfo. Several hardware
    threads of one core are counted as one core, because they share arithmetic units."""
    return len({(b.get("physical id", "0"), b.get("core id", b["processor"])) for b in blocks})


def _isa(block: dict[str, str], flags: set[str], vendor: str) -> str | None:
    family = int(block.get("cpu family", 0) or 0)
    model = block.get("model name", "")
    if "avx512f" in flags:
        if vendor == "AMD":
            return "avx512_zen5" if family >= 26 else "avx512_zen4"
        # Intel's client CPUs and small Xeons have one 512-bit FMA pipe. Larger Xeons have two.
        return (
            "avx512_one_fma"
            if re.search(r"Core\(TM\)|Bronze|Silver|Xeon.* D-", model)
            else "avx512_two_fma"
        )
    if "avx2" in flags and "fma" in flags:
        zen1 = vendor == "AMD" and family == 23 and int(block.get("model", 0) or 0) < 0x30
        return "avx2_zen1" if zen1 else "avx2"
    if "avx" in flags:
        return "avx"
    if "sse4_2" in flags:
        return "sse4"
    if "asimd" in flags:
        return "sve_wide" if "sve" in flags else "neon"
    return None


def _clock(root: Path, block: dict[str, str]) -> float | None:
    limit = _text(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq").strip()
    if limit.isdigit():
        return int(limit) / 1e6
    named = re.search(r"@\s*([\d.]+)\s*GHz", block.get("model name", ""))
    if named:
        return float(named[1])
    return float(block["cpu MHz"]) / 1e3 if block.get("cpu MHz") else None


def _quota(root: Path) -> float | None:
    """Returns the number of CPU seconds that this process may use per second, or None if there is
    no limit. The limit is the smallest quota of the process's cgroup (version 1 or 2) and of the
    parents of this cgroup."""
    quotas = []
    for controllers, path in _cgroups(root):
        for step in (path, *path.parents):
            if not controllers:
                text = _text(root / "sys/fs/cgroup" / step / "cpu.max").split()
                if len(text) == 2 and text[0].isdigit():
                    quotas.append(int(text[0]) / int(text[1]))
            elif "cpu" in controllers:
                for mount in ("cpu", "cpu,cpuacct"):
                    quota = _text(
                        root / "sys/fs/cgroup" / mount / step / "cpu.cfs_quota_us"
                    ).strip()
                    period = _text(
                        root / "sys/fs/cgroup" / mount / step / "cpu.cfs_period_us"
                    ).strip()
                    if quota.isdigit() and period.isdigit():
                        quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory(root: Path) -> float | None:
    total = re.search(r"MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"))
    limits = [int(total[1]) * 1024.0] if total else []
    for controllers, step in _cgroups(root):
        if not controllers:
            value = _text(root / "sys/fs/cgroup" / step / "memory.max").strip()
        elif "memory" in controllers:
            value = _text(root / "sys/fs/cgroup/memory" / step / "memory.limit_in_bytes").strip()
        else:
            continue
        if value.isdigit():
            limits.append(float(value))
    return min(limits, default=None)


def _cgroups(root: Path) -> Iterator[tuple[list[str], Path]]:
    """Yields (controllers, relative path) of the cgroups of this process. In cgroups of version 2,
    `controllers` is empty."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        yield list(filter(None, controllers.split(","))), Path(*Path(path).parts[1:])


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
