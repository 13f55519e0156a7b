"""Reads and verifies only the shards of a checkpoint that one process needs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fnet.parallel._gather import gather
from fnet.training.checkpoints import _leaves, _manifest
from fnet.training.checkpoints._manifest import Damaged
from fnet.training.checkpoints._storage import StorePath

Box = tuple[tuple[int, int], ...]  # (begin, end) along each axis


class Shards:
    """The parts of an array that this process needs. `shards[index]` returns one part, where
    `index` is the position of the part in the complete array."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, parts: Mapping[Box, np.ndarray]):
        self.shape, self.dtype, self._parts = shape, dtype, parts

    def astype(self, dtype: Any) -> Shards:
        return Shards(
            self.shape, dtype, {box: part.astype(dtype) for box, part in self._parts.items()}
        )

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self._parts[_box(index, self.shape)]


def _box(index, shape) -> Box:
    return tuple(where.indices(size)[:2] for where, size in zip(index, shape))


def needed(leaf: Any, shape: tuple[int, ...]) -> set[Box] | None:
    """Returns the parts of a leaf that are on the devices of this process, or None if this process
    needs the complete leaf."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.is_fully_addressable or _leaves.is_key(leaf):
        return None
    return {
        _box(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()
    }


def read(
    folder: Path | StorePath, content: Mapping[str, Any], target: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads those leaves of a checkpoint whose paths are keys of `target`. Returns a dict that maps
    the path of each leaf to the complete array, or to a `Shards` object if this process needs only
    parts of the array.

    A shard is read only if it contains a part of a leaf that this process needs. A shard is always
    read completely, because its checksum covers all of its bytes.

    Args:
      folder: the folder of one checkpoint.
      content: the manifest of the checkpoint.
      target: a dict of the leaves of the target tree. The keys are the paths of the leaves in the
          manifest.

    Raises:
      Damaged: a file or a leaf is damaged; the message names it.
      OSError: as for `_manifest.opened`.
    """
    parts: dict[str, dict[Box, np.ndarray]] = {}
    sharded, missing, jobs = set(), {}, {}
    for path, leaf in target.items():
        saved = content["leaves"][path]
        if "python" in saved:
            jobs.setdefault(saved["pieces"][0]["file"], []).append((path, saved["pieces"][0], None))
            continue
        shape = tuple(saved["shape"])
        whole: Box = tuple((0, size) for size in shape)
        boxes = needed(leaf, shape)
        if boxes is not None:
            sharded.add(path)
        parts[path] = {}
        for box in {whole} if boxes is None else boxes:
            parts[path][box] = np.zeros(
                [high - low for low, high in box], _leaves.DTYPES[saved["dtype"]]
            )
            missing[path, box] = math.prod(high - low for low, high in box)
        for piece in saved["pieces"]:
            index: Box = tuple(map(tuple, piece["index"])) if "index" in piece else whole
            if any(_common(index, box) is not None for box in parts[path]):
                jobs.setdefault(piece["file"], []).append((path, piece, index))
    numbers: dict[str, Any] = {}
    for name, pieces in jobs.items():
        with _manifest.opened(folder / name) as (file, size):
            _manifest.check_size(name, size, content["files"][name])
            for path, piece, index in sorted(pieces, key=lambda job: job[1]["at"]):
                raw = _verified(file, name, path, piece)
                if index is None:
                    numbers[path] = raw
                    continue
                array = _manifest.typed(raw, content["leaves"][path]).reshape(
                    [high - low for low, high in index]
                )
                for box, part in parts[path].items():
                    if (common := _common(index, box)) is not None:
                        part[_inside(common, box)] = array[_inside(common, index)]
                        missing[path, box] -= math.prod(high - low for low, high in common)
    for (path, _), count in missing.items():
        if count:
            raise Damaged(f"the shards of '{path}' do not cover it")
    arrays = {
        path: Shards(
            tuple(content["leaves"][path]["shape"]),
            _leaves.DTYPES[content["leaves"][path]["dtype"]],
            boxes,
        )
        if path in sharded
        else next(iter(boxes.values()))
        for path, boxes in parts.items()
    }
    return arrays | numbers


def _verified(file, name, path, piece):
    begin, end = piece["at"]
    raw = np.empty(end - begin, np.uint8)
    file.seek(begin)
    if file.readinto(memoryview(raw)) < end - begin:
        raise Damaged(f"{name} ends early")
    if zlib.crc32(raw) != piece["crc32"]:
        raise Damaged(f"'{path}' does not have the checksum it was written with")
    return raw


def _common(a: Box, b: Box) -> Box | None:
    """Returns the intersection of two parts of an array, or None if the parts do not overlap."""
    common = tuple((max(low, other), min(high, end)) for (low, high), (other, end) in zip(a, b))
    return common if all(low < high for low, high in common) else None


def _inside(common: Box, box: Box) -> tuple[slice, ...]:
    return tuple(slice(low - begin, high - begin) for (low, high), (begin, _) in zip(common, box))


def together(problem: BaseException | None) -> np.ndarray:
    """Returns an array with a code for each process: 0 if the process has read its shards, 1 if it
    has found damage, and 2 if any other error has occurred. `problem` is the error of this process,
    or None. Every process must call `together`."""
    code = 0 if problem is None else 1 if isinstance(problem, Damaged) else 2
    return gather(np.int32(code))


def first_says(value: int) -> int:
    """Returns the `value` that process 0 has passed. Every process must call `first_says`."""
    return int(gather(np.int32(value))[0])
