"""initialize: connects the processes of a run, with a timeout and clear errors."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence

import jax

from fnet import _jax


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    initialization_timeout: int = 600,
    heartbeat_timeout: int = 100,
    shutdown_timeout: int = 300,
) -> None:
    """Connects the processes of a run, so that `jax.devices()` lists the devices of all.

        parallel.initialize()                                    # on TPU slices, with Slurm, Open MPI or Kubernetes
        parallel.initialize("10.0.0.1:1234", 16, process_id)     # elsewhere: each process passes its index

    Call it in every process, before any other use of JAX. In a run of one process, and when called
    again, it does nothing. Pass the first three arguments together, or none of them if JAX can
    detect their values (see `jax.distributed.initialize`), or if `fnet run` has started the process.

    Args:
        coordinator_address: the address of process 0 as "host:port", such as "10.0.0.1:1234".
        num_processes: the number of processes in the run.
        process_id: the index of this process, from 0.
        local_device_ids: the indices of this machine's devices that this process uses. Default
            None: JAX selects them.
        initialization_timeout: the seconds within which all processes must start and connect.
            Default 600.
        heartbeat_timeout: the seconds without a heartbeat after which JAX takes a process for dead
            and ends the others. Default 100.
        shutdown_timeout: the seconds that a finished process waits for the others. Default 300.

    Raises:
        ValueError: `process_id` is out of range, the address is not host:port, a timeout is less
            than 1, or only one or two of the first three arguments are given and JAX cannot detect
            the rest.
        RuntimeError: the process has already used JAX, or JAX cannot connect to process 0.
        TimeoutError: not all processes connected within `initialization_timeout`. The message names
            this process and the address of process 0. (`jax.distributed.initialize` would end the
            process instead.)

    >>> parallel.initialize()    # no effect in a run of one process
    """
    seconds = {
        "initialization_timeout": initialization_timeout,
        "heartbeat_timeout": heartbeat_timeout,
        "shutdown_timeout": shutdown_timeout,
    }
    for name, value in seconds.items():
        if value < 1:
            raise ValueError(f"initialize: {name} must be >= 1 second; got {value}")
    if jax.distributed.is_initialized():
        return
    coordinator_address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if num_processes is None and process_id is None and "FNET_PROCESSES" in os.environ:
        num_processes, process_id = (int(os.environ[f"FNET_{x}"]) for x in ("PROCESSES", "PROCESS"))
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < 3 and not _jax.processes.cluster_size():
        there = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        raise ValueError(
            f"initialize: expected {' and '.join(missing)} together with {there}, because JAX "
            "detects no cluster here; pass all three, or none for a single process"
        )
    count = _jax.processes.cluster_size() if num_processes is None else num_processes
    if count in (None, 0, 1):
        return
    if not missing:
        _check(coordinator_address, num_processes, process_id)
    if _jax.processes.backend_is_up():
        raise RuntimeError(
            "initialize: JAX is already initialized with the devices of this process; call "
            "initialize before creating an array and before jax.devices()"
        )
    which = (
        f"process {process_id} of {count}"
        if process_id is not None
        else f"this one of {count} processes"
    )
    _join(
        which,
        coordinator_address,
        process_id == 0,
        initialization_timeout,
        {
            **given,
            "local_device_ids": local_device_ids,
            "heartbeat_timeout_seconds": heartbeat_timeout,
            "shutdown_timeout_seconds": shutdown_timeout,
        },
    )


def _check(address, processes, process):
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(
            f"initialize: coordinator_address must be host:port, such as '10.0.0.1:1234'; got "
            f"{address!r}"
        )
    if not 0 <= process < processes:
        raise ValueError(
            f"initialize: process_id={process} with num_processes={processes}: expected 0 to "
            f"{processes - 1}"
        )


def _join(which, address, first, seconds, options):
    """Calls `jax.distributed.initialize` in a thread, and waits at most `seconds` for this thread.
    The timeout of `jax.distributed.initialize` itself is longer, because after this timeout JAX
    ends the process without a helpful message."""
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
        raise RuntimeError(f"initialize: {which} cannot connect to {where} ({said})") from failed[0]
    if thread.is_alive():
        _jax.processes.leave()
        if first or not address or _answers(address):
            why = "not all of the others connected; start all of them with the same address and number of processes"
        else:
            why = "nothing answers there; check that process 0 is running at that address and is reachable"
        raise TimeoutError(
            f"initialize: {which} waited {seconds} s at {where}, and {why} "
            "(to wait longer, increase initialization_timeout=)"
        )


def _answers(address: str) -> bool:
    """Whether a process listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return True
    except (OSError, ValueError):
        return False
