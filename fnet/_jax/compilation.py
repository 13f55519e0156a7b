"""Makes JAX's compilation cache use a store of fnet instead of a folder. Imported on first use."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax

from fnet._jax._features import private

_FEATURE = "the cache of compiled programs"
_cache = private("jax._src.compilation_cache", _FEATURE)
_read = private("jax._src.compilation_cache.get_executable_and_time", _FEATURE)
_write = private("jax._src.compilation_cache.put_executable_and_time", _FEATURE)
_options = private("jaxlib._jax.CompileOptions", "loading of compiled programs in the background")
_devices = private("jaxlib._jax.DeviceList", "loading of compiled programs in the background")
_before: list[float] = []
_used: dict[
    str, tuple[str, int]
] = {}  # options and device of each program that JAX has looked up, by key
_started: dict[
    str, tuple[str, Future]
] = {}  # options and result of each program that is loaded in the background


def install(store: Any, *, shortest: float) -> bool:
    """Makes JAX load compiled programs from `store` and save them to it, unless JAX already has a
    cache.

    Args:
        store: an object with the attribute `path` and the methods `open()`, which returns whether
            the store can be used, `get(key)`, which returns bytes or None, and `put(key, bytes)`.
        shortest: the minimum compilation time of a program that is saved, in seconds.

    Returns:
        Whether JAX now loads compiled programs from `store`. The result is False if the user has
        disabled JAX's compilation cache, or has selected another cache folder. If `store.open()`
        returns False, or if fnet cannot change the storage of the compilation cache in this version
        of JAX, the result is False.
    """
    if not _cache or not jax.config.jax_enable_compilation_cache:
        return False
    if (
        jax.config.jax_compilation_cache_dir is not None
        or _cache._cache is not None
        or not store.open()
    ):
        return False

    _cache._cache = SimpleNamespace(get=store.get, put=store.put, _path=store.path)
    _cache._cache_initialized, _cache._cache_checked = True, False
    if _read and _options and _devices:
        _cache.get_executable_and_time = _look_up
    if _write:
        _cache.put_executable_and_time = _save
    _before.append(jax.config.jax_persistent_cache_min_compile_time_secs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)
    return True


def uninstall() -> None:
    """Makes JAX no longer use the store that was passed to `install`."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _before.pop())
    _cache._cache, _cache._cache_initialized = None, False
    if _read:
        _cache.get_executable_and_time = _read
    if _write:
        _cache.put_executable_and_time = _write
    used()


def used() -> bytes:
    """Returns a JSON description of the compiled programs that JAX has looked up in its cache since
    the last call of `preload`. Programs for several devices and programs that call Python are
    omitted. The function `used` also discards each program that `preload` has loaded, unless JAX
    has looked up this program."""
    for _, loaded in _started.values():
        loaded.cancel()
    _started.clear()
    return json.dumps(_used).encode()


def preload(programs: bytes) -> None:
    """Loads the programs that an earlier process has used. A background thread loads the programs,
    while this process traces its functions. JAX uses a loaded program only if this process looks up
    a program with the same cache key and the same compile options as the earlier process. JAX
    traces all functions even if their compiled programs are loaded.

    Args:
        programs: a JSON description of the compiled programs of an earlier process, as returned by
            the function `used`.
    """
    _used.clear()
    if not _cache or _cache.get_executable_and_time is not _look_up:
        return
    devices = {device.id: device for device in jax.local_devices()}
    loader = ThreadPoolExecutor(1, "load")
    for key, (options, device) in json.loads(programs).items():
        if device in devices:
            _started[key] = options, loader.submit(_load, key, options, devices[device])
    loader.shutdown(wait=False)


def _load(key: Any, options: Any, device: Any) -> Any:
    return _read(
        key, _options.ParseFromString(bytes.fromhex(options)), device.client, _devices((device,))
    )


def _look_up(key: Any, options: Any, backend: Any, devices: Any, *callbacks: Any) -> Any:
    """Returns a compiled program that `preload` has loaded, or reads the program from the store.
    JAX calls `_look_up` in place of its own function `get_executable_and_time`."""
    if len(devices) > 1 or any(callbacks):
        return _read(key, options, backend, devices, *callbacks)
    serialized = options.SerializeAsString().hex()
    _used[key] = serialized, devices[0].id
    expected, loaded = _started.pop(key, (None, None))
    if (
        loaded is not None
        and not loaded.cancel()
        and expected == serialized
        and loaded.exception() is None
    ):
        return loaded.result()
    return _read(key, options, backend, devices, *callbacks)


def _save(*args: Any) -> None:
    """Stands for JAX's `put_executable_and_time`. jaxlib 0.12 cannot serialize programs that call
    oneDNN, and says so by a MemoryError."""
    with contextlib.suppress(MemoryError):
        _write(*args)
