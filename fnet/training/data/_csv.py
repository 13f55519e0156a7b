"""CSV files as columns of NumPy arrays."""

from __future__ import annotations

import csv
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fnet.training.data._arrays import narrowed
from fnet.training.data._cache import local

MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "?"))
_BOOLS = {"true": True, "false": False}


def read_csv(
    path: str | Path,
    *,
    names: Sequence[str] | None = None,
    delimiter: str = ",",
    missing: Any = None,
) -> dict[str, np.ndarray]:
    """Reads a CSV file into a dict {column: array}, as `Batches` takes it.

    A column of integers becomes int32, other numbers float32, and a column of true and false bool.
    What 32 bits would change becomes int64 or float64: integers beyond int32, and in a column with
    fractions integers that float32 rounds, numbers of more than seven digits from 2^24 up (Unix
    times), values that differ only in digits which float32 does not have, and numbers that it
    rounds to 0. Everything else is text, with NumPy's str dtype, dates for example, and integers
    beyond 64 bits. The file is UTF-8. Quoted cells may contain delimiters and line breaks, and
    empty lines are skipped.

    Args:
      path: the path of the file, or the URL of an object in an object store (s3://, gs://, az://),
        as for `read_tokens`.
      names: the names of the columns, for a file that begins with data. Default None: the first
        line has them.
      delimiter: the character between cells, such as ";" or a tab. Default ",".
      missing: what becomes of missing values in columns of numbers or bools: empty cells and NA,
        N/A, NaN, null, none or ?. "drop" omits their rows; a number, or a dict {column: number},
        replaces them. Text is never changed. Default None: they are an error.

    Raises:
      ValueError: a row does not have one cell for each column, a value is missing without a
        replacement, a number is too large for float32, or an integer is too large for its column.
        The message names the file and the line.
      FileNotFoundError: the file does not exist.

    Example:
      >>> table = read_csv("iris.csv")                                     # doctest: +SKIP
      >>> classes, label = np.unique(table["species"], return_inverse=True)   # doctest: +SKIP
    """
    path, rows, lines = local(path), [], []
    if names is not None and len(set(names)) < len(names):
        raise ValueError(f"{path}: names={list(names)}: expected different names")
    with path.open(newline="", encoding="utf-8-sig") as file:
        for line, cells in _rows(path, csv.reader(file, delimiter=delimiter, strict=True)):
            if names is None:
                names = _header(path, line, [cell.strip() for cell in cells])
            elif len(cells) == len(names):
                rows.append(cells)
                lines.append(line)
            else:
                raise ValueError(
                    f"{path}, line {line}: expected {len(names)} cells ({', '.join(names)[:80]}), "
                    f"got {len(cells)}"
                )
    if not rows:
        raise ValueError(f"{path} has no line of values")
    if unknown := sorted(set(missing) - set(names)) if isinstance(missing, Mapping) else ():
        raise ValueError(f"{path}: missing= names {unknown}, but the columns are {list(names)}")
    columns = {name: list(cells) for name, cells in zip(names, zip(*rows))}
    numeric = {name: kind for name, cells in columns.items() if (kind := _kind(cells)) is not None}
    if missing == "drop":
        kept = [
            i
            for i, row in enumerate(rows)
            if not any(_missing(columns[name][i]) for name in numeric)
        ]
        if not kept:
            raise ValueError(f"{path}: every line has a missing value")
        columns = {name: [cells[i] for i in kept] for name, cells in columns.items()}
        lines = [lines[i] for i in kept]
    return {
        name: _array(path, name, cells, numeric.get(name), lines, missing)
        for name, cells in columns.items()
    }


