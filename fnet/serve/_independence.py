"""Tests whether other rows, or padding, change the outputs of a model.

A batch mixes the rows of several clients, and padding adds rows and elements that no client sent.
Both are right only if they leave every client's outputs alone. That no value of one row reaches
another is proved (`_proof`). Whether a row's outputs also stay the same at another position, among
another number of rows and in another program is tried here, and so is padding: the server runs the
model beside hostile values (NaN, infinities, the largest integers) and believes what it has seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fnet.export.standalone import _signature

_SIZES = 3, 5, 2, 4, 8, 16, 32, 64, 128, 224, 1  # tried for axes of any size
_SCALES = 1.0, 0.1, 3.0  # of the drawn floating-point inputs
_NATURAL = 4  # unpadded sizes for which padding is tested
_SMALL = 3  # rows of the batches in which each hostile row meets each position


class Served(Protocol):
    """What the tests use of a model of the server."""

    bundle: Any
    entry: str
    inputs: list
    outputs: list
    rows_name: str
    variables: Sequence[str]
    constraints: Sequence[str]
    pad: Mapping[str, tuple[int, ...]]
    tolerance: float
    rounding: float
    sizes: Callable
    allows: Callable
    drawn: Callable
    padded: Callable
    cut: Callable
    run: Callable
    tried: Callable


class Dependent(ValueError):
    """Raised if other rows or padding change an output, and also if the test cannot show that they
    do not."""


def check_rows(model: Served, max_batch: int) -> None:
    """Tests that the rows of a batch are independent.

    Every row is computed alone, then among other rows: at each batch size that the server uses and
    some that only requests have, at each position, beside rows of NaN, infinities, extreme integers
    and ordinary values.

    Raises:
        Dependent: a row's outputs differ, or the rows of the test show nothing. The message is the
            reason.
    """
    loops, counts_rows = _read(model)
    if loops:
        raise Dependent(
            "the program has a while loop, which the rows of a batch share, so hostile rows could "
            "keep the test running forever"
        )
    known = {min(1 << i, max_batch) for i in range(max_batch.bit_length() + 1)} | {
        2,
        3,
        2 * max_batch + 1,
    }
    batches = sorted({*known, *range(2, max_batch + 1)} if counts_rows else known - {1})
    for first, sizes in enumerate(several(model)):
        rows = _Rows(model, sizes)
        for size in batches[:2] if first else batches:
            rows.check(size)
        if not rows.compared:
            raise Dependent("no batch of the test fulfills the conditions of the proof")
        _require_information(model, rows.alone, "other rows")


def check_padding(model: Served) -> None:
    """Tests that the padding of each size variable in `model.pad` leaves the outputs alone, at
    sizes that need padding.

    The server pads with zeros. That zeros change nothing on a few inputs could be luck (a maximum
    of positive numbers), so other values in the padding must change nothing, either. One input may
    keep its zeros: the mask, if there is one.

    Raises:
        Dependent: an output depends on padding, or the test shows nothing.
    """
    alone = [(name, {name}) for name in model.pad]
    together = [(", ".join(model.pad), set(model.pad))] if len(model.pad) > 1 else []
    for what, names in alone + together:
        cases = [
            (sizes, model.drawn(sizes, scale, seed))
            for sizes in natural(model, names)
            for seed, scale in enumerate(_SCALES)
        ]
        cases += [
            (sizes, inputs)
            for sizes, inputs in _stored(model)
            if _needs_padding(model, names, sizes)
        ]
        wanted = [model.run(inputs) for _, inputs in cases]
        if cases:
            _require_information(model, wanted, f"the padding of {what}")
        for (sizes, inputs), want in zip(cases, wanted):
            _compare_padding(model, what, names, sizes, inputs, want)


def _needs_padding(model, names, sizes) -> bool:
    """Whether exactly the axes `names` are padded for these sizes."""
    return all(
        size <= model.pad[name][-1] and (size not in model.pad[name]) == (name in names)
        for name, size in sizes.items()
        if name in model.pad
    )


def _compare_padding(model, what, names, sizes, inputs, want):
    def run(fills):
        return model.cut(model.run(model.padded(inputs, sizes, fills)), sizes)

    def first_apart(outputs, wanted, tolerance):
        return next(
            (
                leaf
                for (leaf, _), y, z in zip(model.outputs, outputs, wanted)
                if not _close(y, z, tolerance)
            ),
            None,
        )

    zeros = run([0] * len(inputs))
    output = first_apart(zeros, want, model.tolerance)
    if output is not None:
        raise Dependent(f"the output {output!r} depends on the padding of {what}")
    touched = [i for i, (_, leaf) in enumerate(model.inputs) if names & set(leaf["shape"])]
    masks: list[int | None] = [None] if len(touched) == 1 else [None, *touched]
    found = []
    for mask in masks:
        for kind in (0, 1):
            fills = [
                _filling(x.dtype, kind) if i in touched and i != mask else 0
                for i, x in enumerate(inputs)
            ]
            output = first_apart(run(fills), zeros, model.rounding)
            if output is not None:
                found.append(output)
                break
        else:
            return
    raise Dependent(f"the output {found[0]!r} depends on the values in the padding of {what}")


def _filling(dtype, kind):
    """Returns a value for the padding that an output would show. It is finite and small enough to
    be legal: the server itself pads with zeros, and zero weights of attention times NaN are NaN."""
    if dtype.kind == "b":
        return True
    if dtype.kind in "ui":
        return np.iinfo(dtype).max if dtype.itemsize == 1 and kind else 1 + kind
    return (1000.0, -1000.0)[kind]


class _Rows:
    """Rows whose outputs are known because each was computed alone, and hostile rows to put beside
    them."""

    def __init__(self, model: Served, sizes: Mapping[str, int]):
        self.model = model
        one = {**sizes, model.rows_name: 1}
        drawn = [model.drawn(one, scale, seed) for seed, scale in enumerate((*_SCALES, 0.1, 1.0))]
        for known, inputs in _stored(model):
            if {**known, model.rows_name: 1} == one:
                drawn += [
                    [x[i : i + 1] for x in inputs] for i in range(min(2, known[model.rows_name]))
                ]
        tried = [(inputs, model.run(inputs)) for inputs in drawn]
        usable = [pair for pair in tried if any(map(_has_finite, pair[1]))]
        if not usable:
            _require_information(model, [], "other rows")
        self.rows, self.alone = zip(*usable)
        self.hostile = list(_hostile(self.rows[0]))
        self.compared = False

    def check(self, size: int) -> None:
        """Compares the outputs of batches of `size` rows with those of the rows alone, and with one
        another."""
        own = [i % len(self.rows) for i in range(size)]
        base = self._run([self.rows[i] for i in own])
        if base is None:
            return  # the server computes such requests one by one
        self._compare(base, range(size), [self.alone[i] for i in own], self.model.tolerance)
        moved = [(i + 1) % len(self.rows) for i in range(size)]
        for order in (
            moved,
            [own[-1]] * size,
        ):  # the second is a batch of equal rows, as the server's padding
            outputs = self._run([self.rows[i] for i in order])
            self._compare(
                outputs, range(size), [self.alone[i] for i in order], self.model.tolerance
            )
        # In one program, a row at one position has the same bits whatever its neighbors are.
        wanted = [[y[i : i + 1] for y in base] for i in range(size)]
        for kept, foreign in self._neighbors(size):
            outputs = self._run(
                [self.rows[own[i]] if i in kept else foreign(i) for i in range(size)]
            )
            self._compare(outputs, kept, [wanted[i] for i in kept], self.model.rounding)

    def _neighbors(self, size) -> Iterator[tuple[Sequence[int], Callable]]:
        """Yields positions that keep their rows, and a function that returns the hostile row for
        another position."""
        if size <= _SMALL:
            for row in self.hostile:
                for position in range(size):
                    yield [position], lambda i, row=row: row
            return
        for start in 0, 1:
            yield range(start, size, 2), lambda i: self.hostile[i // 2 % len(self.hostile)]

    def _run(self, rows) -> list[np.ndarray] | None:
        return self.model.tried([np.concatenate(parts) for parts in zip(*rows)])

    def _compare(self, outputs, positions, wanted, tolerance):
        if outputs is None:
            return
        self.compared = True
        for i, row in zip(positions, wanted):
            for (name, _), got, want in zip(self.model.outputs, outputs, row):
                if not _close(got[i : i + 1], want, tolerance):
                    raise Dependent(
                        f"the output {name!r} of a row depends on the other rows of a batch, as a "
                        f"test with {len(got)} rows shows"
                    )


def _hostile(row) -> Iterator[list]:
    """Yields rows like `row` that hold extreme values, in all inputs and in one input at a time."""
    fills = [_extremes(x.dtype) for x in row]
    for kind in range(max(map(len, fills))):
        yield [np.full_like(x, fill[kind % len(fill)]) for x, fill in zip(row, fills)]
    if len(row) == 1:
        return
    for changed, fill in enumerate(fills):
        for value in fill[:2]:
            yield [np.full_like(x, value) if i == changed else x for i, x in enumerate(row)]


def _extremes(dtype) -> list:
    if dtype.kind == "b":
        return [True, False]
    if dtype.kind in "ui":
        limits = np.iinfo(dtype)
        return [limits.max, limits.min, 0, 1, 2, 100] + ([-1] if limits.min else [])
    return [np.nan, np.inf, -np.inf, 1e4, -1e4, 0.0, 1.0, -1.0, 100.0, 1e-4] + (
        [1e30, -1e30] if dtype.itemsize > 2 else []
    )


def _require_information(model, results, what):
    """Raises Dependent unless some output differs between two inputs of equal sizes: outputs that
    are always zero hide every effect."""
    if not any(_has_finite(y) for outputs in results for y in outputs):
        why = "have no finite element"
    elif any(
        y.shape == z.shape and not _close(y, z, 0.0)
        for one, other in itertools.combinations(results, 2)
        for y, z in zip(one, other)
    ):
        return
    else:
        why = "are equal"
    raise Dependent(
        f"the outputs of all test inputs {why}, so the test shows nothing about {what}; save the "
        "bundle with realistic inputs, Program.save(tests=...)"
    )


def _has_finite(array) -> bool:
    return bool(np.isfinite(array.astype(np.float64)).any())


def _close(got: np.ndarray, want: np.ndarray, tolerance: float) -> bool:
    got, want = got.astype(np.float64), want.astype(np.float64)
    if got.shape != want.shape:
        return False
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        return False
    allowed = tolerance * np.abs(want[finite]).max(initial=0.0)
    return bool((np.abs(got[finite] - want[finite]) <= allowed).all())  # False for NaN


def _read(model: Served) -> tuple[bool, bool]:
    """Returns whether a program has while loops, and whether it computes with its number of rows.
    Without a stable form, the text of the program tells only about loops, and every batch size must
    be tested."""
    try:
        program = model.bundle.stable(model.entry)
    except _signature.BundleError:
        return "stablehlo.while" in model.bundle._deserialized(model.entry).mlir_module(), True
    operations = list(_operations(program))
    counts = any(model.rows_name in str(options) for name, options in operations if name == "size")
    return any(name == "while" for name, _ in operations), counts


def _operations(data: Any) -> Iterator[tuple[str, Any]]:
    """Yields (name, options) of the operations of a program in stable form, also those inside of
    loops and branches."""
    if isinstance(data, dict):
        for name, _, _, options, _ in data.get("equations", ()):
            yield name, options
            yield from _operations(options)
        for key, value in data.items():
            if key != "equations":
                yield from _operations(value)
    elif isinstance(data, list):
        for value in data:
            yield from _operations(value)


# Sizes.


def _assigned(model: Served, fixed: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yields values of all size variables that satisfy the constraints of the model and agree with
    `fixed`."""
    names = sorted({*model.variables, *([model.rows_name] if model.rows_name else [])} - set(fixed))
    for values in itertools.islice(itertools.product(_SIZES, repeat=len(names)), 100_000):
        sizes = {**fixed, **dict(zip(names, values))}
        if model.allows(sizes):
            yield sizes


