"""Signals that ask a run to stop: noted at once, acted on wherever the loop waits, never counted twice."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

NUMBERS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
ONE = 1.0              # seconds within which repeated signals count as one: `timeout` signals its child and its group
REST = ONE             # seconds after the first for which the handlers stay: its repeat must not meet the old ones
POLL = 0.1             # seconds between two looks at whether a signal has come, wherever the main thread waits
GRACE = 0.5            # seconds for what must be called although a signal has come before it
_runs: list[Signals] = []      # nested runs; the innermost one listens, because signals belong to the process


class Stopping(BaseException):
    """Raised after a signal to interrupt an evaluation, a callback or a wait for data; `fit` catches it.

    It is not a subclass of Exception, so that user code which retries after errors does not catch it.
    """


class Signals:
    """What a run knows of signals.

    Attributes:
      received: the name of the first signal, or None.
      interrupts: whether a signal may raise `Stopping` in the main thread, which then runs user code that leaves the
        state as it is (an evaluation).
    """

    received: str | None = None
    interrupts: bool = False

    @contextlib.contextmanager
    def interrupting(self, allowed: bool = True, *, grace: float = 0.0) -> Iterator[None]:
        """Lets a signal end the body with `Stopping`.

        Args:
          allowed: False: a signal does not end it.
          grace: seconds that the body has if a signal came before it.
        """
        alarm = None
        try:
            self.interrupts = allowed
            if grace and allowed and self.received and _no_alarm():
                alarm = signal.signal(signal.SIGALRM, lambda *_: self.poll())
                signal.setitimer(signal.ITIMER_REAL, grace)
            elif not grace:
                self.poll()
            yield
        finally:
            self.interrupts = False
            if alarm is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, alarm)

    def poll(self) -> None:
        """Raises `Stopping` if a signal has come and may interrupt."""
        if self.interrupts and self.received:
            raise Stopping


def _no_alarm() -> bool:
    """Whether nobody else uses the alarm of this process."""
    return hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def poll() -> None:
    """Ends the evaluation under way if a signal has come. For evaluations, between two batches.

    Raises:
      Stopping: a signal has arrived. The evaluation is repeated when the run is resumed.
    """
    if _runs:
        _runs[-1].poll()


@contextlib.contextmanager
def signals() -> Iterator[Signals]:
    """Records the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 in the body of a with statement.

    A later signal ends the process; in an interactive session, it raises KeyboardInterrupt instead. Signals within one
    second of the first count as one, so the old handlers are restored no earlier than one second after it. Signals that
    the process ignores (`nohup`) stay ignored, and a SIGUSR1 handler of the user stays installed. No handlers are
    installed outside of the main thread. Forked children have the old handlers.
    """
    seen = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    pid, first = os.getpid(), 0.0
    handlers = {number: signal.getsignal(number) for number in NUMBERS}
    own = {number: signal.SIG_DFL if handler is None else handler      # None: installed by C, cannot be put back
           for number, handler in handlers.items() if handler is not signal.SIG_IGN
           and not (number == getattr(signal, "SIGUSR1", None) and callable(handler))}

    def note(number, frame):
        nonlocal first
        if os.getpid() != pid:                             # a child that was forked without Python's hooks
            signal.signal(number, own[number])
            os.kill(os.getpid(), number)
            return
        if seen.received is None:
            first, seen.received = time.monotonic(), signal.Signals(number).name
        elif interactive and time.monotonic() - first > ONE:
            raise KeyboardInterrupt
        seen.poll()

    def forget():
        """In a forked child, a data loader's worker: signals mean there what they meant before `fit`."""
        signal.set_wakeup_fd(-1)
        for number, handler in own.items():
            signal.signal(number, handler)

    with contextlib.ExitStack() as stack:
        if not interactive:
            stack.enter_context(_later_ends(own))
        for number, handler in own.items():
            signal.signal(number, note)
            stack.callback(signal.signal, number, handler)
        _runs.append(seen)
        stack.callback(_runs.remove, seen)
        _IN_CHILD.append(forget)
        stack.callback(_IN_CHILD.remove, forget)
        try:
            yield seen
        finally:
            if seen.received:
                time.sleep(max(0.0, first + REST - time.monotonic()))


_IN_CHILD: list[Callable[[], None]] = []      # innermost run last


def _after_fork() -> None:
    while _IN_CHILD:
        _IN_CHILD.pop()()
    _runs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def _later_ends(numbers) -> Iterator[None]:
    """Ends the process at a signal that comes over a second after the first, even while the main thread compiles,
    where no handler runs: Python writes each signal's number into a pipe at once, and a thread reads it."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch():
        first = None
        while number := os.read(reading, 1)[0]:            # 0 ends it: a forked child may keep the pipe open
            if number not in numbers:
                continue
            now = time.monotonic()
            first = now if first is None else first
            if now - first > ONE:
                with contextlib.suppress(OSError):         # the terminal may be gone
                    os.write(2, b"ended at once; the run resumes from its last checkpoint\n")
                os._exit(128 + number)

    thread = threading.Thread(target=watch, daemon=True, name="later signals")
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writing, b"\0")
        thread.join()
        os.close(reading)
        os.close(writing)
