"""The names in a folder of checkpoints: committing, setting aside and removing steps so that a kill loses nothing."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from fnet.training import _manifest
from fnet.training._lock import LOCK

_ASIDE = re.compile(r"(\d+)\.damaged(-\d+)?")
_TEMPORARY = (".saving-", ".deleting-", ".replaced-")


def steps(folder: Path) -> list[int]:
    """The steps of whole checkpoints, ascending."""
    try:
        return sorted(int(entry.name) for entry in os.scandir(folder) if entry.name.isdecimal() and entry.is_dir())
    except FileNotFoundError:
        return []


def damaged(folder: Path) -> list[str]:
    """The names of folders that were set aside."""
    try:
        return sorted(name for name in os.listdir(folder) if _ASIDE.fullmatch(name))
    except FileNotFoundError:
        return []


def foreign(folder: Path) -> list[str]:
    """The names of entries that no checkpoint writes: a step's folder holds a manifest, arrays or nothing."""
    def own(entry):
        if entry.name == LOCK:
            return True
        if not entry.is_dir(follow_symlinks=False):
            return False
        if entry.name.startswith(_TEMPORARY):
            return True
        inside = [name for name in os.listdir(entry.path) if not name.startswith(".")]
        return bool(entry.name.isdecimal() or _ASIDE.fullmatch(entry.name)) and all(
            name == _manifest.MANIFEST or _manifest.FILE.fullmatch(name) for name in inside)

    return sorted(entry.name for entry in os.scandir(folder) if not own(entry))


def partial(folder: Path, step: int) -> Path:
    """Where a step is written before `commit`."""
    return folder / f".saving-{step}"


def commit(folder: Path, step: int) -> None:
    """Gives a finished step its name; an earlier checkpoint of that step is replaced."""
    final, old = folder / str(step), folder / f".replaced-{step}"
    if final.exists():
        os.rename(final, old)
    os.rename(partial(folder, step), final)
    _manifest.sync_folder(folder)
    shutil.rmtree(old, ignore_errors=True)


def remove(folder: Path, step: int) -> None:
    going = folder / f".deleting-{step}"                   # renamed first: half a step is never taken for a step
    os.rename(folder / str(step), going)
    shutil.rmtree(going, ignore_errors=True)


def set_aside(folder: Path, step: int) -> str:
    """Renames a damaged step; returns its new name."""
    name, number = f"{step}.damaged", 2
    while (folder / name).exists():
        name, number = f"{step}.damaged-{number}", number + 1
    os.rename(folder / str(step), folder / name)
    _manifest.sync_folder(folder)
    return name


def tidy(folder: Path) -> None:
    """Removes what a killed save has left, and undoes a replacement that was half done."""
    for entry in list(os.scandir(folder)):
        if entry.name.startswith((".saving-", ".deleting-")):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name.startswith(".replaced-"):
            step = folder / entry.name.removeprefix(".replaced-")
            if step.exists():
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.rename(entry.path, step)
