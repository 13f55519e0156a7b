"""The files of a checkpoint: safetensors files with the arrays, and the manifest with checksums
that cover every byte.

Each process writes its arrays to one safetensors file, which other frameworks can read.
`manifest.json` contains the number of the step, the size and the CRC-32 of each file, and the dtype
and the shape of each leaf (for a Python number, its type). For each shard of a leaf,
`manifest.json` contains the file, the byte range in the file, the index in the leaf and the CRC-32
of the shard.
The last field of the manifest is a BLAKE2b checksum of all bytes before this field. BLAKE2b is used
only for the manifest, which is short. The checksum of the arrays is CRC-32, which is twice as fast
as BLAKE2b and detects every error that affects at most 32 neighboring bits.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fnet._util import _safetensors
from fnet._util._files import synced, write
from fnet.training.checkpoints._leaves import DTYPES
from fnet.training.checkpoints._storage import Readable, Reader, StorePath

MANIFEST, FORMAT, VERSION = "manifest.json", "fnet checkpoint", 1
FILE = re.compile(r"arrays-\d{1,6}(-[0-9a-f]{16})?\.safetensors")
_SEAL = b'"blake2b": "%s"}\n'
_LIMIT = 1 << 28  # bytes of a manifest: a million leaves
# Bytes of each; an int has as many as it needs.
_PYTHON = {"bool": 1, "int": None, "float": 8, "complex": 16}


class Damaged(Exception):
    """The files of a checkpoint differ from the files that were written. The error message names
    the damaged file or leaf."""


def write_arrays(
    path: Path | StorePath, arrays: list[tuple[str, np.ndarray]]
) -> tuple[dict, list[dict]]:
    """Writes arrays in the safetensors format to a local file or to an object in an object store.

    A local file is synced to the disk (`os.fsync`).

    Returns:
      Two values: a dict with the size and the CRC-32 of the file, and a list of dicts {"at":
      [begin, end], "crc32": checksum}. Each dict of the list contains the byte range and the CRC-32
      of one array in the file.
    """
    head = _safetensors.header(dict(_entry(name, array) for name, array in arrays))
    places = []
    begin, total = len(head), zlib.crc32(head)
    with _sink(path) as file:
        file.write(head)
        for _, array in arrays:
            raw = raw_bytes(array)
            own = zlib.crc32(raw)
            total = joined(total, own, raw)
            places.append({"at": [begin, begin + len(raw)], "crc32": own})
            file.write(raw)
            begin += len(raw)
    return {"bytes": begin, "crc32": total}, places


def _entry(name: str, array: np.ndarray) -> tuple[str, tuple[str, tuple[int, ...], int]]:
    """Returns the name of an array in the file, and its entry in the header."""
    if name in ("", "__metadata__"):
        name = f"leaf:{name}"
    code, shape = _safetensors.CODES.get(array.dtype.name), array.shape
    # Other dtypes are stored as bytes; the manifest contains the dtype. So is C64, which came late to
    # the format, and which earlier releases of fnet did not write either.
    if code is None or code == "C64":
        code = "U8"
        shape = shape if array.dtype.itemsize == 1 else (*shape, array.dtype.itemsize)
    return name, (code, shape, array.nbytes)


@contextlib.contextmanager
def _sink(path: Path | StorePath) -> Iterator[Any]:
    if isinstance(path, StorePath):
        buffers = _Buffers()
        yield buffers
        path.write_parts(buffers)
        return
    with synced(path) as file:
        yield file


class _Buffers(list):
    write = list.append


def raw_bytes(array: np.ndarray) -> memoryview:
    """Returns the bytes of the array in little-endian order, without a copy if the array already
    has this order."""
    array = np.ascontiguousarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return memoryview(array.reshape(-1).view(np.uint8)) if array.size else memoryview(b"")


def joined(before: int, own: int, raw: Any) -> int:
    """Returns the CRC-32 of two concatenated sequences of bytes.

    `before` is the CRC-32 of the first sequence of bytes. `raw` is the second sequence of bytes,
    and `own` is the CRC-32 of `raw`.

    Source: zlib's crc32_combine, which multiplies polynomials over GF(2).
    """
    if len(raw) < 1 << 18:  # faster to compute directly
        return zlib.crc32(raw, before)
    power, n, shift = 1 << 31, len(raw), 3
    while n:
        if n & 1:
            power = _times(_POWERS[shift & 31], power)
        n, shift = n >> 1, shift + 1
    return _times(power, before) ^ own


def _times(a, b):
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ (0xEDB88320 if b & 1 else 0)
    return product


_POWERS = [1 << 30]  # x^(2^n) modulo the polynomial
for _ in range(31):
    _POWERS.append(_times(_POWERS[-1], _POWERS[-1]))


def sealed(content: Mapping[str, Any]) -> bytes:
    """Returns the content of a manifest as bytes, with a checksum of this content."""
    content = {
        name: value
        for name, value in content.items()
        if name not in ("format", "version", "blake2b")
    }
    body = json.dumps({"format": FORMAT, "version": VERSION, **content}, allow_nan=False).encode()
    body = body[:-1] + b", "
    return body + _SEAL % hashlib.blake2b(body, digest_size=32).hexdigest().encode()


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes manifest.json, and syncs it to the disk. The run holds the lock of the folder."""
    write(folder / MANIFEST, sealed(content), durable=True, alone=True)


