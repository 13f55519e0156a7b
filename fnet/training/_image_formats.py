"""Readers of IDX (MNIST's format) and of CIFAR-10's binary version, for files that nobody vouches for.

Whatever the bytes are, the outcome is an array or a ValueError that names the file, and memory
grows with the data that is there, never with what a header claims.
"""

import contextlib
import gzip
import math
import os
import pathlib
import tarfile
import zlib

import numpy as np

CIFAR_FOLDER = "cifar-10-batches-bin"
CIFAR_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR_TEST = "test_batch.bin"
CIFAR_NAMES = "batches.meta.txt"

_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_RECORD = 1 + 3 * 32 * 32
_CIFAR_LIMIT = 10_000 * _RECORD
_CHUNK = 1 << 20


def read_idx(path: str | os.PathLike, *, max_bytes: int = 1 << 30) -> np.ndarray:
    """Reads an IDX file, the format of MNIST, compressed by gzip or not.

    Two zero bytes, a type, the number of dimensions, each dimension as a big-endian uint32, then
    the values in row-major order and nothing after them.

    Args:
        path: the file; gzip is recognised by its first bytes, whatever the name says.
        max_bytes: the most that the values may take.

    Returns:
        An array of the file's shape in native byte order: uint8, int8, int16, int32, float32 or
        float64.

    Raises:
        ValueError: the file is not a whole IDX file, or promises more than it can hold.

    Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database", section "The IDX file format".
    """
    path = pathlib.Path(path)
    size = path.stat().st_size
    with open(path, "rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.GzipFile(fileobj=raw) if zipped else contextlib.nullcontext(raw) as file:
            try:
                # DEFLATE cannot shrink by more than 1032 : 1.
                return _parse_idx(path, file, 1032 * size if zipped else size, max_bytes)
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(f"{path}: not a whole gzip file ({error}); fetch it anew") from None


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
        raise ValueError(f"{path}: ends within its header, at byte {4 + len(dims)}; fetch it anew")
    shape = tuple(int.from_bytes(dims[i : i + 4], "big") for i in range(0, 4 * ndim, 4))
    size = math.prod(shape) * dtype.itemsize
    promise = f"{path}: its header promises {dtype.name} {shape}, {size} bytes"
    if not size:
        raise ValueError(f"{promise}, but an array has values; put the authors' file in its place")
    if size > capacity:
        raise ValueError(f"{promise}, but the file can hold {capacity} at most; fetch it anew")
    if size > max_bytes:
        raise ValueError(f"{promise}, but max_bytes={max_bytes}; raise it if the file is trusted")
    data = _read_upto(file, size + 1)
    if len(data) != size:
        follow = "more" if len(data) > size else len(data)
        raise ValueError(f"{promise}, but {follow} follow; fetch it anew")
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def read_cifar10(files):
    """Reads CIFAR-10's binary version.

    Args:
        files: {name: path} of the unpacked files: data_batch_1.bin to data_batch_5.bin,
            test_batch.bin and, if there, batches.meta.txt; or the path of the .tar.gz itself.

    Returns:
        (train_images, train_labels, test_images, test_labels, classes): uint8 images
        [n, 32, 32, 3], int32 labels [n], the ten names or None.

    Raises:
        ValueError: a file that is not what it should be.

    Source: https://www.cs.toronto.edu/~kriz/cifar.html, "Binary version".
    """
    if isinstance(files, dict):
        where, blobs = files, {}
        for name, path in files.items():
            with open(path, "rb") as file:
                blobs[name] = _read_upto(file, _CIFAR_LIMIT + 1)
    else:
        blobs = _read_archive(files)
        where = {name: f"{files}:{CIFAR_FOLDER}/{name}" for name in blobs}

    train = [_parse_cifar(where[name], blobs[name]) for name in CIFAR_TRAIN]
    classes = None
    if CIFAR_NAMES in blobs:
        classes = tuple(blobs[CIFAR_NAMES][:_CHUNK].decode("ascii", "replace").split())
        if len(classes) != 10:
            raise ValueError(
                f"{where[CIFAR_NAMES]}: names {len(classes)} classes, but CIFAR-10 has 10; "
                "fetch it anew"
            )
    return (
        *(np.concatenate(arrays) for arrays in zip(*train)),
        *_parse_cifar(where[CIFAR_TEST], blobs[CIFAR_TEST]),
        classes,
    )


def _parse_cifar(path, blob):
    size = len(blob)
    if not size or size % _RECORD or size > _CIFAR_LIMIT:
        raise ValueError(
            f"{path}: has {f'over {_CIFAR_LIMIT}' if size > _CIFAR_LIMIT else size} bytes, but "
            f"needs a multiple of {_RECORD} (a label and 3×32×32 pixels), at most {_CIFAR_LIMIT}; "
            "fetch it anew"
        )
    rows = np.frombuffer(blob, np.uint8).reshape(-1, _RECORD)
    images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), checked_labels(path, rows[:, 0])


def checked_labels(path, labels):
    """Labels as int32, once none of them lies beyond the ten classes."""
    if labels.max(initial=0) > 9:
        raise ValueError(
            f"{path}: holds label {labels.max()}, but the ten classes are 0 to 9; fetch it anew"
        )
    return labels.astype(np.int32)


class _Bounded:
    """A file that raises after `limit` bytes, however well it was compressed."""

    def __init__(self, file, limit):
        self.file, self.left = file, limit

    def read(self, size):
        data = self.file.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise ValueError("it unpacks to more than CIFAR-10 could")
        return data


def _read_archive(path):
    """The members we know, {name: bytes}; nothing is written, so no member's path can do harm."""
    wanted, blobs = {*CIFAR_TRAIN, CIFAR_TEST, CIFAR_NAMES}, {}
    try:
        with (
            gzip.open(path) as unzipped,
            tarfile.open(fileobj=_Bounded(unzipped, 8 * _CIFAR_LIMIT), mode="r|") as archive,
        ):
            for member in archive:
                name = member.name.removeprefix("./").removeprefix(f"{CIFAR_FOLDER}/")
                if name in wanted and member.isreg():
                    blobs[name] = _read_upto(archive.extractfile(member), _CIFAR_LIMIT + 1)
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, OverflowError) as error:
        raise ValueError(
            f"{path}: not the archive that CIFAR-10's authors publish ({error}); "
            "delete it and fetch it anew"
        ) from None
    missing = sorted(wanted - {CIFAR_NAMES} - set(blobs))
    if missing:
        raise ValueError(f"{path}: holds no {', '.join(missing)}; delete it and fetch it anew")
    return blobs


def _read_upto(file, size) -> bytearray:
    """At most `size` bytes, a chunk at a time."""
    data = bytearray()
    while chunk := file.read(min(_CHUNK, size - len(data))):
        data += chunk
    return data
