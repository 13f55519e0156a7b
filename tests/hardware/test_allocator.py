"""cpu_allocator: memory stays with the process, where the C library is GNU's."""

import ctypes
import platform
import resource
import subprocess
import sys

import pytest

from fnet import hardware as hw

FAULTS = """
import ctypes, resource, sys
from fnet.hardware._allocator import cpu_allocator
if sys.argv[1] == "tuned":
    assert cpu_allocator() is True
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for i in range(9):
    block = libc.malloc(1 << 26)
    ctypes.memset(block, i, 1 << 26)
    libc.free(block)
    if i == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not GNU's")
def test_freed_memory_is_used_again_without_page_faults():
    """Eight blocks of 64 MB after the first: 131,072 pages of 4 kB, or none."""

    def faults(kind):
        run = subprocess.run(
            [sys.executable, "-c", FAULTS, kind], check=True, capture_output=True, text=True
        )
        return int(run.stdout)

    pages = 8 * (1 << 26) // resource.getpagesize()
    assert faults("tuned") < pages / 100
    assert faults("default") > faults("tuned")


def test_elsewhere_nothing_happens(monkeypatch):
    def none(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", none)
    assert hw.cpu_allocator() is False
