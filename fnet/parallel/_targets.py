"""What a plan is for: the chips of this run, or chips that are not there, by name."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax

from fnet import hardware
from fnet.parallel import _gpus

# what a slice is called -> (the catalog's name, axes of its torus, the length from which an axis is a ring)
TPUS = {
    "v2": ("TPU v2", 2, 16), "v3": ("TPU v3", 2, 32), "v4": ("TPU v4", 3, 4), "v5e": ("TPU v5e", 2, 16),
    "v5p": ("TPU v5p", 3, 4), "v6e": ("TPU v6e", 2, 16), "tpu7x": ("TPU7x", 3, 4),
}
# What libtpu reads when it is loaded without a TPU: it asks no metadata server, lets other processes use it too, and
# looks for no hosts and no kind of TPU on this machine, which it would complain about on stderr.
_LIBTPU = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost",
           "TPU_ACCELERATOR_TYPE": "v5litepod-1"}
_FORMS = ("'local', a list of devices, a slice of TPUs such as 'v5e:4x4' or 'v5p:4x4x4*2', GPUs such as 'h100:4x8' (4 "
          "machines of 8), a chip such as 'RTX 3080', or a system such as 'dgx-1'")


_MOST = 1 << 20      # chips


class Target(NamedTuple):
    """Chips to plan for.

    Attributes:
        name: as the user said it.
        chip: what they are.
        count: JAX devices in all; groups: slices or machines among which they are divided, joined by a slower network.
        devices: those to compile for; None where that is not possible here, and `why` says why.
        here: whether they are, so that a program runs on them.
        sent: bytes/s that a device sends to others of its group, and `sent_between` to other groups; None: unknown.
    """

    name: str
    chip: hardware.Chip
    count: int
    groups: int = 1
    devices: list | None = None
    here: bool = False
    why: str = ""
    sent: float | None = None
    sent_between: float | None = None

    def __str__(self):
        chips = max(1, self.count // self.chip.jax_devices_per_chip)
        divided = f" in {self.groups} {'slices' if self.chip.kind == 'tpu' else 'machines'}" if self.groups > 1 else ""
        if chips == self.count or self.chip.kind == "cpu":
            return f"{self.count} x {self.chip.name}{divided}"
        return f"{chips} x {self.chip.name} ({self.count} devices){divided}"


def target(what: str | Sequence[jax.Device]) -> Target:
    """The chips that a name or a list of devices means.

    Raises:
        ValueError: for an empty list, a name of nothing, or a slice that TPUs of that kind do not come in.
    """
    if not isinstance(what, str):
        devices = list(what)
        if not devices:
            raise ValueError("plan: there must be at least one device; got an empty list")
        return _present(devices, f"{len(devices)} devices")
    if what == "local":
        return _present(list(jax.devices()), what)
    kind, _, shape = what.strip().lower().partition(":")
    if not shape:
        return _by_name(what.strip())
    found = re.fullmatch(r"(\d+(?:x\d+)*)(?:\*(\d+))?", shape)
    if found and math.prod(int(n[:30]) for n in re.findall(r"[1-9]\d*", shape)) > _MOST:
        raise ValueError(f"plan: {what!r} has more than {_MOST:,} chips, the most that are planned for")
    if found and kind in TPUS:
        return _slice(what, kind, tuple(map(int, found[1].split("x"))), int(found[2] or 1))
    if found and kind in hardware.chips and hardware.chips[kind].kind == "gpu":
        return _machines(what, hardware.chips[kind], tuple(map(int, found[1].split("x"))), int(found[2] or 1))
    raise ValueError(f"plan: devices are {_FORMS}; got {what!r}" + _nearest(kind))


def _nearest(name) -> str:
    known = (*TPUS, *hardware.chips.nearest(name, 2))
    return f": no chip is called {name!r}; slices are of {', '.join(TPUS)}, nearest in the catalog: " + ", ".join(
        repr(near) for near in known[len(TPUS):])


def _present(devices, name) -> Target:
    chip = hardware.detect(devices[0])
    hosts = {device.process_index for device in devices}
    slices = {getattr(device, "slice_index", None) for device in devices}
    groups = len(slices) if len(slices) > 1 else 1 if chip.kind == "tpu" else len(hosts)
    here = jax.process_count() == 1 or jax.process_index() in hosts
    axes = None
    if chip.kind == "tpu" and hasattr(devices[0], "coords"):
        axes = [len({device.coords[i] for device in devices}) for i in range(len(devices[0].coords))]
    return Target(name, chip, len(devices), groups, devices, here, "", *_rates(chip, axes, len(devices) // groups))


def _by_name(name) -> Target:
    if name in hardware.systems:
        system = hardware.systems[name]
        chip, count = system.chip, system.count * system.chip.jax_devices_per_chip
        return _absent(name, chip, count, 1, None)
    if name in hardware.chips:
        chip = hardware.chips[name]
        return _absent(name, chip, chip.jax_devices_per_chip, 1, None)
    raise ValueError(f"plan: devices are {_FORMS}; got {name!r}" + _nearest(name))


def _absent(name, chip, count, groups, axes, shape=None) -> Target:
    devices, why = _gpus.devices(chip, count // groups, groups) if chip.kind == "gpu" else (
        None, f"a single {chip.name} is not compiled for: name a slice, such as '{_example(chip)}'"
        if chip.kind == "tpu" else f"{chip.name} is not here")
    return Target(name, chip, count, groups, devices, False, why, *_rates(chip, axes, count // groups))


def _example(chip) -> str:
    return next((f"{kind}:{'x'.join(['2', '2', '1'][:axes])}" for kind, (name, axes, _) in TPUS.items()
                 if hardware.chips[name].name == chip.name), "v5e:2x2")


def _machines(name, chip, shape, repeated) -> Target:
    machines, each = (1, shape[0]) if len(shape) == 1 else shape[:2]
    if len(shape) > 2 or not machines * each * repeated:
        raise ValueError(f"plan: GPUs are MACHINESxGPUS, such as 'h100:4x8', or as many of one machine, 'h100:8'; got "
                         f"{name!r}")
    machines *= repeated
    return _absent(name, chip, machines * each, machines, None)


def _slice(name, kind, shape, slices) -> Target:
    catalog, axes, ring = TPUS[kind]
    chip = hardware.chips[catalog]
    if len(shape) != axes or not all(shape) or not slices:
        raise ValueError(f"plan: slices of {chip.name} have {axes} axes, as in '{kind}:{'x'.join(['2'] * axes)}'; got "
                         f"{name!r}")
    rates = _rates(chip, shape, math.prod(shape) * chip.jax_devices_per_chip, ring)
    count = math.prod(shape) * slices * chip.jax_devices_per_chip
    here = Target(name, chip, count, slices, None, False, "", *rates)
    largest = ring if axes == 2 else 32
    if any(n > largest or (n > 2 and n % 4) for n in shape):
        raise ValueError(f"plan: TPUs do not come as {name!r}: an axis is 1, 2 or a multiple of 4, up to {largest}")
    if importlib.util.find_spec("libtpu") is None:
        return here._replace(why="libtpu is not installed, which compiles for TPUs that are not there: pip install "
                                 "'fnet[tpu-plan]'")
    from jax.experimental import topologies

    options = {"num_slices": slices} if slices > 1 else {}
    if kind == "v4":    # two cores as one device, as JAX has them on such a chip
        options["chip_config_name"] = "megacore"
    try:
        with _environment(_LIBTPU):
            devices = topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{'x'.join(map(str, shape))}",
                                                   **options).devices
    except (RuntimeError, ValueError) as error:    # jaxlib's JaxRuntimeError is a RuntimeError
        said = str(error).strip().split("\n")[0]
        raise ValueError(f"plan: TPUs do not come as {name!r}: {said}") from error
    return here._replace(devices=list(devices))


@contextlib.contextmanager
def _environment(variables: dict[str, str]):
    """Sets environment variables that are not set yet, for a while."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _rates(chip, axes, group, ring=4) -> tuple[float | None, float | None]:
    """Bytes/s that a device sends within its group and between groups.

    A chip of a torus has two links along an axis, one along an axis of two chips; an axis too short for a ring sends as
    much, but for its ends. A chip's links are shared by its devices.
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