def several(model: Served) -> list[dict[str, int]]:
    """Returns one or two assignments of the sizes besides the number of rows. Padded sizes are
    those of the padding."""
    found: list[dict[str, int]] = []
    for place in (0, -1):
        fixed = {name: sizes[place] for name, sizes in model.pad.items()}
        for sizes in itertools.islice(_assigned(model, {**fixed, model.rows_name: 1}), 2):
            different = all(
                all(
                    sizes[n] != other[n]
                    for n in model.variables
                    if n not in model.pad or len(model.pad[n]) > 1
                )
                for other in found
            )
            if sizes not in found and (not found or different):
                found.append(sizes)
    if not found:
        raise Dependent(
            f"no small sizes satisfy the constraints {', '.join(model.constraints)}, so nothing "
            "can be tested"
        )
    return found[:2]


def natural(model: Served, names: set[str]) -> list[dict[str, int]]:
    """Returns sizes for which the server pads exactly the axes `names`: the ends of the ranges
    below the padded
    sizes. The list is empty if there are no such sizes."""
    listed = {name: sizes[0] for name, sizes in model.pad.items() if name not in names}
    between = {
        name: [n for n in range(1, model.pad[name][-1]) if n not in model.pad[name]]
        for name in names
    }
    if not all(between.values()):
        return []
    found = []
    for i in range(max(map(len, between.values()))):
        chosen = {name: sizes[min(i, len(sizes) - 1)] for name, sizes in between.items()}
        for others in listed, {}:
            sizes = next(_assigned(model, {**others, **chosen}), None)
            if sizes is not None and _needs_padding(model, names, sizes):
                found.append(sizes)
                break
    if not found:
        raise Dependent(
            f"no small sizes satisfy the constraints {', '.join(model.constraints)}, so the "
            f"padding of {', '.join(names)} cannot be tested"
        )
    name = min(names)
    ends = [sizes for sizes in found if {sizes[name] - 1, sizes[name] + 1} & {0, *model.pad[name]}]
    return (
        ends
        if 0 < len(ends) <= _NATURAL
        else [*(ends or found)[: _NATURAL - 2], *(ends or found)[-2:]]
    )


def _stored(model: Served) -> list[tuple[dict[str, int], list[np.ndarray]]]:
    """Returns the test inputs in the bundle with their sizes, or an empty list."""
    inputs, wanted = model.bundle.tests()[model.entry]
    if not wanted:
        return []
    arrays = [np.asarray(x) for x in inputs]
    return [(model.sizes(arrays), arrays)]
