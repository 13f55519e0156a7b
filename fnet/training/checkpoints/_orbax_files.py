"""The files of a tree that Orbax has saved.

_METADATA describes the tree, and array_metadatas/ tells which arrays are PRNG keys. Strings are in
_strings.json. All of these are JSON. TensorStore reads the arrays, in zarr 2 or 3, each in its own
folder or all in one database (OCDBT). https://orbax.readthedocs.io, "Checkpoint format"
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fnet.training.checkpoints import _leaves
from fnet.training.checkpoints._reading import CheckpointError

TREE = "_METADATA"
AGAIN = "read it with orbax.checkpoint.PyTreeCheckpointer().restore, and save it again"
_EMPTY = {"Dict": dict, "List": list, "Tuple": tuple, "None": type(None), "NamedTuple": type(None)}
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_SCALARS = {"bool": "bool", "int64": "int", "float64": "float", "complex128": "complex"}
_AT_ONCE = 2**30  # bytes in host memory beside those that are already where they belong

Name = tuple[str, ...]  # the path of a leaf; Orbax's names may contain any character


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf in the tree that _METADATA describes."""

    name: Name


class Files:
    """Reads the files of a tree.

    Args:
      folder: the folder with _METADATA.

    Fields:
      tree: dicts, lists, None and `Leaf`s.
      filled: after `read`, the arrays of an old Orbax whose missing chunks were read as zeros.

    Raises:
      CheckpointError: the files are damaged.
    """

    def __init__(self, folder: Any):
        self.folder = folder
        self.filled: list[str] = []
        self._stores: dict[Name, Any] = {}
        with self._damage(TREE):
            document = json.loads((folder / TREE).read_text())
            described = {
                tuple((str(key["key"]), key["key_type"]) for key in leaf["key_metadata"]): leaf[
                    "value_metadata"
                ]
                for leaf in document["tree_metadata"].values()
            }
            self.tree = _nested({path: leaf["value_type"] for path, leaf in described.items()})
            self._values = {tuple(key for key, _ in path): leaf for path, leaf in described.items()}
            self._zarr3 = bool(document.get("use_zarr3"))
            # Older versions of Orbax do not say so, and leave out chunks of zeros.
            self._complete = bool(document.get("store_array_data_equal_to_fill_value"))
            self._ocdbt = document.get("use_ocdbt")
            custom = document.get("custom_metadata")
            ours = custom.get("fnet") if isinstance(custom, dict) else None
            self._sums = dict(ours["sha256"]) if ours else {}
        if self._ocdbt is None:
            self._ocdbt = (folder / "manifest.ocdbt").exists()
        with self._damage("array_metadatas/"):
            self._keys = self._key_implementations()

    def names(self) -> list[Name]:
        return [leaf.name for leaf in jax.tree.leaves(self.tree)]

    def open(self, names: Iterable[Name]) -> dict[Name, dict[str, Any]]:
        """Returns a description of each leaf, as `_leaves.entry` does. "host" marks leaves that were
        not saved from JAX."""
        import tensorstore

        self._context = tensorstore.Context(
            {
                "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000}
            }  # for its index, not for arrays
        )
        arrays = []
        for name in names:
            kind = self._values[name]["value_type"]
            if self._values[name]["skip_deserialize"]:  # SaveArgs(aggregate=True), until 2024
                raise CheckpointError(
                    f"{self.folder}: the file 'checkpoint' holds the values of "
                    f"'{'/'.join(name)}': {AGAIN}"
                )
            if kind in _ARRAYS:
                arrays.append(name)
            elif kind != "string":
                raise CheckpointError(
                    f"{self.folder}: '{'/'.join(name)}' is of Orbax's type {kind!r}, which "
                    "from_orbax does not read; select another part="
                )
        begun = {name: self._open(name) for name in arrays}
        entries: dict[Name, dict[str, Any]] = {}
        for name in names:
            if name not in begun:
                entries[name] = {"python": "str"}
                continue
            with self._damage(name):
                store = self._stores[name] = begun[name].result()
                dtype = np.dtype(store.dtype.numpy_dtype).name
            kind = self._values[name]["value_type"]
            if kind == "scalar" and dtype in _SCALARS:
                entries[name] = {"python": _SCALARS[dtype]}
                continue
            host = kind != "jax.Array"
            entries[name] = {"dtype": dtype, "shape": list(store.shape), "host": host}
            if implementation := self._keys.get(".".join(name)):
                entries[name]["key"] = implementation
        return entries

    def read(self, shardings: Mapping[Name, Any]) -> Iterator[tuple[Name, Any]]:
        """Reads leaves that are open, and verifies those that `to_orbax` has written.

        Yields (name, value): a string, a NumPy array, or if a sharding is given, a JAX array, of
        which this process has read only its own shards.
        """
        begun, size = [], 0
        for name, sharding in shardings.items():
            if name not in self._stores:
                with self._damage(name):
                    yield name, self._verified(name, self._string(name))
                continue
            store = self._stores[name]
            indices = _indices(store.shape, sharding)
            reads = {index: store[_slices(index)].read() for index in indices}
            begun.append((name, sharding, reads))
            size += sum(map(_elements, indices)) * store.dtype.numpy_dtype.itemsize
            if size > _AT_ONCE:
                yield from (self._completed(*each) for each in begun)
                begun, size = [], 0
        yield from (self._completed(*each) for each in begun)

    def _completed(self, name, sharding, reads):
        with self._damage(name):
            try:
                parts = {index: np.asarray(read.result()) for index, read in reads.items()}
            except Exception:
                if self._complete:
                    raise
                store = self._open(name, fill=True).result()
                parts = {
                    index: np.asarray(store[_slices(index)].read().result()) for index in reads
                }
                self.filled.append(f"'{'/'.join(name)}'")
        if sharding is None:
            (value,) = parts.values()
        else:
            shape = self._stores[name].shape
            value = jax.make_array_from_callback(
                shape, sharding, lambda index: parts[_bounds(index, shape)]
            )
        return name, self._verified(name, value)

    def _open(self, name, *, fill=False):
        import tensorstore

        place, leaf = os.fspath(self.folder), ".".join(name)
        base = f"{place}/" if "://" in place else {"driver": "file", "path": f"{place}/"}
        if self._ocdbt:
            files = {
                "driver": "ocdbt",
                "base": base,
                "path": f"{leaf}/",
                "cache_pool": "cache_pool#ocdbt",
            }
        elif isinstance(base, str):
            files = f"{base}{leaf}/"
        else:
            files = base | {"path": f"{place}/{leaf}/"}
        spec = {
            "driver": "zarr3" if self._zarr3 else "zarr",
            "kvstore": files,
            "fill_missing_data_reads": fill,
        }
        return tensorstore.open(spec, open=True, read=True, context=self._context)

    def _string(self, name) -> str:
        text = json.loads((self.folder / "_strings.json").read_text())
        for key in ".".join(name).split("/"):  # Orbax uses the name as a JSON pointer
            text = text[key.replace("~1", "/").replace("~0", "~")]
        if not isinstance(text, str):
            raise ValueError("_strings.json has no string of this name")
        return text

    def _key_implementations(self) -> dict[str, str]:
        """Returns the implementation of each typed PRNG key."""
        described: dict[str, str | None] = {}
        place = self.folder / "array_metadatas"
        for file in place.glob("process_*") if place.exists() else ():
            for one in json.loads(file.read_text())["array_metadatas"]:
                array = one["array_metadata"]
                extra = array.get("ext_metadata") or {}
                described[array["param_name"]] = extra.get("random_key_impl")
        for name, leaf in self._values.items():
            if "write_shape" in leaf and ".".join(name) not in described:
                raise ValueError(
                    f"nothing says whether '{'/'.join(name)}' is a PRNG key or an array of uint32"
                )
        return {name: key for name, key in described.items() if key}

    def _verified(self, name, value):
        expected = self._sums.get(".".join(name))
        if expected is not None and here(value) and checksum(value) != expected:
            raise CheckpointError(
                f"{self.folder}: this checkpoint is damaged ('{'/'.join(name)}' does not have the "
                "checksum with which it was saved)"
            )
        return value

    @contextlib.contextmanager
    def _damage(self, what: Name | str) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            shown = what if isinstance(what, str) else f"'{'/'.join(what)}'"
            raise CheckpointError(
                f"{self.folder}: this checkpoint is damaged: {shown} cannot be read "
                f"({reason(error)})"
            ) from None


