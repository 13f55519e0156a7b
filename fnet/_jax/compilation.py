"""Replaces the store of JAX's cache of compiled programs. Imported on first use."""

from __future__ import annotations

from types import SimpleNamespace

import jax

from fnet._jax._features import private

_FEATURE = "the cache of compiled programs"
_cache = private("jax._src.compilation_cache", _FEATURE)
_before: list[float] = []


def install(store, *, shortest: float) -> bool:
    """Makes JAX load compiled programs from `store` and save them to it, unless JAX already has a cache.

    Args:
        store: an object with the attribute `path` and the methods `open()`, which returns whether the store can be
            used, `get(key)`, which returns bytes or None, and `put(key, bytes)`.
        shortest: the minimum compilation time of a program that is saved, in seconds.

    Returns:
        Whether JAX uses the store now. It does not if the user has selected another cache folder or disabled the cache,
        if the store cannot be used, or if this version of JAX does not support other stores.
    """
    if not _cache or not jax.config.jax_enable_compilation_cache:
        return False
    if jax.config.jax_compilation_cache_dir is not None or _cache._cache is not None or not store.open():
        return False

    _cache._cache = SimpleNamespace(get=store.get, put=store.put, _path=store.path)
    _cache._cache_initialized, _cache._cache_checked = True, False
    _before.append(jax.config.jax_persistent_cache_min_compile_time_secs)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)
    return True


def uninstall() -> None:
    """Makes JAX no longer use the store of `install`."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _before.pop())
    _cache._cache, _cache._cache_initialized = None, False
