"""Downloads data files from an object store when they are first read, and again if they have
changed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from fnet._util._files import replacing, write
from fnet.training.checkpoints._storage import StorePath, location

_CHUNK = 8 << 20


def local(where: str | os.PathLike) -> Path:
    """Returns a local path unchanged. For a URL, returns the path of a local copy in FNET_DATA or
    ~/.cache/fnet.

    An existing copy is used if the object in the store still has the same version and the checksum
    of the copy is correct. If the version of the object differs or the checksum of the copy is
    wrong, the object is downloaded again. A downloaded file has a temporary name until the download
    is complete.

    Raises:
      FileNotFoundError: the object store does not contain the object, or the user has no home
        directory for the local copy.
      StorageError: the object store cannot be read.
    """
    source = location(where)
    if not isinstance(source, StorePath):
        return source
    if (meta := source.meta()) is None:
        raise FileNotFoundError(f"{source}: no such object")
    base = data_folder(source, None, "set FNET_DATA")
    digest = hashlib.blake2b(str(source).encode(), digest_size=8).hexdigest()
    copy = base / "objects" / f"{digest}-{source.name}"
    note = copy.with_name(f"{copy.name}.json")
    wanted = {"url": str(source), "bytes": meta.size, **meta.version}
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = json.loads(note.read_text())
        if known == wanted | {"blake2b": known["blake2b"]} and known["blake2b"] == _digest(copy):
            return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    seal = hashlib.blake2b(digest_size=32)
    with replacing(copy) as new:
        with new.open("wb") as file:
            for begin in range(0, meta.size, _CHUNK):
                raw = source.read_range(begin, min(begin + _CHUNK, meta.size))
                seal.update(raw)
                file.write(raw)
        after = source.meta()
        if new.stat().st_size != meta.size or after is None or after.version != meta.version:
            raise OSError(f"{source}: the object changed while it was read; read it again")
    write(note, json.dumps(wanted | {"blake2b": seal.hexdigest()}))
    return copy


def data_folder(what: object, folder: str | os.PathLike | None, hint: str) -> Path:
    """Returns the folder of downloaded data: `folder`, or a default folder if `folder` is None.
    `what` and `hint` are parts of the message of the FileNotFoundError if there is no home
    directory."""
    base = Path(folder or os.environ.get("FNET_DATA") or "~/.cache/fnet")
    try:
        return base.expanduser()
    except RuntimeError:  # HOME is not set and the user is unknown
        raise FileNotFoundError(
            f"{what}: this user has no home directory for {base}; {hint}"
        ) from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
