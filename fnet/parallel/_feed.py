"""feed: transfers the batches of each process to its devices. All batches have the same shape, and
all processes run the same number of steps."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from fnet.parallel._channel import BATCH, END, FAILED, GO, OUT, Channel, Closed, PeersGone
from fnet.parallel._local_batches import LocalBatches
from fnet.parallel._plan import Plan

_AHEAD = 2  # batches that are prepared in advance


def feed(
    batches: Iterable[Any], plan: Plan, *, drop_remainder: bool = False, timeout: float = 300.0
) -> Iterator[Any]:
    """Yields batches whose rows lie on the devices of a plan.

        for batch in parallel.feed(batches, plan):
            state, metrics = step(state, batch)

    Each process passes its own rows, those that its devices hold, and every batch that comes out
    has the shape of the plan's batch, so that the step is compiled once. A batch with fewer rows,
    such as the last of an epoch, is padded with copies of its last row, for which
    `batch["weight"]`, a float32 array [rows], is 0: a mean with these weights ignores them. If the
    plan's batch has the leaf "weight" and yours does not, `feed` adds it.

    In a run of several processes, these tell each other during the current step whether they have a
    batch for the next one. If the step reads `batch["weight"]`, a process that has run out provides
    rows of weight 0 until all have finished. In one process, the calling thread transfers the next
    batch while the device runs the previous step.

    Args:
        batches: an iterable of batches, trees of NumPy arrays with the structure of the plan's
            batch and only the rows of this process. For reproducible results, its order must be the
            same in every run. Leaves without axes, such as a PRNG key, must be equal in all
            processes. The arrays may be overwritten when the next batch is requested.
        plan: the result of `parallel.plan`, for devices that are attached.
        drop_remainder: skip short batches instead of padding them, and end as soon as one process
            has no more. Pass True if the step does not read `batch["weight"]`. Default False.
        timeout: how long to wait for the slowest process, in seconds, the compilation of its step
            included. Default 300.

    Yields:
        Trees of `jax.Array`s with the structure of the plan's batch and the plan's shardings.

    Raises:
        ValueError: a batch has too many rows, or other leaves, shapes or dtypes than the plan's
            batch; the message names the leaf, its shape and the number of rows to pass. Also if a
            batch must be padded but the step does not read `batch["weight"]`.
        PeersGone: another process did not answer within `timeout`, has ended, or has left the loop;
            the message names it. A process that is blocked in a step cannot raise, so it prints the
            message to stderr and exits.
        TypeError: `batches` is not iterable.

    Source: `jax.make_array_from_process_local_data`. With unequal numbers of rows, PyTorch's
    DistributedSampler repeats or drops examples, and in PyTorch's Join a process without data still
    takes part in collectives.

    >>> step = lambda state, batch: (state, {"mean": batch.mean()})
    >>> plan = parallel.plan(step, lambda key: {"w": jnp.ones(3)}, jnp.ones((8, 3)), devices=jax.devices()[:1])
    >>> [batch.shape for batch in parallel.feed([np.ones((8, 3), np.float32)], plan)]
    [(8, 3)]
    """
    if not plan.attached:
        raise ValueError(
            f"feed: this plan is for {plan.mesh.size} x {plan.chip.name}, which are not attached; "
            "use devices='local' or jax.devices() to run it"
        )
    if not hasattr(batches, "__iter__"):
        raise TypeError(
            "feed: batches must be iterable, e.g. a list or a generator such as (batches(i) for i "
            f"in range(steps)); got {type(batches).__name__}"
        )
    if timeout <= 0:
        raise ValueError(f"feed: timeout must be > 0 seconds; got {timeout}")
    rows = LocalBatches(plan, drop_remainder)
    processes = sorted({device.process_index for device in plan.mesh.devices.flat})
    if jax.process_index() not in processes:
        raise ValueError(
            f"feed: the plan's devices belong to processes {processes}, but this is process "
            f"{jax.process_index()}; plan for jax.devices()"
        )
    return (
        _alone(batches, rows)
        if len(processes) == 1
        else _together(batches, rows, processes, timeout)
    )


def _alone(batches, rows):
    placed = None
    for batch in _sized(batches, rows):
        yield (placed := rows.place(batch))
        _transferred(placed)  # before the arrays may be overwritten


def _sized(batches, rows):
    """Yields the batches. Short batches are padded, or omitted with `drop_remainder`."""
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
    """Provides the batches of this process in a run of several processes. A thread prepares each
    batch, and asks the other processes whether they have a batch for the same step.
    """

    def __init__(self, batches, rows, processes, timeout):
        self.batches, self.rows, self.timeout = iter(_sized(batches, rows)), rows, timeout
        self.channel = Channel(processes, timeout, self.decide)
        self.ready: queue.Queue = queue.Queue()
        self.room, self.taken = threading.Semaphore(_AHEAD), threading.Event()
        self.since: float | None = (
            None  # when the thread began to wait for this process's own batch
        )
        threading.Thread(target=self.fill, daemon=True, name="feed").start()

    def next(self) -> Any:
        """Returns the next batch, or None at the end of the iteration."""
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
                    raise PeersGone(
                        f"feed: {me}, this one, {why}, at batch {at}, so the others stop waiting; "
                        "check the source of its batches, or increase timeout="
                    ) from None
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
                except BaseException as found:  # passed to the loop, which raises it
                    error = found
                self.since = None
                batch, found = self.agreed(batch, error)
                self.ready.put((batch, found))
                if isinstance(found, PeersGone):
                    self.channel.end_process(found, self.taken)
                if batch is None:
                    return

    def agreed(self, batch, error):
        """Decides together with the other processes whether to run a step. Returns (batch on the
        devices, None) to run the step, (None, error) to raise an error, or (None, None) at the
        end."""
        said = (
            (BATCH if batch is not None else OUT)
            if error is None
            else (FAILED + f"{type(error).__name__}: {error}".split("\n")[0][:300])
        )
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
            return f"feed: {name(process)} failed to create batch {at}: {text.removeprefix(FAILED)}"
        if not out or (self.rows.weighted and not self.rows.drop and len(out) < len(said)):
            return GO
        if len(out) == len(said) or self.rows.drop:
            return END
        return (
            f"feed: {name(out[0])} has no more batches after {at}, but others have; "
            f"{self.rows.why}, so its rows cannot be padded; {self.rows.choices}"
        )
