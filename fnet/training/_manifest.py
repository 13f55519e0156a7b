"""What a checkpoint's folder holds: files of arrays, and the manifest that vouches for every byte of them.

The arrays of a process stand in one safetensors file, which any framework reads. `manifest.json` names the step, each
file with its size and CRC-32, each leaf with its dtype, shape, place and CRC-32, and ends with a BLAKE2b of itself.
CRC-32 finds every flip within 32 neighbouring bits, at twice BLAKE2b's speed; the manifest is short.
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

from fnet.training._leaves import DTYPES

MANIFEST, FORMAT, VERSION = "manifest.json", "fnet checkpoint", 1
FILE = re.compile(r"arrays-\d{1,6}\.safetensors")
_SEAL = b'"blake2b": "%s"}\n'
_LIMIT = 1 << 28      # bytes of a manifest: a million leaves
_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}
_PYTHON = {"bool": 1, "int": None, "float": 8, "complex": 16}      # bytes of each; an int has as many as it needs


class Damaged(Exception):
    """A checkpoint that is not what was written; the message says which file or leaf."""


def write_arrays(path: Path, arrays: list[tuple[str, np.ndarray]]) -> tuple[dict, list[dict]]:
    """Writes a safetensors file and sees it onto the disk.

    Returns:
      The file's entry in the manifest, and each array's place in it: {"at": [begin, end], "crc32"}.
    """
    header, places, at = {}, [], 0
    for name, array in arrays:
        kind, shape = _SAFETENSORS.get(array.dtype.name), list(array.shape)
        if kind is None:      # bytes, whose dtype the manifest knows
            kind, shape = "U8", shape if array.dtype.itemsize == 1 else [*shape, array.dtype.itemsize]
        name = f"leaf:{name}" if name in ("", "__metadata__") else name
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head
    begin, total = len(head), zlib.crc32(head)
    with path.open("wb") as file:
        file.write(head)
        for _, array in arrays:
            raw = raw_bytes(array)
            own = zlib.crc32(raw)
            total = joined(total, own, raw)
            places.append({"at": [begin, begin + len(raw)], "crc32": own})
            file.write(raw)
            begin += len(raw)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": begin, "crc32": total}, places


def raw_bytes(array: np.ndarray) -> memoryview:
    """The array's bytes, little-endian, without a copy where they lie that way."""
    array = np.ascontiguousarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return memoryview(array.reshape(-1).view(np.uint8)) if array.size else memoryview(b"")


def joined(before: int, own: int, raw: Any) -> int:
    """The CRC-32 of some bytes and `raw` after them, from that of the first and `raw`'s own.

    Source: zlib's crc32_combine, which multiplies polynomials over GF(2).
    """
    if len(raw) < 1 << 18:      # sooner done over again
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


_POWERS = [1 << 30]      # x^(2^n) modulo the polynomial
for _ in range(31):
    _POWERS.append(_times(_POWERS[-1], _POWERS[-1]))


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes manifest.json under another name, and renames it when it is on the disk."""
    content = {name: value for name, value in content.items() if name not in ("format", "version", "blake2b")}
    body = json.dumps({"format": FORMAT, "version": VERSION, **content}, allow_nan=False).encode()
    body = body[:-1] + b", "
    new = folder / f".{MANIFEST}.new"
    with new.open("wb") as file:
        file.write(body + _SEAL % hashlib.blake2b(body, digest_size=32).hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, folder / MANIFEST)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Sees the names in a folder onto the disk."""
    with contextlib.suppress(PermissionError):      # Windows opens no folders
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, once its seal and everything that it says make sense.

    Raises:
      Damaged: there is none, or it is not what was written.
      PermissionError: it may not be read.
    """
    with _opened(folder / MANIFEST) as (file, size):
        if size > _LIMIT:
            raise Damaged(f"{MANIFEST} has {size} bytes, more than any has")
        raw = file.read(size)
    seal = len(_SEAL % (b"0" * 64))
    body, end = raw[:-seal], raw[-seal:]
    if end != _SEAL % hashlib.blake2b(body, digest_size=32).hexdigest().encode():
        raise Damaged(f"{MANIFEST} does not have the checksum it was written with")
    try:
        content = json.loads(raw)
        _check(content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} makes no sense ({type(error).__name__}: {str(error)[:100]})") from None
    if folder.name.isdecimal() and int(folder.name) != content["step"]:
        raise Damaged(f"{MANIFEST} is that of step {content['step']}")
    return content


def _check(content):
    """Holds a manifest to its own promises, so that whoever wrote it, reading it allocates what the files hold."""
    def natural(value):
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise ValueError(f"{value!r} is no count")
        return value

    if (content["format"], content["version"]) != (FORMAT, VERSION):
        raise ValueError(f"it is of format {content['format']!r}, version {content['version']!r}; this fnet reads "
                         f"{FORMAT!r}, version {VERSION}")
    natural(content["step"])
    if not isinstance(content["notes"], dict) or not all(
            isinstance(value, int | float) for value in content["metrics"].values()):
        raise ValueError("its notes or metrics are not what they should be")
    for name, file in content["files"].items():
        if not FILE.fullmatch(name):
            raise ValueError(f"{name!r} is no file of a checkpoint")
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
            if not begin <= end <= content["files"][piece["file"]]["bytes"] or free[piece["file"]] < 0:
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
def _opened(path: Path) -> Iterator[tuple[Any, int]]:
    """(a regular file opened for reading, its size); no link and no pipe, which may lead anywhere or wait for ever."""
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
                         | getattr(os, "O_BINARY", 0))
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


class _Whole:
    """A raw file whose reads are whole: as many bytes as asked for, or those to the end."""

    def __init__(self, file):
        self._file = file

    def read(self, size: int) -> bytearray:
        raw = bytearray(size)
        return raw[:self.readinto(memoryview(raw))]

    def readinto(self, view: memoryview) -> int:
        got = 0
        while got < len(view) and (count := self._file.readinto(view[got:])):
            got += count
        return got


def read_leaves(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Every leaf as an array (Python numbers: as bytes), each byte of each file held to its checksum.

    Raises:
      Damaged: naming the file or the leaf.
    """
    arrays: dict[str, Any] = {}
    for name, entry in content["files"].items():
        pieces = [(*piece["at"], path, piece) for path, leaf in content["leaves"].items()
                  for piece in leaf["pieces"] if piece["file"] == name]
        pieces.sort(key=lambda piece: piece[:2])
        with _opened(folder / name) as (file, size):
            if size != entry["bytes"]:
                raise Damaged(f"{name} has {size} bytes, it was written with {entry['bytes']}")
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


def _place(arrays, path, leaf, piece, raw):
    if "python" in leaf:
        arrays[path] = raw
        return
    dtype = DTYPES[leaf["dtype"]]
    dtype = dtype.newbyteorder("<") if dtype.isbuiltin == 1 else dtype
    raw = raw.view(dtype).astype(dtype.newbyteorder("="), copy=False) if dtype.isbuiltin == 1 else raw.view(dtype)
    if "index" not in piece:
        arrays[path] = raw.reshape(leaf["shape"])
        return
    if path not in arrays:
        arrays[path] = np.zeros(leaf["shape"], raw.dtype)
    where = tuple(slice(low, high) for low, high in piece["index"])
    arrays[path][where] = raw.reshape([high - low for low, high in piece["index"]])
