"""Public names that moved to another package. The old names work for one more release."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

MOVED = {
    "export.serve": "serve",
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


def moved_from(package: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package, which finds the names that moved away from it."""
    short = package.removeprefix("fnet.")

    def find(name: str) -> Any:
        if (new := MOVED.get(f"{short}.{name}")) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        package_of, _, attribute = new.rpartition(".")
        if not package_of:
            return importlib.import_module(f"fnet.{new}")
        return getattr(importlib.import_module(f"fnet.{package_of}"), attribute)

    return find
