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
        affinity = _affinity()
    blocks = _blocks(_text(root / "proc/cpuinfo"))
    mine = [block for block in blocks if int(block.get("processor", -1)) in affinity] or blocks
    first = mine[0] if mine else {}
    flags = _flags(first)
    vendor = _vendor(first)

    cores: float | None = _physical(mine) if mine else None
    quota = _quota(root)
    if cores is not None and quota is not None:
        cores = min(float(cores), quota)

    named = first.get("model name") or platform.processor() or platform.machine()
    return CPU(
        model=named or "unknown CPU",
        vendor=vendor,
        cores=cores,
        threads=len(mine) or None,
        quota=quota,
        isa=_isa(first, flags, vendor),
        flags=tuple(flag for flag in _SHOWN_FLAGS if flag in flags),
        clock_ghz=_clock(root, first),
        virtual="hypervisor" in flags,
        memory_bytes=_memory(root),
    )


def _affinity() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):  # Linux has it, macOS and Windows do not
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _flags(block: dict[str, str]) -> set[str]:
    listed = block.get("flags") or block.get("Features") or ""  # "Features" on ARM
    return set(listed.replace("avx512bf16", "avx512_bf16").split())


def _vendor(block: dict[str, str]) -> str:
    names = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}
    other = "ARM" if "CPU implementer" in block else "unknown"
    return names.get(block.get("vendor_id", ""), other)


def _blocks(text: str) -> list[dict[str, str]]:
    """Returns the entries of /proc/cpuinfo that describe a logical CPU, {key: value} for each."""
    blocks = []
    for part in text.strip().split("\n\n"):
        block = {}
        for line in part.splitlines():
            key, colon, value = line.partition(":")
            if colon:
                block[key.strip()] = value.strip()
        if "processor" in block:
            blocks.append(block)
    return blocks


def _physical(blocks: list[dict[str, str]]) -> int:
    """Returns the number of physical cores in the entries of /proc/cpuinfo. Several hardware
    threads of one core are counted as one core, because they share arithmetic units."""
    return len({(b.get("physical id", "0"), b.get("core id", b["processor"])) for b in blocks})


def _isa(block: dict[str, str], flags: set[str], vendor: str) -> str | None:
    family = int(block.get("cpu family", 0) or 0)
    if "avx512f" in flags and vendor == "AMD":
        return "avx512_zen5" if family >= 26 else "avx512_zen4"
    if "avx512f" in flags:
        # Intel's client CPUs and small Xeons have one 512-bit FMA pipe. Larger Xeons have two.
        small = re.search(r"Core\(TM\)|Bronze|Silver|Xeon.* D-", block.get("model name", ""))
        return "avx512_one_fma" if small else "avx512_two_fma"
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
        for group in (path, *path.parents):
            if not controllers:
                quotas += _quota_v2(root / "sys/fs/cgroup" / group)
            elif "cpu" in controllers:
                quotas += _quota_v1(root / "sys/fs/cgroup/cpu" / group)
                quotas += _quota_v1(root / "sys/fs/cgroup/cpu,cpuacct" / group)
    return min(quotas, default=None)


def _quota_v2(group: Path) -> list[float]:
    words = _text(group / "cpu.max").split()  # "200000 100000", or "max 100000" without a limit
    if len(words) == 2 and words[0].isdigit():
        return [int(words[0]) / int(words[1])]
    return []


def _quota_v1(group: Path) -> list[float]:
    quota = _text(group / "cpu.cfs_quota_us").strip()  # "-1" without a limit
    period = _text(group / "cpu.cfs_period_us").strip()
    if quota.isdigit() and period.isdigit():
        return [int(quota) / int(period)]
    return []


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
