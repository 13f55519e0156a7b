"""Public names that moved to another package. The old names work for one more release."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

MOVED = {
    "export.serve": "serve",
    "search.federated": "federated",
    "hardware.Cost": "cost.Cost",
    "hardware.Count": "cost.Count",
    "hardware.Matmul": "cost.Matmul",
    "hardware.count": "cost.count",
    "hardware.MFU": "cost.MFU",
    "hardware.mfu": "cost.mfu",
    "hardware.Bound": "cost.Bound",
    "hardware.Roofline": "cost.Roofline",
    "hardware.roofline": "cost.roofline",
    "hardware.Waste": "cost.Waste",
    "hardware.tile_size": "cost.tile_size",
    "hardware.tile_waste": "cost.tile_waste",
}


class _Alias(types.ModuleType):
    """A module under its old name, for `import fnet.export.serve`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for its file, which loads nothing
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"fnet.{MOVED[self.__name__[5:]]}"), name)


def moved_from(package: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package, which finds the names that moved away from it."""
    short = package.removeprefix("fnet.")
    for old, new in MOVED.items():
        if "." not in new and old.startswith(f"{short}."):
            sys.modules[f"fnet.{old}"] = _Alias(f"fnet.{old}")

    def find(name: str) -> Any:
        if (new := MOVED.get(f"{short}.{name}")) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if "." not in new:
            return importlib.import_module(f"fnet.{new}")
        module, _, attribute = new.rpartition(".")
        return getattr(importlib.import_module(f"fnet.{module}"), attribute)

    return find
