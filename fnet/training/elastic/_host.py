"""The loop of a host in a run whose hosts come and go."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from fnet.training.elastic._board import Board
from fnet.training.elastic._membership import (
    FAILED,
    FINISHED,
    LEAVING,
    Next,
    Round,
    Watch,
    due,
    over,
)
from fnet.training.elastic._process import Process

_SOON = 600.0  # seconds; a program that fails later than this has failed for the first time
_NOT_STARTED = 127  # the exit status of shells for it
_BEATS = 10  # notes in the time after which a host without notes is lost


class Host:
    """Runs a command on this host, together with other hosts.

    Args:
        folder: a folder that all hosts share, or the URL of an object store.
        command: the program and its arguments. Its environment says which process it is, for
            `parallel.initialize`.
        at_least: the number of hosts below which nothing runs.
        lost_after: seconds without a sign of life after which a host is lost.
        grace: seconds in which the program may save its work when hosts join or leave.
        restarts: how often in a row a program that fails by itself is started again.
        address: the name or number under which other hosts reach this one.
        name: the name of this host.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        command: Sequence[str],
        *,
        at_least: int = 1,
        lost_after: float = 30.0,
        grace: float = 60.0,
        restarts: int = 3,
        address: str | None = None,
        name: str | None = None,
    ):
        self._board, self._command = Board(folder), list(command)
        self._at_least, self._grace, self._restarts = at_least, grace, restarts
        self._patience = lost_after
        self.name = name or f"{socket.gethostname()}-{secrets.token_hex(2)}"
        self._address = address or socket.gethostname()
        self._watch = Watch(lost_after)
        # Rounds of the past are no concern of this host, nor that they have ended or given up.
        self._round = Round.read(self._board.last_round())
        self._past = self._round.number
        self._began = time.monotonic()
        self._process: Process | None = None
        self._note = {"count": 0, "round": 0, "status": "waiting", "code": 0}
        self._note |= {"machine": socket.gethostname(), "address": self._address}
        self._lock, self._end, self._stop = threading.Lock(), threading.Event(), threading.Event()
        self._due: tuple[Any, float] | None = None  # what is due, and since when

    def run(self) -> int:
        """Runs the command until it has ended on all hosts. Returns the exit status: 0, that of the
        command if it keeps failing, or 143 after a signal."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._stop.set())
        beats = threading.Thread(target=self._beat, name="elastic", daemon=True)
        beats.start()
        try:
            while True:
                if self._stop.is_set():
                    return self._leave()
                try:
                    code = self._turn()
                except OSError as error:
                    self._complain(error)
                else:
                    if code is not None:
                        return code
                self._stop.wait(self._patience / _BEATS)
        finally:
            self._end.set()
            beats.join()
            if self._process is not None:
                self._process.stop()
            if self._note["status"] != FINISHED:
                self._board.remove(self.name)

    def _turn(self) -> int | None:
        """One look at the board. Returns an exit status, or None to go on."""
        notes, newest = self._board.hosts(), Round.read(self._board.last_round())
        if newest.number > self._round.number:
            if newest.code is not None:
                self._halt(gently=False)
                self._say(f"gave up: {newest.why}")
                return newest.code
            self._enter(newest)
            return None
        self._look()
        ended = over(self._round, notes)
        if ended and self._round.number > self._past:
            return 0
        gone = (LEAVING, FINISHED) if ended else (LEAVING,)
        alive = [n for n in self._watch.alive(notes) if notes[n]["status"] not in gone]
        if self.name in alive and not any(map(self._watch.undecided, notes)):
            self._lead(notes, alive)
        return None

    def _enter(self, new: Round) -> None:
        """Ends the process of the round before, and starts that of a new one."""
        self._round, self._due, self._began = new, None, time.monotonic()
        self._halt(gently=new.gently)
        if self.name not in new.members:
            self._write(status="waiting")
            self._say(f"round {new.number} is without this host, which waits: {new.why}")
            return
        place, count = new.members.index(self.name), len(new.members)
        self._say(f"round {new.number}: {new.why}; this is process {place} of {count}")
        try:
            self._process = Process(self._command, environment(new, place))
        except OSError as error:
            self._say(f"cannot start {self._command[0]}: {error}")
            self._write(status=FAILED, round=new.number, code=_NOT_STARTED)
        else:
            self._write(status="running", round=new.number)

    def _look(self) -> None:
        """Notes that the process has ended."""
        if self._process is None or (code := self._process.ended()) is None:
            return
        self._process.stop(0)  # what it has started
        self._process = None
        self._write(status=FAILED if code else FINISHED, code=code)

    def _lead(self, notes: dict[str, dict], alive: list[str]) -> None:
        """Begins a new round if one is due, and if this host is the first of those that are there:
        a little later, so that hosts that come or go at about the same time do so together."""
        reason, few = due(self._round, notes, alive), len(alive) < self._at_least
        if reason is None or alive[0] != self.name or (few and not self._round.members):
            self._due = None
            return
        what = reason.failed, alive
        if self._due is None or self._due[0] != what:
            self._due = what, time.monotonic()
        if time.monotonic() - self._due[1] < self._patience * (0.5 if reason.failed else 0.3):
            return
        # A program also fails when another host is gone, and this is known only later.
        if reason.failed and any(self._watch.quiet(n) > 0.4 * self._patience for n in alive):
            return
        self._begin(reason, notes, [] if few else alive)

    def _begin(self, reason: Next, notes: dict[str, dict], alive: list[str]) -> None:
        soon = time.monotonic() - self._began < _SOON
        failures = self._round.failures * soon + 1 if reason.failed else 0
        few = f"; waiting for {self._at_least} hosts" * (not alive)
        new = {
            "number": self._round.number + 1,
            "members": alive,  # this host is the first
            "address": self._meeting([notes[name] for name in alive]),
            "why": reason.why + few,
            "gently": reason.gently,
            "failures": failures,
        }
        if failures > self._restarts:
            new["code"] = reason.code if reason.code > 0 else 1
            new["why"] += f", {failures} times in a row"
        self._board.begin(new["number"], new)
        for name in notes:
            if self._watch.quiet(name) > self._patience:
                self._board.remove(name)

    def _meeting(self, notes: list[dict]) -> str:
        """The address for process 0, which is on this host."""
        here = all(note["machine"] == self._note["machine"] for note in notes)
        with socket.socket() as free:
            free.bind(("127.0.0.1" if here else "", 0))
            port = free.getsockname()[1]
        return f"{'127.0.0.1' if here else self._address}:{port}"

    def _leave(self) -> int:
        """Ends the process after a signal, with the time to save its work."""
        self._say("told to end; the others go on")
        try:
            self._write(status=LEAVING)
        except OSError as error:
            self._complain(error)
        self._halt(gently=True)
        return 128 + signal.SIGTERM

    def _halt(self, *, gently: bool) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stop(self._grace if gently else None)

    def _beat(self) -> None:
        while not self._end.wait(self._patience / _BEATS):
            try:
                self._write()
            except OSError as error:
                self._complain(error)

    def _write(self, **changes: Any) -> None:
        with self._lock:
            self._note |= {**changes, "count": self._note["count"] + 1}
            self._board.write(self.name, self._note)

    def _complain(self, error: OSError) -> None:
        self._say(f"cannot use {self._board}: {error}; trying again")

    def _say(self, text: str) -> None:
        print(f"fnet run: {self.name}: {text}", file=sys.stderr, flush=True)


def environment(now: Round, place: int) -> dict[str, str]:
    """The variables by which `parallel.initialize` finds the other processes of a round."""
    return {
        "JAX_COORDINATOR_ADDRESS": now.address,
        "FNET_PROCESSES": str(len(now.members)),
        "FNET_PROCESS": str(place),
    }
