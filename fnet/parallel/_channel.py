"""The class `Channel`. The processes of a run use a `Channel` to decide together whether to run the
next step. A process that waits longer than a time limit for another process raises an error."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
import socket
import sys
import threading
import time

import jax

from fnet import _jax

GO, END, BATCH, OUT, FAILED = "go", "end", "batch", "out", "failed: "
_SLICE = 0.5  # seconds that one query to the key-value store waits for a key
_GRACE = 30.0  # seconds that the main thread has to receive an error about another process
_LINGER = 5.0  # seconds that the process which runs the store waits for the others to end
_LEFT, _FAILED, _GONE = "has left the loop before the others", "has ended", "gone: "
_numbers = itertools.count()


class PeersGone(RuntimeError):
    """Raised by `feed` if another process of the run is late or has ended; the message names it.

    The process that receives it can exit without waiting for the other one.

    >>> step = lambda state, batch: (state, {"mean": batch.mean()})
    >>> plan = parallel.plan(step, lambda key: {"w": jnp.zeros(4)}, np.zeros((8, 4), "float32"))
    >>> try:
    ...     shapes = [batch.shape for batch in parallel.feed([np.ones((8, 4), "float32")], plan, timeout=60)]
    ... except parallel.PeersGone as error:
    ...     raise SystemExit(f"restart the job: {error}")
    >>> shapes
    [(8, 4)]
    """


class Closed(Exception):
    """Raised when this process no longer waits for the other processes."""


class Channel:
    """Lets several processes decide together whether to run the next step.

    Before a step, each process writes its status to JAX's key-value store. The first process in
    `processes` reads every status, and decides whether all processes run the step, end the loop or
    raise an error. All other processes wait until the first process has written its decision (run,
    end or error) to the store. For each step, the first process sends at least three requests to
    the store, and one more request to delete the entries of the previous step. Each process except
    the first sends at least two requests to the store for each step.

    Args:
        processes: the indices of all processes, including this one.
        timeout: the number of seconds that a process waits for the slowest process.
        decide: a function that maps {process: status} to the decision for all processes: `GO`,
            `END`, or the message of an error that all processes raise.
    """

    def __init__(self, processes: list[int], timeout: float, decide):
        self.processes, self.timeout, self.decide = processes, timeout, decide
        self.me, self.first = jax.process_index(), processes[0]
        self.store, self.root = _jax.processes.notes(), f"fnet/feed/{next(_numbers)}"
        self.at, self.closed, self.over = 0, False, False
        self._set(f"host/{self.me}", socket.gethostname())
        atexit.register(self._end)

    def agree(self, mine: str) -> str:
        """Returns the decision for all processes, as a string.

        The decision is `GO` (all processes run the next step), `END` (all processes end the loop),
        or the message of an error that all processes raise.

        Args:
            mine: the status of this process.

        Raises:
            PeersGone: a process is late, has ended or has left the loop.
        """
        began = time.monotonic()
        try:
            self._set(f"{self.at}/said/{self.me}", mine)
            verdict = self._collected(began) if self.me == self.first else self._verdict(began)
        except jax.errors.JaxRuntimeError as error:
            said = str(error).strip().split("\n")[0][:150]
            raise self.gone([self.first], f"does not answer ({said})") from None
        self.at += 1
        self.over = verdict == END
        return verdict

    def name(self, process: int) -> str:
        host = self._get(f"host/{process}")
        return f"process {process}" + (f" ({host})" if host else "")

    def close(self, why: str = _LEFT) -> None:
        """Tells the other processes that this process has left the loop, and why. If all processes
        have agreed to end the loop, no message is sent."""
        if not self.closed:
            self.closed = True
            if self.over:
                atexit.unregister(self._end)
            else:
                self._say(why)

    def _end(self):
        """Runs when the interpreter exits. Tells the other processes that this process has left,
        and whether an exception was the reason."""
        error, self.closed = getattr(sys, "last_value", None), True
        if error is None:
            self._say(_LEFT)
            return
        self._say(f"{_FAILED} with {type(error).__name__}: {error}".split("\n")[0][:300])
        _jax.processes.leave()
        if isinstance(
            error, jax.errors.JaxRuntimeError
        ):  # perhaps because another process has died
            self._suspect()
        # Else gloo ends the other processes too early.
        self._last(min(_GRACE, self.timeout) + _LINGER, stay=True)

    def _suspect(self):
        """Prints a line about late processes while this process waits for them."""
        time.sleep(min(_LINGER, self.timeout) / 2)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            there = self._list(f"{self.at}/said")
            if missing := [p for p in self.processes if p not in there and p != self.me]:
                print(self.gone(missing, "did not come"), file=sys.stderr, flush=True)

    def _say(self, why):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the other processes may have ended
            self._set(f"left/{self.me}", why)

    def leave(self, why: str = "has given up waiting") -> None:
        """Does the same as `close`, but this process does not wait for other processes when it
        exits. Use `leave` if other processes are late or gone."""
        self.close(why)
        atexit.unregister(self._end)
        _jax.processes.leave()
        atexit.register(self._last)

    def gone(self, who: list[int], what: str) -> PeersGone:
        """Returns the error that names the late or missing processes."""
        names = " and ".join(map(self.name, who[:8])) + (
            f" and {len(who) - 8} more" if len(who) > 8 else ""
        )
        return PeersGone(
            f"feed: {names} {what}, at batch {self.at}, so the others cannot continue; restart all "
            "processes, or increase timeout= for slow ones"
        )

    def _collected(self, began):
        while True:
            there = self._list(f"{self.at}/said")
            missing = [p for p in self.processes if p not in there]
            if not missing:
                break
            if error := self._behind(missing, time.monotonic() - began > self.timeout):
                self._set(f"{self.at}/verdict", f"{_GONE}{error}")
                raise error
            self._wait(f"{self.at}/said/{missing[0]}")
        verdict = self.decide(there)
        self._set(f"{self.at}/verdict", verdict)
        if self.at:
            self.store.key_value_delete(f"{self.root}/{self.at - 1}/")
        return verdict

    def _verdict(self, began):
        while (verdict := self._wait(f"{self.at}/verdict")) is None:
            if (
                time.monotonic() - began > self.timeout + 2 * _SLICE
            ):  # the first process reports the error first
                there = self._list(f"{self.at}/said")
                raise self._behind(
                    [p for p in self.processes if p not in there] or [self.first], True
                )
        if verdict.startswith(_GONE):
            raise PeersGone(verdict.removeprefix(_GONE))
        return verdict

    def _behind(self, missing, late):
        """Returns an error that names those of the missing processes that have left the loop over
        batches, or else, past the time limit, all of them. None: wait on."""
        left = self._list("left")
        if early := [p for p in missing if p in left]:
            return self.gone(early, left[early[0]])
        return self.gone(missing, f"did not come within {self.timeout:g} s") if late else None

    def end_process(self, error: PeersGone, taken: threading.Event) -> None:
        """Ends this process with a message on stderr if the main thread does not raise `error`
        within a time limit. A main thread that is blocked in a step, waiting for a missing process,
        cannot raise an exception.

        If another process left the loop over batches without an exception, `end_process` waits for
        the main thread without a time limit, because the main thread may still be computing its
        last step.
        """
        began, seconds = time.monotonic(), math.inf if _LEFT in str(error) else self.timeout
        while not taken.wait(_SLICE) and not self.closed:
            if seconds > _GRACE and (failed := self._failed()):
                error, began, seconds = failed, time.monotonic(), min(_GRACE, self.timeout)
            if time.monotonic() - began > seconds:
                print(f"{error} (this process was blocked in a step)", file=sys.stderr, flush=True)
                self._last()
                os._exit(1)

    def _failed(self):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            left = self._list("left")
            if who := [p for p, why in left.items() if why.startswith(_FAILED)]:
                return self.gone(who, left[who[0]])
        return None

    # Access to JAX's key-value store.

    def _set(self, key, text):
        self.store.key_value_set(f"{self.root}/{key}", text, allow_overwrite=True)

    def _list(self, key):
        found = self.store.key_value_dir_get(f"{self.root}/{key}/")
        return {int(name.rpartition("/")[2]): text for name, text in found}

    def _get(self, key):
        try:
            return self.store.key_value_try_get(f"{self.root}/{key}")
        except jax.errors.JaxRuntimeError:
            return None

    def _wait(self, key):
        """Returns the value of a key in the key-value store, or None if the key is not set within
        `_SLICE` seconds."""
        if self.closed:
            raise Closed
        try:
            return self.store.blocking_key_value_get(f"{self.root}/{key}", int(_SLICE * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def _last(self, seconds=_LINGER, *, stay=False):
        """Waits up to `seconds` for the other processes to end. If `stay` is False, only the first
        process waits for the others, because the first process runs JAX's key-value store."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._set(f"ended/{self.me}", "")
            end = time.monotonic() + seconds
            while (stay or self.me == self.first) and time.monotonic() < end:
                if len(self._list("ended")) == len(self.processes):
                    time.sleep(_SLICE)
                    break
                time.sleep(0.05)
