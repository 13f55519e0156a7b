"""Compiled programs on disk, so that the next process that needs one does not compile it again.

JAX has such a cache, which is off by default. Its files are written in place and are not verified: a process that is
killed while it writes leaves a damaged file. Here, files appear complete, have a checksum, and old ones are deleted.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

from fnet import _jax
from fnet.hardware._cache import cache_folder

LIMIT = 4 << 30      # bytes; above it, the programs that were not used for the longest time are deleted
SHORTEST = 0.05      # seconds of compilation; programs that take less are compiled each time
_DIGEST = hashlib.sha256().digest_size
_lock, _users = threading.Lock(), 0


@contextlib.contextmanager
def compilation_cache(path: str | os.PathLike | None = None) -> Iterator[None]:
    """Loads programs that an earlier process compiled, and keeps those that this one compiles.

        with tr.compilation_cache():
            state = init(jax.random.key(0))        # a second process starts without compiling

    `fit` and the experiments do this by themselves. JAX identifies a program by its operations, shapes, devices,
    options and versions; here, also by the instructions of the CPU. A folder that the user has chosen for JAX
    (JAX_COMPILATION_CACHE_DIR) is used instead, and JAX_ENABLE_COMPILATION_CACHE=false disables both. A program that
    cannot be read or is damaged is compiled again.

    Args:
      path: the folder, of at most 4 GiB. It is used only if this user owns it and no other user can write to it,
        because its programs are executed. Default: compiled/ in the environment's FNET_CACHE, or in ~/.cache/fnet.

    Example:
      >>> import tempfile
      >>> import jax
      >>> from fnet.training import compilation_cache
      >>> with tempfile.TemporaryDirectory() as folder, compilation_cache(folder):
      ...     jax.jit(lambda x: 2 * x)(1.5).item()
      3.0
    """
    global _users
    with _lock:
        used = _users > 0 or _begin(path)
        _users += used
    try:
        yield
    finally:
        if used:
            with _lock:
                _users -= 1
                if not _users:
                    _jax.compilation.uninstall()


def _begin(path):
    folder = cache_folder() / "compiled" if path is None else Path(path)
    return _jax.compilation.install(Store(folder), shortest=SHORTEST)


class Store:
    """Programs by key in a folder. Those that cannot be read are missing, those that cannot be written are not kept."""

    def __init__(self, path: Path):
        self.path = path

    def open(self) -> bool:
        """Makes the folder. Returns whether it exists and only this user can write to it."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
        except OSError:
            return False
        return not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)

    def get(self, key: str) -> bytes | None:
        file = self._file(key)
        with contextlib.suppress(OSError):
            content = file.read_bytes()
            if hashlib.sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
                os.utime(file)
                return content[_DIGEST:]
            file.unlink()
        return None

    def put(self, key: str, value: bytes) -> None:
        file = self._file(key)
        partial = file.with_suffix(f".{secrets.token_hex(8)}")
        try:
            partial.write_bytes(hashlib.sha256(value).digest() + value)
            os.replace(partial, file)
            self._trim()
        except OSError:                                    # such as a full disk
            with contextlib.suppress(OSError):
                partial.unlink()

    def _trim(self):
        files = sorted(((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(self.path)),
                       reverse=True)
        total = 0
        for _, size, path in files:
            total += size
            if total > LIMIT:
                os.unlink(path)

    def _file(self, key):
        return self.path / f"{hashlib.sha256(f'{_cpu()} {key}'.encode()).hexdigest()}.program"


@functools.cache
def _cpu() -> str:
    """The CPU for which XLA compiles: its instructions and the number of its cores, which JAX's keys do not contain."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                return f"{cores} {line}"
    return f"{cores} {platform.machine()} {platform.processor()}"
