"""The table of a safetensors file: which array lies where.

A file is the length of its header in 8 bytes, the header, and the bytes of all arrays without gaps.
The header is a JSON object {name: {"dtype", "shape", "data_offsets"}}, in which "__metadata__" may
hold texts. `read` treats it as untrusted: nothing is allocated before its size was checked. Weights
of models, checkpoints and bundles all use this file. Bundles contain a copy of it as
tensor_table.py, so it imports NumPy alone.
"""

import json
import math
from typing import Any, NamedTuple

import numpy as np

try:  # bfloat16 and the 8-bit floating-point types, which JAX installs
    import ml_dtypes  # noqa: F401
except ImportError:
    pass

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
CODES = {name: code for code, name in DTYPES.items()}
# Dtypes of the format for which NumPy or fnet has no use; some have less than a byte per element.
_OTHERS = ("F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_METADATA = "__metadata__"
_LARGEST = 1 << 48  # elements of an axis and bytes of a file; the product of 32 axes is an int
_AXES = 32  # NumPy 1 has at most 32 axes, NumPy 2 has 64
# Lists and objects of a header, of which each tensor has three. A million empty ones fill 64 MB.
_LISTS = 500_000


class Unsupported(ValueError):
    """The file is right, but has an array of a dtype that fnet does not read."""


class Place(NamedTuple):
    """Where an array lies in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int  # in bytes, from the start of the file


class Table(NamedTuple):
    """The content of a header: the places of the arrays in the order of the file, and the texts in
    its metadata."""

    places: dict[str, Place]
    metadata: dict[str, str]

    def arrays(self, raw: Any) -> dict[str, np.ndarray]:
        """Returns {name: array}, views of the bytes `raw` that contain the file."""
        return {name: _view(raw, place) for name, place in self.places.items()}


def read(raw: Any, *, start: int = 0, total: int, most: int) -> Table:
    """Reads the header of a safetensors file, and checks that its arrays fill the file.

    Args:
        raw: the bytes that contain the file, or a memory map of them.
        start: where the file begins in `raw`.
        total: the bytes of the file.
        most: the largest length of a header that is read.

    Raises:
        Unsupported: the file has an array of a dtype that fnet does not read.
        ValueError: the header is damaged, or does not fit the file.
    """
    length = int.from_bytes(raw[start : start + min(8, total)], "little")
    if not 2 <= length <= min(most, total - 8):
        raise ValueError(f"it states a header of {length:,} bytes")
    data = 8 + length  # from the start of the file
    entries = _parsed(raw[start + 8 : start + data])
    metadata = _texts(entries.pop(_METADATA, None))
    tensors = [_tensor(name, entry) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: tensor[3:])  # by their offsets
    places = {}
    end = 0
    for name, dtype, shape, low, high in tensors:
        size = math.prod(shape) * dtype.itemsize
        if low != end or high - low != size or data + high > total:
            raise ValueError(
                f"{name!r} has {high - low:,} bytes at {low:,}; expected {size:,} at {end:,}"
            )
        places[name] = Place(dtype, shape, start + data + low)
        end = high
    if data + end != total:
        raise ValueError(f"it has {total:,} bytes; its tensors end at {data + end:,}")
    return Table(places, metadata)


def header(arrays: dict[str, tuple[str, tuple[int, ...], int]], alignment: int = 8) -> bytes:
    """Returns the beginning of a safetensors file, up to the bytes of the arrays.

    Args:
        arrays: {name: (code of the dtype, shape, number of bytes)}, in the order of the file.
        alignment: the length of the result is a multiple of it.
    """
    entries = {}
    end = 0
    for name, (code, shape, size) in arrays.items():
        entries[name] = {
            "dtype": code,
            "shape": list(shape),
            "data_offsets": [end, end + size],
        }
        end += size
    head = json.dumps(entries, separators=(",", ":")).encode()
    head += b" " * (-(8 + len(head)) % alignment)
    return len(head).to_bytes(8, "little") + head


def _parsed(head: bytes) -> dict[str, Any]:
    if head.count(b"[") + head.count(b"{") > _LISTS:
        raise ValueError(f"its header contains more than {_LISTS:,} lists and objects")
    try:
        text = head.decode()
        header = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError(f"its header is a JSON {type(header).__name__}, expected an object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    held = dict(pairs)
    if len(held) < len(pairs):
        raise ValueError("its header has a name twice")
    texts = [*held, *(value for value in held.values() if isinstance(value, str))]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise ValueError("its header has half a character (a lone surrogate)") from None
    return held


def _no_number(text: str) -> None:
    raise ValueError(f"its header contains {text}, which JSON does not have")


def _texts(metadata: Any) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise ValueError(f"{_METADATA} must be an object of texts")
    return metadata


def _tensor(name: str, entry: Any) -> tuple[str, np.dtype, tuple[int, ...], int, int]:
    """Returns (name, dtype, shape, begin, end) of a tensor, begin and end in bytes of the data."""
    try:
        code, shape, (low, high) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(shape, list):
            raise TypeError
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{name!r} needs a dtype, a shape and two data_offsets") from None
    if code in _OTHERS:
        raise Unsupported(f"{name!r} has dtype {code}, which fnet does not support")
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"{name!r} has the unknown dtype {str(code)[:20]!r}")
    # NumPy refuses a shape by the product of its other axes even if one has size 0.
    possible = len(shape) <= _AXES and all(_is_size(n) for n in shape)
    if not possible or math.prod(n or 1 for n in shape) >= _LARGEST:
        raise ValueError(f"{name!r} has shape {str(tuple(shape))[:80]}, which is not possible")
    if not (_is_size(low) and _is_size(high)):
        raise ValueError(f"{name!r} lies at {str(low)[:20]} to {str(high)[:20]}")
    return name, np.dtype(DTYPES[code]), tuple(shape), low, high


def _is_size(n: Any) -> bool:
    return type(n) is int and 0 <= n < _LARGEST


def _view(raw: Any, place: Place) -> np.ndarray:
    count = math.prod(place.shape)
    if not count:
        return np.empty(place.shape, place.dtype)
    return np.frombuffer(raw, place.dtype, count, place.begin).reshape(place.shape)
