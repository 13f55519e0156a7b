"""Who is there, and when the hosts begin again together.

Time is never compared between hosts. A host counts its notes, and the others watch, with their own
clocks, whether the count still grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

LEAVING, FAILED, FINISHED = "leaving", "failed", "finished"


class Round(NamedTuple):
    """The hosts run the program together, until one of them is lost, leaves, fails or joins.

    Attributes:
        number: 1 for the first.
        members: the names of the hosts, in the order of their processes. The first began the round.
        address: of process 0, as "host:port".
        why: a text for people.
        gently: whether the processes of the round before may save their work first.
        failures: how many rounds in a row have ended soon because the program itself failed.
        code: the exit status with which all hosts give up, or None.
    """

    number: int
    members: tuple[str, ...]
    address: str
    why: str
    gently: bool = False
    failures: int = 0
    code: int | None = None

    @classmethod
    def read(cls, note: dict | None) -> Round:
        """Returns the round of a note, or round 0 without hosts if there is none.

        Raises:
            ValueError: the note has not the fields of a round.
        """
        if note is None:
            return cls(0, (), "", "")
        known, needed = set(cls._fields), set(cls._fields) - set(cls._field_defaults)
        if not isinstance(note, dict) or not needed <= set(note) <= known:
            found = ", ".join(sorted(note)) if isinstance(note, dict) else repr(note)[:80]
            raise ValueError(
                f"elastic: a round in the shared folder has the fields {found}; expected "
                f"{', '.join(cls._fields)}. Another version of fnet, or another program, wrote "
                "it: run one version of fnet on all hosts, or name a new folder"
            )
        return cls(**{**note, "members": tuple(note["members"])})


class Watch:
    """Tells from the counts in the notes which hosts are there.

    Args:
        patience: the seconds without a new note after which a host is lost.
        clock: a function that returns seconds.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic):
        self._patience, self._clock = patience, clock
        self._seen: dict[str, tuple[int, float, bool]] = {}  # count, since when, whether it grew

    def alive(self, notes: dict[str, dict]) -> list[str]:
        """Returns the names of the hosts that have written lately. The first sight of a note is no
        sign of life: it may be old."""
        now, seen = self._clock(), {}
        for name, note in notes.items():
            count, since, grew = self._seen.get(name, (note["count"], now, False))
            if note["count"] != count:
                count, since, grew = note["count"], now, True
            seen[name] = count, since, grew
        self._seen = seen
        return sorted(n for n, (_, at, grew) in seen.items() if grew and now - at < self._patience)

    def quiet(self, name: str) -> float:
        """Returns for how many seconds a host has not written."""
        return self._clock() - self._seen[name][1] if name in self._seen else float("inf")

    def undecided(self, name: str) -> bool:
        """Whether a host may be alive, or lost, because its note has not been watched for long."""
        _, since, grew = self._seen.get(name, (0, float("-inf"), True))
        return not grew and self._clock() - since < self._patience


class Next(NamedTuple):
    """Why a new round is due.

    Attributes:
        why: a text.
        gently: whether the processes that run may save their work first.
        failed: whether the program itself has failed.
        code: its exit status then.
    """

    why: str
    gently: bool = False
    failed: bool = False
    code: int = 0


def due(now: Round, notes: dict[str, dict], alive: list[str]) -> Next | None:
    """Returns why a new round must begin, or None if this one goes on."""
    if not now.members:
        return Next(f"{len(alive)} host(s) are there", gently=True)
    mine = {name: note for name, note in notes.items() if name in now.members}
    leaving = [name for name, note in mine.items() if note["status"] == LEAVING]
    mine = {name: note for name, note in mine.items() if note["round"] == now.number}
    ended = [name for name, note in mine.items() if note["status"] == FINISHED]
    failed = {name: note["code"] for name, note in mine.items() if note["status"] == FAILED}
    lost = [name for name in now.members if name not in (*alive, *ended, *leaving)]
    joined = [name for name in alive if name not in now.members]
    if lost:
        return Next(f"{_few(lost)} {'is' if len(lost) == 1 else 'are'} lost")
    if leaving:
        return Next(f"{_few(leaving)} leaves", gently=True)
    if failed:
        name, code = min(failed.items())
        return Next(f"the program ended with status {code} on {name}", failed=True, code=code)
    # When some have finished, the others will have soon.
    if joined and (not ended or over(now, notes)):
        return Next(f"{_few(joined)} joined", gently=True)
    return None


def over(now: Round, notes: dict[str, dict]) -> bool:
    """Whether the program has ended on all hosts of a round."""
    return bool(now.members) and all(
        name in notes and notes[name]["round"] == now.number and notes[name]["status"] == FINISHED
        for name in now.members
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
