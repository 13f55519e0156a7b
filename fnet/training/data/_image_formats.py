"""Readers of IDX (the format of MNIST) and of CIFAR-10's binary version, for untrusted files.

For any content of a file, a reader returns an array or raises a ValueError that names the file. The
memory that a reader uses depends on the data in the file, not on the sizes in its headers, and a
small file cannot unpack to a large array.
"""

import contextlib
import gzip
import math
import os
import pathlib
import re
import zlib

import numpy as np

CIFAR_FOLDER = "cifar-10-batches-bin"
CIFAR_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR_TEST = "test_batch.bin"
CIFAR_NAMES = "batches.meta.txt"

_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_RECORD = 1 + 3 * 32 * 32
_CIFAR_LIMIT = 10_000 * _RECORD
_ARCHIVE_LIMIT = 7 * _CIFAR_LIMIT  # CIFAR-10 has six files of this size, and a few small ones
_CHUNK = 1 << 20
_BLOCK = 512  # bytes of a tar header


def read_idx(path: str | os.PathLike, *, max_bytes: int | None = None) -> np.ndarray:
    """Reads an IDX file, the format of MNIST, also one compressed by gzip.

    IDX is two zero bytes, a type, the number of dimensions, each dimension as a big-endian uint32,
    and the values in row-major order.

    Args:
        path: the path of the file. Gzip is recognized by its first bytes, not by its name.
        max_bytes: the largest allowed size of the values in bytes, so that a small compressed file
          cannot fill the memory. Default None: 1 GiB for an uncompressed file; 32 times the file
          size for a compressed one, but not less than 64 MiB and not more than 1 GiB.

    Returns:
        An array in native byte order: uint8, int8, int16, int32, float32 or float64.

    Raises:
        ValueError: the file is not a complete IDX file, or unpacks to more than `max_bytes`.

    Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database", section "The IDX file format".
    """
    path = pathlib.Path(path)
    size = path.stat().st_size
    with open(path, "rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if max_bytes is None:
            max_bytes = min(max(32 * size, 1 << 26), 1 << 30) if zipped else 1 << 30
        with gzip.GzipFile(fileobj=raw) if zipped else contextlib.nullcontext(raw) as file:
            try:
                # DEFLATE cannot shrink by more than 1032 : 1.
                return _parse_idx(path, file, 1032 * size if zipped else size, max_bytes)
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(
                    f"{path}: not a whole gzip file ({error}); download it again"
                ) from None


def _parse_idx(path, file, capacity, max_bytes):
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES or not head[3]:
        raise ValueError(
            f"{path}: begins with {head.hex(' ') or 'nothing'}, but an IDX file begins with 00 00, "
            "a type (08, 09, 0b, 0c, 0d or 0e) and its number of dimensions; "
            "put the authors' file in its place"
        )
    dtype, ndim = np.dtype(_IDX_TYPES[head[2]]), head[3]
    if ndim > 32:
        raise ValueError(f"{path}: has {ndim} dimensions, but at most 32 can be read")
    dims = file.read(4 * ndim)
    if len(dims) < 4 * ndim:
        raise ValueError(
            f"{path}: ends within its header, at byte {4 + len(dims)}; download it again"
        )
    shape = tuple(int.from_bytes(dims[i : i + 4], "big") for i in range(0, 4 * ndim, 4))
    size = math.prod(shape) * dtype.itemsize
    promise = f"{path}: its header promises {dtype.name} {shape}, {size} bytes"
    if not size:
        raise ValueError(f"{promise}, but an array has values; put the authors' file in its place")
    if size > capacity:
        raise ValueError(f"{promise}, but the file can hold {capacity} at most; download it again")
    if size > max_bytes:
        raise ValueError(f"{promise}, but max_bytes={max_bytes}; raise it if the file is trusted")
    data = _read_upto(file, size + 1)
    if len(data) != size:
        follow = "more" if len(data) > size else len(data)
        raise ValueError(f"{promise}, but {follow} follow; download it again")
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def read_cifar10(files):
    """Reads CIFAR-10's binary version.

    Args:
        files: the path of the .tar.gz file, or a dict {name: path} of the unpacked files. The names
            of the unpacked files are data_batch_1.bin to data_batch_5.bin, test_batch.bin and
            optionally batches.meta.txt.

    Returns:
        (train_images, train_labels, test_images, test_labels, classes). The images are uint8 arrays
        [n, 32, 32, 3], and the labels are int32 arrays [n]. `classes` are the ten class names, or
        None if the file batches.meta.txt is missing.

    Raises:
        ValueError: a file does not have the expected content.

    Source: https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version".
    """
    if isinstance(files, dict):
        parts = {name: _parse_member(name, path, _read_file(path)) for name, path in files.items()}
    else:
        parts = _read_archive(files)
    train = zip(*(parts[name] for name in CIFAR_TRAIN))
    return (*map(np.concatenate, train), *parts[CIFAR_TEST], parts.get(CIFAR_NAMES))


def _read_file(path):
    with open(path, "rb") as file:
        return _read_upto(file, _CIFAR_LIMIT + 1)


def _parse_member(name, path, blob):
    """Returns the images and labels in a file of CIFAR-10, or the class names if `name` is
    batches.meta.txt."""
    if name != CIFAR_NAMES or len(blob) > _CHUNK:
        return _parse_cifar(path, blob)
    classes = tuple(blob.decode("ascii", "replace").split())
    if len(classes) != 10:
        raise ValueError(
            f"{path}: names {len(classes)} classes, but CIFAR-10 has 10; download it again"
        )
    return classes


def _parse_cifar(path, blob):
    size = len(blob)
    if not size or size % _RECORD or size > _CIFAR_LIMIT:
        raise ValueError(
            f"{path}: has {f'over {_CIFAR_LIMIT}' if size > _CIFAR_LIMIT else size} bytes, but "
            f"needs a multiple of {_RECORD} (a label and 3×32×32 pixels), at most {_CIFAR_LIMIT}; "
            "download it again"
        )
    rows = np.frombuffer(blob, np.uint8).reshape(-1, _RECORD)
    # First: a wrong label is reported before the images are copied.
    labels = checked_labels(path, rows[:, 0])
    images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels


def checked_labels(path, labels):
    """Returns the labels as int32. Raises an error if a label is not in the range 0 to 9."""
    if labels.max(initial=0) > 9:
        raise ValueError(
            f"{path}: holds label {labels.max()}, but the ten classes are 0 to 9; download it again"
        )
    return labels.astype(np.int32)


class _BadArchive(Exception):
    pass


# The standard library's tarfile would not do: it reads a whole extended header at once (a file of
# 0.9 MB takes 422 MB of memory), calls itself for each long name, so that some hundred of them raise
# RecursionError, takes a damaged header for the end of the archive, and stops before gzip's
# checksum. Its data filter concerns what it extracts, and nothing is extracted here.
def _read_archive(path):
    """Parses the files of CIFAR-10 in its tar archive. Returns {file name: result of
    _parse_member}.

    The files of CIFAR-10 are regular files with short names. Other members of the archive are
    skipped, including those in which GNU tar and pax store long names and other attributes. The
    reader writes no files and follows no links.
    """
    wanted, parts, left = {*CIFAR_TRAIN, CIFAR_TEST, CIFAR_NAMES}, {}, _ARCHIVE_LIMIT
    try:
        with gzip.open(path) as file:
            while any(header := file.read(_BLOCK)):
                name, size, regular = _parse_header(header)
                padded = -(-size // _BLOCK) * _BLOCK
                left -= _BLOCK + padded
                if left < 0:
                    raise _BadArchive("it unpacks to more than CIFAR-10 could")
                name = name.removeprefix("./").removeprefix(f"{CIFAR_FOLDER}/")
                if not regular or name not in wanted:
                    _skip(file, padded)
                    continue
                if name in parts:
                    raise _BadArchive(f"it holds {name} twice")
                blob = _read_upto(file, min(padded, _CIFAR_LIMIT + 1))
                if len(blob) < min(size, _CIFAR_LIMIT + 1):
                    raise _BadArchive(f"it ends within {name}")
                del blob[size:]
                parts[name] = _parse_member(name, f"{path}:{CIFAR_FOLDER}/{name}", blob)
            _skip(file, left)  # to the end, where gzip verifies its checksum
            if file.read(1):
                raise _BadArchive("it unpacks to more than CIFAR-10 could")
    except (_BadArchive, OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path}: not the archive that CIFAR-10's authors publish ({error}); "
            "delete it and download it again"
        ) from None
    missing = sorted(wanted - {CIFAR_NAMES} - set(parts))
    if missing:
        raise ValueError(f"{path}: holds no {', '.join(missing)}; delete it and download it again")
    return parts


def _parse_header(block):
    """Parses a tar header (POSIX.1-1988 ustar). Returns (name, size of the data, whether it is a
    regular file)."""
    checksum = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    if len(block) < _BLOCK or _octal(block[148:156]) != checksum:
        raise _BadArchive("a member's header is damaged")
    kind = block[156:157]
    # Links, devices and folders have no data; ignore their size. Sizes of 8 GiB or more are not
    # stored as octal digits.
    size = (
        0
        if kind in b"123456"
        else _octal(block[124:136])
        if block[124] < 128
        else _ARCHIVE_LIMIT + 1
    )
    if size is None:
        raise _BadArchive("a member's header is damaged")
    parts = [block[:100]]
    if block[257:263] == b"ustar\0" and block[345]:
        parts = [block[345:500], block[:100]]
    name = b"/".join(part.partition(b"\0")[0] for part in parts).decode("utf-8", "replace")
    return name, size, kind in (b"0", b"\0", b"7")


def _octal(field):
    digits = field.partition(b"\0")[0].strip(b" ")
    return int(digits, 8) if re.fullmatch(rb"[0-7]+", digits) else None


def _skip(file, size):
    while size > 0 and (chunk := file.read(min(_CHUNK, size))):
        size -= len(chunk)


def _read_upto(file, size) -> bytearray:
    """Reads at most `size` bytes, one chunk at a time."""
    data = bytearray()
    while chunk := file.read(min(_CHUNK, size - len(data))):
        data += chunk
    return data
