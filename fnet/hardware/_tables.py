"""Immutable tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class FrozenTable(Mapping):
    """An immutable mapping, so that a `Chip` with its tables can be hashed, compared and pickled.

    >>> table = hw.FrozenTable({"bf16": 197e12})
    >>> table["bf16"], len({table, hw.FrozenTable({"bf16": 197e12})})
    (197000000000000.0, 1)
    """

    __slots__ = ("_items",)

    def __init__(self, items: Any = (), /, **more: Any):
        self._items = tuple(dict(items, **more).items())

    def __getitem__(self, key: Any) -> Any:
        for name, value in self._items:
            if name == key:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator:
        return (name for name, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return repr(dict(self._items))
