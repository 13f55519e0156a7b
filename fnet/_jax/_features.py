"""Access to JAX names that are not public, one feature at a time.

A name that this version of JAX lacks disables the feature that needs it and nothing else: `private` returns a stand-in
that raises when it is used, and `disabled` lists what is missing.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax

_missing: dict[str, str] = {}


class Missing:
    """Stands for a name that this version of JAX lacks; using it raises NotImplementedError."""

    def __init__(self, path: str, feature: str):
        self._path, self._feature = path, feature

    def _fail(self):
        raise NotImplementedError(f"{self._feature} needs {self._path}, which JAX {jax.__version__} does not have; use "
                                  "a version of JAX that fnet was tested with (constraints/)")

    def __call__(self, *args, **kwargs):
        self._fail()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        self._fail()

    def __bool__(self):
        return False


def private(path: str, feature: str) -> Any:
    """The object at a dotted path, such as "jax._src.core.typeof", or a `Missing` that names `feature`."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pass
    try:
        return importlib.import_module(path)
    except ImportError:
        _missing[path] = feature
        return Missing(path, feature)


def disabled() -> tuple[str, ...]:
    """One line for each feature that this version of JAX does not support, as far as it has been asked for."""
    return tuple(f"{feature} is disabled: JAX {jax.__version__} has no {path}" for path, feature in _missing.items())
