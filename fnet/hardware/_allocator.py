"""Memory of a CPU program, kept from one step for the next."""

from __future__ import annotations

import ctypes

# From malloc.h of the GNU C library.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def cpu_allocator() -> bool:
    """Lets this process keep the memory that a step has freed, for the next step.

    XLA allocates a CPU program's temporary memory anew for each call, and the C library hands large blocks back to the
    system at once, so that each step begins with a page fault for every 4 kB. After this call freed memory stays with
    the process: its size stays what it was at its largest, with temporary memory for each of the steps that JAX queues.

        from fnet import hardware as hw
        hw.cpu_allocator()      # first thing in a script, before any large array

    It is for the whole process and cannot be undone, therefore nothing in fnet calls it.

    Returns:
        Whether it took effect: True with the GNU C library on Linux, False elsewhere, where nothing happens.

    Source: mallopt(3).
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, 2**31 - 1), mallopt(M_ARENA_MAX, 1)])
