"""Converts data sets (trees of arrays and data frames) to trees of NumPy arrays with one row for
each example."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

INT32 = np.iinfo(np.int32)
_SOME = 4096  # rows of a file from which the range of float64 values is estimated
_READ, _READ_OF_FILE = 1 << 30, 1 << 24  # bytes that a digest reads of an array, and of a file
_PLACES = 64  # from which it reads them


def is_frame(data: Any) -> bool:
    """Whether `data` is a pandas DataFrame or has the same interface. `is_frame` does not import
    pandas."""
    return hasattr(data, "iloc") and hasattr(data, "columns")


def is_series(data: Any) -> bool:
    """Whether `data` is a column of a data frame."""
    return hasattr(data, "iloc") and hasattr(data, "dtype")


def is_leaf(data: Any) -> bool:
    """Whether `data` is a leaf: a data frame, a column, or a list that contains no arrays, dicts or
    tuples."""
    if isinstance(data, list):
        return not any(isinstance(x, dict | tuple) or getattr(x, "shape", ()) != () for x in data)
    return is_frame(data) or is_series(data)


def as_arrays(data: Any, what: str) -> tuple[Any, int]:
    """Converts a data set to a tree of NumPy arrays. Returns the tree and the number of examples.

    Memory-mapped arrays stay memory-mapped. Their integers are checked when `rows_of` reads them,
    and the range of their float64 values is estimated from 4,096 rows.

    Args:
      data: an array, a data frame, or a tree of arrays and data frames (nested dicts, tuples and
        lists). A data frame becomes a dict of its columns.
      what: the name of the data in error messages.

    Raises:
      ValueError: `data` contains no arrays, or arrays of different lengths.
      TypeError: `data` contains missing values, or values that are not numbers (text, dates,
        categories). A TypeError is also raised for integers that do not fit into 32 bits, and for
        float64 values that differ only in digits which float32 does not have, unless JAX computes
        in 64 bits.
    """
    names, arrays = [], []

    def convert(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if is_frame(leaf):
            below = f"{name}/" if name else ""
            labels = list(map(str, leaf.columns))
            if repeated := sorted({label for label in labels if labels.count(label) > 1}):
                raise TypeError(
                    f"{what}: the table has several columns called {repeated}: rename them"
                )
            return {
                label: keep(below + label, _column(leaf[column], what, below + label))
                for label, column in zip(labels, leaf.columns)
            }
        return keep(
            name, _column(leaf, what, name) if is_series(leaf) else _array(leaf, what, name)
        )

    def keep(name, array):
        wide = array.dtype == np.float64 and not jax.config.jax_enable_x64
        some = array
        if wide and array.ndim and _is_file(array):
            some = array[np.linspace(0, len(array) - 1, min(len(array), _SOME)).astype(int)]
        if wide and narrowed(some, 1e-3):
            raise TypeError(
                f"{what}: '{name}' holds values from {np.nanmin(some)!r} to {np.nanmax(some)!r}, "
                "which float32 rounds to multiples of their difference: subtract their mean, or "
                "set jax.config.update('jax_enable_x64', True)"
            )
        names.append(name)
        arrays.append(array)
        return array

    tree = jax.tree_util.tree_map_with_path(convert, data, is_leaf=is_leaf)
    for name, array in zip(names, arrays):
        if array.ndim == 0:
            raise ValueError(
                f"{what}: '{name}' is a single value: expected an array with one row for each "
                f"example"
            )
    lengths = {name: len(array) for name, array in zip(names, arrays)}
    if not lengths or len(set(lengths.values())) > 1 or min(lengths.values()) == 0:
        raise ValueError(
            f"{what} needs one or more arrays of one length, at least 1, got lengths {lengths}"
        )
    return tree, len(arrays[0])


def digest(data: Any) -> str:
    """Returns a digest of the values of a tree from `as_arrays`. Of an array with more than 1 GiB,
    or of a file with more than 16 MiB, it reads as many bytes at 64 places."""
    seal = 0
    for path, array in jax.tree_util.tree_leaves_with_path(data):
        seal = zlib.crc32(
            f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode(), seal
        )
        most = _READ_OF_FILE if _is_file(array) else _READ
        parts = [array]
        if array.nbytes > most:
            rows = max(1, most // _PLACES * len(array) // array.nbytes)
            starts = np.linspace(0, len(array) - rows, min(_PLACES, len(array))).astype(int)
            parts = [array[start : start + rows] for start in starts]
        for part in parts:
            seal = zlib.crc32(np.ascontiguousarray(part).reshape(-1).view(np.uint8), seal)
    return f"{seal:08x}"


def digest_of_rows(rows: Sequence[np.ndarray]) -> str:
    """Returns a digest of many small arrays, such as texts: of all sizes and values, or, beyond as
    many bytes as `digest` reads of one array, of the values in every n-th array."""
    sizes = np.array([len(row) for row in rows])
    seal = zlib.crc32(sizes)
    most = _READ_OF_FILE if any(map(_is_file, rows)) else _READ
    skipped = max(1, -(-sum(row.nbytes for row in rows) // most))
    for row in rows[::skipped]:
        seal = zlib.crc32(np.ascontiguousarray(row).view(np.uint8), seal)
    return f"{seal:08x}"


def rows_of(data: Any, rows: np.ndarray, what: str) -> Any:
    """Returns rows of a tree from `as_arrays`, which must be numbers that JAX can represent. `what`
    names the data in error messages."""

    def chosen(path, array):
        part = array[rows]
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return numbers_of(part, what, name) if _is_file(array) else part

    return jax.tree_util.tree_map_with_path(chosen, data)


def checked_integers(data: Any, what: str) -> Any:
    """Returns a batch. Raises TypeError if JAX would wrap its 64-bit integers around, which it does
    in silence."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iu":
            numbers_of(leaf, what, jax.tree_util.keystr(path, simple=True, separator="/"))
    return data


