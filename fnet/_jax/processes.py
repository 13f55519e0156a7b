"""Functions for runs of several processes, for example to exit a process without waiting for the
other processes.

Imported on first use.
"""

from __future__ import annotations

import atexit
import ctypes
from typing import Any

from fnet._jax._features import private

_FEATURE = "runs of several processes"
_api = private("jax._src.api", _FEATURE)
_clusters = private("jax._src.clusters", _FEATURE)
_dispatch = private("jax._src.dispatch", _FEATURE)
_distributed = private("jax._src.distributed", _FEATURE)
_xla_bridge = private("jax._src.xla_bridge", _FEATURE)


def cluster_size() -> int | None:
    """Returns the number of processes of the cluster that JAX detects, or None if it detects no
    cluster."""
    for kind in _clusters.ClusterEnv._cluster_types:
        if not kind.opt_in_only_method and kind.is_env_present():
            return kind.get_process_count()
    return None


def backend_is_up() -> bool:
    """Whether JAX has initialized its devices. After JAX has initialized its devices, a process can
    no longer join a run of several processes."""
    return _xla_bridge.backends_are_initialized()


def notes() -> Any:
    """Returns the client of JAX's key-value store, through which processes exchange short texts.
    Process 0 runs the store."""
    return _distributed.global_state.client


def leave() -> None:
    """Lets this process exit without waiting for the other processes of the run.

    Without `leave`, JAX waits for the other processes when this process exits. If the other
    processes do not exit before a timeout, JAX aborts this process. The function `leave`
    unregisters JAX's exit handlers from `atexit`. `leave` also keeps the objects of the connection
    alive, because JAX waits for the other processes when these objects are freed.
    """
    atexit.unregister(_api.clean_up)
    atexit.unregister(_dispatch.wait_for_tokens)
    state = _distributed.global_state
    for held in (state, state.client, state.service, state.preemption_sync_manager):
        if held is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
