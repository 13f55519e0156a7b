"""Checkpoints, which are written atomically and in the background, and verified when they are read."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fnet.training._direction import direction
from fnet.training.checkpoints import _leaves, _shards, _storage, _structure
from fnet.training.checkpoints._folder import Folder
from fnet.training.checkpoints._lease import Lease
from fnet.training.checkpoints._lock import Lock, Locked
from fnet.training.checkpoints._objects import Objects
from fnet.training.checkpoints._reading import CheckpointError, Reading, named, reason
from fnet.training.checkpoints._snapshot import snapshot
from fnet.training.checkpoints._writing import write


class Checkpoints(Reading):
    """Saves the checkpoints of one run in the background, and keeps the latest and the best.

    A process that is killed in the middle of a save damages nothing: a local checkpoint is written
    under a temporary name, fsynced and renamed; in an object store, its manifest is written last.
    Each checkpoint is a folder named by its step, with the arrays in safetensors files and a JSON
    manifest that has checksums of every shard, every file and itself. Reading one verifies all of
    its bytes.

    Args:
      folder: the folder of the checkpoints, a path or a URL (s3://bucket/prefix,
        gs://bucket/prefix, az://container/prefix), which is created if it does not exist. The first
        `save` locks it for this process.
      keep: how many of the latest checkpoints stay. Default 3.
      keep_every: keep each checkpoint whose step is a multiple of it, too. Default None.
      best: the name of a metric that `save` gets. The checkpoint with its best value also stays.
        Default None.
      mode: "max" or "min": which value is the best. Default None: known for accuracies, losses,
        errors and other common metrics; required for the rest.

    Raises:
      ValueError: `keep` or `keep_every` is less than 1, `mode` is neither "max" nor "min", or it is
        missing for a metric whose direction fnet does not know.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, tr.Checkpoints(folder, keep=2) as checkpoints:
    ...     checkpoints.save(1, {"w": jnp.ones(3)})
    ...     checkpoints.wait()
    ...     checkpoints.restore({"w": jnp.zeros(3)})["w"].tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        best: str | None = None,
        mode: str | None = None,
    ):
        if not isinstance(keep, int | np.integer) or keep < 1:
            raise ValueError(f"keep={keep!r}: expected a whole number of checkpoints, at least 1")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every={keep_every}: expected a number of steps, at least 1")
        if best is not None or mode is not None:
            mode = direction(best or "", mode, "mode=")
        where = _storage.location(folder)
        self._where = (
            Objects(where) if isinstance(where, _storage.StorePath) else Folder(where.absolute())
        )
        self.folder = self._where.folder
        self._keep, self._keep_every, self._best, self._mode = keep, keep_every, best, mode
        self._lock: Lock | Lease | None = None
        self._saving: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._values: dict[int, float] = {}
        self.anchor: int | None = (
            None  # a step whose checkpoint is kept, because the run may roll back to it
        )
        self._hurry = threading.Event()
        self._shared = False

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is not None:  # the first error is raised, not one of `wait`
            self._hurry.set()
            with contextlib.suppress(CheckpointError):
                self.wait()
        self.close()

    def lock(self) -> None:
        """Locks the folder until `close` or the end of the process, and removes incomplete saves.

        Raises:
          CheckpointError: another run uses the folder, it cannot be written to, or this process has
            the lock but the folder was removed or replaced.
        """
        if jax.process_index() > 0:
            return
        if self._lock is not None:
            self._held(ask=False)
            return
        try:
            self._lock = self._where.lock()
        except Locked as error:
            raise CheckpointError(
                f"{self.folder}: another run is using this folder ({error}): wait for it, end "
                "it, or choose another folder"
            ) from None
        except _storage.StorageError as error:
            raise CheckpointError(f"{error}. Nothing can be saved there") from None
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: nothing can be saved here ({reason(error)}): choose another "
                "folder, or make this one writable"
            ) from None
        with named(self.folder):
            self._where.tidy()

    def clear(self) -> None:
        """Removes all checkpoints.

        Raises:
          CheckpointError: another run uses the folder, or it contains files that do not belong to
            checkpoints. Nothing was removed.
        """
        self.wait()
        self.lock()
        if foreign := self._where.foreign():
            raise CheckpointError(
                f"{self.folder} holds files that are not of checkpoints "
                f"({', '.join(foreign[:5])}), so no file was removed: remove the folder manually, "
                "or choose another workdir"
            )
        self._where.clear()
        self._values.clear()

    def _ready(self) -> None:
        """Locks the folder. Only process 0 holds the lock of the folder. Before the first save, all
        processes wait until process 0 has locked the folder."""
        if self._shared or jax.process_count() == 1:
            self.lock()
            return
        problem = None
        try:
            self.lock()
        except CheckpointError as error:
            problem = error
        failed = _shards.first_says(problem is not None)
        if problem is not None:
            raise problem
        if failed:
            raise CheckpointError(
                f"{self.folder}: the first process could not lock this folder; its own error "
                "states the reason"
            )
        self._shared = True

    def _held(self, *, ask: bool = True) -> None:
        """Raises an error if this run no longer holds the lock of the folder. If `ask` is False, no
        request is sent to an object store."""
        if self._lock is not None and not (self._lock.holds() if ask else self._lock.kept()):
            raise CheckpointError(
                f"{self.folder}: this folder was removed or replaced, or another run took it over; "
                "nothing more is written there. Start the run again"
            )

    def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        notes: Mapping[str, Any] | None = None,
        sound: Any = None,
    ) -> None:
        """Saves `tree` as the checkpoint of step `step`, in the background.

        `save` waits for the previous save, dispatches a copy of the arrays on the device, and
        returns. An error in the background is raised by the next call of `save`, `wait` or `close`.

        Args:
          step: the step, which names the checkpoint. An earlier checkpoint of it is replaced.
          tree: any pytree of JAX arrays, NumPy arrays, PRNG keys and Python numbers.
          metrics: metrics by name, with the one that `best` names. Default None.
          notes: other data of JSON types by name, for the manifest. Default None.
          sound: a bool scalar on the device, such as whether all parameters are finite. If it is
            False, nothing is saved. Default None: always save.

        Raises:
          CheckpointError: the folder cannot be written to, another run uses it, or the previous
            save failed.
          TypeError: a leaf has an unsupported type.
        """
        leaves = _leaves.paths(tree)
        entries = {path: _leaves.entry(path, leaf) for path, leaf in leaves.items()}
        self.wait()
        self._ready()
        head = {
            "step": int(step),
            "notes": _json(notes),
            "metrics": _finite(metrics),
            "tree": _structure.describe(tree),
        }
        arguments = head, entries, snapshot(leaves), sound
        self._saving = threading.Thread(
            target=self._save, args=arguments, name=f"checkpoint {step}"
        )
        self._saving.start()

    def amend(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds metrics and notes to a saved step, in the background and without writing its arrays
        again.

        A pending save is completed first. Has no effect on a step that was not saved because
        `sound` was False.

        Args:
          step: a step that was passed to `save`.
          metrics, notes: as in `save`. They replace values of the same name.

        Raises:
          CheckpointError: the folder has been removed or replaced, or another run has taken it
            over. An error in the background is raised by the next call of `save`, `wait` or
            `close`.
        """
        self._held(ask=False)
        if jax.process_index() == 0:
            arguments = self._saving, step, _finite(metrics), _json(notes)
            self._saving = threading.Thread(
                target=self._amend, args=arguments, name=f"amend {step}"
            )
            self._saving.start()

    def wait(self) -> None:
        """Waits until all saves are complete, and raises their errors."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _newest(self, step: int | None, read: Any) -> Any:
        if self._saving is not None:
            self._saving.join()  # this save may write the newest checkpoint
        return super()._newest(step, read)

    def close(self) -> None:
        """Waits until all saves are complete, and unlocks the folder."""
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    # Writing, in a separate thread.

    def _save(
        self, head: dict[str, Any], entries: dict[str, Any], copies: Mapping[str, Any], sound: Any
    ) -> None:
        step = head["step"]
        try:
            if sound is not None and not bool(sound):
                return
            content = write(self._where, head, entries, copies, self._hurry)
            if content is None:  # the first process commits the step
                return
            self._where.commit(step, content, self._held)
            self._values[step] = head["metrics"].get(self._best, math.nan)
        except BaseException as error:
            self._failed(step, error)
            with contextlib.suppress(OSError):
                if jax.process_index() == 0 and (self._lock is None or self._lock.holds()):
                    self._where.discard(step)
            return
        self._prune(step)

    def _amend(
        self,
        before: threading.Thread | None,
        step: int,
        metrics: dict[str, float],
        notes: dict[str, Any],
    ) -> None:
        if before is not None:
            before.join()
        try:
            if self._error is None and step in self.steps():
                self._held()
                content = self._manifest(step)
                content["metrics"] |= metrics
                content["notes"] |= notes
                self._where.amend(step, content)
                self._values[step] = content["metrics"].get(self._best, math.nan)
                self._prune(step)
        except BaseException as error:
            self._failed(step, error)

    def _failed(self, step: int, error: BaseException) -> None:
        if isinstance(error, CheckpointError):
            self._error = error
            return
        try:
            steps = self.steps()
        except CheckpointError:  # the steps that are known without the store
            steps = sorted(self._values)
        kept = [before for before in steps if before != step]
        kept = f"the checkpoint of step {kept[-1]} is whole" if kept else "there is none before it"
        why = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        self._error = CheckpointError(
            f"{self.folder}: step {step} could not be saved ({why}); {kept}"
        )

    def _prune(self, saved: int) -> None:
        try:
            steps = self.steps()
            kept = {*steps[-self._keep :], self.best(), self.anchor}
            for step in steps:
                if step not in kept and not (self._keep_every and step % self._keep_every == 0):
                    self._where.remove(step)
                    self._values.pop(step, None)
        except BaseException as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            self._error = CheckpointError(
                f"{self.folder}: step {saved} was saved, but older checkpoints could not be "
                f"removed ({why})"
            )


def _finite(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in (metrics or {}).items()
        if np.ndim(value) == 0 and math.isfinite(float(value))
    }


def _json(notes: Mapping[str, Any] | None) -> dict[str, Any]:
    return json.loads(json.dumps(dict(notes or {}), allow_nan=False))
