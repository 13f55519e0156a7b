"""initialize: the processes of a run find each other, within a time that is said."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence

import jax

from fnet import _jax


def initialize(coordinator_address: str | None = None, num_processes: int | None = None,
               process_id: int | None = None, *, local_device_ids: int | Sequence[int] | None = None,
               initialization_timeout: int = 600, heartbeat_timeout: int = 100, shutdown_timeout: int = 300) -> None:
    """Joins this process to the others of a run, so that `jax.devices()` are those of all; alone it does nothing.

        parallel.initialize()                                    # on TPU slices, under Slurm, Open MPI, Kubernetes
        parallel.initialize("10.0.0.1:1234", 16, process_id)     # elsewhere: each process says which it is

    To be called before anything else is done with JAX, by every process. A second call does nothing.

    Args:
        coordinator_address: host and port of process 0. All three of these, or none where JAX finds them out
            (`jax.distributed.initialize` says how).
        num_processes: how many there are.
        process_id: which this one is, from 0.
        local_device_ids: which of this machine's devices are this process's; None: all, or JAX's choice.
        initialization_timeout: seconds for all of them to come, cold starts included.
        heartbeat_timeout: seconds without a sign of life after which JAX takes a process for dead and ends the others.
        shutdown_timeout: seconds that a process which is done waits for the others.

    Raises:
        ValueError: some of the three given, not all; a process id that there is not; no host:port; a time-out of 0.
        RuntimeError: JAX is in use already, or cannot join.
        TimeoutError: the others were not there in time; naming the address and this process.

    Source: jax.distributed.initialize, which ends the process where this raises.
    """
    seconds = {"initialization_timeout": initialization_timeout, "heartbeat_timeout": heartbeat_timeout,
               "shutdown_timeout": shutdown_timeout}
    for name, value in seconds.items():
        if value < 1:
            raise ValueError(f"initialize: {name}={value}: it is in seconds, at least 1")
    if jax.distributed.is_initialized():
        return
    coordinator_address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    given = {"coordinator_address": coordinator_address, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < 3 and not _jax.processes.cluster_size():
        there = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        raise ValueError(f"initialize: {' and '.join(missing)} missing beside {there}, and JAX finds no cluster here "
                         "to ask: give all three, or none on one process")
    count = _jax.processes.cluster_size() if num_processes is None else num_processes
    if count in (None, 0, 1):
        return
    if not missing:
        _check(coordinator_address, num_processes, process_id)
    if _jax.processes.backend_is_up():
        raise RuntimeError("initialize: JAX has begun already, with this process's devices alone: call initialize "
                           "before any array is made and before jax.devices()")
    which = f"process {process_id} of {count}" if process_id is not None else f"this one of {count} processes"
    _join(which, coordinator_address, process_id == 0, initialization_timeout,
          {**given, "local_device_ids": local_device_ids, "heartbeat_timeout_seconds": heartbeat_timeout,
           "shutdown_timeout_seconds": shutdown_timeout})


def _check(address, processes, process):
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"initialize: coordinator_address={address!r}: it is a host and a port, as in '10.0.0.1:1234'")
    if not 0 <= process < processes:
        raise ValueError(f"initialize: process_id={process} of num_processes={processes}: they count from 0, to "
                         f"{processes - 1}")


def _join(which, address, first, seconds, options):
    """In a thread: JAX ends the process when its own time is up, and says nothing that helps."""
    failed: list[BaseException] = []

    def join():
        try:
            jax.distributed.initialize(**options, initialization_timeout=seconds + 3600)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=join, daemon=True, name="initialize")
    thread.start()
    thread.join(seconds)
    where = address or "the coordinator that JAX found"
    if failed:
        said = str(failed[0]).strip().split("\n")[0]
        raise RuntimeError(f"initialize: {which} cannot join the run at {where} ({said})") from failed[0]
    if thread.is_alive():
        _jax.processes.leave()
        if first or not address or _answers(address):
            why = "not all of the others came: start every one, with the same address and number"
        else:
            why = "nothing answers there: is process 0 running at that address, and may it be reached?"
        raise TimeoutError(f"initialize: {which} waited {seconds} s at {where}, and {why} "
                           "(initialization_timeout= gives them longer)")


def _answers(address: str) -> bool:
    """Whether somebody listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return True
    except (OSError, ValueError):
        return False
