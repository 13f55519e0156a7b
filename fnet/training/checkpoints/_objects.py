"""The checkpoints under a prefix of an object store. A checkpoint is complete once its manifest
(JSON file) has been written."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from fnet.training.checkpoints import _manifest
from fnet.training.checkpoints._folder import ASIDE
from fnet.training.checkpoints._lease import Lease
from fnet.training.checkpoints._lock import LOCK
from fnet.training.checkpoints._storage import StorageError, StorePath


class Objects:
    """The checkpoints in an object store. The names of the objects of a checkpoint begin with a
    prefix that belongs to this checkpoint alone. The class has the same methods as
    `_folder.Folder`.

    A save first writes the arrays to objects with new names, so the arrays of an existing
    checkpoint are never overwritten. After the arrays, a save writes manifest.json with a
    conditional write, which succeeds only if no other process has created or changed manifest.json
    in the meantime. A prefix without a manifest.json is not a checkpoint.

    Args:
      folder: the prefix of the checkpoints of all steps.
    """

    poll = 0.25

    def __init__(self, folder: StorePath):
        self.folder = folder

    def _names(self) -> dict[str, list[str]]:
        """Returns a dict {first part: [rest, ...]} of the names of all objects, which are split at
        the first slash. The first part of an object's name is usually the number of a step."""
        names: dict[str, list[str]] = {}
        for key in self.folder.keys():
            first, _, rest = key.partition("/")
            names.setdefault(first, []).append(rest)
        return names

    def steps(self) -> list[int]:
        return sorted(
            int(name)
            for name, inside in self._names().items()
            if name.isdecimal() and _manifest.MANIFEST in inside
        )

    def damaged(self) -> list[str]:
        return sorted(name for name in self._names() if ASIDE.fullmatch(name))

    def foreign(self) -> list[str]:
        def own(name, inside):
            if inside == [""]:
                return name.startswith(LOCK)
            return bool(name.isdecimal() or ASIDE.fullmatch(name)) and all(
                key == _manifest.MANIFEST
                or _manifest.FILE.fullmatch(key)
                or key.startswith(".part-")
                for key in inside
            )

        return sorted(name for name, inside in self._names().items() if not own(name, inside))

    def lock(self) -> Lease:
        return Lease(self.folder)

    def partial(self, step: int) -> StorePath:
        return self.folder / str(step)

    def arrays(self, process: int) -> str:
        return f"arrays-{process}-{secrets.token_hex(8)}.safetensors"

    def write_part(self, step: int, process: int, text: str) -> None:
        self._part(step, process).write_text(text)

    def take_part(self, step: int, process: int) -> str | None:
        try:
            return self._part(step, process).read_text()
        except FileNotFoundError:
            return None

    def taken(self, step: int, process: int) -> bool:
        return not self._part(step, process).exists()

    def _part(self, step, process):
        return self.partial(step) / f".part-{process}.json"

    def commit(self, step: int, content: Mapping[str, Any], check: Callable[[], None]) -> None:
        check()
        self._put(step, content)
        with contextlib.suppress(OSError):  # else `tidy` does it
            self._sweep(step, content)

    def amend(self, step: int, content: Mapping[str, Any]) -> None:
        self._put(step, content)

    def _put(self, step, content):
        path, data = self.partial(step) / _manifest.MANIFEST, _manifest.sealed(content)
        before = path.meta()
        written = path.create(data) if before is None else path.replace(data, before)
        if written is None:
            raise StorageError(f"{path}: another process wrote this object at the same time")

    def _sweep(self, step, content):
        """Removes the objects of a checkpoint that are not listed in its manifest."""
        for name in self.partial(step).keys():
            if name != _manifest.MANIFEST and name not in content["files"]:
                (self.partial(step) / name).unlink(missing_ok=True)

    def discard(self, step: int) -> None:
        """Abandons a checkpoint that could not be committed, so that the other processes no longer
        wait for it.

        `discard` keeps the arrays, because the checkpoint may be complete. For example, the object
        store may have written the manifest (JSON file), although its response was lost. If the
        manifest does not exist, or does not list the arrays, `tidy` removes the arrays."""
        with contextlib.suppress(OSError):
            for name in self.partial(step).keys():
                if name.startswith(".part-"):
                    (self.partial(step) / name).unlink(missing_ok=True)

    def remove(self, step: int) -> None:
        self._remove(str(step))

    def _remove(self, name):
        prefix = self.folder / name
        # First, so that the rest is not a checkpoint.
        (prefix / _manifest.MANIFEST).unlink(missing_ok=True)
        for key in prefix.keys():
            (prefix / key).unlink(missing_ok=True)

    def clear(self) -> None:
        for name, inside in self._names().items():
            if inside != [""]:
                self._remove(name)

    def set_aside(self, step: int) -> str:
        """Renames a damaged checkpoint: copies its objects inside the object store, and removes the
        originals."""
        names, name, number = self._names(), f"{step}.damaged", 2
        while name in names:
            name, number = f"{step}.damaged-{number}", number + 1
        for key in names[str(step)]:
            (self.partial(step) / key).copy(self.folder / name / key)
        self.remove(step)
        return name

    def tidy(self) -> None:
        """Removes the objects that remain after an interrupted save or removal of a checkpoint. If
        a checkpoint has no manifest (JSON file), `tidy` removes all objects of the checkpoint. If a
        checkpoint has a manifest, `tidy` removes only objects that the manifest does not list."""
        for name, inside in self._names().items():
            if not name.isdecimal() or inside == [""]:
                continue
            if _manifest.MANIFEST not in inside:
                self._remove(name)
            elif (
                any(key.startswith(".part-") for key in inside) or sum(map(_is_arrays, inside)) > 1
            ):
                with contextlib.suppress(_manifest.Damaged):
                    self._sweep(int(name), _manifest.read_manifest(self.folder / name))


def _is_arrays(name):
    return bool(_manifest.FILE.fullmatch(name))
