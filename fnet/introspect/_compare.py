"""Compares the named values of two programs (see `transforms.sites`)."""

from __future__ import annotations

import dataclasses
import itertools
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import transforms as ft
from fnet._util._nearest import nearest_to_pattern
from fnet._util._text_table import aligned
from fnet.introspect._reduce._reduce import Reduced, reduce
from fnet.jaxpr import check_function, pack

_SAME = 1e-3  # sites with different names form a pair if their error is smaller than this
_TOLERANCE = 1e-5  # for float32; for other dtypes, it is proportional to their precision


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two programs are apart in one named value (see `transforms.sites`).

    Attributes:
        name: the value's name in the first program, or "result". In a `lax.scan`, each iteration
            has its own `Difference`.
        other: its name in the second program, or "result".
        error: max |a - b| / max |b| of the values a and b. It is infinite if the shapes differ, or
            if an element is finite in one of them alone.
        tolerance: the largest error that counts as equal.
        types: the dtype and shape in the first and in the second program, as text.

    >>> row = introspect.compare(jnp.sin, lambda x: jnp.sin(x) + 1, jnp.zeros(3)).rows[-1]
    >>> row.name, row.error
    ('result', 1.0)
    """

    name: str
    other: str
    error: float
    tolerance: float
    types: tuple[str, str]

    @property
    def equal(self) -> bool:
        return self.error <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of `compare`; `str()` returns a table.

    Attributes:
        rows: a `Difference` for each pair of named values, in the order in which the first program
            computes them, and at the end one for the results.
        only: the names without a counterpart, a tuple for the first program and one for the second.

    >>> f = lambda x: ft.tag(2 * x, "double").sum()
    >>> g = lambda x: ft.tag(x + x, "double").sum()
    >>> introspect.compare(f, g, jnp.arange(3.0)).first is None
    True
    """

    rows: tuple[Difference, ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    _program: tuple[Callable, tuple] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    def reduce(
        self, failing: str | Callable, folder: str | Path = "out", **options: Any
    ) -> Reduced:
        """Reduces the first program to a short script, from the first difference on: of its
        results, only the value in which it first differs is looked at.

            print(introspect.compare(f, g, *args).reduce("differs from float64"))

        Args:
            failing, folder, options: as for `introspect.reduce`.

        Returns:
            A `Reduced`.

        Raises:
            ValueError: the programs do not differ, or that value does not fail.

        >>> import tempfile
        >>> f = lambda x: jnp.sin(ft.tag(jnp.sqrt(x - 3), "root"))
        >>> compared = introspect.compare(f, lambda x: jnp.sin(ft.tag(x, "root")), jnp.ones(2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     compared.reduce("not finite", folder).operations
        ('sqrt',)
        """
        if self.first is None or self._program is None:
            raise ValueError("Comparison.reduce: the two programs do not differ")
        f, args = self._program
        name = re.sub(r" \[\d+\]$", "", self.first.name)
        names = {name, re.sub(r"\[\d+\]", "[:]", name)}
        known = [site.name for site in ft.sites(f)(*args)]
        chosen = [re.escape(each) for each in known if each in names]
        if not chosen:  # the result
            return reduce(f, args, failing, folder, **options)
        value = lambda *args: ft.capture(f, chosen)(*args)[1]
        return reduce(value, args, failing, folder, **options)

    @property
    def first(self) -> Difference | None:
        """The first row whose error exceeds the tolerance, or None."""
        return next((row for row in self.rows if not row.equal), None)

    def __str__(self):
        first = self.first
        table = [("site", "in the other program", "error", "types")]
        table += [
            (
                row.name,
                row.other if row.other != row.name else "",
                f"{row.error:.1e}",
                row.types[0] if row.types[0] == row.types[1] else " / ".join(row.types),
            )
            for row in self.rows
        ]
        lines = aligned(table, left=range(4))
        if first is not None:
            lines[self.rows.index(first) + 1] += "  <- first difference"
        lines += [
            f"only in the {which} program: {', '.join(names)}"
            for which, names in zip(("first", "second"), self.only)
            if names
        ]
        summary = (
            "no difference"
            if first is None
            else f"first difference: {first.name} (error {first.error:.1e}, tolerance {first.tolerance:.1e})"
        )
        return "\n".join([*lines, summary])


def compare(
    f: Callable,
    g: Callable,
    *args: Any,
    names: Mapping[str, str] | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """Finds the first named value in which two programs differ, and the error of each.

        print(introspect.compare(model, ft.autocast(model, "bfloat16"), params, x, tolerance=0.05))
        print(introspect.compare(partial(model, params), partial(twin.apply, variables), x))

    Values with the same name form pairs. The others are paired if they are nearly equal, and what
    then remains if the shapes are equal, both in the order of computation, as in an alignment of
    two sequences. So a model can be compared with its port to another library, whose names differ.

    Args:
        f: a function with named values (see `transforms.sites`).
        g: the reference, a function of the same arguments.
        args: the arguments. Each function runs once on them, and all named values are kept in
            memory.
        names: {regular expression: replacement}, pairs that you state yourself. If an expression
            matches the whole name of a value in f, its counterpart in g is
            `re.sub(expression, replacement, name)`. Default: none.
        tolerance: the largest relative error that counts as equal. Default: 1e-5 for float32, in
            proportion to the machine epsilon for other floating-point dtypes, and 0 for integers;
            of two dtypes, the larger tolerance.

    Returns:
        A `Comparison`.

    Raises:
        ValueError: `names` contains a name that g does not have.

    >>> model = nn.Sequential(hidden=nn.Dense(4), head=nn.Dense(2))
    >>> params, _ = model.init(jax.random.key(0), jnp.ones((3, 5)))
    >>> faulty = ft.intervene(model, {"head": lambda value, index: 1.01 * value})
    >>> compare(faulty, model, params, jnp.ones((3, 5))).first.name
    'head'
    """
    for function in f, g:
        check_function("compare", function)
    runs = [_Run(function, args) for function in (f, g)]
    pairs = _pairs(*(list(run.values) for run in runs), runs, names or {})
    rows = []
    for scans, group in itertools.groupby(pairs, key=lambda pair: runs[0].sites[pair[0]].scans[:1]):
        group = list(group)
        if not scans:
            rows += [
                _difference(a, b, runs[0].values[a], runs[1].values[b], tolerance) for a, b in group
            ]
        else:
            rows += _iterations(group, runs, tolerance)
    rows.append(_difference("result", "result", runs[0].result, runs[1].result, tolerance))
    matched = [{pair[i] for pair in pairs} for i in (0, 1)]
    only = tuple(
        tuple(name for name in run.values if name not in seen) for run, seen in zip(runs, matched)
    )
    return Comparison(tuple(rows), only, (f, args))


class _Run:
    """One run of a function, with the values of its sites (named values)."""

    def __init__(self, function, args):
        with warnings.catch_warnings():
            # Which do not apply here.
            warnings.filterwarnings("ignore", "tune: the compiler options")
            self.sites = {
                site.name: site for site in ft.sites(function)(*args) if site.inside is None
            }
            arrays, form = pack(args)
            if form is not None:  # modules, which the function may change in place
                args = form.unpack(arrays)
            self.result, values = ft.capture(function, [re.escape(name) for name in self.sites])(
                *args
            )
        self.values = {name: values[name] for name in self.sites}


def _pairs(mine, others, runs, names) -> list[tuple[str, str]]:
    """Returns pairs (name of a value in f, name of a value in g), in the order of computation in f.
    The docstring of `compare` describes how pairs are formed."""
    pairs: dict[str, str] = {}
    free = set(others)

    def pair(name: str, other: str) -> None:
        pairs[name] = other
        free.remove(other)

    for pattern, replacement in names.items():
        for name in mine:
            if name in pairs or not re.fullmatch(pattern, name):
                continue
            other = re.sub(pattern, replacement, name)
            if other not in free:
                raise ValueError(
                    f"compare: names give {other!r} for {name!r}, and the second function has no "
                    f"such site left; nearest: {nearest_to_pattern(other, others)}"
                )
            pair(name, other)
    for name in mine:
        if name not in pairs and name in free:
            pair(name, name)

    left = [name for name in mine if name not in pairs]
    right = [name for name in others if name in free]
    left_values = [runs[0].values[name] for name in left]
    right_values = [runs[1].values[name] for name in right]
    for a, b in _aligned(left_values, right_values):
        pair(left[a], right[b])
    return [(name, pairs[name]) for name in mine if name in pairs]


def _aligned(mine, others) -> list[tuple[int, int]]:
    """Returns the pairs (index in `mine`, index in `others`) of corresponding values. The function
    first pairs nearly equal values of the two lists, and then pairs remaining values that have the
    same shape. The indices in both lists increase from each pair to the next."""
    shapes = [
        [str(jax.tree.map(jnp.shape, value)) for value in values] for values in (mine, others)
    ]
    same = lambda i, j: (
        shapes[0][i] == shapes[1][j]
        and all(
            map(
                lambda a, b: _error(a, b) < _SAME,
                *(jax.tree.leaves(values[k]) for values, k in ((mine, i), (others, j))),
            )
        )
    )
    equal = [[same(i, j) for j in range(len(others))] for i in range(len(mine))]
    found, start = [], (0, 0)
    for i, j in [*_common(equal), (len(mine), len(others))]:
        a, b = start
        gap = [[x == y for y in shapes[1][b:j]] for x in shapes[0][a:i]]
        found += [(a + k, b + m) for k, m in _common(gap)]
        found += [(i, j)] if i < len(mine) else []
        start = i + 1, j + 1
    return found


def _common(equal) -> list[tuple[int, int]]:
    """Returns the longest common subsequence of two sequences as pairs of indices. `equal[i][j]`
    states whether element i of the first sequence equals element j of the second."""
    rows, columns = len(equal), len(equal[0]) if equal else 0
    best = np.zeros((rows + 1, columns + 1), int)
    for i in reversed(range(rows)):
        for j in reversed(range(columns)):
            best[i, j] = (
                1 + best[i + 1, j + 1] if equal[i][j] else max(best[i + 1, j], best[i, j + 1])
            )
    found, i, j = [], 0, 0
    while i < rows and j < columns:
        if equal[i][j]:
            found.append((i, j))
            i, j = i + 1, j + 1
        elif best[i + 1, j] >= best[i, j + 1]:
            i += 1
        else:
            j += 1
    return found


def _iterations(group, runs, tolerance) -> list[Difference]:
    """Returns a `Difference` for each iteration of a scan and each pair of named values inside the
    scan."""
    length, rows = runs[0].sites[group[0][0]].scans[0], []
    for i in range(length):
        for a, b in group:
            values = runs[0].values[a], runs[1].values[b]
            if all(jnp.shape(x)[:1] == (length,) for x in jax.tree.leaves(values)):
                values = jax.tree.map(lambda x, i=i: x[i], values)
            rows.append(_difference(_indexed(a, i), _indexed(b, i), *values, tolerance))
    return rows


def _indexed(name, i) -> str:
    return name.replace("[:]", f"[{i}]") if "[:]" in name else f"{name} [{i}]"


def _difference(name, other, a, b, tolerance) -> Difference:
    types = tuple(
        ", ".join(_type(x) for x in jax.tree.leaves(value)) or "nothing" for value in (a, b)
    )
    a, b = ([x for x in jax.tree.leaves(value) if _comparable(x)] for value in (a, b))
    if [jnp.shape(x) for x in a] != [jnp.shape(x) for x in b]:
        return Difference(name, other, float("inf"), tolerance or _TOLERANCE, types)
    if tolerance is None:
        tolerance = max((_precision(x) for x in (*a, *b)), default=0.0)
    return Difference(name, other, max(map(_error, a, b), default=0.0), tolerance, types)


def _type(x) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__


def _comparable(x) -> bool:
    return isinstance(
        x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    ) and not jax.dtypes.issubdtype(jnp.result_type(x), jax.dtypes.extended)


def _precision(x) -> float:
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return _TOLERANCE * float(jnp.finfo(dtype).eps) / float(jnp.finfo(jnp.float32).eps)


def _error(a, b) -> float:
    """Returns max |a - b| / max |b|."""
    a, b = (np.asarray(x) for x in (a, b))
    wide = np.complex128 if any(np.iscomplexobj(x) for x in (a, b)) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite) or not np.array_equal(
        a[~finite], b[~finite], equal_nan=True
    ):
        return float("inf")
    difference = np.abs(a - b)[finite].max(initial=0.0)
    return (
        float(difference / max(np.abs(b[finite]).max(initial=0.0), np.finfo(np.float32).tiny))
        if difference
        else 0.0
    )
