"""Where JAX keeps compiled programs between processes. Imported on first use."""

from __future__ import annotations

from types import SimpleNamespace

import jax

from fnet._jax._features import private

_FEATURE = "the cache of compiled programs"
_cache = private("jax._src.compilation_cache", _FEATURE)
_before: list[float] = []


def install(store, *, shortest: float) -> bool:
    """Makes JAX load programs from `store` and keep them there, if it has no cache of its own.

    Args:
        store: has `path`, `open() -> whether it can be used`, `get(key) -> bytes or None` and `put(key, bytes)`.
        shortest: the compilation time, in seconds, from which a program is kept.

    Returns:
        Whether it is used now: not if the user has chosen a folder or disabled caches, the store cannot be used, or
        JAX has no such cache.
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
    """Ends what `install` began."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _before.pop())
    _cache._cache, _cache._cache_initialized = None, False
