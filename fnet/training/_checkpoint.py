"""Checkpoints: whole or not there, saved in the background, verified when read."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fnet.training import _leaves, _manifest
from fnet.training._lock import Lock, Locked
from fnet.training._manifest import Damaged
from fnet.training._snapshot import snapshot
from fnet.training._writing import write

_ASIDE = re.compile(r"(\d+)\.damaged(-\d+)?")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used or written; the message says what to do."""


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was set aside, and an earlier one is used."""


class Checkpoints:
    """The checkpoints of one run: saved in the background, the last few and the best one kept.

    A checkpoint is a folder named by its step: safetensors files and a manifest with a checksum of every leaf, every
    file and itself. It is written under another name and renamed when all of it is on the disk, so that a process that
    is killed, whenever, leaves the checkpoint before it in force. Reading verifies every byte.

    Args:
      folder: where the step folders go; made when needed. Saving locks it for this process.
      keep: how many of the latest to keep.
      keep_every: keep every checkpoint whose step is a multiple of this as well.
      best: name of a metric given to `save`; the checkpoint with the best value is kept as well.
      mode: "max" or "min", what best means.

    Raises:
      ValueError: keep < 1, keep_every < 1, or another mode.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, keep_every: int | None = None, best: str | None = None,
                 mode: str = "max"):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the last checkpoint has to be kept")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every={keep_every}: it counts steps, at least 1")
        if mode not in ("max", "min"):
            raise ValueError(f"mode='{mode}': the best value is the 'max' or the 'min'")
        self.folder = Path(folder).absolute()
        self._keep, self._keep_every, self._best, self._mode = keep, keep_every, best, mode
        self._lock: Lock | None = None
        self._saving: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._values: dict[int, float] = {}
        self._hurry = threading.Event()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is not None:      # what went wrong first is what is raised
            self._hurry.set()
            with contextlib.suppress(CheckpointError):
                self.wait()
        self.close()

    def lock(self) -> None:
        """Makes the folder this process's to write, until `close` or the process's end, and clears away what a killed
        save has left.

        Raises:
          CheckpointError: another run has it, or it cannot be written to.
        """
        if self._lock is None and jax.process_index() == 0:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = Lock(self.folder)
            except Locked as error:
                raise CheckpointError(f"{self.folder}: another run is using this folder ({error}): wait for it, end "
                                      "it, or choose another folder") from None
            except OSError as error:
                raise CheckpointError(f"{self.folder}: nothing can be saved here ({_why(error)}): name another folder, "
                                      "or make this one writable") from None
            self._clear()

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, ascending; unfinished saves and those set aside do not count."""
        try:
            return sorted(int(entry.name) for entry in os.scandir(self.folder)
                          if entry.name.isdecimal() and entry.is_dir())
        except FileNotFoundError:
            return []

    def damaged(self) -> list[str]:
        """The names of folders that were found damaged and set aside."""
        try:
            return sorted(name for name in os.listdir(self.folder) if _ASIDE.fullmatch(name))
        except FileNotFoundError:
            return []

    def latest(self) -> int | None:
        """The last step saved, or None."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step whose metric was best, or None."""
        if self._best is None:
            return None
        values = {step: self._value(step) for step in self.steps()}
        finite = [step for step, value in values.items() if math.isfinite(value)]
        sign = 1 if self._mode == "min" else -1
        return min(finite, key=lambda step: (sign * values[step], step), default=None)

    def notes(self, step: int | None = None) -> dict[str, Any]:
        """The notes that were given to `save` with a step; None for the latest.

        Raises:
          FileNotFoundError, CheckpointError: as `restore`.
        """
        step = self._there(step)
        try:
            return self._manifest(step)["notes"]
        except Damaged as error:
            raise CheckpointError(self._named(step, error)) from None

    def save(self, step: int, tree: Any, *, metrics: Mapping[str, float] | None = None,
             notes: Mapping[str, Any] | None = None, sound: Any = None) -> None:
        """Starts saving `tree` as step `step` and returns as soon as the device has been told to copy it.

        An earlier checkpoint of the same step is replaced. What went wrong with a save is raised by the next one, by
        `wait` and by `close`.

        Args:
          step: the number of the checkpoint.
          tree: any pytree of arrays, NumPy arrays, PRNG keys and Python numbers.
          metrics: where to look up the metric that decides about the best.
          notes: what else is to be known of the run, JSON's types.
          sound: a bool on the device: where it turns out False, nothing is saved.

        Raises:
          CheckpointError: the folder cannot be written to or is another run's; or the save before this one failed.
          TypeError: a leaf is of another kind.
        """
        leaves = _leaves.paths(tree)
        entries = {path: _leaves.entry(path, leaf) for path, leaf in leaves.items()}
        self.wait()
        self.lock()
        head = {"step": int(step), "notes": json.loads(json.dumps(dict(notes or {}))),
                "metrics": {name: float(value) for name, value in (metrics or {}).items()
                            if np.ndim(value) == 0 and math.isfinite(float(value))}}
        arguments = head, entries, snapshot(leaves), sound
        self._saving = threading.Thread(target=self._save, args=arguments, name=f"checkpoint {step}")
        self._saving.start()

    def restore(self, target: Any, step: int | None = None, *, cast: bool = False) -> Any:
        """The tree saved at `step`, in the structure, places and kinds of `target`.

        Without a `step` it is the newest one that is whole: damaged ones are set aside (renamed to STEP.damaged, never
        deleted), with a `CheckpointWarning`.

        Args:
          target: a tree like the saved one; arrays may be jax.ShapeDtypeStruct. Their shardings decide where things go,
            on however many devices the run was before. Every process reads all files, to verify them.
          step: None for the newest good one.
          cast: whether a leaf of another dtype is converted to the target's.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          CheckpointError: none can be read, or it differs from the target in a leaf's name, shape or dtype, each of
            which is listed. Nothing is dropped or started afresh.
        """
        if step is not None or jax.process_count() > 1:
            step = self._agreed(step)
            try:
                return self._read(step, target, cast)
            except Damaged as error:
                raise CheckpointError(self._named(step, error)) from None
        failed: list[str] = []
        for step in reversed(self.steps()):
            try:
                tree = self._read(step, target, cast)
            except Damaged as error:
                failed.append(self._set_aside(step, error))
                continue
            self._warn(failed, step)
            return tree
        raise self._none_good(failed)

    def verify(self, step: int | None = None) -> int:
        """Reads a checkpoint, the newest if None, and returns its step.

        Raises:
          FileNotFoundError: there is none.
          CheckpointError: it is damaged; the message names the file or the leaf.
        """
        step = self._there(step)
        try:
            _manifest.read_leaves(self.folder / str(step), self._manifest(step))
        except Damaged as error:
            raise CheckpointError(self._named(step, error)) from None
        return step

    def wait(self) -> None:
        """Returns when everything saved so far is on the disk; raises what went wrong there."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits, and gives the folder free."""
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    # Reading.

    def _there(self, step: int | None) -> int:
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        step = self.latest() if step is None else step
        if step is None and self.damaged():
            raise self._none_good([])
        if step is None or step not in self.steps():
            raise FileNotFoundError(f"{self.folder}: {wanted} here, there are steps {self.steps()}")
        return step

    def _manifest(self, step: int) -> dict[str, Any]:
        try:
            return _manifest.read_manifest(self.folder / str(step))
        except PermissionError as error:
            raise CheckpointError(f"{self.folder / str(step)} cannot be read ({_why(error)})") from None

    def _read(self, step: int, target: Any, cast: bool) -> Any:
        folder, content = self.folder / str(step), self._manifest(step)
        saved, leaves = content["leaves"], _leaves.paths(target)
        wanted = {path: _leaves.entry(path, leaf) for path, leaf in leaves.items()}
        if lines := _leaves.mismatches(saved, wanted, cast=cast):
            raise CheckpointError(f"{folder}: this checkpoint is of something else:\n  " + "\n  ".join(lines))
        try:
            arrays = _manifest.read_leaves(folder, content)
        except PermissionError as error:
            raise CheckpointError(f"{folder} cannot be read ({_why(error)})") from None
        restored = [_leaves.number(saved[path]["python"], arrays[path].tobytes()) if "python" in saved[path]
                    else _leaves.like(leaf, arrays[path], saved[path]) for path, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(target), restored)

    def _agreed(self, step: int | None) -> int:
        """The step that all processes restore: that of the first one, which has read all of it."""
        if jax.process_count() == 1 or step is not None:
            return self._there(step)
        from jax.experimental import multihost_utils

        chosen, failed = -1, []
        if jax.process_index() == 0:
            for step in reversed(self.steps()):
                try:
                    _manifest.read_leaves(self.folder / str(step), self._manifest(step))
                    chosen = step
                    break
                except Damaged as damage:
                    failed.append(self._set_aside(step, damage))
        chosen = int(multihost_utils.broadcast_one_to_all(np.int32(chosen)))
        if chosen < 0:
            raise self._none_good(failed)
        self._warn(failed, chosen)
        return chosen

    def _set_aside(self, step: int, why: Damaged) -> str:
        name = f"{step}.damaged"
        for number in range(2, 10_000):
            if not (self.folder / name).exists():
                break
            name = f"{step}.damaged-{number}"
        try:      # not where another run writes, nor where nothing can be written
            self.lock()
            os.rename(self.folder / str(step), self.folder / name)
            _manifest.sync_folder(self.folder)
        except (CheckpointError, OSError):
            return f"step {step} is damaged ({why})"
        return f"step {step} is damaged ({why}) and was set aside as {name}"

    def _warn(self, failed: list[str], step: int) -> None:
        if failed:
            warnings.warn(f"{self.folder}: {'; '.join(failed)}; going on from step {step}, the newest that is whole",
                          CheckpointWarning, stacklevel=4)

    def _none_good(self, failed: list[str]) -> Exception:
        if not failed and not self.damaged():
            return FileNotFoundError(f"{self.folder}: no checkpoint here, there are steps []")
        what = "; ".join(failed) or f"what is here was found damaged and set aside: {', '.join(self.damaged())}"
        return CheckpointError(f"{self.folder}: no checkpoint here can be read: {what}. To start anew, remove the "
                               "folder or choose another")

    def _named(self, step: int, why: Damaged) -> str:
        others = [str(other) for other in self.steps() if other != step]
        there = f"there are also steps {', '.join(others)}" if others else "there is no other"
        return f"{self.folder / str(step)}: this checkpoint is damaged ({why}); {there}"

    def _value(self, step: int) -> float:
        if step not in self._values:
            try:
                self._values[step] = self._manifest(step)["metrics"].get(self._best, math.nan)
            except (Damaged, CheckpointError):
                return math.nan
        return self._values[step]

    # Writing, in a thread of its own.

    def _save(self, head: dict[str, Any], entries: dict[str, Any], copies: Mapping[str, Any], sound: Any) -> None:
        step = head["step"]
        partial = self.folder / f".saving-{step}"
        try:
            if (sound is None or bool(sound)) and write(partial, head, entries, copies, self._hurry):
                self._commit(partial, head)
        except BaseException as error:
            kept = [before for before in self.steps() if before != step]
            kept = f"the checkpoint of step {kept[-1]} is whole" if kept else "there is none before it"
            why = _why(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._error = CheckpointError(f"{self.folder}: step {step} could not be saved ({why}); {kept}")
            if jax.process_index() == 0:
                shutil.rmtree(partial, ignore_errors=True)

    def _commit(self, partial: Path, head: dict[str, Any]) -> None:
        final, old = self.folder / str(head["step"]), self.folder / f".replaced-{head['step']}"
        if final.exists():
            os.rename(final, old)
        os.rename(partial, final)
        _manifest.sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        self._values[head["step"]] = head["metrics"].get(self._best, math.nan)
        self._prune()

    def _prune(self) -> None:
        steps = self.steps()
        kept = {*steps[-self._keep:], self.best()}
        for step in steps:
            if step in kept or (self._keep_every and step % self._keep_every == 0):
                continue
            going = self.folder / f".deleting-{step}"      # renamed, so that no half of it is ever taken for a step
            os.rename(self.folder / str(step), going)
            shutil.rmtree(going, ignore_errors=True)
            self._values.pop(step, None)

    def _clear(self) -> None:
        for entry in list(os.scandir(self.folder)):
            if entry.name.startswith((".saving-", ".deleting-")):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name.startswith(".replaced-"):
                step = self.folder / entry.name.removeprefix(".replaced-")
                if step.exists():
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.rename(entry.path, step)


def _why(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
