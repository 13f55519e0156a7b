"""Delta debugging: judges candidates, each of them once, and minimizes lists."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fnet.introspect._reduce import _child
from fnet.introspect._reduce._checks import script
from fnet.introspect._reduce._child import Limits, Outcome
from fnet.introspect._reduce._journal import Journal
from fnet.introspect._reduce._predicates import InChild, Predicate, said
from fnet.introspect._reduce._program import Program, Recorded, made_up, recorded
from fnet.introspect._reduce._spell import Unwritable

log = logging.getLogger("fnet.reduce")


class Search:
    """Judges candidates.

    Attributes:
        predicate, limits: as for `reduce`.
        reason: why the program fails. None, while any reason counts.
        tried: how many candidates were judged, without those from the journal.
        until: the time of `time.monotonic` after which no further candidate is tried.
    """

    def __init__(
        self, predicate: Predicate, folder: Path, *, limits: Limits, seconds: float, child: bool
    ):
        self.predicate, self.folder, self.limits = predicate, folder, limits
        self.journal = Journal(folder)
        self.reason: str | None = None
        self.tried = 0
        self.child = child or predicate.in_child
        self.until = time.monotonic() + seconds

    def holds(self, program: Program | None) -> bool:
        """Whether a program fails, for the reason that is looked for."""
        if program is None or not program.equations or time.monotonic() > self.until:
            return False
        reason = self.judge(program)
        return reason is not None and (self.reason is None or reason == self.reason)

    def judge(self, program: Program) -> str | None:
        """Returns why a program fails, or None."""
        question = hashlib.sha256(self.predicate.question(program).encode()).hexdigest()
        key = f"{self.predicate.name} {question[:16]} {program.key}"
        if key not in self.journal:
            self.tried += 1
            self.journal.add(key, self._judged(program))
        return self.journal[key]

    def _judged(self, program: Program) -> str | None:
        if self.child:
            return self._in_child(program)
        try:
            return self.predicate.judge(program)
        except Exception as failed:  # a candidate that cannot be run is no smaller failure
            log.debug("a candidate raised %s", said(failed))
            return None

    def _in_child(self, program: Program) -> str | None:
        try:
            written = script(program, self.predicate)
        except Unwritable as failed:
            log.debug("%s", failed)
            return None
        path = self.folder / "candidate" / "candidate.py"
        path.parent.mkdir(exist_ok=True)
        written.write(path)
        return outcome_reason(self.predicate, _child.run(path, self.limits))

    def values(self, program: Program) -> Recorded:
        """Returns the value of each variable of a program."""
        made = self.child or self.predicate.by_type
        return made_up(program) if made else recorded(program)

    def progress(self, what: str, program: Program) -> None:
        log.info("%s: %d equations, %d candidates tried", what, len(program.equations), self.tried)


def outcome_reason(predicate: Predicate, outcome: Outcome) -> str | None:
    """Returns why a script that ran in a child process shows the failure, or None."""
    if isinstance(predicate, InChild) and predicate.kind == "crashes":
        return outcome.crashed
    if isinstance(predicate, InChild) and predicate.kind == "hangs":
        return outcome.hung
    said = outcome.reproduced
    return None if said is None else said.partition(":")[0]


def minimized(items: Sequence, holds: Callable[[list], bool]) -> list:
    """Returns a part of a list for which `holds` is True, and no longer without any one of its
    elements (delta debugging). `holds(items)` is True."""
    items, pieces = list(items), 2
    while len(items) > 1:
        size = -(-len(items) // pieces)
        starts = range(0, len(items), size)
        for start in starts:
            rest = items[:start] + items[start + size :]
            part = items[start : start + size]
            if pieces > 1 and len(part) < len(items) and holds(part):
                items, pieces = part, 2
                break
            if rest and holds(rest):
                items, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                break
            pieces = min(len(items), pieces * 2)
    return items


def first(count: int, holds: Callable[[int], bool]) -> int | None:
    """Returns the smallest i below `count` for which `holds(i)` is True, if it is False before some
    i and True from there on, found by bisection; None if it is False for the last."""
    if not count or not holds(count - 1):
        return None
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high
