"""Reads and writes safetensors files, of one file or several shards.

Files are memory-mapped for reading. Pickles are never loaded: `read` raises an error for a pickle.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fnet._util import _safetensors
from fnet._util._files import replacing

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ADAPTER = "adapter_model.safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
# Files that hold the weights of a model as well, in shards or with other names, or change them.
_SETS = re.compile(
    rf"model-\d+-of-\d+\.safetensors|consolidated.*\.safetensors|{re.escape(ADAPTER)}"
)
_PARTIAL = ".incomplete", ".part", ".partial", ".crdownload", ".download", ".aria2", ".tmp"
_PICKLES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_HEADER = 1 << 23  # maximum bytes of a safetensors header, enough for 100,000 tensors
_INDEX = 1 << 24  # maximum bytes of an index of shards; the index of DeepSeek-V3 has 9 million
_ALIGNMENT = 64  # the alignment that XLA's CPU client needs to avoid a copy


class Tensors(NamedTuple):
    """The content of a tensor file: {key: read-only view of the memory-mapped file}, and the file's
    metadata."""

    path: Path
    arrays: dict[str, np.ndarray]
    metadata: dict[str, str]


def read(path: Path) -> Tensors:
    """Reads the tensors of a file or folder: model.safetensors or its shards.

    Raises:
        FileNotFoundError: `path` does not exist or contains no weights.
        ValueError: the file is damaged or has an unsupported format.
    """
    file = weights_file(path)
    if file.name.endswith(".index.json"):
        return _shards(file)
    if file.suffix == ".safetensors":
        return _mapped(file)
    if file.suffix in _PICKLES or _pickled(file):
        raise ValueError(
            f"{file} is a pickle, which can run arbitrary code when it is opened; convert it to "
            "safetensors with PyTorch: import torch, safetensors.torch as s; "
            f"s.save_file(torch.load({file.name!r}, weights_only=True), 'model.safetensors')"
        )
    if file.suffix == ".bin":
        raise ValueError(
            f"{file} is not a safetensors file. If it is a model.bin of llama2.c, "
            "experiments/llama2c.py in fnet's repository converts it: python llama2c.py "
            f"{file} FOLDER"
        )
    raise ValueError(
        f"{file} is not a safetensors file (*.safetensors, or {INDEX} next to its shards); convert "
        "it with the framework that wrote it"
    )


def weights_file(path: Path) -> Path:
    """Returns `path` if it is a file, or else the file with the weights in the folder `path`.

    Raises:
        FileNotFoundError: `path` does not exist or contains no weights.
        ValueError: the folder has several files that could be meant, or a download is not complete.
    """
    if path.is_file():
        return path
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    names = sorted(f.name for f in path.iterdir() if not f.name.startswith("."))
    _check_downloads(path, names)
    files = [name for name in names if name.endswith(".safetensors")]
    sets = [name for name in (INDEX, SINGLE) if name in names]
    rest = [name for name in files if name != SINGLE and _SETS.fullmatch(name)]
    if INDEX in sets:
        named = shards(path / INDEX)[1]
        sets = [name for name in sets if name not in named]
        rest = [name for name in rest if name not in named and not name.startswith("consolidated")]
        rest += [
            name
            for name in names
            if name.endswith(_INDEX_SUFFIX)
            and name != INDEX
            and not set(named) & set(shards(path / name)[1])
        ]
    elif files == [ADAPTER]:
        raise ValueError(
            f"{path} has no weights of a model, only the LoRA adapter {ADAPTER}; load the model "
            "that it changes, then apply it with pretrained.load_adapter"
        )
    if len(sets) + len(rest) > 1 and sets:
        raise ValueError(
            f"{path} contains more than one set of weights: {', '.join([*sets, *rest])}. Pass the "
            f"path of the one that you mean, such as {path / sets[-1]}, or move the others to "
            "another "
            "folder" + (f"; pretrained.load_adapter applies {ADAPTER}" if ADAPTER in rest else "")
        )
    if sets:
        return path / sets[0]
    if len(files) == 1:
        return path / files[0]
    if len(files) > 1:
        raise ValueError(
            f"{path} contains {len(files)} safetensors files ({', '.join(files[:4])}) and no "
            f"{INDEX}; pass the path of one file"
        )
    others = [name for name in names if name.endswith((".bin", *_PICKLES))]
    if others:
        return path / others[0]
    held = ", ".join(names[:6]) or "nothing"
    raise FileNotFoundError(
        f"{path} contains no weights ({SINGLE}, or {INDEX} and its shards); found {held}"
    )


def _check_downloads(path, names):
    """Some programs reserve the whole file at once, so that the file looks complete and is zero
    where bytes are missing. What is left of the download beside it tells."""
    for name in names:
        whole = name.removesuffix(name[name.rfind(".") :])
        if (
            name.endswith(_PARTIAL)
            and whole.endswith((".safetensors", ".safetensors.index.json"))
            and whole in names
        ):
            raise ValueError(
                f"{path}: {name} is left of a download of {whole}, which may not be complete; "
                f"finish the download, or remove {name}"
            )


def write(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file atomically."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        save_file(
            {
                key: np.ascontiguousarray(array).reshape(array.shape)
                for key, array in arrays.items()
            },
            partial,
            metadata=dict(metadata) or None,
        )


def aligned(shape, dtype) -> np.ndarray:
    """Returns an uninitialized array with the alignment that `jax.device_put` needs on a CPU to
    avoid a second copy."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _mapped(file: Path) -> Tensors:
    """Returns the tensors of one safetensors file, as views of the memory-mapped file."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        raw = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    if _HEADER < length <= size:
        raise ValueError(
            f"{file} is not a safetensors file of a model: its header has {length:,} bytes, "
            f"expected at most {_HEADER:,}"
        )
    try:
        table = _safetensors.read(raw, total=size, most=_HEADER)
    except _safetensors.Unsupported as error:
        raise ValueError(f"{file}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{file} is not a complete safetensors file: {error}") from None
    return Tensors(file, table.arrays(raw), table.metadata)


def shards(index: Path) -> tuple[dict[str, str], list[str]]:
    """Reads an index of shards. Returns ({name of a tensor: the name of its shard}, the names of
    the shards).

    Raises:
        ValueError: the file is not an index of shards.
    """
    size = index.stat().st_size
    if size > _INDEX:
        raise ValueError(
            f"{index} is not an index of shards: it has {size:,} bytes, expected at most {_INDEX:,}"
        )
    try:
        text = index.read_text(encoding="utf-8")
        if (
            text.count("{") + text.count("[") > 1000
        ):  # an index has two objects; a million would fill the memory
            raise ValueError("it contains more than 1,000 lists and objects")
        where = json.loads(text)["weight_map"]
        names = sorted(set(where.values()))
        if not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("its shards must be files in the same folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{index} is not an index of shards: {error or type(error).__name__}"
        ) from None
    return where, names


def _shards(index: Path) -> Tensors:
    where, names = shards(index)
    lacking = [name for name in names if not (index.parent / name).is_file()]
    if lacking:
        raise FileNotFoundError(
            f"{index} names {len(names)} shards; {', '.join(lacking)} {_is(lacking)} missing"
        )
    arrays, metadata = {}, {}
    for name in names:
        shard = _mapped(index.parent / name)
        for key in shard.arrays:
            if where.get(key) != name:
                raise ValueError(
                    f"{shard.path} contains {key!r}, but {index.name} places it in {where.get(key)}"
                )
        arrays |= shard.arrays
        metadata |= shard.metadata
    lacking = [key for key in where if key not in arrays]
    if lacking:
        raise ValueError(
            f"{index} places {lacking[0]!r} in {where[lacking[0]]}, which does not contain it"
        )
    return Tensors(index, arrays, metadata)


def _pickled(file):
    """Whether a file starts like a PyTorch file: a zip archive, or a pickle of protocol 2 to 5."""
    with file.open("rb") as opened:
        head = opened.read(2)
    return head == b"PK" or (head[:1] == b"\x80" and head[1:] in (b"\2", b"\3", b"\4", b"\5"))


def _is(names):
    return "is" if len(names) == 1 else "are"
