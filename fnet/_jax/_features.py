"""Access to JAX names that are not public.

If this version of JAX lacks a name, only the feature that needs the name is disabled: `private`
then returns a `Missing`, which raises an error when it is used. The function `disabled` lists the
disabled features of fnet.
"""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

import jax

_missing: dict[str, str] = {}


class Missing:
    """A placeholder for a name that this version of JAX lacks. Using it raises NotImplementedError."""

    def __init__(self, path: str, feature: str):
        self._path, self._feature = path, feature

    def _fail(self) -> NoReturn:
        raise NotImplementedError(
            f"{self._feature} needs {self._path}, which JAX {jax.__version__} does not have; use "
            "a version of JAX that fnet was tested with (constraints/)"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._fail()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._fail()

    def __bool__(self) -> bool:
        return False


def private(path: str, feature: str) -> Any:
    """Returns the object at a dotted path, such as "jax._src.core.typeof". If this version of JAX
    has no object at the path, returns a placeholder (`Missing`). Using a `Missing` object raises an
    error whose message contains the argument `feature`, which names the feature that needs the
    object."""
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
    """Returns one line of text for each JAX name that the function `private` has looked up but not
    found. The line also names the feature that is disabled."""
    return tuple(
        f"{feature} is disabled: JAX {jax.__version__} has no {path}"
        for path, feature in _missing.items()
    )
