"""Every name of JAX's that is not public stands here, and nowhere else.

Each has a test in tests/test_jax_names.py that fails in words when JAX moves it.
"""

from __future__ import annotations

try:    # jax >= 0.11
    from jax.extend.core import get_opaque_trace_state
except ImportError:    # jax 0.10
    from jax.core import get_opaque_trace_state

__all__ = ["trace_state"]


def trace_state():
    """A token that equals another one only within the same trace.

    Two calls give equal tokens exactly when no jax transform (scan, cond, vmap, jit, ...) was entered or left
    between them.
    """
    return get_opaque_trace_state()
