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
    """JAX's key-value store, which the first process hosts and through which processes exchange short texts."""
    return _distributed.global_state.client


def leave() -> None:
    """Lets this process exit without waiting for processes that have ended.

    Otherwise, JAX waits at a barrier on exit until the timeout, and then aborts. The objects that hold the connection
    are never freed, because freeing them waits as well.
    """
    atexit.unregister(_api.clean_up)
    atexit.unregister(_dispatch.wait_for_tokens)
    state = _distributed.global_state
    for held in (state, state.client, state.service, state.preemption_sync_manager):
        if held is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
