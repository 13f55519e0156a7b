"""Checkpoints through Orbax, in this one file; Orbax is imported when the first one is made.

On disk a checkpoint is an Orbax folder per step with two items: `arrays`, a flat dict from the
leaf's path ("params/conv1/kernel") to its array, and `manifest`, JSON that names each leaf's dtype,
shape and CRC-32. What is read back has to match the manifest bit for bit and the target leaf by leaf.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np


class CheckpointError(RuntimeError):
    """A checkpoint that is there but cannot be used; the message says what to do."""


def _paths(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _array(leaf: Any) -> np.ndarray:
    """A host copy. A copy, because the step donates its buffers while Orbax is still writing."""
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return np.array(jax.device_get(leaf), copy=True)


def _entry(array: np.ndarray, leaf: Any) -> dict[str, Any]:
    entry = {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "crc32": zlib.crc32(np.ascontiguousarray(array).view(np.uint8).reshape(-1))
        if array.size
        else 0,
    }
    return entry | ({"key": str(jax.random.key_impl(leaf))} if _is_key(leaf) else {})


def _describe(entry: Mapping[str, Any]) -> str:
    key = f" (PRNG key, {entry['key']})" if "key" in entry else ""
    return f"{entry['dtype']}{list(entry['shape'])}{key}"


def _mismatches(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    lines = []
    for path in sorted(saved.keys() | wanted.keys()):
        if path not in saved:
            lines.append(f"'{path}': not in the checkpoint, the target has {_describe(wanted[path])}")
        elif path not in wanted:
            lines.append(f"'{path}': {_describe(saved[path])} in the checkpoint, not in the target")
        elif _describe(saved[path]) != _describe(wanted[path]):
            lines.append(
                f"'{path}': {_describe(saved[path])} in the checkpoint, "
                f"the target has {_describe(wanted[path])}"
            )
    return lines


def _like(leaf: Any, array: np.ndarray, entry: Mapping[str, Any]) -> Any:
    """The saved array as the kind of thing the target's leaf is, where that leaf is."""
    if isinstance(leaf, bool | int | float):
        return type(leaf)(array.item())
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return array if isinstance(leaf, np.ndarray) else array[()]
    # An array that is bound to no device must not come back bound to one: it may meet sharded data.
    bound = isinstance(leaf, jax.ShapeDtypeStruct) or leaf.committed
    sharding = leaf.sharding if bound else None
    if "key" in entry:
        return jax.device_put(jax.random.wrap_key_data(array, impl=entry["key"]), sharding)
    return jax.device_put(array, sharding)