def _nested(kinds: Mapping[tuple, str], begin: Name = ()) -> Any:
    """Builds the tree of {((key, type of the key), ...): value_type}."""
    children: dict[str, dict] = {}
    lists = set()
    for path, kind in kinds.items():
        if path:
            (key, key_type), *rest = path
            children.setdefault(key, {})[tuple(rest)] = kind
            lists.add(key_type == 1)  # Orbax's number for elements of sequences
    if not children:
        (kind,) = kinds.values()
        return _EMPTY[kind]() if kind in _EMPTY else Leaf(begin)
    # An empty container among the children was filled by a later partial save.
    if kinds.get((), "None") not in _EMPTY or len(lists) > 1:
        raise ValueError(f"'{'/'.join(begin)}' is a leaf and a container, or a list and a dict")
    if lists == {False}:
        return {key: _nested(below, (*begin, key)) for key, below in children.items()}
    if sorted(map(int, children)) != list(range(len(children))):
        raise ValueError(f"elements of the list '{'/'.join(begin)}' are missing")
    return [_nested(children[str(i)], (*begin, str(i))) for i in range(len(children))]


def reason(error: BaseException) -> str:
    """The first line of an error, without the specification that TensorStore adds."""
    text = (str(error).splitlines() or [""])[0].split(" [tensorstore_spec=")[0]
    return f"{type(error).__name__}: {text[:300]}"


def here(leaf: Any) -> bool:
    """Returns whether all of a leaf's bytes are in this process."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def checksum(leaf: Any) -> str:
    """Returns the SHA-256 of a leaf: of its bytes in C order, or in UTF-8."""
    if isinstance(leaf, str):
        return hashlib.sha256(leaf.encode()).hexdigest()
    array = np.asarray(jax.random.key_data(leaf) if _leaves.is_key(leaf) else leaf)
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).hexdigest()


def _bounds(index, shape) -> tuple[tuple[int, int], ...]:
    return tuple(where.indices(size)[:2] for where, size in zip(index, shape))


def _slices(bounds):
    return tuple(slice(*each) for each in bounds)


def _elements(bounds) -> int:
    return math.prod(end - begin for begin, end in bounds)


def _indices(shape, sharding) -> set:
    """The parts of an array that this process needs."""
    if sharding is None:
        return {tuple((0, size) for size in shape)}
    return {
        _bounds(index, shape)
        for index in sharding.addressable_devices_indices_map(tuple(shape)).values()
    }