def _rows(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yields (line number, cells) for each row that is not empty."""
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}, after line {reader.line_num}: the file is not in UTF-8 ({error})"
        ) from None
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None


def _header(path: Path, line: int, names: list[str]) -> list[str]:
    if all(not _missing(name) and _kind([name]) for name in names):
        raise ValueError(
            f"{path}, line {line}: expected the names of the columns, got numbers: if the file has "
            "no such line, pass names=[...]"
        )
    if len(names) == 1 and (found := [mark for mark in ";\t|," if mark in names[0]]):
        raise ValueError(
            f"{path}, line {line}: there is one column, {names[0][:80]!r}: pass "
            f"delimiter={found[0]!r}"
        )
    for number, name in enumerate(names, 1):
        if not name or names.index(name) < number - 1:
            what = (
                f"the name {name!r} of column {number} is used twice"
                if name
                else f"column {number} has no name"
            )
            raise ValueError(
                f"{path}, line {line}: {what}: pass a file with one name for each column"
            )
    return names


def _missing(cell: str) -> bool:
    return cell.strip().lower() in MISSING


def _kind(cells: Sequence[str]) -> Callable[[str], Any] | None:
    """Returns the function that converts the cells of a column of numbers or bools, or None for a
    column of text."""
    present = [cell for cell in cells if not _missing(cell)]
    if present and all(cell.strip().lower() in _BOOLS for cell in present):
        return lambda cell: _BOOLS[cell.strip().lower()]
    if any("_" in cell for cell in present):  # Python reads 1_000 as a number
        return None
    for kind in (int, float):
        try:
            values = [kind(cell) for cell in present]
        except ValueError:
            continue
        return (
            kind
            if kind is float or not present or -(2**63) <= min(values) <= max(values) < 2**63
            else None
        )
    return None


def _array(
    path: Path, name: str, cells: list[str], kind: Callable | None, lines: list[int], missing: Any
) -> np.ndarray:
    if kind is None:
        return np.array(cells)
    given = missing.get(name) if isinstance(missing, Mapping) else missing
    values = []
    for line, cell in zip(lines, cells):
        if not _missing(cell):
            values.append(kind(cell))
        elif given is None:
            raise ValueError(
                f"{path}, line {line}: column '{name}' has a missing value, {cell!r}: pass "
                f"missing={{{name!r}: 0}}, or another number, or missing='drop' to leave out such "
                f"lines"
            )
        else:
            values.append(given)
    if all(isinstance(value, bool) for value in values):
        return np.array(values)
    if all(isinstance(value, numbers.Integral) for value in values):
        return np.array(
            values, np.int32 if -(2**31) <= min(values) <= max(values) < 2**31 else np.int64
        )
    try:
        wide = np.array(values, np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"{path}: missing={given!r} for column '{name}': expected a number"
        ) from None
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    whole = np.zeros(len(cells), bool)
    for i, (line, cell) in enumerate(zip(lines, cells)):
        if np.isinf(narrow[i]) and "inf" not in cell.lower() and not _missing(cell):
            raise ValueError(
                f"{path}, line {line}: column '{name}' holds {cell[:40]}, more than float32 can "
                "hold: scale the column"
            )
        exact = _integer(cell)
        whole[i] = exact is not None
        if exact is not None and int(wide[i]) != exact:
            raise ValueError(
                f"{path}, line {line}: column '{name}' holds the integer {cell[:40]}, and "
                "fractions or missing values: float64 rounds it. Use missing='drop', or missing= "
                "with an integer"
            )
    return wide if _needs_float64(wide, narrow, whole) else narrow


def _integer(cell: str) -> int | None:
    try:
        return int(cell)
    except ValueError:
        return None


def _needs_float64(wide: np.ndarray, narrow: np.ndarray, whole: np.ndarray) -> bool:
    """Whether float32 would change what a column says. Cells that are written as integers
    (`whole`) may be identifiers or counts."""
    if (whole & (narrow != wide)).any() or ((narrow == 0) & (wide != 0)).any():
        return True
    large = wide[np.isfinite(wide) & (np.abs(wide) >= 2**24) & ~whole]
    return any(float(f"{value:.7g}") != value for value in large.tolist()) or narrowed(wide, 1e-5)