class Checkpoints:
    """The checkpoints of one run: saved in the background, the last few and the best one kept.

    A save is atomic (a folder is renamed when it is complete), so a process killed in the middle of
    one leaves the checkpoint before it in force. One process; arrays sharded over its devices are
    gathered on saving and put back in their places on restoring.

    Args:
      folder: where the step folders go; made when needed.
      keep: how many of the latest to keep.
      best: name of a metric given to `save`; the checkpoint with the best value is kept as well.
      mode: "max" or "min", what best means.

    Raises:
      ValueError: keep < 1, or another mode.
    """

    def __init__(
        self, folder: str | Path, *, keep: int = 3, best: str | None = None, mode: str = "max"
    ):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the last checkpoint has to be kept")
        if mode not in ("max", "min"):
            raise ValueError(f"mode='{mode}': the best value is the 'max' or the 'min'")
        self.folder = Path(folder).absolute()
        self._keep, self._best, self._mode = keep, best, mode
        self._manager: Any = None

    def _open(self) -> Any:
        if self._manager is None:
            import orbax.checkpoint as ocp
            from orbax.checkpoint import checkpoint_managers as managers

            policies: list[Any] = [managers.LatestN(self._keep)]
            if self._best is not None:
                policies.append(
                    managers.BestN(
                        get_metric_fn=lambda values: values["best"],
                        reverse=self._mode == "min",
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    )
                )
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=managers.AnyPreservationPolicy(policies),
                    best_fn=None if self._best is None else lambda values: values["best"],
                    best_mode=self._mode,
                ),
            )
        return self._manager

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, ascending; unfinished saves do not count."""
        return sorted(self._open().all_steps()) if self.folder.exists() else []

    def latest(self) -> int | None:
        """The last step saved, or None."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step whose metric was best, or None."""
        return self._open().best_step() if self._best and self.steps() else None

    def save(self, step: int, tree: Any, *, metrics: Mapping[str, float] | None = None) -> None:
        """Starts saving `tree` as step `step` and returns as soon as it has been copied.

        Args:
          step: the number of the checkpoint, larger than any saved before.
          tree: any pytree of arrays, NumPy arrays, PRNG keys and Python numbers.
          metrics: where to look up the metric that decides about the best.
        """
        import orbax.checkpoint as ocp

        leaves = _paths(tree)
        arrays = {path: _array(leaf) for path, leaf in leaves.items()}
        manifest = {path: _entry(arrays[path], leaf) for path, leaf in leaves.items()}
        value = (metrics or {}).get(self._best, math.nan) if self._best else math.nan
        if not math.isfinite(value):
            value = -math.inf if self._mode == "max" else math.inf
        self._open().save(
            step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave({p: a for p, a in arrays.items() if a.size}),
                manifest=ocp.args.JsonSave({"leaves": manifest}),
            ),
            metrics=None if self._best is None else {"best": value},
            force=True,
        )

    def restore(self, target: Any, step: int | None = None) -> Any:
        """The tree saved at `step`, in the structure, places and kinds of `target`.

        Args:
          target: a tree like the saved one; arrays may be jax.ShapeDtypeStruct.
          step: None for the latest.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          CheckpointError: it cannot be read, is damaged, or differs from the target in a leaf's
            name, shape or dtype. Nothing is cast, dropped or started afresh.
        """
        step = self.latest() if step is None else step
        if step is None or step not in self.steps():
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise FileNotFoundError(f"{self.folder}: {wanted} here, there are steps {self.steps()}")
        leaves = _paths(target)
        saved = self._manifest(step)
        wanted = {path: self._wanted(leaf) for path, leaf in leaves.items()}
        if lines := _mismatches(saved, wanted):
            more = f"\n  and {len(lines) - 8} more" if len(lines) > 8 else ""
            raise CheckpointError(
                f"{self.folder / str(step)}: this checkpoint is of something else:\n  "
                + "\n  ".join(lines[:8]) + more
            )
        arrays = self._arrays(step, saved)
        restored = [_like(leaf, arrays[path], saved[path]) for path, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(target), restored)

    @staticmethod
    def _wanted(leaf: Any) -> dict[str, Any]:
        if _is_key(leaf):
            data = jax.eval_shape(jax.random.key_data, leaf)
            impl = str(jax.random.key_impl(leaf))
            return {"dtype": str(data.dtype), "shape": list(data.shape), "key": impl}
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        return {"dtype": str(dtype), "shape": list(np.shape(leaf))}

    def _manifest(self, step: int) -> dict[str, Any]:
        import orbax.checkpoint as ocp

        try:
            args = ocp.args.Composite(manifest=ocp.args.JsonRestore())
            return self._open().restore(step, args=args).manifest["leaves"]
        except Exception as error:
            raise self._unreadable(step, error) from error

    def _arrays(self, step: int, saved: Mapping[str, Any]) -> dict[str, np.ndarray]:
        import orbax.checkpoint as ocp

        empty = {
            path: np.zeros(entry["shape"], jax.numpy.dtype(entry["dtype"]))
            for path, entry in saved.items()
        }
        target = {path: array for path, array in empty.items() if array.size}
        try:
            args = ocp.args.Composite(arrays=ocp.args.StandardRestore(target))
            read = self._open().restore(step, args=args).arrays
        except Exception as error:
            raise self._unreadable(step, error) from error
        for path, array in read.items():
            if _entry(array, None)["crc32"] != saved[path]["crc32"]:
                damage = ValueError(f"'{path}' does not have the checksum it was saved with")
                raise self._unreadable(step, damage)
        return empty | read

    def _unreadable(self, step: int, error: Exception) -> CheckpointError:
        before = [other for other in self.steps() if other < step]
        then = f"go on from step {before[-1]}" if before else "start anew"
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        return CheckpointError(
            f"{self.folder / str(step)}: this checkpoint cannot be read "
            f"({type(error).__name__}: {reason}); move that folder away to {then}"
        )

    def wait(self) -> None:
        """Returns when everything saved so far is on the disk; raises what went wrong there."""
        if self._manager is not None:
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None
