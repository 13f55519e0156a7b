"""Signals that ask a run to stop.

A signal is recorded when it arrives. The training loop handles the signal after a step, or during
an evaluation, a callback or a wait for data.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

NUMBERS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
)
ONE = 1.0  # seconds within which signals count as one: `timeout` signals its child and its group
REST = ONE  # seconds after the first signal for which the handlers stay, to catch a repeated signal
POLL = 0.1  # seconds between two checks for a signal while the main thread waits
GRACE = 0.5  # seconds for functions that must run even after a signal
_runs: list[
    Signals
] = []  # nested runs; the innermost run handles signals, which are sent to the process


class Stopping(BaseException):
    """Raised after a signal, to interrupt an evaluation, a callback or a wait for data. `fit`
    catches this exception.

    `Stopping` is not a subclass of Exception, so that user code which retries after errors does not
    catch it.
    """


class Signals:
    """The signals that a run has received.

    Attributes:
      received: the name of the first signal, or None.
      interrupts: whether a signal may raise `Stopping` in the main thread. The attribute
        `interrupts` is True while the main thread runs user code that does not change the state,
        such as an evaluation.
    """

    received: str | None = None
    interrupts: bool = False

    @contextlib.contextmanager
    def interrupting(self, allowed: bool = True, *, grace: float = 0.0) -> Iterator[None]:
        """Returns a context manager, in whose body a signal raises `Stopping`.

        Args:
          allowed: whether a signal raises `Stopping`. Default True.
          grace: a number of seconds. If a signal arrived before the with statement, the body may
            run for `grace` seconds before `Stopping` is raised. Default 0.
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
        """Raises `Stopping` if a signal has arrived and `interrupts` is True."""
        if self.interrupts and self.received:
            raise Stopping


def _no_alarm() -> bool:
    """Whether SIGALRM exists and has its default handler."""
    return hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def poll() -> None:
    """Ends the current evaluation if a signal has arrived. Evaluations call `poll` between two
    batches.

    Raises:
      Stopping: a signal has arrived. The evaluation is repeated when the run is resumed.
    """
    if _runs:
        _runs[-1].poll()


@contextlib.contextmanager
def signals() -> Iterator[Signals]:
    """Returns a context manager that records the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 sent to
    the process.

    A signal that arrives more than one second after the first signal ends the process. In an
    interactive session, a later signal raises KeyboardInterrupt instead of ending the process. All
    signals within one second of the first signal are treated as one signal. The old signal handlers
    are restored no earlier than one second after the first signal, so that a repeated signal is
    caught. Signals that the process ignores (`nohup`) stay ignored, and a SIGUSR1 handler of the
    user stays installed. No signal handlers are installed outside of the main thread. In forked
    child processes, the old signal handlers are restored.
    """
    seen = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    interactive = hasattr(sys, "ps1") or "ipykernel" in sys.modules
    pid, first = os.getpid(), 0.0
    handlers = {number: signal.getsignal(number) for number in NUMBERS}
    own = {
        number: signal.SIG_DFL
        if handler is None
        else handler  # None: installed by C, cannot be restored
        for number, handler in handlers.items()
        if handler is not signal.SIG_IGN
        and not (number == getattr(signal, "SIGUSR1", None) and callable(handler))
    }

    def note(number, frame):
        nonlocal first
        if os.getpid() != pid:  # a child that was forked without Python's fork hooks
            signal.signal(number, own[number])
            os.kill(os.getpid(), number)
            return
        if seen.received is None:
            first, seen.received = time.monotonic(), signal.Signals(number).name
        elif interactive and time.monotonic() - first > ONE:
            raise KeyboardInterrupt
        seen.poll()

    def forget():
        """Restores, in a forked child process, the signal handlers that were installed before
        `fit`."""
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


_IN_CHILD: list[Callable[[], None]] = []  # innermost run last


def _after_fork() -> None:
    while _IN_CHILD:
        _IN_CHILD.pop()()
    _runs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def _later_ends(numbers) -> Iterator[None]:
    """Ends the process at a signal that arrives more than one second after the first signal.

    Python runs signal handlers only in the main thread, and not while the main thread compiles a
    program. Python immediately writes the number of each signal to a pipe, and a second thread
    reads this pipe."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch():
        first = None
        while number := os.read(reading, 1)[0]:  # 0 ends it: a forked child may keep the pipe open
            if number not in numbers:
                continue
            now = time.monotonic()
            first = now if first is None else first
            if now - first > ONE:
                with contextlib.suppress(OSError):  # the terminal may be gone
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
