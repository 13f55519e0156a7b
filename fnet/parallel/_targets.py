"""The devices of a sharding plan: the devices of this run, or devices that the user specifies by
name. Devices that are specified by name need not be attached."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from fnet import hardware
from fnet._util import _missing
from fnet.parallel import _gpus

# kind of a slice -> (name in the catalog, number of axes of its torus, minimum length of an axis
# that is a ring)
TPUS = {
    "v2": ("TPU v2", 2, 16),
    "v3": ("TPU v3", 2, 32),
    "v4": ("TPU v4", 3, 4),
    "v5e": ("TPU v5e", 2, 16),
    "v5p": ("TPU v5p", 3, 4),
    "v6e": ("TPU v6e", 2, 16),
    "tpu7x": ("TPU7x", 3, 4),
}
# Environment variables for loading libtpu without a TPU: no metadata server, no lock on the
# library, and no detection of hosts or of the kind of TPU, which would print warnings to stderr.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
}
_FORMS = (
    "'local', 'dividing', a list of devices, a slice of TPUs such as 'v5e:4x4' or 'v5p:4x4x4*2', GPUs such as "
    "'h100:4x8' (4 machines of 8), a chip such as 'RTX 3080', or a system such as 'dgx-1'"
)


_MOST = 1 << 20  # maximum number of chips


class Target(NamedTuple):
    """The devices of a plan.

    Attributes:
        name: the name that the user passed for the devices, or a text that describes a list of
            devices.
        chip: the chip, with its peaks and memory.
        count: number of JAX devices.
        groups: number of slices or machines that contain the devices. The network between slices or
            machines is slower than the links within a slice or machine.
        devices: devices to compile for, or None if this process cannot compile programs for the
            target.
        attached: whether the devices are attached, so that a program can run.
        why: the reason why `devices` is None, or "".
        sent: bytes/s that a device can send to the devices of its own slice or machine, or None if
            unknown.
        sent_between: bytes/s that a device can send to other slices or machines, or None if
            unknown.
    """

    name: str
    chip: hardware.Chip
    count: int
    groups: int = 1
    devices: list | None = None
    attached: bool = False
    why: str = ""
    sent: float | None = None
    sent_between: float | None = None

    def __str__(self):
        chips = max(1, self.count // self.chip.jax_devices_per_chip)
        divided = (
            f" in {self.groups} {'slices' if self.chip.kind == 'tpu' else 'machines'}"
            if self.groups > 1
            else ""
        )
        if chips == self.count or self.chip.kind == "cpu":
            return f"{self.count} x {self.chip.name}{divided}"
        return f"{chips} x {self.chip.name} ({self.count} devices){divided}"


def target(what: str | Sequence[jax.Device]) -> Target:
    """Returns the `Target`, a description of devices, for a name or a list of devices.

    Raises:
        ValueError: the list of devices is empty, the name is unknown, or the slice does not exist
            for the given kind of TPU.
    """
    if not isinstance(what, str):
        if not isinstance(what, Iterable):
            raise TypeError(
                f"plan: devices must be the name of devices or a list of devices; got {what!r}"
            )
        devices = list(what)
        if not devices:
            raise ValueError("plan: expected at least one device; got an empty list")
        return _present(devices, f"{len(devices)} devices")
    if what == "local":
        return _present(list(jax.devices()), what)
    kind, _, shape = what.strip().lower().partition(":")
    if not shape:
        return _by_name(what.strip())
    found = re.fullmatch(r"(\d+(?:x\d+)*)(?:\*(\d+))?", shape)
    if found and math.prod(int(n[:30]) for n in re.findall(r"[1-9]\d*", shape)) > _MOST:
        raise ValueError(f"plan: {what!r} has more than {_MOST:,} chips, the maximum")
    if found and kind in TPUS:
        return _slice(what, kind, tuple(map(int, found[1].split("x"))), int(found[2] or 1))
    if found and kind in hardware.chips and hardware.chips[kind].kind == "gpu":
        return _machines(
            what, hardware.chips[kind], tuple(map(int, found[1].split("x"))), int(found[2] or 1)
        )
    raise ValueError(f"plan: devices must be {_FORMS}; got {what!r}" + _nearest(kind))


def dividing(rows: Iterable[int], mesh: Any) -> list[jax.Device]:
    """Returns the most devices of this run over which all numbers of rows can be divided, the same
    number of each process as far as possible.

    Args:
        rows: numbers of rows.
        mesh: the lengths of the mesh's axes, or None.

    Raises:
        ValueError: the mesh is not a dict, or there are fewer such devices than processes.
    """
    if mesh is not None and not isinstance(mesh, Mapping):
        raise ValueError(
            "plan: devices='dividing' chooses the devices, and this mesh has its own; pass the "
            "lengths of its axes, such as mesh={'tensor': 2}"
        )
    whole = math.gcd(*rows)
    tied = math.prod(
        n for name, n in (mesh or {}).items() if name not in ("data", "slice") and n > 0
    )
    by_process: dict[int, list] = {}
    for device in jax.devices():
        by_process.setdefault(device.process_index, []).append(device)
    queue = [
        devices[i]
        for i in range(max(map(len, by_process.values())))
        for devices in by_process.values()
        if i < len(devices)
    ]
    most = next(
        (n for n in range(len(queue), 0, -1) if n % tied == 0 and whole % (n // tied) == 0), 0
    )
    if most < len(by_process):
        raise ValueError(
            f"plan: no number of devices from {len(by_process)}, one of each process, to {len(queue)} "
            f"divides {whole} rows" + f" x {tied} (mesh={dict(mesh or {})})" * (tied > 1)
        )
    used = set(queue[:most])
    return [device for device in jax.devices() if device in used]


def _nearest(name) -> str:
    if len(variants := hardware.chips.variants(name)) > 1:
        return f": the catalog has {len(variants)} chips {name!r}: {', '.join(map(repr, variants))}; choose one"
    known = (*TPUS, *hardware.chips.nearest(name, 2))
    return (
        f": unknown chip {name!r}; slices are of {', '.join(TPUS)}; similar names in the catalog: "
        + ", ".join(repr(near) for near in known[len(TPUS) :])
    )


def _present(devices, name) -> Target:
    chip = hardware.detect(devices[0])
    hosts = {device.process_index for device in devices}
    groups = _groups([getattr(device, "slice_index", None) for device in devices])
    if groups == 1 and chip.kind != "tpu":
        groups = _groups([device.process_index for device in devices])
    here = jax.process_count() == 1 or jax.process_index() in hosts
    axes = None
    if chip.kind == "tpu" and hasattr(devices[0], "coords"):
        axes = [
            len({device.coords[i] for device in devices}) for i in range(len(devices[0].coords))
        ]
    return Target(
        name,
        chip,
        len(devices),
        groups,
        devices,
        here,
        "",
        *_rates(chip, axes, len(devices) // groups),
    )


def _groups(of_devices: list) -> int:
    """Returns the number of groups of devices, or 1 if they are not of equal size: a mesh axis over
    the groups needs as many devices of each."""
    counts = collections.Counter(of_devices).values()
    return len(counts) if len(set(counts)) == 1 else 1


def _by_name(name) -> Target:
    if name in hardware.systems:
        system = hardware.systems[name]
        return _absent(name, system.chip, system.count * system.chip.jax_devices_per_chip)
    if name in hardware.chips:
        chip = hardware.chips[name]
        return _absent(name, chip, chip.jax_devices_per_chip)
    raise ValueError(f"plan: devices must be {_FORMS}; got {name!r}" + _nearest(name))


def _absent(name, chip, count, groups=1) -> Target:
    devices, why = (
        _gpus.devices(chip, count // groups, groups)
        if chip.kind == "gpu"
        else (
            None,
            f"libtpu cannot compile for a single {chip.name}; use a slice, such as "
            f"'{_example(chip)}'"
            if chip.kind == "tpu"
            else f"{chip.name} is not attached",
        )
    )
    return Target(
        name, chip, count, groups, devices, False, why, *_rates(chip, None, count // groups)
    )


def _example(chip) -> str:
    return next(
        (
            f"{kind}:{'x'.join(['2', '2', '1'][:axes])}"
            for kind, (name, axes, _) in TPUS.items()
            if hardware.chips[name].name == chip.name
        ),
        "v5e:2x2",
    )


def _machines(name, chip, shape, repeated) -> Target:
    machines, each = (1, shape[0]) if len(shape) == 1 else shape[:2]
    if len(shape) > 2 or not machines * each * repeated:
        raise ValueError(
            "plan: GPUs must be MACHINESxGPUS, such as 'h100:4x8', or GPUS of one machine, "
            f"'h100:8'; got {name!r}"
        )
    machines *= repeated
    return _absent(name, chip, machines * each, machines)


def _slice(name, kind, shape, slices) -> Target:
    catalog, axes, ring = TPUS[kind]
    chip = hardware.chips[catalog]
    if len(shape) != axes or not all(shape) or not slices:
        raise ValueError(
            f"plan: slices of {chip.name} have {axes} axes, e.g. "
            f"'{kind}:{'x'.join(['2'] * axes)}'; got {name!r}"
        )
    rates = _rates(chip, shape, math.prod(shape) * chip.jax_devices_per_chip, ring)
    count = math.prod(shape) * slices * chip.jax_devices_per_chip
    here = Target(name, chip, count, slices, None, False, "", *rates)
    largest = ring if axes == 2 else 32
    if any(n > largest or (n > 2 and n % 4) for n in shape):
        raise ValueError(
            f"plan: there are no TPUs {name!r}: an axis must be 1, 2 or a multiple of 4, up to "
            f"{largest}"
        )
    if importlib.util.find_spec("libtpu") is None:
        return here._replace(
            why=_missing.message("compiling for TPUs that are not attached needs", "libtpu")
        )
    from jax.experimental import topologies

    options = {"num_slices": slices} if slices > 1 else {}
    if kind == "v4":  # the two cores of a chip are one device, as in JAX on a v4
        options["chip_config_name"] = "megacore"
    try:
        with _environment(_LIBTPU):
            devices = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{kind}:{'x'.join(map(str, shape))}", **options
            ).devices
    except (RuntimeError, ValueError) as error:  # jaxlib's JaxRuntimeError is a RuntimeError
        said = str(error).strip().split("\n")[0]
        raise ValueError(f"plan: there are no TPUs {name!r}: {said}") from error
    return here._replace(devices=list(devices))


@contextlib.contextmanager
def _environment(variables: dict[str, str]):
    """Temporarily sets environment variables that are not set yet."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _rates(chip, axes, group, ring=4) -> tuple[float | None, float | None]:
    """Returns the bytes/s that a device can send within its slice or machine, and to other slices
    or machines.

    In a torus of TPU chips, a chip has two links along each axis, or one link along an axis of two
    chips. Each axis of the torus that has more than two chips is treated as a closed ring. In fact,
    a short axis of a TPU slice is not a closed ring: the first and the last chip along this axis
    have one link fewer than the other chips. If a chip has several devices, they share its links.
    """
    links = chip.links
    if links is None:
        return None, None
    share = chip.jax_devices_per_chip
    within = links.total / 2 if links.total else None
    if chip.kind == "tpu":
        used = sum(0 if n == 1 else 1 if n == 2 else 2 for n in axes) if axes else links.count
        within = used * links.each_way if links.each_way and used else within
    return within and within / share, links.network and links.network / share