def read_manifest(folder: Path | StorePath) -> dict[str, Any]:
    """Reads the manifest (JSON file) of a checkpoint, and checks its checksum and its consistency.

    Raises:
      Damaged: the manifest is missing, or differs from what was written.
      OSError: reading is not permitted, or the object store cannot be reached.
    """
    with opened(folder / MANIFEST) as (file, size):
        if size > _LIMIT:
            raise Damaged(f"{MANIFEST} has {size} bytes, more than the format allows")
        raw = file.read(size)
    seal = len(_SEAL % (b"0" * 64))
    body, end = raw[:-seal], raw[-seal:]
    if end != _SEAL % hashlib.blake2b(body, digest_size=32).hexdigest().encode():
        raise Damaged(f"{MANIFEST} does not have the checksum it was written with")
    try:
        content = json.loads(raw)
        _check(content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(
            f"{MANIFEST} makes no sense ({type(error).__name__}: {str(error)[:100]})"
        ) from None
    if folder.name.isdecimal() and int(folder.name) != content["step"]:
        raise Damaged(f"{MANIFEST} is that of step {content['step']}")
    return content


def _check(content):
    """Checks that a manifest is consistent, because it may be untrusted. After this check, reading
    a checkpoint cannot allocate more memory for the leaves than the total size of the checkpoint's
    files."""

    def natural(value):
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise ValueError(f"{value!r} is no count")
        return value

    if (content["format"], content["version"]) != (FORMAT, VERSION):
        raise ValueError(
            f"it is of format {content['format']!r}, version {content['version']!r}; this fnet "
            f"reads {FORMAT!r}, version {VERSION}"
        )
    natural(content["step"])
    if not isinstance(content["notes"], dict) or not all(
        isinstance(value, int | float) for value in content["metrics"].values()
    ):
        raise ValueError("its notes or metrics have an invalid format")
    for name, file in content["files"].items():
        if not FILE.fullmatch(name):
            raise ValueError(f"{name!r} is not a file of a checkpoint")
        natural(file["bytes"]), natural(file["crc32"])
    free = {name: file["bytes"] for name, file in content["files"].items()}
    for path, leaf in content["leaves"].items():
        if "python" in leaf:
            whole = _PYTHON[leaf["python"]]
            itemsize, shape = 1, None if whole is None else [whole]
        else:
            itemsize, shape = DTYPES[leaf["dtype"]].itemsize, [natural(n) for n in leaf["shape"]]
            if len(shape) > 32 or not isinstance(leaf.get("key", ""), str):
                raise ValueError(f"{path!r} is no array")
        pieces = leaf["pieces"]
        if not pieces:
            raise ValueError(f"{path!r} has no bytes")
        held = 0
        for piece in pieces:
            begin, end = map(natural, piece["at"])
            natural(piece["crc32"])
            free[piece["file"]] -= end - begin
            if (
                not begin <= end <= content["files"][piece["file"]]["bytes"]
                or free[piece["file"]] < 0
            ):
                raise ValueError(f"{path!r} lies outside of {piece['file']}")
            part = shape
            if "index" in piece:
                if shape is None or len(piece["index"]) != len(shape):
                    raise ValueError(f"a piece of {path!r} has no place in it")
                for (low, high), most in zip(piece["index"], shape):
                    if not natural(low) <= natural(high) <= most:
                        raise ValueError(f"a piece of {path!r} lies outside of it")
                part = [high - low for low, high in piece["index"]]
            elif len(pieces) > 1:
                raise ValueError(f"{path!r} has several wholes")
            if part is not None and math.prod(part) * itemsize != end - begin:
                raise ValueError(f"{path!r} has {end - begin} bytes")
            held += 0 if part is None else math.prod(part)
        if shape is not None and held != math.prod(shape):
            raise ValueError(f"the pieces of {path!r} are not the whole")


@contextlib.contextmanager
def opened(path: Path | StorePath) -> Iterator[tuple[Any, int]]:
    """Opens a regular file or an object for reading. Yields (file, size).

    Links and pipes raise an error: a link may point to any file of the machine, and reading from a
    pipe may never end.

    Raises:
      Damaged: the file is missing, or a local file cannot be read.
      OSError: reading is not permitted, or the object store cannot be reached. An OSError does not
        mean that the file is damaged.
    """
    if isinstance(path, StorePath):
        try:
            if (known := path.meta()) is None:
                raise FileNotFoundError
            yield Reader(path, known.size), known.size
        except FileNotFoundError:
            raise Damaged(f"{path.name} is missing") from None
        return
    try:
        number = os.open(
            path,
            os.O_RDONLY
            | getattr(os, "O_NOFOLLOW", 0)
            | getattr(os, "O_NONBLOCK", 0)
            | getattr(os, "O_BINARY", 0),
        )
    except PermissionError:
        raise
    except OSError as error:
        why = "missing" if error.errno == errno.ENOENT else f"not to be read ({error.strerror})"
        raise Damaged(f"{path.name} is {why}") from None
    known = os.fstat(number)
    if not stat.S_ISREG(known.st_mode):
        os.close(number)
        raise Damaged(f"{path.name} is no file")
    with os.fdopen(number, "rb", buffering=0) as file:
        try:
            yield _Whole(file), known.st_size
        except OSError as error:
            raise Damaged(f"{path.name} cannot be read ({error.strerror})") from None


class _Whole(Readable):
    """An unbuffered file. `read` and `readinto` return fewer bytes than requested only at the end
    of the file."""

    def __init__(self, file):
        self._file = file

    def seek(self, at: int) -> None:
        self._file.seek(at)

    def readinto(self, view: memoryview) -> int:
        got = 0
        while got < len(view) and (count := self._file.readinto(view[got:])):
            got += count
        return got


def read_leaves(folder: Path | StorePath, content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a dict {path: array} of all leaves of a checkpoint. A Python number is returned as an
    array of its bytes. Every byte of every file is verified.

    Raises:
      Damaged: a file or a leaf is damaged; the message names it.
      OSError: as for `opened`.
    """
    arrays: dict[str, Any] = {}
    for name, entry in content["files"].items():
        pieces = [
            (*piece["at"], path, piece)
            for path, leaf in content["leaves"].items()
            for piece in leaf["pieces"]
            if piece["file"] == name
        ]
        pieces.sort(key=lambda piece: piece[:2])
        with opened(folder / name) as (file, size):
            check_size(name, size, entry)
            total, at, wrong = 0, 0, None
            for begin, end, path, piece in pieces:
                if begin < at:
                    raise Damaged(f"'{path}' lies in {name} where another leaf does")
                total = _skip(file, begin - at, total)
                raw = np.empty(end - begin, np.uint8)
                if file.readinto(memoryview(raw)) < end - begin:
                    raise Damaged(f"{name} ends early")
                own = zlib.crc32(raw)
                total, at = joined(total, own, raw), end
                if own != piece["crc32"]:
                    wrong = wrong or f"'{path}' does not have the checksum it was written with"
                _place(arrays, path, content["leaves"][path], piece, raw)
            total = _skip(file, size - at, total)
        if wrong or total != entry["crc32"]:
            raise Damaged(wrong or f"{name} does not have the checksum it was written with")
    return arrays


def _skip(file, count, total):
    while count:
        raw = file.read(min(count, 1 << 20))
        if not raw:
            raise Damaged("a file ends early")
        total, count = zlib.crc32(raw, total), count - len(raw)
    return total


def check_size(name: str, size: int, entry: Mapping[str, Any]) -> None:
    if size != entry["bytes"]:
        raise Damaged(f"{name} has {size} bytes, it was written with {entry['bytes']}")


def typed(raw: np.ndarray, leaf: Mapping[str, Any]) -> np.ndarray:
    """Converts bytes to a one-dimensional array of the leaf's dtype."""
    dtype = DTYPES[leaf["dtype"]]
    if dtype.isbuiltin != 1:
        return raw.view(dtype)
    return raw.view(dtype.newbyteorder("<")).astype(dtype.newbyteorder("="), copy=False)


def _place(arrays, path, leaf, piece, raw):
    if "python" in leaf:
        arrays[path] = raw
        return
    raw = typed(raw, leaf)
    if "index" not in piece:
        arrays[path] = raw.reshape(leaf["shape"])
        return
    if path not in arrays:
        arrays[path] = np.zeros(leaf["shape"], raw.dtype)
    where = tuple(slice(low, high) for low, high in piece["index"])
    arrays[path][where] = raw.reshape([high - low for low, high in piece["index"]])
