"""Reading checkpoints: which there are, the newest that is whole, every byte verified."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fnet.training import _folder, _leaves, _manifest, _structure
from fnet.training._manifest import Damaged


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used or written; the message says what to do."""


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was set aside, and an earlier one is used."""


class Reading:
    """What `Checkpoints` does that needs no right to write, except for setting damaged steps aside."""

    folder: Path
    _best: str | None
    _mode: str
    _values: dict[int, float]

    def lock(self) -> None:
        raise NotImplementedError

    def steps(self) -> list[int]:
        """The steps of the checkpoints, ascending; unfinished ones and those set aside do not count."""
        return _folder.steps(self.folder)

    def damaged(self) -> list[str]:
        """The names of folders that were found damaged and set aside."""
        return _folder.damaged(self.folder)

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

    def restore(self, target: Any, step: int | None = None, *, cast: bool = False, part: str = "") -> Any:
        """The tree saved at `step`, in the structure, placement and kinds of `target`.

        Without a `step` it is the newest one that is whole: damaged ones are set aside (renamed to STEP.damaged, never
        deleted), with a `CheckpointWarning`.

        Args:
          target: a tree like the saved one; arrays may be jax.ShapeDtypeStruct. Their shardings decide where things go,
            on however many devices the run was before. Every process reads all files, to verify them.
          step: None for the newest good one.
          cast: whether a leaf of another dtype is converted to the target's.
          part: the path of the subtree that `target` is like, such as "state"; "" for all that was saved.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          CheckpointError: none can be read, or it differs from the target in a leaf's name, shape or dtype, each of
            which is listed. Nothing is dropped or started afresh.
        """
        return self._newest(step, lambda step: self._read(step, target, cast, part))

    def read(self, step: int | None = None) -> tuple[dict[str, Any], Any]:
        """(the manifest, the tree) of a checkpoint without a target: dicts, lists and tuples of arrays and numbers.

        Args:
          step: None for the newest good one, as `restore`.

        Raises:
          FileNotFoundError, CheckpointError: as `restore`.
        """
        return self._newest(step, self._plain)

    def _newest(self, step: int | None, read: Callable[[int], Any]) -> Any:
        if step is not None or jax.process_count() > 1:
            step = self._agreed(step)
            try:
                return read(step)
            except Damaged as error:
                raise CheckpointError(self._named(step, error)) from None
        failed: list[str] = []
        for step in reversed(self.steps()):
            try:
                tree = read(step)
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
            raise CheckpointError(f"{self.folder / str(step)} cannot be read ({reason(error)})") from None

    def _read(self, step: int, target: Any, cast: bool, part: str) -> Any:
        folder, content = self.folder / str(step), self._manifest(step)
        inside = f"{part}/" if part else ""
        saved = {path.removeprefix(inside): leaf for path, leaf in content["leaves"].items() if path.startswith(inside)}
        leaves = _leaves.paths(target)
        wanted = {path: _leaves.entry(path, leaf) for path, leaf in leaves.items()}
        if lines := _leaves.mismatches(saved, wanted, cast=cast):
            raise CheckpointError(f"{folder}: this checkpoint is of something else:\n  " + "\n  ".join(lines))
        arrays = self._arrays(folder, content)
        restored = [_leaves.number(saved[path]["python"], arrays[inside + path].tobytes()) if "python" in saved[path]
                    else _leaves.like(leaf, arrays[inside + path], saved[path]) for path, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(target), restored)

    def _plain(self, step: int) -> tuple[dict[str, Any], Any]:
        folder, content = self.folder / str(step), self._manifest(step)
        arrays = self._arrays(folder, content)
        leaves = {path: _leaves.plain(arrays[path], leaf) for path, leaf in content["leaves"].items()}
        if "tree" not in content:
            return content, _structure.nested(leaves)
        try:
            return content, _structure.build(content["tree"], leaves)
        except (ValueError, KeyError, RecursionError) as error:
            raise Damaged(f"{_manifest.MANIFEST} makes no sense ({type(error).__name__}: {error})") from None

    def _arrays(self, folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return _manifest.read_leaves(folder, content)
        except PermissionError as error:
            raise CheckpointError(f"{folder} cannot be read ({reason(error)})") from None

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
        try:      # not where another run writes, nor where nothing can be written
            self.lock()
            name = _folder.set_aside(self.folder, step)
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


def reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
