"""Reuses the temporary memory of a CPU program from one step to the next."""

from __future__ import annotations

import ctypes

# From malloc.h of the GNU C library.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def cpu_allocator() -> bool:
    """Makes this process keep the memory that a step frees, so that the next step can reuse it.

        from fnet import hardware as hw
        hw.cpu_allocator()      # at the start of a script, before any large array

    XLA allocates the temporary memory of a CPU program anew for each call, and the C library
    returns large blocks to the operating system at once, so each step has a page fault for every 4
    kB of it. After this call, memory usage stays at its peak, which includes the temporary memory
    of every step that JAX has queued.

    The call affects the whole process and cannot be undone. fnet never makes it itself.

    Returns:
        True if the process now keeps freed memory (with the GNU C library on Linux), False
        otherwise.

    Source: the manual page mallopt(3).

    >>> kept = hw.cpu_allocator()    # at the start of a script; False: no effect on this system
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return all(
        [mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, 2**31 - 1), mallopt(M_ARENA_MAX, 1)]
    )
