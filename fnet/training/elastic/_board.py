"""A shared folder in which hosts leave notes for each other: a directory or an object store."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from fnet._util._files import create
from fnet.training.checkpoints._storage import StorePath, location, write_whole

FIELDS = ("count", "round", "status", "code", "machine", "address")  # of the note of a host
_HOST, _ROUND, _END = "host-", "round-", ".json"


class Board:
    """The notes of the hosts: each host overwrites its own, and a round is written once.

    Args:
        where: a folder that all hosts share, or the URL of an object store.
    """

    def __init__(self, where: str | os.PathLike):
        self._folder = location(where)
        self._folder.mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        return str(self._folder)

    def hosts(self) -> dict[str, dict]:
        """Returns the notes of all hosts by their names."""
        found = {}
        for name in self._names(_HOST):
            with contextlib.suppress(OSError, ValueError):  # removed, or not a note
                note = json.loads(self._at(_HOST + name).read_bytes())
                if isinstance(note, dict) and note.keys() >= set(FIELDS):
                    found[name] = note
        return found

    def write(self, name: str, note: dict) -> None:
        """Replaces the note of a host."""
        write_whole(self._at(_HOST + name), json.dumps(note).encode())

    def remove(self, name: str) -> None:
        """Removes the note of a host, if there is one."""
        with contextlib.suppress(OSError):
            self._at(_HOST + name).unlink(missing_ok=True)

    def last_round(self) -> dict | None:
        """Returns the newest round, or None if there is none.

        Raises:
            ValueError: its file is not JSON.
        """
        numbers = sorted(filter(str.isdecimal, self._names(_ROUND)), key=int)
        if not numbers:
            return None
        data = self._at(_ROUND + numbers[-1]).read_bytes()
        try:
            return json.loads(data)
        except ValueError:
            raise ValueError(
                f"elastic: {_ROUND}{numbers[-1]}{_END} in {self} is not JSON, so it is no round: "
                "remove it, or name a new folder"
            ) from None

    def begin(self, number: int, note: dict) -> bool:
        """Writes a round, unless another host has written a round of this number. Returns whether
        it was written."""
        data = json.dumps(note).encode()
        path = self._at(f"{_ROUND}{number}")
        return path.create(data) is not None if isinstance(path, StorePath) else create(path, data)

    def _at(self, name: str) -> Any:
        return self._folder / (name + _END)

    def _names(self, kind: str) -> list[str]:
        folder = self._folder
        names = [p.name for p in folder.iterdir()] if isinstance(folder, Path) else folder.keys()
        return [n[len(kind) : -len(_END)] for n in names if n.startswith(kind) and n.endswith(_END)]
