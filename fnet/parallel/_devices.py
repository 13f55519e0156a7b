"""Devices by name: those of this machine, or of a TPU slice that is not there."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence

import jax

TPUS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")


def devices_of(what: str | Sequence[jax.Device]) -> list:
    """The devices that a plan is for: "local", a list, or a slice such as "v5e:4x4", whose devices can be compiled for.

    Raises:
        ValueError: for an empty list, a name that is neither, or a slice that TPUs of that kind do not come in.
        ModuleNotFoundError: for a slice, where libtpu is not installed.
    """
    if not isinstance(what, str):
        if not len(what):
            raise ValueError("plan: there must be at least one device; got an empty list")
        return list(what)
    if what == "local":
        return jax.local_devices()
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", what)
    if not found or found[1] not in TPUS:
        raise ValueError(f"plan: devices are 'local', a list of devices, or a TPU slice such as 'v5e:4x4' (of "
                         f"{', '.join(TPUS)}); got {what!r}")
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(f"plan: compiling for {what!r} needs libtpu: pip install 'fnet[tpu-plan]'",
                                  name="libtpu")
    # Nobody is to be asked about a TPU that is not here, and another process may compile, too.
    for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        os.environ.setdefault(name, "1")
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=what).devices)
    except Exception as error:    # libtpu's own, of several classes
        said = str(error).strip().split("\n")[0]
        raise ValueError(f"plan: TPUs do not come as {what!r}: {said}") from error
