"""Files that are written whole or not at all.

A file is written under a temporary name beside its own, and then renamed. So a reader, or whoever
looks after a crash, finds the old content or the new, and never a part of it; two processes that
write the same file at once do not mix their bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False, alone: bool = False) -> Iterator[Path]:
    """A block that writes a file under a temporary name. At its end the file replaces `path`; if it
    raises an error, the temporary file is removed and `path` is as it was.

    Args:
        path: the file; its folder exists.
        durable: whether the file and its new name are on the disk (`os.fsync`) at the end of the
            block. Otherwise a loss of power may leave an empty file, which is enough for what can
            be written again.
        alone: whether a lock keeps others from writing this file. The temporary name is then always
            the same, so that what a killed process leaves is overwritten by the next one; without a
            lock each writer needs a name of its own.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "notes.txt")
    ...     with replacing(path) as new:
    ...         _ = new.write_text("whole")
    ...     path.read_text(), os.listdir(folder)
    ('whole', ['notes.txt'])
    """
    own = "" if alone else f".{secrets.token_hex(4)}"
    new = path.with_name(f".{path.name}{own}.partial")
    try:
        yield new
        if durable:
            # This also reports what the kernel failed to write since the block closed the file.
            # Windows syncs only files that are open for writing.
            with new.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        # It is gone already after the rename; an error here would hide the one of the block.
        with contextlib.suppress(OSError):
            new.unlink()
    if durable:
        sync_folder(path.parent)


def write(path: Path, content: bytes | str, *, durable: bool = False, alone: bool = False) -> None:
    """Replaces a file by these bytes, or by this text in UTF-8. For the options see `replacing`."""
    with replacing(path, durable=durable, alone=alone) as new:
        new.write_bytes(content.encode() if isinstance(content, str) else content)


def create(path: Path, content: bytes) -> bool:
    """Writes a file whole, unless it exists. Returns whether it was written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     create(Path(folder, "first"), b"a"), create(Path(folder, "first"), b"b")
    (True, False)
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        new.write_bytes(content)
        os.link(new, path)  # unlike a rename, a link does not replace a file
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(OSError):
            new.unlink()
    return True


def write_json(path: Path, content: Any, *, indent: int = 2) -> None:
    """Replaces a file by a value of JSON types, for people to read."""
    write(path, f"{json.dumps(content, indent=indent)}\n")


@contextlib.contextmanager
def synced(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for writing, and syncs it to the disk at the end of the block. This is for the
    files of a folder that is renamed when all of them are complete."""
    with path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Syncs a folder to the disk, so that new and renamed files in it are not lost if the machine
    loses power."""
    with contextlib.suppress(PermissionError):  # Windows cannot open folders
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
