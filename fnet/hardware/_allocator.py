"""Reuses the temporary memory of a CPU program from one step to the next."""

from __future__ import annotations

import ctypes

# From malloc.h of the GNU C library.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def cpu_allocator() -> bool:
    """Makes this process keep the memory that a step frees, so that the next step can reuse this
    memory.

    XLA allocates the temporary memory of a CPU program anew for each call, and the C library
    returns large blocks to the operating system immediately. Without `cpu_allocator`, each step
    therefore causes a page fault for every 4 kB of its temporary memory. After a call of
    `cpu_allocator`, the process keeps freed memory, so its memory usage stays at the peak. If JAX
    has queued several steps, the peak includes the temporary memory of each queued step.

        from fnet import hardware as hw
        hw.cpu_allocator()      # at the start of a script, before any large array

    `cpu_allocator` affects the whole process and cannot be undone. fnet never calls `cpu_allocator`
    itself.

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
