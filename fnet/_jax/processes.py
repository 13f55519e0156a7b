"""Processes: whether there are several, what they tell each other, and how one exits after others are gone.

Imported on first use.
"""

from __future__ import annotations

import atexit
import ctypes

from fnet._jax._features import private

_FEATURE = "runs of several processes"
_api = private("jax._src.api", _FEATURE)
_clusters = private("jax._src.clusters", _FEATURE)
_dispatch = private("jax._src.dispatch", _FEATURE)
_distributed = private("jax._src.distributed", _FEATURE)
_xla_bridge = private("jax._src.xla_bridge", _FEATURE)


def cluster_size() -> int | None:
    """Returns the number of processes of the cluster that JAX detects, or None if it detects no cluster."""
    for kind in _clusters.ClusterEnv._cluster_types:
        if not kind.opt_in_only_method and kind.is_env_present():
            return kind.get_process_count()
    return None


def backend_is_up() -> bool:
    """Whether JAX has asked for devices, after which processes can no longer find each other."""
    return _xla_bridge.backends_are_initialized()


def notes():
    """The store in which the processes of a run leave each other short texts, kept by the first of them."""
    return _distributed.global_state.client


def leave() -> None:
    """Lets this process end by itself, without waiting for processes that are gone.

    Else JAX stands before a barrier at the exit until its time-out, and then aborts. What holds the connection is never
    freed, since freeing it waits as well.
    """
    atexit.unregister(_api.clean_up)
    atexit.unregister(_dispatch.wait_for_tokens)
    state = _distributed.global_state
    for held in (state, state.client, state.service, state.preemption_sync_manager):
        if held is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
