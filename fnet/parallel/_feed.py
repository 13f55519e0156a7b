"""feed: each process's own rows as batches that lie on all chips, of one shape, ending together."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from fnet.parallel._channel import BATCH, END, FAILED, GO, OUT, Channel, Closed, PeersGone
from fnet.parallel._plan import Plan
from fnet.parallel._rows import Rows

_AHEAD = 2      # batches that are made ready while the loop is at another


def feed(batches: Iterable[Any], plan: Plan, *, drop_remainder: bool = False, timeout: float = 300.0) -> Iterator[Any]:
    """Batches for a step that is spread over chips, each process giving its own rows.

        for batch in parallel.feed(batches, plan):
            state, metrics = step(state, batch)

    Every batch has the plan's shape, so that nothing is compiled twice. A process's share of its rows is fixed: those
    on its own devices. A short batch, such as the last one of an epoch, is filled up with copies of its last row that
    have weight 0 in `batch["weight"]`, float32 [rows], which is added where the plan's batch has it and the given one
    does not. A loss that is a mean weighted by it is that of the true rows.

    Several processes agree before each step whether all have a batch, while the step before it runs; with weights,
    those that have run out give rows of weight 0 until all have, and all end together. One process has none of this:
    its batches are placed by the calling thread, while the device works at the step before.

    Args:
        batches: trees of NumPy arrays as the plan's batch, the rows of this process alone, in the same order in every
            epoch and run as one wants the result. Leaves without rows, such as a key, must be the same everywhere. The
            arrays may be filled again once the next batch is asked for.
        plan: of `parallel.plan`, for devices that are here.
        drop_remainder: leave short batches out, and end with the first process that has no more. For steps that do not
            read `batch["weight"]`.
        timeout: seconds that a process may be behind the others, time to compile included.

    Yields:
        Trees as the plan's batch, of jax.Arrays placed as the plan says.

    Raises:
        ValueError: naming leaf, shape and share, for more rows than the share; for other leaves, row shapes or dtypes
            than the plan's; or where rows have to be filled up, or processes do not end together, and the step reads no
            weight.
        PeersGone: naming the process that lags, is gone or has left the loop. Each process may then end, without
            waiting for it. A process which stands in a step and cannot be told ends with a line on stderr.
        TypeError: `batches` is nothing to go through.

    Source: jax.make_array_from_process_local_data. Of uneven rows: PyTorch's DistributedSampler, which repeats or drops
        examples, and Join, in which ranks that have run out shadow the others' collectives.
    """
    if not plan.here:
        raise ValueError(f"feed: this plan is for {plan.mesh.size} x {plan.chip.name} that are not here; plan for "
                         "devices='local' or jax.devices() to run")
    if not hasattr(batches, "__iter__"):
        raise TypeError(f"feed: batches are gone through one by one, and {type(batches).__name__} cannot be: give a "
                        "list or a generator, such as (batches(i) for i in range(steps))")
    if timeout <= 0:
        raise ValueError(f"feed: timeout={timeout}: it is in seconds, more than 0")
    rows = Rows(plan, drop_remainder)
    processes = sorted({device.process_index for device in plan.mesh.devices.flat})
    if jax.process_index() not in processes:
        raise ValueError(f"feed: the plan's devices are those of processes {processes}, and this is process "
                         f"{jax.process_index()}: plan for jax.devices()")
    return _alone(batches, rows) if len(processes) == 1 else _together(batches, rows, processes, timeout)


def _alone(batches, rows):
    placed = None
    for batch in _sized(batches, rows):
        yield (placed := rows.place(batch))
        _transferred(placed)      # before the arrays may be filled again


def _sized(batches, rows):
    """The batches at full size, without those that are left out."""
    for at, batch in enumerate(batches):
        if (filled := rows.fill(batch, at)) is not None:
            yield filled


def _transferred(tree):
    for x in jax.tree.leaves(tree):
        if not x.is_deleted():
            x.block_until_ready()


def _together(batches, rows, processes, timeout):
    peers = _Peers(batches, rows, processes, timeout)
    try:
        while (batch := peers.next()) is not None:
            yield batch
    finally:
        peers.channel.close()


class _Peers:
    """The batches of a process among others, made ready and agreed upon by a thread."""

    def __init__(self, batches, rows, processes, timeout):
        self.batches, self.rows, self.timeout = iter(_sized(batches, rows)), rows, timeout
        self.channel = Channel(processes, timeout, self.decide)
        self.ready: queue.Queue = queue.Queue()
        self.room, self.taken = threading.Semaphore(_AHEAD), threading.Event()
        self.since: float | None = None      # when it began to wait for this process's own batch
        threading.Thread(target=self.fill, daemon=True, name="feed").start()

    def next(self) -> Any:
        """The next batch, or None at the end."""
        while True:
            try:
                batch, error = self.ready.get(timeout=0.5)
                break
            except queue.Empty:
                since = self.since
                if since is not None and time.monotonic() - since > self.timeout:
                    why = f"had no batch of its own within {self.timeout:g} s"
                    me, at = self.channel.name(self.channel.me), self.channel.at
                    self.channel.leave(why)
                    raise PeersGone(f"feed: {me}, this one, {why}, at batch {at}: the others give up waiting; look at "
                                    "what makes its batches, or give it longer with timeout=") from None
        if error is not None:
            self.taken.set()
            if isinstance(error, PeersGone):
                self.channel.leave()
            raise error
        self.room.release()
        return batch

    def fill(self) -> None:
        with contextlib.suppress(Closed):
            while True:
                self.room.acquire()
                batch, error = None, None
                self.since = time.monotonic()
                try:
                    batch = next(self.batches, None)
                except BaseException as found:    # handed to the loop, which raises it
                    error = found
                self.since = None
                batch, found = self.agreed(batch, error)
                self.ready.put((batch, found))
                if isinstance(found, PeersGone):
                    self.channel.end_process(found, self.taken)
                if batch is None:
                    return

    def agreed(self, batch, error):
        """(what to run, None at the end; what to raise)"""
        said = (BATCH if batch is not None else OUT) if error is None else (
            FAILED + f"{type(error).__name__}: {error}".split("\n")[0][:300])
        try:
            verdict = self.channel.agree(said)
            if error is not None or verdict == END:
                return None, error
            if verdict != GO:
                return None, ValueError(verdict)
            placed = self.rows.place(self.rows.nothing() if batch is None else batch)
            _transferred(placed)
            return placed, None
        except Closed:
            raise
        except BaseException as found:
            return None, error or found

    def decide(self, said: dict[int, str]) -> str:
        failed = {process: text for process, text in said.items() if text.startswith(FAILED)}
        out = [process for process, text in said.items() if text == OUT]
        at, name = self.channel.at, self.channel.name
        if failed:
            process, text = next(iter(failed.items()))
            return f"feed: {name(process)} could not make batch {at}: {text.removeprefix(FAILED)}"
        if not out or (self.rows.weighted and not self.rows.drop and len(out) < len(said)):
            return GO
        if len(out) == len(said) or self.rows.drop:
            return END
        return (f"feed: {name(out[0])} has no more after {at} batches, and others have: {self.rows.why}, so that its "
                f"rows cannot be filled up; {self.rows.choices}")
