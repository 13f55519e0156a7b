"""The checkpoints in a local folder. Checkpoints are committed, renamed and removed in such a way
that no complete checkpoint is lost if the process is killed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fnet._util._files import sync_folder
from fnet.training.checkpoints import _manifest
from fnet.training.checkpoints._lock import LOCK, Lock
from fnet.training.checkpoints._storage import write_whole

ASIDE = re.compile(r"(\d+)\.damaged(-\d+)?")
_TEMPORARY = (".saving-", ".deleting-", ".replaced-")


class Folder:
    """The checkpoints in a local folder. The checkpoint of each step is a subfolder.

    A checkpoint is written to the subfolder .saving-STEP, synced to the disk and renamed. The class
    `_objects.Objects` has the same methods as `Folder`, for object stores.

    Args:
      folder: the folder that contains the checkpoints of all steps.
    """

    poll = 0.02  # seconds between two checks for files of other processes

    def __init__(self, folder: Path):
        self.folder = folder

    def steps(self) -> list[int]:
        """Returns the steps of complete checkpoints, ascending."""
        return sorted(
            int(entry.name)
            for entry in self._entries()
            if entry.name.isdecimal() and entry.is_dir()
        )

    def damaged(self) -> list[str]:
        """Returns the names of damaged checkpoints, which were renamed."""
        return sorted(entry.name for entry in self._entries() if ASIDE.fullmatch(entry.name))

    def _entries(self) -> list[os.DirEntry]:
        try:
            return list(os.scandir(self.folder))
        except FileNotFoundError:
            return []

    def foreign(self) -> list[str]:
        """Returns the names of files and folders that do not belong to checkpoints."""

        def own(entry):
            if entry.name == LOCK:
                return True
            if not entry.is_dir(follow_symlinks=False):
                return False
            if entry.name.startswith(_TEMPORARY):
                return True
            inside = [name for name in os.listdir(entry.path) if not name.startswith(".")]
            return bool(entry.name.isdecimal() or ASIDE.fullmatch(entry.name)) and all(
                name == _manifest.MANIFEST or _manifest.FILE.fullmatch(name) for name in inside
            )

        return sorted(entry.name for entry in os.scandir(self.folder) if not own(entry))

    def lock(self) -> Lock:
        """Locks the folder. Raises `Locked` or OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return Lock(self.folder)

    # Writing a step, by one process or by several.

    def partial(self, step: int) -> Path:
        """Returns the folder in which the files of a step are written before `commit`."""
        return self.folder / f".saving-{step}"

    def arrays(self, process: int) -> str:
        """Returns the name of the file with the arrays of a process."""
        return f"arrays-{process}.safetensors"

    def write_part(self, step: int, process: int, text: str) -> None:
        """Writes a JSON file that describes the arrays saved by process `process`. Process 0 reads
        the JSON files of all other processes before it commits the step."""
        write_whole(self._part(step, process), text.encode())

    def take_part(self, step: int, process: int) -> str | None:
        """Reads and deletes the JSON file that describes the arrays saved by process `process`.
        Returns the JSON text, or None if the JSON file does not exist yet."""
        part = self._part(step, process)
        if not part.exists():
            return None
        text = part.read_text()
        part.unlink()
        return text

    def taken(self, step: int, process: int) -> bool:
        """Returns whether process 0 has already completed or abandoned the checkpoint of `step`."""
        return not self.partial(step).exists()

    def _part(self, step, process):
        return self.partial(step) / f".part-{process}.json"

    def commit(self, step: int, content: Mapping[str, Any], check: Callable[[], None]) -> None:
        """Writes the manifest (JSON file) of a checkpoint and renames the folder of the checkpoint.
        An earlier checkpoint of `step` is replaced.

        Args:
          step: the step.
          content: the content of the manifest, which describes the files and arrays.
          check: a function that raises an error if this run no longer holds the lock of the folder.
        """
        _manifest.write_manifest(self.partial(step), content)
        check()
        # Folders, which `os.replace` cannot replace: two renames, which `tidy` completes or takes
        # back if the process is killed in between.
        final, old = self.folder / str(step), self.folder / f".replaced-{step}"
        if final.exists():
            os.rename(final, old)
        try:
            os.rename(self.partial(step), final)
        except OSError:  # the folder was replaced since `check`: what is there stays there
            if old.exists() and not final.exists():
                os.rename(old, final)
            raise
        sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def amend(self, step: int, content: Mapping[str, Any]) -> None:
        """Replaces the manifest (JSON file) of the checkpoint of a step."""
        _manifest.write_manifest(self.folder / str(step), content)

    def discard(self, step: int) -> None:
        """Removes the files of a step that could not be committed."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    # Removing steps.

    def remove(self, step: int) -> None:
        # Renamed first: a partial folder must not look complete.
        going = self.folder / f".deleting-{step}"
        os.rename(self.folder / str(step), going)
        shutil.rmtree(going, ignore_errors=True)

    def clear(self) -> None:
        for entry in os.scandir(self.folder):
            if entry.is_dir():
                shutil.rmtree(entry.path)

    def set_aside(self, step: int) -> str:
        """Renames the folder of a damaged checkpoint. Returns the new name."""
        name, number = f"{step}.damaged", 2
        while (self.folder / name).exists():
            name, number = f"{step}.damaged-{number}", number + 1
        os.rename(self.folder / str(step), self.folder / name)
        sync_folder(self.folder)
        return name

    def tidy(self) -> None:
        """Removes the files of interrupted saves and removals. If a save was interrupted after it
        had renamed the old checkpoint of the step, but before the new checkpoint replaced it,
        restores the old checkpoint."""
        for entry in list(os.scandir(self.folder)):
            if entry.name.startswith((".saving-", ".deleting-")):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name.startswith(".replaced-"):
                step = self.folder / entry.name.removeprefix(".replaced-")
                if step.exists():
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.rename(entry.path, step)
