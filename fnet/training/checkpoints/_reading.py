"""Reads checkpoints, and verifies every byte."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from fnet.training._meaning import explained
from fnet.training.checkpoints import _leaves, _manifest, _shards, _structure
from fnet.training.checkpoints._folder import Folder
from fnet.training.checkpoints._manifest import Damaged
from fnet.training.checkpoints._objects import Objects
from fnet.training.checkpoints._storage import StorageError, StorePath


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, written or used. The message says what to do.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, tr.Checkpoints(folder) as checkpoints:
    ...     checkpoints.save(1, {"kernel": jnp.ones(3)})
    ...     try:
    ...         checkpoints.restore({"kernel": jnp.ones(4)})
    ...     except tr.CheckpointError as error:
    ...         print("kernel" in str(error))
    True
    """


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was renamed, and an earlier checkpoint is used instead.

    >>> import pathlib, tempfile, warnings
    >>> with tempfile.TemporaryDirectory() as folder, tr.Checkpoints(folder) as checkpoints:
    ...     checkpoints.save(1, {"kernel": jnp.ones(3)})
    ...     checkpoints.save(2, {"kernel": jnp.zeros(3)})
    ...     checkpoints.wait()
    ...     _ = pathlib.Path(folder, "2", "manifest.json").write_text("damaged")
    ...     with warnings.catch_warnings(record=True, action="always") as issued:
    ...         tree = checkpoints.restore({"kernel": jnp.zeros(3)})
    >>> issued[0].category.__name__, tree["kernel"].tolist()
    ('CheckpointWarning', [1.0, 1.0, 1.0])
    """


class Reading:
    """The methods of `Checkpoints` that read. They change the folder only to rename damaged
    checkpoints."""

    folder: Path | StorePath
    _where: Folder | Objects
    _best: str | None
    _mode: str | None
    _values: dict[int, float]

    def lock(self) -> None:
        raise NotImplementedError

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints in ascending order, without incomplete and renamed
        ones."""
        with named(self.folder):
            return self._where.steps()

    def damaged(self) -> list[str]:
        """Returns the folders of damaged checkpoints, such as "400.damaged" for step 400."""
        with named(self.folder):
            return self._where.damaged()

    def latest(self) -> int | None:
        """Returns the step of the latest checkpoint, or None."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the step with the best value of the metric `best`, or None: no metric was named,
        or no checkpoint has a finite value of it."""
        if self._best is None:
            return None
        values = {step: self._value(step) for step in self.steps()}
        finite = [step for step, value in values.items() if math.isfinite(value)]
        sign = 1 if self._mode == "min" else -1
        return min(finite, key=lambda step: (sign * values[step], step), default=None)

    def notes(self, step: int | None = None) -> dict[str, Any]:
        """Returns the notes that were passed to `save` for a step, by default the latest.

        Raises:
          FileNotFoundError, CheckpointError: as for `restore`.
        """
        step = self._there(step)
        try:
            return self._manifest(step)["notes"]
        except Damaged as error:
            raise CheckpointError(self._named(step, error)) from None

    def restore(
        self, target: Any, step: int | None = None, *, cast: bool = False, part: str = ""
    ) -> Any:
        """Returns the tree that was saved at `step`, with the structure, shardings and leaf types
        of `target`.

        `restore` waits for a save in the background, and never omits or initializes a leaf
        silently. Without a `step`, it takes the newest undamaged checkpoint: damaged ones are
        renamed to STEP.damaged, with a `CheckpointWarning`, and never deleted.

        Args:
          target: a tree with the structure of the saved one, of arrays or `jax.ShapeDtypeStruct`s.
            The numbers of devices and processes may differ from those at the time of saving; with
            several processes, each reads and verifies only the shards that its devices need.
          step: the step of the checkpoint. Default None: the newest undamaged one.
          cast: convert saved leaves to the dtypes of `target`. Default False: another dtype is an
            error.
          part: the path of a subtree, such as "state", whose structure `target` then has. Default
            "": the whole tree.

        Raises:
          FileNotFoundError: the checkpoint does not exist.
          CheckpointError: no checkpoint can be read, or it differs from `target` in the name, shape
            or dtype of a leaf. The message lists all differences.
        """
        return self._newest(step, lambda step: self._read(step, target, cast, part))

    def read(self, step: int | None = None) -> tuple[dict[str, Any], Any]:
        """Reads a checkpoint without a target tree. Returns (manifest, tree).

        The tree consists of dicts, lists, tuples, arrays and numbers.

        Args:
          step: the step of the checkpoint. Default None: the newest undamaged one, as for
            `restore`.

        Raises:
          FileNotFoundError, CheckpointError: as for `restore`.
        """
        return self._newest(step, self._plain)

    def _newest(self, step: int | None, read: Callable[[int], Callable[[], Any]]) -> Any:
        """Returns the tree of the checkpoint of `step`, or of the newest undamaged checkpoint if
        `step` is None. `read(step)` reads and verifies the files, and returns a function without
        arguments that builds the tree."""
        if jax.process_count() > 1:
            return self._together(step, read)
        if step is not None:
            try:
                return read(self._there(step))()
            except Damaged as error:
                raise CheckpointError(self._named(step, error)) from None
        failed: list[str] = []
        for step in reversed(self.steps()):
            try:
                tree = read(step)()
            except Damaged as error:
                failed.append(self._set_aside(step, error))
                continue
            self._warn(failed, step)
            return tree
        raise self._none_good(failed)

    def _together(self, wanted: int | None, read: Callable[[int], Callable[[], Any]]) -> Any:
        """`_newest` for several processes. Process 0 selects the step, and every process must read
        its shards successfully."""
        me, failed, tried = jax.process_index(), [], []
        while True:
            step = self._there(wanted) if wanted is not None else self._candidate(tried)
            if step < 0:
                raise self._none_good(failed)
            make, problem = None, None
            try:
                make = read(step)
            except Exception as error:  # the others must not wait for this process
                problem = error
            came = _shards.together(problem)
            if problem is not None and not isinstance(problem, Damaged):
                raise problem
            if (came > 1).any():
                raise CheckpointError(
                    f"{self.folder / str(step)}: process {int(came.argmax())} could not read this "
                    "checkpoint; its own error states the reason"
                )
            if not came.any():
                self._warn(failed, step)
                return make()
            why = problem or Damaged(f"as process {int(came.argmax())} found")
            if wanted is not None:
                raise CheckpointError(self._named(step, why)) from None
            tried.append(step)
            failed.append(
                self._set_aside(step, why) if me == 0 else f"step {step} is damaged ({why})"
            )

    def _candidate(self, tried: list[int]) -> int:
        """Returns the newest checkpointed step that is not in `tried`, or -1 if there is no such
        step. Process 0 reads the steps of all checkpoints from the folder, and sends the selected
        step to the other processes."""
        if jax.process_index() > 0:
            if (step := _shards.first_says(0)) == -2:
                raise CheckpointError(
                    f"{self.folder}: the first process could not list the checkpoints; its own "
                    "message says why"
                )
            return step
        try:
            step = max((step for step in self.steps() if step not in tried), default=-1)
        except BaseException:
            _shards.first_says(-2)
            raise
        return _shards.first_says(step)

    def verify(self, step: int | None = None) -> int:
        """Reads and verifies a checkpoint, by default the newest, and returns its step.

        Raises:
          FileNotFoundError: the checkpoint does not exist.
          CheckpointError: the checkpoint is damaged. The message names the file or leaf.
        """
        step = self._there(step)
        try:
            self._arrays(self.folder / str(step), self._manifest(step))
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
        with named(self.folder / str(step)):
            return _manifest.read_manifest(self.folder / str(step))

    def _read(self, step: int, target: Any, cast: bool, part: str) -> Callable[[], Any]:
        folder, content = self.folder / str(step), self._manifest(step)
        inside = f"{part}/" if part else ""
        saved = {
            path.removeprefix(inside): leaf
            for path, leaf in content["leaves"].items()
            if path.startswith(inside)
        }
        leaves = _leaves.paths(target)
        wanted = {path: _leaves.entry(path, leaf) for path, leaf in leaves.items()}
        if lines := _leaves.mismatches(saved, wanted, cast=cast):
            why = "".join(f"\n{text}" for text in explained(saved, wanted))
            raise CheckpointError(
                f"{folder}: this checkpoint is of something else:\n  " + "\n  ".join(lines) + why
            )
        if jax.process_count() > 1:
            with named(folder):
                arrays = _shards.read(
                    folder, content, {inside + path: leaf for path, leaf in leaves.items()}
                )
        else:
            arrays = self._arrays(folder, content)

        def made():
            restored = [
                _leaves.number(saved[path]["python"], arrays[inside + path].tobytes())
                if "python" in saved[path]
                else _leaves.like(leaf, arrays[inside + path], saved[path])
                for path, leaf in leaves.items()
            ]
            return jax.tree.unflatten(jax.tree.structure(target), restored)

        return made

    def _plain(self, step: int) -> Callable[[], tuple[dict[str, Any], Any]]:
        folder, content = self.folder / str(step), self._manifest(step)
        arrays = self._arrays(folder, content)
        leaves = {
            path: _leaves.plain(arrays[path], leaf) for path, leaf in content["leaves"].items()
        }
        if "tree" not in content:
            return lambda: (content, _structure.nested(leaves))
        try:
            tree = _structure.build(content["tree"], leaves)
            return lambda: (content, tree)
        except (ValueError, KeyError, RecursionError) as error:
            raise Damaged(
                f"{_manifest.MANIFEST} makes no sense ({type(error).__name__}: {error})"
            ) from None

    def _arrays(self, folder: Path | StorePath, content: Mapping[str, Any]) -> dict[str, Any]:
        with named(folder):
            return _manifest.read_leaves(folder, content)

    def _set_aside(self, step: int, why: Damaged) -> str:
        try:  # fails if another run uses the folder or if it cannot be written to
            self.lock()
            name = self._where.set_aside(step)
        except (CheckpointError, OSError):
            return f"step {step} is damaged ({why})"
        return f"step {step} is damaged ({why}) and was set aside as {name}"

    def _warn(self, failed: list[str], step: int) -> None:
        if failed:
            warnings.warn(
                f"{self.folder}: {'; '.join(failed)}; going on from step {step}, the newest that "
                f"is whole",
                CheckpointWarning,
                stacklevel=4,
            )

    def _none_good(self, failed: list[str]) -> Exception:
        if not failed and not self.damaged():
            return FileNotFoundError(f"{self.folder}: no checkpoint here, there are steps []")
        what = (
            "; ".join(failed)
            or f"what is here was found damaged and set aside: {', '.join(self.damaged())}"
        )
        return CheckpointError(
            f"{self.folder}: no checkpoint here can be read: {what}. To start again from the first "
            "step, remove the folder or choose another"
        )

    def _named(self, step: int, why: Damaged) -> str:
        others = [str(other) for other in self.steps() if other != step]
        there = f"there are also steps {', '.join(others)}" if others else "there is no other"
        return f"{self.folder / str(step)}: this checkpoint is damaged ({why}); {there}"

    def _value(self, step: int) -> float:
        if step not in self._values:
            try:
                self._values[step] = self._manifest(step)["metrics"].get(self._best, math.nan)
            except Damaged:
                return math.nan
            except CheckpointError:
                if isinstance(
                    self.folder, StorePath
                ):  # currently unreachable, but it may be the best
                    raise
                return math.nan
        return self._values[step]


def reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


@contextlib.contextmanager
def named(folder: Path | StorePath) -> Iterator[None]:
    """Returns a context manager that raises a CheckpointError if the body of the `with` statement
    raises an OSError. The message of the CheckpointError names the folder or, for the OSError of an
    object store, the URL."""
    try:
        yield
    except StorageError as error:
        raise CheckpointError(str(error)) from None
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({reason(error)})") from None
