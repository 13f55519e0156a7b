"""What was tried: a file with one line for each candidate, from which a second call continues."""

from __future__ import annotations

import json
from pathlib import Path

from fnet._util import _files


class Journal:
    """The outcomes of the candidates that were tried, in `journal.jsonl`.

    A candidate is known by a digest of its program, its arguments and what is asked of it, so a
    journal of another program, transform or tolerance does no harm.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "journal.jsonl"
        self._known: dict[str, str | None] = {}
        for line in self._read():
            try:
                entry = json.loads(line)
                self._known[entry["key"]] = entry["reason"]
            except (ValueError, KeyError, TypeError):  # the last line of a killed process
                continue
        _files.write(
            self._path,
            "".join(self._line(key, reason) for key, reason in self._known.items()),
        )
        self._file = self._path.open("a")

    def _read(self) -> list[str]:
        return self._path.read_text().splitlines() if self._path.exists() else []

    @staticmethod
    def _line(key: str, reason: str | None) -> str:
        return json.dumps({"key": key, "reason": reason}) + "\n"

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> str | None:
        return self._known[key]

    def add(self, key: str, reason: str | None) -> None:
        self._known[key] = reason
        self._file.write(self._line(key, reason))
        self._file.flush()

    def close(self) -> None:
        self._file.close()
