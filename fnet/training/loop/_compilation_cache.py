"""A cache of compiled programs on disk, so that later processes do not compile them again.

JAX has its own cache of compiled programs, which is off by default. JAX writes the files of its
cache in place and does not verify them, so that a process that is killed during a write leaves a
damaged file. In fnet's cache of compiled programs, a file appears only when it is complete, each
file has a checksum, and old files are deleted.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path

from fnet import _jax
from fnet._util._cache import cache_folder
from fnet._util._files import write

LIMIT = 4 << 30  # bytes; if the cache is larger, the least recently used programs are deleted
SHORTEST = 0.05  # seconds of compilation; programs that compile faster are not stored
_DIGEST = hashlib.sha256().digest_size
_lock, _users = threading.Lock(), 0
_store: Store | None = None  # the store in use
_preloaded: set[str] = set()


@contextlib.contextmanager
def compilation_cache(path: str | os.PathLike | None = None) -> Iterator[None]:
    """Loads compiled programs from a cache on disk, and stores newly compiled ones in it.

        with tr.compilation_cache():
            state = init(jax.random.key(0))        # a second process starts without compiling

    `fit` and the experiments use it by themselves. A program is loaded only if it has the same
    operations, shapes, devices, compiler options and library versions, and on a CPU the same
    instruction set and number of cores. One that is damaged or cannot be read is compiled again. If
    JAX_COMPILATION_CACHE_DIR is set, JAX's own cache in that folder takes its place, and
    JAX_ENABLE_COMPILATION_CACHE=false disables both.

    Args:
      path: the folder of the cache, which grows to at most 4 GiB. Its programs are executed, so it
        is used only if the current user owns it and no other can write to it. Default None:
        `compiled` in fnet's cache folder, which is $FNET_CACHE, $XDG_CACHE_HOME/fnet or
        ~/.cache/fnet.

    Example:
      >>> import tempfile
      >>> import jax
      >>> from fnet.training import compilation_cache
      >>> with tempfile.TemporaryDirectory() as folder, compilation_cache(folder):
      ...     jax.jit(lambda x: 2 * x)(1.5).item()
      3.0
    """
    global _users, _store
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
                    _store = None


def preload(name: str) -> None:
    """Begins to load the compiled programs that an earlier process listed with `remember(name)`.

    A second call of `preload` with the same `name` does nothing, because the process already has
    the programs.
    """
    if _store is not None and name not in _preloaded:
        _preloaded.add(name)
        _jax.compilation.preload(_store.get(_listed(name)) or b"{}")


def remember(name: str) -> None:
    """Stores the list of the compiled programs that this process has used since it called
    `preload(name)`."""
    if _store is not None and (programs := _jax.compilation.used()) != _store.get(_listed(name)):
        _store.put(_listed(name), programs)


def _listed(name):
    return f"the programs of {name}"


def _begin(path):
    global _store
    store = Store(cache_folder() / "compiled" if path is None else Path(path))
    _store = store if _jax.compilation.install(store, shortest=SHORTEST) else None
    return _store is not None


class Store:
    """A folder of compiled programs, each with a key. A program that cannot be read counts as
    missing, and write errors are ignored."""

    def __init__(self, path: Path):
        self.path = path

    def open(self) -> bool:
        """Creates the folder if necessary. Returns whether the folder exists and only this user can
        write to it."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
        except OSError:
            return False
        return not hasattr(os, "getuid") or (
            found.st_uid == os.getuid() and not found.st_mode & 0o022
        )

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
        with contextlib.suppress(OSError):  # such as a full disk
            write(file, hashlib.sha256(value).digest() + value)
            self._trim()

    def _trim(self):
        files = sorted(
            (
                (entry.stat().st_mtime, entry.stat().st_size, entry.path)
                for entry in os.scandir(self.path)
            ),
            reverse=True,
        )
        total = 0
        for _, size, path in files:
            total += size
            if total > LIMIT:
                os.unlink(path)

    def _file(self, key):
        return self.path / f"{hashlib.sha256(f'{_cpu()} {key}'.encode()).hexdigest()}.program"


@functools.cache
def _cpu() -> str:
    """Returns the instruction set and the number of cores of the CPU. JAX's cache keys do not
    contain the instruction set and the number of cores, so fnet's compilation cache adds them to
    each key."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith(("flags", "Features")):
                return f"{cores} {line}"
    return f"{cores} {platform.machine()} {platform.processor()}"
