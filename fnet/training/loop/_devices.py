"""Checks the devices of a run before anything is compiled for it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax

from fnet import _jax
from fnet.hardware import DeviceCheck, FaultyDevice, check_devices
from fnet.hardware._device_check import remember, remembered
from fnet.parallel import Plan
from fnet.training.loop._ending import PeerLost

_TIMEOUT = 300  # seconds to wait for the checks of the other processes, as in `parallel.feed`
_COULD_NOT = "could not check its devices"
_numbers: Iterator[int] = itertools.count()


def check(state: Any, plan: Plan | None, say: Callable[[str], None]) -> DeviceCheck | None:
    """Checks the devices of this process that a run with this state and plan may use. Returns None
    if they were found right before, or if FNET_PROBE is 0.

    All local devices of a platform are checked together, because the result is remembered for
    their kind. In a run of several processes, each one checks its own devices, and all of them
    raise an error if one of them must.

    Raises:
      FaultyDevice: a device computes wrong values.
      PeerLost: another process did not finish its check.
    """
    alone = jax.process_count() == 1
    checked = None
    try:
        devices = [] if os.environ.get("FNET_PROBE") == "0" else _local(state, plan)
        if devices and not remembered(devices):
            say("checking the devices, once for this kind, driver and jaxlib")
            checked = check_devices(devices)
            remember(devices, checked)
    except BaseException as error:
        if not alone:
            _exchange(f"{_COULD_NOT}: {type(error).__name__}: {error}")
        raise
    report = "" if checked is None else checked.report()
    if not alone:
        report = _together(report)
    if report:
        raise FaultyDevice(f"fit: {report}")
    return checked


def _local(state: Any, plan: Plan | None) -> list[Any]:
    """Returns the local devices of the platforms that the run uses."""
    if plan is not None and not plan.attached:  # `Spread` says so
        return []
    if plan is not None:
        used = set(plan.mesh.devices.flat)
    else:
        arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        used = {device for array in arrays for device in array.sharding.device_set}
    platforms = sorted({device.platform for device in used})
    if not platforms:  # the state consists of NumPy arrays
        return jax.local_devices()
    return [device for name in platforms for device in jax.local_devices(backend=name)]


def summary(checked: DeviceCheck) -> str:
    """Describes a check in which nothing was wrong."""
    said = f"checked {', '.join(checked.devices)} in {checked.seconds:.1f} s"
    return "; ".join([said, *(f"{one.device}: {one}" for one in checked.failed)])


def _together(report: str) -> str:
    """Returns the reports of all processes, the same in each one."""
    reports = _exchange(report)
    return "\n".join(f"process {process}: {text}" for process, text in sorted(reports.items()))


def _exchange(report: str) -> dict[int, str]:
    """Returns the reports of all processes that have something to report, through JAX's key-value
    store: a faulty device must not compute the agreement."""
    store, root = _jax.processes.notes(), f"fnet/devices/{next(_numbers)}"
    try:
        if report:
            store.key_value_set(f"{root}/{jax.process_index()}", report)
        store.wait_at_barrier(root, _TIMEOUT * 1000)
        return {
            int(name.rpartition("/")[2]): text for name, text in store.key_value_dir_get(f"{root}/")
        }
    except jax.errors.JaxRuntimeError as error:
        raise PeerLost(
            f"process {jax.process_index()} of {jax.process_count()} has checked its devices, and "
            f"another process has not within {_TIMEOUT} s ({str(error).splitlines()[0][:150]}): "
            "start all of them again, each with the same check_devices="
        ) from error