def take(data: Any, rows: np.ndarray) -> Any:
    """Returns the examples of `data` at the indices `rows`, in the order of `rows`."""
    pick = lambda leaf: (
        leaf.iloc[rows] if is_frame(leaf) or is_series(leaf) else np.asarray(leaf)[rows]
    )
    return jax.tree.map(pick, data, is_leaf=is_leaf)


def _array(leaf: Any, what: str, name: str) -> np.ndarray:
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise TypeError(f"{what}: '{name}' has masked values: fill them, array.filled(value)")
    return numbers_of(array := np.asarray(leaf), what, name, values=not _is_file(array))


def _is_file(array: np.ndarray) -> bool:
    """Whether an array is memory-mapped, so that it may be larger than memory."""
    return isinstance(array, np.memmap) or isinstance(array.base, np.memmap)


def _column(series: Any, what: str, name: str) -> np.ndarray:
    """Returns a column of a data frame as an array. Raises TypeError if the column contains values
    that are not numbers."""
    missing = np.asarray(series.isna())
    if missing.any():
        raise TypeError(
            f"{what}: column '{name}' has {missing.sum()} missing values, the first in row "
            f"{missing.argmax()}: fill them (table.fillna(...)) or leave out their rows "
            f"(table.dropna())"
        )
    if hasattr(series.dtype, "categories"):
        raise TypeError(
            f"{what}: column '{name}' holds categories: pass their numbers instead, "
            f"table[{name.rpartition('/')[2]!r}].cat.codes"
        )
    dtype = getattr(series.dtype, "numpy_dtype", series.dtype)  # of pandas' Int64 and the like
    if isinstance(dtype, np.dtype):
        return numbers_of(series.to_numpy(dtype=dtype), what, name)
    return numbers_of(np.asarray(series.to_numpy()), what, name)


def narrowed(array: np.ndarray, tolerance: float) -> bool:
    """Whether rounding a float64 array [n, ...] to float32 changes a value by more than `tolerance`
    times the difference between the largest and the smallest of the n values at its place.
    Differences in the last digits of float64 are rounding errors, not data. Places with infinite
    values are not examined."""
    if not array.size:
        return False
    low, high = np.fmin.reduce(array, 0), np.fmax.reduce(array, 0)  # NaN is ignored
    with np.errstate(invalid="ignore", over="ignore"):
        largest, spread = np.maximum(abs(low), abs(high)), high - low
        suspect = (
            (spread > 1e-12 * largest)
            & (spread < np.inf)
            & (2.0**-24 * largest > tolerance * spread)
        )
    if not suspect.any():
        return False
    values = array[:, suspect] if array.ndim > 1 else array
    error = np.abs(values.astype(np.float32) - values)
    return bool((error > tolerance * (spread[suspect] if array.ndim > 1 else spread)).any())


def numbers_of(array: np.ndarray, what: str, name: str, *, values: bool = True) -> np.ndarray:
    """Returns `array`. Raises TypeError if a JAX array cannot represent its dtype or, if `values`,
    its values."""
    if array.dtype.names:
        raise TypeError(
            f"{what}: '{name}' is an array of records: pass its fields as a dict, "
            "{name: array[name] for name in array.dtype.names}"
        )
    if array.dtype.kind in "OUST":
        raise TypeError(
            f"{what}: '{name}' holds text or objects ({array.dtype}): pass numbers, for example "
            "those of classes, numbers = np.unique(values, return_inverse=True)"
        )
    if array.dtype.kind in "mM":
        raise TypeError(
            f"{what}: '{name}' holds dates or durations ({array.dtype}): pass numbers, for example "
            "(values - values.min()) / np.timedelta64(1, 'D')"
        )
    wide = array.dtype in (np.int64, np.uint64) and not jax.config.jax_enable_x64
    if wide and array.size and values:
        for value in (int(array.min()), int(array.max())):
            if (
                not INT32.min
                <= value
                <= (INT32.max if array.dtype == np.int64 else 2 * INT32.max + 1)
            ):
                raise TypeError(
                    f"{what}: '{name}' holds {value}, which does not fit into 32 bits: leave the "
                    "array out, or set jax.config.update('jax_enable_x64', True)"
                )
    return array
