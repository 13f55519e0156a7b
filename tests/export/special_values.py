"""Every operation that can be exported, on special values: what each target computes, compared with
JAX.

    python -m tests.export.special_values [onnx numpy jax litert] [--only gather,scatter] [--wrong]

prints, for each target, in how many cells of the table (operation x dtype x column) it equals JAX,
refuses the operation by name at export, differs with a warning, or is wrong. `--wrong` lists the
wrong cells, and `--only` chooses operations.

Tests use `programs()` (the table) and `outcome(target, program, column)`.

NaN, infinities and the signs of zeros are compared exactly, all other numbers for each element and
relative to it.
XLA flushes subnormal numbers to zero on CPUs, and does so in arithmetic and comparisons, but not
where it moves or negates numbers. NumPy and onnxruntime do not flush them. Therefore a result that
depends on a subnormal number may also be what JAX computes for the same numbers in float64, where
they are normal.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import functools
import itertools
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import export
from fnet.export import _evaluate, _stable
from fnet.export.standalone import _interpret

COLUMNS = (
    "ordinary",
    "NaN",
    "Inf",
    "-0",
    "subnormal",
    "near 0",
    "far out",
    "saturating",
    "out-of-range",
    "empty",
    "ties",
)
TARGETS = "onnx", "numpy", "jax", "litert"
EQUAL, REFUSED, WARNED, WRONG = "equal", "refused", "differs with warning", "WRONG"
FLOATS = "float32", "float16", "float64"
SIGNED = "int8", "int16", "int32", "int64"
UNSIGNED = "uint8", "uint16", "uint32", "uint64"
INTS = SIGNED + UNSIGNED
RELATIVE = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-5}


class Program(NamedTuple):
    """A function of arrays, and inputs for it.

    Attributes:
        operation: the name of the operation in the stable form of programs, or of a composition of
            operations.
        variant: the options of the operation.
        dtype: the dtype of the inputs.
        f: the function.
        columns: the inputs of each column of the table, {column: arrays}.
        symbolic: whether the sizes of the first input's axes are exported as size variables.
    """

    operation: str
    variant: str
    dtype: str
    f: Callable
    columns: dict[str, tuple]
    symbolic: bool = False

    def __str__(self):
        return f"{self.operation}[{self.variant}] {self.dtype}"


class Outcome(NamedTuple):
    state: str
    detail: str = ""


# What the columns contain.


def special(dtype: str) -> dict[str, list]:
    """Returns the numbers of each column, for elementwise operations."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return {"ordinary": [True, False], "ties": [True, True]}
    if kind.kind in "iu":
        low, high, bits = np.iinfo(kind).min, np.iinfo(kind).max, 8 * kind.itemsize
        some = [1, 2, 3, 5, 7, 10] + ([-1, -2, -3, -7] if low else [])
        return {
            "ordinary": some,
            "near 0": [0, 1, 2] + ([-1] if low else []),
            "saturating": [low, low + 1, high, high - 1, high // 2 + 1, low // 2, 1]
            + ([-1] if low else []),
            "out-of-range": [0, bits - 1, bits, bits + 1, 100]
            + ([-1, -bits, low] if low else [high]),
            "ties": [3, 3, 0, 0],
        }
    info = np.finfo(kind)
    small, most, tiny, least = map(float, (info.eps, info.max, info.tiny, info.smallest_subnormal))
    return {
        "ordinary": [0.1, -0.1, 0.3, -0.7, 0.99, 1, -1, 1.5, 2, -2.25, 3.7, -5.3],
        "NaN": [np.nan, 1, -1, 0, -np.nan],
        "Inf": [np.inf, -np.inf, 1, -1, 0],
        "-0": [-0.0, 0.0, 1, -1],
        "subnormal": [least, -least, tiny / 2, -tiny / 2, tiny, -tiny, tiny * 3, 1],
        "near 0": [
            x
            for scale in (1e-20, 1e-8, 1e-6, 1e-4, 1e-3, 1e-2, small, small / 4)
            if scale > tiny
            for x in (scale, -scale)
        ]
        + [1 + small, 1 - small, -1 - small, -1 + small],
        "far out": [
            x
            for n in (
                5,
                8,
                9.5,
                10,
                12.5,
                15,
                16.7,
                18,
                20,
                30,
                50,
                87,
                88.5,
                89,
                100,
                104,
                120,
                300,
                700,
                710,
                746,
                1e4,
                3e4,
                1e6,
                1e9,
                1e18,
                1e30,
            )
            if n < most
            for x in (n, -n)
        ],
        "saturating": [
            most,
            -most,
            most / 2,
            most / 3,
            -most / 3,
            most**0.5,
            2 * most**0.5,
            tiny,
            -tiny,
        ]
        + [x for n in (127, 128, 255, 256, 32767, 65535) if n < most for x in (n + 0.5, -n - 0.5)]
        + [
            x
            for n in (2.0**24 + 2, 2.0**31, 2.0**32, 2.0**33, 2.0**63, 2.0**64)
            if n < most
            for x in (n, -n)
        ],
        "out-of-range": [-1, -0.5, 1, -2, 2, 1 + small, -1 - small, -30, 1000],
        "ties": [x + s for x in (0.5, 1.5, 2.5, 3.5, 1023.5) for s in (0, -2 * x)]
        + [0.5 - small / 4, small / 4 - 0.5, 1 / small + 1, 0.25, 1, 1],
    }


def unary_columns(dtype: str) -> dict[str, tuple]:
    numbers = special(dtype)
    length = max(map(len, numbers.values()))  # one shape, so that each program is compiled once
    columns: dict[str, tuple] = {
        name: (np.resize(np.array(some, dtype), length),) for name, some in numbers.items()
    }
    return columns | {"empty": (np.zeros((0, 2), dtype),)}


def binary_columns(dtype: str) -> dict[str, tuple]:
    """Returns all pairs of the numbers of a column, and their pairs with a few other numbers."""
    columns = {}
    kind = np.dtype(dtype)
    others = {
        "b": [True, False],
        "i": [0, 1, -1, 3],
        "u": [0, 1, 3],
        "f": [np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 2, -3.5, 0.5],
    }[kind.kind]
    for name, numbers in special(dtype).items():
        pairs = [
            *itertools.product(numbers, numbers),
            *itertools.product(numbers, others),
            *itertools.product(others, numbers),
        ]
        columns[name] = tuple(np.array(side, dtype) for side in zip(*pairs))
    columns["ties"] = tuple(
        np.array([*numbers, *numbers], dtype) for numbers in (special(dtype)["ties"],) * 2
    )
    length = max(len(x) for x, _ in columns.values())
    columns = {
        name: tuple(np.resize(x, length) for x in arrays) for name, arrays in columns.items()
    }
    return columns | {"empty": (np.zeros((2, 0), dtype),) * 2}


def matrices(dtype: str, rows: int = 4, width: int = 5) -> dict[str, np.ndarray]:
    """Returns an array [rows, width] for each column, for operations along axes."""
    kind, draw = np.dtype(dtype), np.random.default_rng(0)
    empty = {"empty": np.zeros((rows, 0), dtype)}
    if kind.kind == "b":
        x = draw.random((rows, width)) < 0.5
        x[1], x[2] = True, False
        return {"ordinary": x, "ties": np.ones((rows, width), bool), **empty}
    if kind.kind in "iu":
        low, high = np.iinfo(kind).min, np.iinfo(kind).max
        x = draw.integers(1, 6, (rows, width)).astype(kind)
        y = x.copy()
        y[:, 0], y[:, 1], y[0, 2] = high, high, low
        y[2, :3] = low
        return {
            "ordinary": x,
            "saturating": y,
            "ties": np.tile(np.array([3, 3, 1, 1, 3], kind), (rows, 1)),
            **empty,
        }
    x = draw.uniform(0.5, 2, (rows, width)).astype(kind)
    info = np.finfo(kind)

    def edited(**cells):
        y = x.copy()
        for numbers in cells.values():
            for i, j, number in numbers:
                y[i, j] = number
        return y

    inf, nan = np.inf, np.nan
    return {
        "ordinary": x,
        "ties": np.tile(np.array([2, 1, 2, 1, 2], kind), (rows, 1)),
        **empty,
        "NaN": edited(
            a=[
                (0, 1, nan),
                (1, 0, nan),
                (1, 4, nan),
                (2, 4, nan),
                (2, 2, inf),
                (3, 1, -inf),
                (3, 3, nan),
            ]
        ),
        "Inf": edited(a=[(0, 1, inf), (1, 0, -inf), (2, 2, inf), (2, 3, -inf), (3, 4, -inf)])
        if rows < 4
        else np.vstack(
            [
                edited(a=[(0, 1, inf), (1, 0, -inf), (2, 2, inf), (2, 3, -inf)])[:-1],
                np.full((1, width), -inf, kind),
            ]
        ),
        "-0": np.tile(np.array([0.0, -0.0, -0.0, 0.0, -0.0], kind), (rows, 1))[:, :width]
        * np.array([[1], [-1], [1], [1]], kind)[:rows],
        "subnormal": np.full((rows, width), info.tiny / 4, kind),
        "far out": (x * kind.type(2.0**9)).astype(kind),
        # All of one sign, because a sum of numbers of both overflows in some orders of its summands
        # only.
        "saturating": edited(
            a=[
                (0, 0, info.max),
                (0, 1, info.max),
                (1, 1, info.max),
                (1, 2, info.max / 2),
                (2, 0, info.max),
                (2, 1, 2),
            ]
        ),
    }


def _columns_of(arrays: dict[str, np.ndarray], *more: Any) -> dict[str, tuple]:
    return {name: (x, *more) for name, x in arrays.items()}


# The table.

_UNARY = """neg sign floor ceil is_finite abs exp exp2 expm1 log log1p tanh logistic sin cos tan asin acos atan sinh
cosh asinh acosh atanh sqrt rsqrt cbrt erf erfc erf_inv lgamma digamma""".split()
_INTEGER_UNARY = "neg sign abs bitwise_not population_count clz".split()
_BINARY = "add sub mul div rem max min pow atan2 nextafter eq ne lt le gt ge".split()
_INTEGER_BINARY = (
    "add sub mul div rem max min bitwise_and bitwise_or bitwise_xor shift_left shift_right_logical "
    "shift_right_arithmetic eq ne lt le gt ge"
).split()


@functools.cache
def programs() -> tuple[Program, ...]:
    """Returns the table: every operation, with several options and dtypes."""
    return (
        *_elementwise(),
        *_conversions(),
        *_reductions(),
        *_layout(),
        *_indexing(),
        *_sorting(),
        *_lookups(),
        *_products(),
        *_windows(),
        *_control(),
        *_compositions(),
    )


def _named(name: str) -> str:
    return name.removeprefix("bitwise_")


def _digamma(x):
    """digamma of 0 is NaN before jax 0.11, and -inf since."""
    if jax.__version_info__ < (0, 11):
        x = jnp.where(jnp.abs(x) < jnp.finfo(x.dtype).tiny, jnp.ones_like(x), x)
    return lax.digamma(x)


def _elementwise():
    for dtype in FLOATS:
        for name in _UNARY:
            f = _digamma if name == "digamma" else getattr(lax, name)
            yield Program(name, "", dtype, f, unary_columns(dtype))
        for name in _BINARY:
            yield Program(name, "", dtype, getattr(lax, name), binary_columns(dtype))
        for n in (-3, -2, -1, 0, 1, 2, 3, 4, 5, 13):
            yield Program(
                "power", f"{n}", dtype, lambda x, n=n: lax.integer_pow(x, n), unary_columns(dtype)
            )
        for method in lax.RoundingMethod:
            yield Program(
                "round",
                method.name.lower(),
                dtype,
                lambda x, m=method: lax.round(x, m),
                unary_columns(dtype),
            )
        for bits in ((5, 10), (8, 7), (8, 23)):
            yield Program(
                "reduce_precision",
                str(bits),
                dtype,
                lambda x, bits=bits: lax.reduce_precision(x, *bits),
                unary_columns(dtype),
            )
        columns = {}
        for name, (x,) in unary_columns(dtype).items():
            if name == "empty":
                continue
            bounds = [
                (-1, 1),
                (1, -1),
                (0, 0),
                (-0.0, 0.0),
                (np.nan, 1),
                (-1, np.nan),
                (-np.inf, np.inf),
                (2, 3),
            ]
            columns[name] = tuple(
                np.array(side, dtype)
                for side in zip(*((low, number, high) for low, high in bounds for number in x))
            )
        yield Program("clamp", "arrays", dtype, lax.clamp, columns)
        yield Program(
            "clamp",
            "numbers",
            dtype,
            lambda x: lax.clamp(x.dtype.type(-1), x, x.dtype.type(1)),
            unary_columns(dtype),
        )
        yield Program(
            "pow",
            "int32 exponent",
            dtype,
            lax.pow,
            {
                name: tuple(
                    np.array(side, kind)
                    for kind, side in zip(
                        (dtype, "int32"),
                        zip(
                            *itertools.product(x, (-3, -2, -1, 0, 1, 2, 3, 7, 2**31 - 1, -(2**31)))
                        ),
                    )
                )
                for name, (x,) in unary_columns(dtype).items()
                if name != "empty"
            },
        )
    for dtype in INTS:
        for name in _INTEGER_UNARY:
            if dtype in UNSIGNED and name in ("neg", "abs", "sign"):
                continue
            yield Program(_named(name), "", dtype, getattr(lax, name), unary_columns(dtype))
        for name in _INTEGER_BINARY:
            yield Program(_named(name), "", dtype, getattr(lax, name), binary_columns(dtype))
        for n in (0, 1, 2, 3, 7, 25):
            yield Program(
                "power", f"{n}", dtype, lambda x, n=n: lax.integer_pow(x, n), unary_columns(dtype)
            )
        low = np.iinfo(dtype).min
        columns = {
            name: tuple(
                np.array(side, dtype)
                for side in zip(
                    *(
                        (a, number, b)
                        for number in x
                        for a, b in ((1, 3), (3, 1), (low, 100), (low, low))
                    )
                )
            )
            for name, (x,) in unary_columns(dtype).items()
            if name != "empty"
        }
        yield Program("clamp", "arrays", dtype, lax.clamp, columns)
        for exponent in (0, 1, 3):
            yield Program(
                "shift_left",
                f"by the number {exponent}",
                dtype,
                lambda x, n=exponent: lax.shift_left(x, x.dtype.type(n)),
                unary_columns(dtype),
            )
    for name in ("bitwise_not",):
        yield Program("not", "", "bool", getattr(lax, name), unary_columns("bool"))
    for name in (
        "max",
        "min",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
    ):
        yield Program(_named(name), "", "bool", getattr(lax, name), binary_columns("bool"))
    for dtype in (*FLOATS, "int8", "int32", "int64", "uint8", "uint32", "bool"):
        columns = {}
        for name, (x,) in unary_columns(dtype).items():
            columns[name] = (np.arange(x.size).reshape(x.shape) % 3 == 0, x, x[::-1])
        yield Program("select", "bool", dtype, lax.select_n, columns)
        columns = {
            name: (np.arange(x.size, dtype=np.int32).reshape(x.shape) % 3, x, x[::-1], x)
            for name, (x,) in unary_columns(dtype).items()
        }
        yield Program("select", "int32", dtype, lax.select_n, columns)
        yield Program(
            "select",
            "of a scalar",
            dtype,
            lambda which, x, y: lax.select_n(which, x, y),
            {name: (np.bool_(True), x, x[::-1]) for name, (x,) in unary_columns(dtype).items()},
        )
    yield Program(
        "real",
        "",
        "complex64",
        lambda x: lax.real(x),
        {"ordinary": (np.array([1 + 2j], np.complex64),)},
    )
    yield Program(
        "imag",
        "",
        "complex64",
        lambda x: lax.imag(x),
        {"ordinary": (np.array([1 + 2j], np.complex64),)},
    )


def _conversions():
    every = (*FLOATS, *INTS, "bool")
    for source in every:
        for wanted in every:
            if source != wanted:
                yield Program(
                    "convert",
                    f"to {wanted}",
                    source,
                    lambda x, to=wanted: lax.convert_element_type(x, to),
                    unary_columns(source),
                )


def _reductions():
    def columns(dtype, axis):
        found = _columns_of(matrices(dtype))
        if axis == 0:
            found["empty"] = (np.zeros((0, 3), dtype),)
        return found

    for dtype in (*FLOATS, *INTS, "bool"):
        for axes in ((0,), (1,), (0, 1)):
            for name in ("max", "min") + (("sum", "prod") if dtype != "bool" else ()):
                yield Program(
                    f"reduce_{name}",
                    f"axes {axes}",
                    dtype,
                    lambda x, name=name, axes=axes: getattr(lax, f"reduce_{name}")(x, axes),
                    columns(dtype, axes[0]),
                )
            if np.dtype(dtype).kind in "iub":
                for name in ("and", "or", "xor"):
                    yield Program(
                        f"reduce_{name}",
                        f"axes {axes}",
                        dtype,
                        lambda x, name=name, axes=axes: getattr(lax, f"reduce_{name}")(x, axes),
                        columns(dtype, axes[0]),
                    )
        for axis in (0, 1):
            for name in ("argmax", "argmin"):
                for index in ("int32", "int8", "uint32"):
                    if index != "int32" and dtype not in ("float32", "int32"):
                        continue
                    full = {k: v for k, v in columns(dtype, axis).items() if k != "empty"}
                    full["empty"] = (np.zeros((0, 3) if axis == 1 else (3, 0), dtype),)
                    yield Program(
                        name,
                        f"axis {axis} to {index}",
                        dtype,
                        lambda x, name=name, axis=axis, index=index: getattr(lax, name)(
                            x, axis, np.dtype(index)
                        ),
                        full,
                    )
            if dtype == "bool":
                continue
            for name in (
                "cumsum",
                "cumprod",
                "cummax",
                "cummin",
                *(["cumlogsumexp"] if dtype in FLOATS else []),
            ):
                for reverse in (False, True):
                    yield Program(
                        name,
                        f"axis {axis}{', reverse' if reverse else ''}",
                        dtype,
                        lambda x, name=name, axis=axis, reverse=reverse: getattr(lax, name)(
                            x, axis, reverse=reverse
                        ),
                        columns(dtype, axis),
                    )
    for name in ("max", "min", "sum"):
        yield Program(
            f"reduce_{name}",
            "axes () of a scalar",
            "float32",
            lambda x, name=name: getattr(lax, f"reduce_{name}")(x, ()),
            {"NaN": (np.float32(np.nan),), "ordinary": (np.float32(2),)},
        )


def _layout():
    for dtype in (*FLOATS, *INTS, "bool"):
        x = _columns_of(matrices(dtype))
        yield Program(
            "broadcast", "", dtype, lambda x: lax.broadcast_in_dim(x, (2, *x.shape, 3), (1, 2)), x
        )
        yield Program("reshape", "", dtype, lambda x: lax.reshape(x, (x.shape[1], 4)), x)
        yield Program("transpose", "", dtype, lambda x: lax.transpose(x, (1, 0)), x)
        yield Program("reverse", "", dtype, lambda x: lax.rev(x, (0, 1)), x)
        yield Program("concatenate", "", dtype, lambda x: lax.concatenate([x, x, x[:, :0]], 1), x)
        yield Program(
            "slice", "strided", dtype, lambda x: lax.slice(x, (1, 0), (4, x.shape[1]), (2, 3)), x
        )
        yield Program("slice", "nothing", dtype, lambda x: lax.slice(x, (1, 0), (1, x.shape[1])), x)
        yield Program(
            "iota",
            "",
            dtype,
            lambda x, dtype=dtype: (
                [lax.broadcasted_iota(np.dtype(dtype), (2, 3), 1), x] if dtype != "bool" else [x]
            ),
            x,
        )
        for padding in (
            ((1, 0, 0), (0, 2, 1)),
            ((-1, 1, 0), (1, -1, 0)),
            ((0, 0, 2), (-1, -1, 1)),
            ((-2, -2, 0), (0, 0, 0)),
            ((3, -4, 0), (0, 0, 0)),
        ):
            full = {
                k: (*v, v[0].dtype.type(v[0].flat[1] if v[0].size else 0))
                for k, v in x.items()
                if k != "empty" or padding[1][0] >= 0
            }
            yield Program(
                "pad",
                str(padding),
                dtype,
                lambda x, value, padding=padding: lax.pad(x, value, padding),
                full,
            )
        yield Program(
            "dynamic_slice",
            "",
            dtype,
            lambda x, i, j: lax.dynamic_slice(x, (i, j), (2, 2)),
            {
                **{k: (*v, np.int32(1), np.int32(2)) for k, v in x.items() if k != "empty"},
                "out-of-range": (x["ordinary"][0], np.int32(-3), np.int32(100)),
            },
        )
        yield Program(
            "dynamic_update_slice",
            "",
            dtype,
            lambda x, update, i, j: lax.dynamic_update_slice(x, update, (i, j)),
            {
                **{
                    k: (*v, v[0][:2, :2], np.int32(1), np.int32(2))
                    for k, v in x.items()
                    if k != "empty"
                },
                "out-of-range": (
                    x["ordinary"][0],
                    x["ordinary"][0][:2, :2],
                    np.int32(-3),
                    np.int32(100),
                ),
                "empty": (x["ordinary"][0], x["ordinary"][0][:2, :0], np.int32(1), np.int32(2)),
            },
        )
    for index in INTS:
        info = np.iinfo(index)
        x = np.arange(12, dtype=np.float32).reshape(4, 3)
        for name, starts in {
            "out-of-range": (info.min, info.max),
            "ordinary": (1, 0),
            "near 0": (info.min and -1, 1),
        }.items():
            starts = tuple(np.array(start, index)[()] for start in starts)
            yield Program(
                "dynamic_slice",
                f"index {index}",
                "float32",
                lambda x, i, j: lax.dynamic_slice_p.bind(x, i, j, slice_sizes=(2, 2)),
                {name: (x, *starts)},
            )
            yield Program(
                "dynamic_update_slice",
                f"index {index}",
                "float32",
                lambda x, u, i, j: lax.dynamic_update_slice_p.bind(x, u, i, j),
                {name: (x, -x[:2, :2], *starts)},
            )
    for width in (0, 3):
        yield Program(
            "dynamic_slice",
            f"width {width} of 3",
            "float32",
            lambda x, i, width=width: lax.dynamic_slice(x, (i,), (width,)),
            {
                "out-of-range": (np.arange(3, dtype=np.float32), np.int32(7)),
                "empty": (np.arange(3, dtype=np.float32), np.int32(-1)),
            },
        )
    yield Program(
        "size",
        "",
        "float32",
        lambda x: x / jnp.asarray(x.shape[0], x.dtype) + x.shape[0],
        {"ordinary": (np.ones((3, 2), np.float32),), "empty": (np.ones((0, 2), np.float32),)},
        symbolic=True,
    )


def _index_columns(x, n, index="int32", updates=None):
    """Returns columns for indices into an axis of n elements. `x` are the values of each column."""
    info = np.iinfo(index)
    more = (lambda k: ()) if updates is None else updates
    wide = [-1, -n, -n - 1, 0, n - 1, n, n + 1, info.max, info.min]
    found = {
        name: (values, np.array([0, 2, n - 1, 1], index), *more(4))
        for name, values in x.items()
        if name != "empty"
    }
    found["out-of-range"] = (
        x["ordinary"],
        np.array([i for i in wide if info.min <= i <= info.max], index),
        *more(len([i for i in wide if info.min <= i <= info.max])),
    )
    found["ties"] = (x["ordinary"], np.array([1, 1, 0, n, n, 1], index), *more(6))
    found["empty"] = (x["ordinary"], np.zeros(0, index), *more(0))
    return found


_KINDS = "set", "add", "mul", "min", "max"


def _indexing():
    modes = "clip", "fill", "promise_in_bounds"
    for dtype in (*FLOATS, *INTS, "bool"):
        rows = matrices(dtype)
        vectors = {name: m[1] if m.size else m[0] for name, m in rows.items()}
        for mode in modes:
            if mode == "promise_in_bounds" and dtype not in ("float32", "int32"):
                continue
            for variant, f, x, n in (
                ("elements", lambda x, i, m=mode: x.at[i].get(mode=m), vectors, 5),
                ("rows", lambda x, i, m=mode: x.at[i].get(mode=m), rows, 4),
                ("columns", lambda x, i, m=mode: x.at[:, i].get(mode=m), rows, 5),
                ("pairs", lambda x, i, m=mode: x.at[i, i].get(mode=m), rows, 4),
            ):
                columns = _index_columns(x, n)
                if (
                    mode == "promise_in_bounds"
                ):  # out of bounds is undefined, but for numbers from the end
                    columns["out-of-range"] = (
                        x["ordinary"],
                        np.array([-1, -n, 0, n - 1], np.int32),
                    )
                    columns["ties"] = (x["ordinary"], np.array([1, 1, 0, n - 1], np.int32))
                yield Program("gather", f"{variant}, {mode}", dtype, f, columns)
        for fill in (
            np.zeros((), dtype)[()],
            np.ones((), dtype)[()],
            *([np.float32(-np.inf), np.float32("nan")] if dtype in FLOATS else []),
        ):
            yield Program(
                "gather",
                f"elements, fill {fill}",
                dtype,
                lambda x, i, fill=fill: x.at[i].get(mode="fill", fill_value=fill.item()),
                _index_columns(vectors, 5),
            )
        yield Program(
            "gather",
            "take_along_axis",
            dtype,
            lambda x, i: jnp.take_along_axis(x, jnp.stack([i] * 4), 1),
            _index_columns(rows, 5),
        )
        yield Program(
            "gather",
            "a window, fill",
            dtype,
            lambda x, i: _windows_of(x, i, "fill"),
            _index_columns(vectors, 5),
        )
        yield Program(
            "gather",
            "a window, clip",
            dtype,
            lambda x, i: _windows_of(x, i, "clip"),
            _index_columns(vectors, 5),
        )
        yield Program(
            "gather",
            "vmap",
            dtype,
            lambda x, i: jax.vmap(lambda row: row.at[i].get(mode="fill"))(x),
            _index_columns(rows, 5),
        )
        windows = {
            name: (
                rows["ordinary"],
                np.array(starts, np.int32),
                np.resize(rows["ordinary"][::-1], (4, 2)),
            )
            for name, starts in {"ordinary": [0, 1, 3, 2], "out-of-range": [-9, 9, 4, -1]}.items()
        }
        yield Program(
            "gather",
            "vmap of windows",
            dtype,
            lambda x, i, v: jax.vmap(lambda row, start: lax.dynamic_slice(row, (start,), (2,)))(
                x, i
            ),
            windows,
        )
        yield Program(
            "scatter",
            "set, vmap of windows",
            dtype,
            lambda x, i, v: jax.vmap(
                lambda row, start, new: lax.dynamic_update_slice(row, new, (start,))
            )(x, i, v),
            windows,
        )

        for kind in _KINDS:
            if dtype == "bool" and kind in ("add", "mul"):
                continue
            for mode in ("clip", "drop", "promise_in_bounds"):
                if mode == "promise_in_bounds" and dtype != "float32":
                    continue
                for variant, x, n, f in (
                    (
                        "elements",
                        vectors,
                        5,
                        lambda x, i, v, k=kind, m=mode: getattr(x.at[i], k)(v, mode=m),
                    ),
                    (
                        "rows",
                        rows,
                        4,
                        lambda x, i, v, k=kind, m=mode: getattr(x.at[i], k)(v, mode=m),
                    ),
                    (
                        "pairs",
                        rows,
                        4,
                        lambda x, i, v, k=kind, m=mode: getattr(x.at[i, i], k)(v, mode=m),
                    ),
                ):
                    if variant == "pairs" and dtype not in ("float32", "int32", "bool"):
                        continue
                    columns = {}
                    for name, (values, i) in _index_columns(x, n).items():
                        shape = (len(i), *values.shape[1:]) if variant != "pairs" else (len(i),)
                        source = (
                            values
                            if name not in ("out-of-range", "ties", "empty")
                            else x["ordinary"]
                        )
                        v = np.resize(source[::-1], shape).astype(dtype)
                        if (
                            kind == "set" and name == "ties"
                        ):  # JAX does not say which of two updates remains
                            v = np.resize(np.ones(1, dtype), shape)
                        if mode == "promise_in_bounds" and name in ("out-of-range", "ties"):
                            i = i.clip(0, n - 1)
                        if kind == "set" and (mode == "clip" or mode == "promise_in_bounds"):
                            v = np.resize(np.ones(1, dtype), shape) if name == "out-of-range" else v
                        if kind == "set" and name == "out-of-range":
                            v = np.resize(np.ones(1, dtype), shape)
                        columns[name] = values, i, v
                    yield Program("scatter", f"{kind}, {variant}, {mode}", dtype, f, columns)
            columns = {
                name: (
                    values,
                    i,
                    np.resize(values[:1] if kind == "set" else values[::-1], (len(i), 2)).astype(
                        dtype
                    ),
                )
                for name, (values, i) in _index_columns(vectors, 5).items()
            }
            if kind != "set" or dtype in ("float32", "int32", "bool"):
                for mode in ("clip", "drop"):
                    yield Program(
                        "scatter",
                        f"{kind}, windows, {mode}",
                        dtype,
                        lambda x, i, v, k=kind, m=mode: _scatter_windows(x, i, v, k, m),
                        columns
                        if kind != "set"
                        else {k: (x, i, np.ones_like(v)) for k, (x, i, v) in columns.items()},
                    )
        yield Program(
            "scatter",
            "set, distinct, drop",
            dtype,
            lambda x, i, v: x.at[i].set(v, mode="drop"),
            {
                "out-of-range": (
                    vectors["ordinary"],
                    np.array([3, 5, -6, 2**31 - 1, 0, -(2**31), 4], np.int32),
                    np.resize(vectors["ordinary"][::-1], 7),
                ),
                "near 0": (
                    vectors["ordinary"],
                    np.array([-1, -4, 1], np.int32),
                    vectors["ordinary"][:3],
                ),
            },
        )
        yield Program(
            "scatter",
            "set, vmap, drop",
            dtype,
            lambda x, i, v: jax.vmap(lambda row: row.at[i].set(v, mode="drop"))(x),
            {
                "out-of-range": (
                    rows["ordinary"],
                    np.array([3, 5, -6, 0], np.int32),
                    rows["ordinary"][0, :4],
                )
            },
        )
        yield Program(
            "scatter",
            "set, dynamic rows, drop",
            dtype,
            lambda x, i, v: x.at[i].set(v, mode="drop"),
            {
                "out-of-range": (rows["ordinary"], np.int32(4), rows["ordinary"][0]),
                "near 0": (rows["ordinary"], np.int32(-1), rows["ordinary"][0]),
                "ordinary": (rows["ordinary"], np.int32(2), rows["ordinary"][0]),
            },
        )
        yield Program(
            "scatter",
            "set, into nothing",
            dtype,
            lambda x, i, v: x.at[i].set(v, mode="drop"),
            {"empty": (np.zeros((0,), dtype), np.array([0, -1, 3], np.int32), np.ones(3, dtype))},
        )
    for index in INTS:
        x = {"ordinary": np.arange(5, dtype=np.float32)}
        for mode in ("clip", "fill"):
            yield Program(
                "gather",
                f"elements, {mode}, index {index}",
                "float32",
                lambda x, i, m=mode: x.at[i].get(mode=m),
                _index_columns(x, 5, index),
            )
        for mode in ("clip", "drop"):
            yield Program(
                "scatter",
                f"add, elements, {mode}, index {index}",
                "float32",
                lambda x, i, v, m=mode: x.at[i].add(v, mode=m),
                _index_columns(x, 5, index, lambda k: (np.arange(k, dtype=np.float32),)),
            )
    yield Program(
        "scatter",
        "apply",
        "float32",
        lambda x, i: x.at[i].apply(jnp.sin),
        {
            "ordinary": (np.arange(5, dtype=np.float32), np.array([1, 3], np.int32)),
            "ties": (np.arange(5, dtype=np.float32), np.array([1, 1], np.int32)),
        },
    )
    yield Program(
        "scatter",
        "sub",
        "float32",
        lambda x, i, v: x.at[i].subtract(v),
        {
            "out-of-range": (
                np.arange(5, dtype=np.float32),
                np.array([1, 5, -1], np.int32),
                np.arange(3, dtype=np.float32),
            )
        },
    )


def _windows_of(x, i, mode):
    numbers = lax.GatherDimensionNumbers((1,), (), (0,))
    return lax.gather(x, i[:, None], numbers, (2,), mode=mode)


def _scatter_windows(x, i, v, kind, mode):
    numbers = lax.ScatterDimensionNumbers((1,), (), (0,))
    function = {
        "set": lax.scatter,
        "add": lax.scatter_add,
        "mul": lax.scatter_mul,
        "min": lax.scatter_min,
        "max": lax.scatter_max,
    }[kind]
    return function(x, i[:, None], v, numbers, mode=mode)


def _sorting():
    for dtype in (*FLOATS, *INTS, "bool"):
        rows = matrices(dtype, 4, 6) if dtype == "bool" else matrices(dtype)
        if dtype in FLOATS:
            rows["NaN"] = np.array(
                [
                    [np.nan, 1, -np.nan, -1, np.inf],
                    [0.0, np.nan, -0.0, -np.inf, 2],
                    [np.nan] * 5,
                    [3, 1, np.nan, 1, 3],
                ],
                dtype,
            )
        x = _columns_of(rows)
        # In top_k, the sign of a NaN matters: the order is that of the bits.
        largest = _columns_of(
            {
                name: np.where(m != m, np.array(np.nan, dtype), m) if dtype in FLOATS else m
                for name, m in rows.items()
            }
        )
        order = {
            name: (m, np.arange(m.size, dtype=np.int32).reshape(m.shape))
            for name, m in rows.items()
        }
        for axis in (0, 1):
            yield Program("sort", f"axis {axis}", dtype, lambda x, axis=axis: lax.sort(x, axis), x)
            yield Program(
                "sort",
                f"axis {axis}, with values, stable",
                dtype,
                lambda x, i, axis=axis: lax.sort((x, i), axis, num_keys=1, is_stable=True),
                order,
            )
            yield Program(
                "top_k",
                f"axis {axis}",
                dtype,
                lambda x, axis=axis: lax.top_k(x, min(3, x.shape[axis]), axis=axis),
                largest,
            )
        yield Program("top_k", "all", dtype, lambda x: lax.top_k(x, x.shape[1]), largest)
        yield Program("top_k", "none", dtype, lambda x: lax.top_k(x, 0), largest)
        yield Program(
            "sort",
            "two keys",
            dtype,
            lambda x, i: lax.sort((x, i), 1, num_keys=2),
            {name: (m, (i * 7 % 5).astype(np.int32)) for name, (m, i) in order.items()},
        )
        yield Program(
            "sort", "descending (argsort)", dtype, lambda x: jnp.argsort(x, 1, descending=True), x
        )


_LAYOUT = "NHWC", "HWIO", "NHWC"


def _products():
    for dtype in (*FLOATS, *INTS, "bool"):
        columns = {}
        for name, m in matrices(dtype).items():
            columns[name] = m, m.T.copy()
        if dtype in FLOATS:
            x, y = (a.copy() for a in columns["ordinary"])
            x[0, 0], y[0, 0] = np.inf, 0
            columns["out-of-range"] = x, y
        if dtype != "bool":
            yield Program(
                "dot",
                "matrix",
                dtype,
                lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))),
                columns,
            )
        yield Program(
            "dot",
            "batch",
            dtype,
            lambda x, y: lax.dot_general(x, x, (((1,), (1,)), ((0,), (0,)))),
            columns,
        )
        if dtype in ("int8", "uint8", "int16", "int32"):
            yield Program(
                "dot",
                "to int32",
                dtype,
                lambda x, y: lax.dot_general(
                    x, y, (((1,), (0,)), ((), ())), preferred_element_type=np.int32
                ),
                columns,
            )
        if dtype == "float16":
            yield Program(
                "dot",
                "to float32",
                dtype,
                lambda x, y: lax.dot_general(
                    x, y, (((1,), (0,)), ((), ())), preferred_element_type=np.float32
                ),
                columns,
            )
        if dtype in ("float32", "float16", "float64", "int32", "int8"):
            images = {}
            for name, m in matrices(dtype).items():
                if name != "empty":
                    images[name] = (
                        np.resize(m, (1, 4, 5, 2)).astype(dtype),
                        np.resize(matrices(dtype)["ordinary"], (2, 2, 2, 4)).astype(dtype),
                    )
            if dtype in FLOATS:
                x, kernel = images["ordinary"]
                images["out-of-range"] = (
                    np.where(x > 1.5, np.inf, x).astype(dtype),
                    kernel * np.array(0, dtype),
                )
            images["empty"] = np.zeros((0, 4, 5, 2), dtype), images["ordinary"][1]
            for variant, options in {
                "valid": {"padding": "VALID"},
                "same": {"padding": "SAME"},
                "strides": {"padding": [(1, 0), (0, 2)], "window_strides": (2, 1)},
                "dilation": {"padding": "VALID", "rhs_dilation": (2, 2)},
                "transposed": {"padding": [(1, 1), (1, 1)], "lhs_dilation": (2, 2)},
                "negative padding": {"padding": [(-1, 0), (1, -1)]},
            }.items():
                options = {"window_strides": (1, 1), **options}
                yield Program(
                    "convolution",
                    variant,
                    dtype,
                    lambda x, k, o=options: lax.conv_general_dilated(
                        x, k, dimension_numbers=_LAYOUT, **o
                    ),
                    images,
                )
            yield Program(
                "convolution",
                "groups",
                dtype,
                lambda x, k: lax.conv_general_dilated(
                    x, k[:, :, :1], (1, 1), "SAME", dimension_numbers=_LAYOUT, feature_group_count=2
                ),
                images,
            )
            yield Program(
                "convolution",
                "groups of the batch",
                dtype,
                lambda x, k: lax.conv_general_dilated(
                    jnp.concatenate([x, x]),
                    k,
                    (1, 1),
                    "SAME",
                    dimension_numbers=_LAYOUT,
                    batch_group_count=2,
                ),
                {k: v for k, v in images.items() if k != "empty"},
            )


def _windows():
    for dtype in (*FLOATS, *INTS, "bool"):
        x = _columns_of({name: m for name, m in matrices(dtype).items()})
        x["empty"] = (np.zeros((0, 5), dtype),)
        kind = np.dtype(dtype)
        low = False if kind.kind == "b" else -np.inf if kind.kind == "f" else np.iinfo(kind).min
        high = True if kind.kind == "b" else np.inf if kind.kind == "f" else np.iinfo(kind).max
        for variant, window, strides, padding, base, dilation in (
            ("rows", (1, 2), (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1)),
            ("padded", (2, 3), (1, 2), ((1, 1), (2, 1)), (1, 1), (1, 1)),
            ("padding of the window's size", (1, 2), (1, 1), ((0, 0), (3, 2)), (1, 1), (1, 1)),
            ("dilated", (1, 2), (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 3)),
            ("input dilated", (1, 2), (1, 1), ((0, 0), (1, 1)), (1, 2), (1, 1)),
            ("negative padding", (1, 2), (1, 1), ((0, 0), (-1, 1)), (1, 1), (1, 1)),
            ("window of 1", (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1)),
        ):
            for name, start, function in (
                ("max", low, lax.max),
                ("min", high, lax.min),
                ("sum", 0, lax.add),
            ):
                if name == "sum" and dtype == "bool":
                    continue
                yield Program(
                    f"window_{name}",
                    variant,
                    dtype,
                    lambda x, start=start, function=function, w=window, s=strides, p=padding, b=base, d=dilation: (
                        lax.reduce_window(x, np.array(start, x.dtype), function, w, s, p, b, d)
                    ),
                    x,
                )
        if dtype in FLOATS:
            for variant, function, window, strides, padding in (
                ("max", lax.max, (1, 2), (1, 2), "VALID"),
                ("max, overlapping", lax.max, (2, 3), (1, 1), "SAME"),
                ("min", lax.min, (1, 2), (1, 2), "VALID"),
                ("min, padded", lax.min, (2, 2), (2, 2), "SAME"),
                ("max, a window that leaves elements", lax.max, (2, 2), (3, 3), "VALID"),
            ):
                start = -np.inf if function is lax.max else np.inf

                def f(
                    x,
                    function=function,
                    window=window,
                    strides=strides,
                    padding=padding,
                    start=start,
                ):
                    y, back = jax.vjp(
                        lambda x: lax.reduce_window(
                            x, np.array(start, x.dtype), function, window, strides, padding
                        ),
                        x,
                    )
                    return back(jnp.arange(1, y.size + 1, dtype=y.dtype).reshape(y.shape))[0]

                yield Program(
                    "window_select_add",
                    variant,
                    dtype,
                    f,
                    {k: v for k, v in x.items() if k != "empty"},
                )


def _control():
    for dtype in ("float32", "float16", "float64", "int32", "bool"):
        x = _columns_of(matrices(dtype))
        for reverse in (False, True):
            yield Program(
                "scan",
                f"{'reverse' if reverse else 'forward'}",
                dtype,
                lambda x, r=reverse: lax.scan(
                    lambda c, row: (lax.max(c, row), (c, row)), x[0], x, reverse=r
                ),
                x,
            )
        none = {k: (np.zeros((0, 3), v[0].dtype),) for k, v in x.items() if k == "empty"}
        yield Program(
            "scan",
            "of nothing",
            dtype,
            lambda x: lax.scan(
                lambda c, row: (lax.max(c, row), row), jnp.ones(x.shape[1:], x.dtype), x
            ),
            none,
        )
    branches = [lambda x: x + 1, lambda x: x * 2, lambda x: -x]
    x = np.array([1, np.nan, -0.0], np.float32)
    yield Program(
        "cond",
        "switch",
        "float32",
        lambda i, x: lax.switch(i, branches, x),
        {"ordinary": (np.int32(1), x), "near 0": (np.int32(0), x), "ties": (np.int32(2), x)},
    )
    for value in (-1, 3, 2**31 - 1, -(2**31)):
        yield Program(
            "cond",
            f"switch to {value}",
            "float32",
            lambda i, x: lax.switch(i, branches, x),
            {"out-of-range": (np.int32(value), x)},
        )
    yield Program(
        "cond",
        "if",
        "float32",
        lambda p, x: lax.cond(p, branches[0], branches[1], x),
        {"NaN": (np.bool_(True), x), "ordinary": (np.bool_(False), x)},
    )
    for limit in (0, 1, 7):
        yield Program(
            "while",
            f"{limit} times",
            "float32",
            lambda n, x: lax.while_loop(
                lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2), (jnp.int32(0), x)
            ),
            {"empty" if limit == 0 else "NaN": (np.int32(limit), x)},
        )
    yield Program(
        "while",
        "until NaN",
        "float32",
        lambda x: lax.while_loop(lambda c: c < 1e30, lambda c: c * c - c, x),
        {"NaN": (np.float32(np.nan),), "Inf": (np.float32(np.inf),), "ordinary": (np.float32(3),)},
    )


def _lookups():
    """Places in sorted arrays, which JAX finds in the total order of numbers."""
    inf, nan = np.inf, np.nan
    grids = {
        "f": [-inf, -2.25, -1, -0.0, 0.0, 0.0, 0.3, 1, 1, 3.7, 88, inf, nan, nan],
        "i": [-7, -1, 0, 0, 1, 3, 3, 100],
        "u": [0, 0, 1, 3, 3, 100],
    }
    for dtype in (*FLOATS, "int32", "int8", "uint32", "uint64"):
        grid = np.array(grids[np.dtype(dtype).kind], dtype)
        columns = {name: (x, grid) for name, (x,) in unary_columns(dtype).items()}
        for method in ("scan", "scan_unrolled", "sort", "compare_all"):
            for side in ("left", "right"):
                yield Program(
                    "jnp searchsorted",
                    f"{method}, {side}",
                    dtype,
                    lambda x, grid, method=method, side=side: jnp.searchsorted(
                        grid, x, side=side, method=method
                    ),
                    columns,
                )
        for variant, f in {
            "increasing": lambda x, grid: jnp.digitize(x, grid),
            "right": lambda x, grid: jnp.digitize(x, grid, right=True),
            "decreasing": lambda x, grid: jnp.digitize(x, grid[::-1]),
        }.items():
            finite = np.unique(grid[np.isfinite(grid)])
            columns = {name: (x, finite) for name, (x,) in unary_columns(dtype).items()}
            yield Program("jnp digitize", variant, dtype, f, columns)
    for dtype in FLOATS:
        grid = np.array([-5.3, -1, 0, 0.3, 1, 3.7, 88], dtype)
        columns = {name: (x, grid, grid * grid) for name, (x,) in unary_columns(dtype).items()}
        for variant, options in {
            "": {},
            "left and right": {"left": -7, "right": 9},
            "extrapolate": {"left": "extrapolate", "right": "extrapolate"},
        }.items():
            yield Program(
                "jnp interp",
                variant,
                dtype,
                lambda x, grid, y, options=options: jnp.interp(x, grid, y, **options),
                columns,
            )


def _compositions():
    for dtype in FLOATS:
        x = unary_columns(dtype)
        for name, f in {
            "softplus": jax.nn.softplus,
            "log of softplus": lambda x: jnp.log(jax.nn.softplus(x)),
            "log_sigmoid": jax.nn.log_sigmoid,
            "log of sigmoid": lambda x: jnp.log(jax.nn.sigmoid(x)),
            "elu": jax.nn.elu,
            "selu": jax.nn.selu,
            "celu": jax.nn.celu,
            "relu": jax.nn.relu,
            "relu6": jax.nn.relu6,
            "silu": jax.nn.silu,
            "gelu": jax.nn.gelu,
            "gelu, exact": lambda x: jax.nn.gelu(x, approximate=False),
            "leaky_relu": jax.nn.leaky_relu,
            "hard_sigmoid": jax.nn.hard_sigmoid,
            "hard_tanh": jax.nn.hard_tanh,
            "soft_sign": jax.nn.soft_sign,
            "mish": jax.nn.mish,
            "squareplus": jax.nn.squareplus,
            "sinc": jnp.sinc,
            "nan_to_num": jnp.nan_to_num,
            "isnan": jnp.isnan,
            "isinf": jnp.isinf,
            "signbit": jnp.signbit,
            "reciprocal": lambda x: 1 / x,
            "trunc": jnp.trunc,
            "deg2rad": jnp.deg2rad,
            "norm.logpdf": jax.scipy.stats.norm.logpdf,
        }.items():
            yield Program(f"jnp {name}", "", dtype, f, x)
        for name, f in {
            "logaddexp": jnp.logaddexp,
            "floor_divide": jnp.floor_divide,
            "mod": jnp.mod,
            "maximum": jnp.maximum,
            "fmax": jnp.fmax,
            "fmin": jnp.fmin,
            "hypot": jnp.hypot,
            "copysign": jnp.copysign,
            "power": jnp.power,
            "heaviside": jnp.heaviside,
            "xlogy": jax.scipy.special.xlogy,
            "isclose": jnp.isclose,
            "where": lambda x, y: jnp.where(x > y, x, y),
        }.items():
            yield Program(f"jnp {name}", "", dtype, f, binary_columns(dtype))
        for name, f in {
            "softmax": lambda x: jax.nn.softmax(x, 1),
            "log_softmax": lambda x: jax.nn.log_softmax(x, 1),
            "logsumexp": lambda x: jax.nn.logsumexp(x, 1),
            "mean": lambda x: x.mean(1),
            "var": lambda x: x.var(1),
            "std": lambda x: x.std(1),
            "nanmax": lambda x: jnp.nanmax(x, 1),
            "nansum": lambda x: jnp.nansum(x, 1),
            "median": lambda x: jnp.median(x, 1),
            "standardize": lambda x: jax.nn.standardize(x, 1),
            "ptp": lambda x: jnp.ptp(x, 1),
            "norm": lambda x: jnp.linalg.norm(x, axis=1),
        }.items():
            yield Program(
                f"jnp {name}",
                "",
                dtype,
                f,
                {
                    k: v
                    for k, v in _columns_of(matrices(dtype)).items()
                    if k != "empty" or name in ("softmax", "mean", "nansum")
                },
            )
    for dtype in INTS:
        for name, f in {"floor_divide": jnp.floor_divide, "mod": jnp.mod}.items():
            yield Program(f"jnp {name}", "", dtype, f, binary_columns(dtype))
    for name, f in {
        "one_hot": lambda i: jax.nn.one_hot(i, 5),
        "bincount": lambda i: jnp.bincount(i, length=5),
    }.items():
        yield Program(
            f"jnp {name}",
            "",
            "int32",
            f,
            {
                "out-of-range": (np.array([-1, 5, 0, 4, 100, -100], np.int32),),
                "ordinary": (np.array([0, 2], np.int32),),
            },
        )
    for shape, axes in (
        ((1, 1024, 1024, 1), (1, 2)),
        ((1, 1024, 1024, 1), (0, 1, 2, 3)),
        ((1 << 20,), (0,)),
        ((2, 1 << 19), (1,)),
        ((1 << 19, 2), (0,)),
        ((3, 1 << 16, 5), (1,)),
        ((1000, 1001), (0, 1)),
        ((1, 512, 512, 4), (1, 2)),
    ):
        for dtype in ("float32", "float16"):
            for name in ("mean", "sum"):
                if name == "sum" and dtype == "float16":
                    continue
                yield Program(
                    f"jnp {name} of many",
                    f"{shape}, {axes}",
                    dtype,
                    lambda x, name=name, axes=axes: getattr(jnp, name)(x, axes),
                    {
                        "far out": (np.full(shape, 0.1, dtype),),
                        "ordinary": (np.random.default_rng(0).random(shape).astype(dtype),),
                    },
                )
    yield Program(
        "jnp mean of many",
        "symbolic",
        "float32",
        lambda x: x.mean((1, 2)),
        {"far out": (np.full((2, 1024, 1024, 1), 0.1, np.float32),)},
        symbolic=True,
    )
    for f, name in (
        (jnp.cumsum, "cumsum"),
        (lambda x: x @ jnp.ones((x.shape[0],), x.dtype), "dot"),
        (
            lambda x: lax.reduce_window(
                x[None], np.float32(0), lax.add, (1, x.size), (1, 1), "VALID"
            ),
            "window_sum",
        ),
        (lambda x: jnp.var(x), "var"),
        (lambda x: jax.nn.logsumexp(x), "logsumexp"),
    ):
        yield Program(
            f"jnp {name} of many",
            "",
            "float32",
            f,
            {"far out": (np.resize(np.array([0.1, 0.3], np.float32), 1 << 16),)},
        )


# Outcomes.


def _without_flushing(program: Program, column: str) -> list[np.ndarray] | None:
    """Returns what JAX computes in float64 (for float64: what NumPy computes), without flushing
    subnormal numbers."""
    inputs = program.columns[column]
    if not any(x.dtype.kind == "f" for x in map(np.asarray, inputs)):
        return None
    try:
        with jax.enable_x64(True):
            if program.dtype == "float64":
                with mock.patch.object(_interpret, "_flushed", lambda x: x):
                    return _numpy(program, column)(*inputs)
            wide = [
                np.asarray(x, np.float64) if np.asarray(x).dtype.kind == "f" else x for x in inputs
            ]
            return [np.asarray(y) for y in jax.tree.leaves(jax.jit(program.f)(*wide))]
    except Exception:  # a program whose dtypes are fixed has no such result
        return None


def _needs_x64(program: Program) -> bool:
    return any(word in f"{program.dtype} {program.variant}" for word in ("int64", "float64"))


def outcome(target: str, program: Program, column: str) -> Outcome:
    """Returns the state of a cell of the table, and what differs if it is wrong."""
    with (
        jax.enable_x64(True) if _needs_x64(program) else contextlib.nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        right = [
            np.asarray(y) for y in jax.tree.leaves(jax.jit(program.f)(*program.columns[column]))
        ]
    with jax.enable_x64(True) if _needs_x64(program) else contextlib.nullcontext():
        try:
            run, messages = _written(target, program, column)
        except NotImplementedError as error:
            return _refused(program, column, error)
        except Exception as error:
            if "expected a number of at least 1 for" in str(error):  # sizes of 0, named
                return Outcome(REFUSED, str(error))
            return Outcome(WRONG, f"fails at export: {type(error).__name__}: {str(error)[:200]}")
        try:
            results = run(*map(np.asarray, program.columns[column]))
        except Exception as error:
            return Outcome(WRONG, f"fails when it runs: {type(error).__name__}: {str(error)[:200]}")
    if any(name in str(program) for name in _EITHER_ZERO):
        results, right = ([_positive(y) for y in arrays] for arrays in (results, right))
    slack = _ROOTS[program.dtype] if program.operation in ("lgamma", "digamma") else 0.0
    why = difference(results, right, slack=slack)
    if why is not None:
        other = _without_flushing(program, column)
        within = program.operation.startswith(
            "jnp "
        )  # a composition, in which a subnormal number may occur
        if other is not None and (column == "subnormal" or within or _underflows(other, right)):
            rounded = [_rounded(y, x) for y, x in zip(other, right)]
            if difference(results, right, rounded, slack=slack) is None:
                why = None
    if why is None:
        return Outcome(EQUAL)
    warned = [text for text in messages if "onnxruntime" in text or "LiteRT" in text]
    return Outcome(WARNED, f"{why}; {warned[0]}") if warned else Outcome(WRONG, why)


# Near their roots, lgamma and digamma are differences of larger numbers, of which XLA keeps the
# absolute error.
_ROOTS = {"float16": 3e-6, "float32": 3e-6, "float64": 1e-14}

# Of the zeros 0.0 and -0.0, XLA's reductions return the one that they meet last, in an order that
# depends on the shape and on the instructions of the processor, so that the sign is no property of
# the program.
_EITHER_ZERO = (
    "reduce_max",
    "reduce_min",
    "window_max",
    "window_min",
    "cummax",
    "cummin",
    "scatter[max",
    "scatter[min",
    "nanmax",
    "ptp",
)


def _positive(y):
    y = np.asarray(y)
    return y + np.zeros((), y.dtype) if y.dtype.kind == "f" else y


def _refused(program, column, error) -> Outcome:
    text = str(error)
    try:
        names = {
            eqn.primitive.name
            for eqn in _equations(jax.make_jaxpr(program.f)(*program.columns[column]).jaxpr)
        }
    except Exception:
        names = set()
    stable = {
        name.replace("reduce_window_", "window_").replace("dot_general", "dot") for name in names
    }
    known = (
        names
        | stable
        | {
            program.operation,
            "concatenate",
            "select",
            "total_lt",
            "total_le",
            "power",
            "convert",
            "convolution",
            "scatter",
            "scatter_apply",
            "broadcast",
            "size",
            "reverse",
            "complex",
            "window_select_add",
            "mul",
        }
    )  # of a square
    if (
        any(repr(name) in text or f" {name} " in text for name in known)
        or "complex" in text
        or "bfloat16" in text
        or ("stablehlo." in text or "chlo." in text)
    ):
        return Outcome(REFUSED, text)
    return Outcome(WRONG, f"refused without the operation's name: {text[:200]}")


def _equations(body):
    for eqn in body.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def _rounded(y, x):
    with np.errstate(all="ignore"):
        return y.astype(x.dtype) if x.dtype.kind == "f" else y


def _underflows(other, right) -> bool:
    """Whether a result is too small for the dtype's normal numbers."""
    return any(
        y.shape == x.shape
        and x.dtype.kind == "f"
        and bool(((np.abs(y) < 2 * np.finfo(x.dtype).tiny) & (y != 0)).any())
        for y, x in zip(other, right)
    )


def difference(
    results: list, right: list, other: list | None = None, *, slack: float = 0.0
) -> str | None:
    """Compares results with JAX's, and returns what differs, or None. Elements may also equal those
    of `other`, or differ by `slack`."""
    if len(results) != len(right):
        return f"{len(results)} outputs instead of {len(right)}"
    for i, (y, x) in enumerate(zip(results, right)):
        y = np.asarray(y)
        if y.dtype != x.dtype or y.shape != x.shape:
            return f"output {i}: {y.dtype}{list(y.shape)} instead of {x.dtype}{list(x.shape)}"
        same = _same(y, x)
        with np.errstate(invalid="ignore"):
            same = same | (np.abs(y.astype(float) - x.astype(float)) < slack)
        if other is not None and other[i].shape == x.shape and other[i].dtype == x.dtype:
            same = same | _same(y, other[i])
            if (
                x.dtype.kind == "f"
            ):  # where XLA has flushed to 0, a subnormal number with few digits led to y
                with np.errstate(all="ignore"):
                    same = same | (x == 0) & (np.abs(y - other[i]) <= 1e-4 * np.abs(other[i]))
        if not same.all():
            at = tuple(int(a) for a in np.argwhere(~same)[0])
            count = f"{int((~same).sum())} of {same.size} elements"
            return f"output {i}{list(at)}: {y[at]!r} instead of {x[at]!r} ({count})"
    return None


def _same(y: np.ndarray, x: np.ndarray) -> np.ndarray:
    if x.dtype.kind != "f":
        return np.asarray(y == x)
    wide = np.longdouble
    with np.errstate(all="ignore"):
        step = np.finfo(x.dtype).smallest_subnormal
        distance = np.abs(y.astype(wide) - x.astype(wide))
        close = distance <= np.maximum(RELATIVE[x.dtype.name] * np.abs(x.astype(wide)), wide(step))
        zero = (x == 0) & (y == 0) & (np.signbit(x) == np.signbit(y))
        finite = np.isfinite(x) & np.isfinite(y) & (x != 0) & (y != 0) & close
        rounded = (np.signbit(x) == np.signbit(y)) & (np.maximum(np.abs(x), np.abs(y)) <= step)
        return np.asarray(
            (np.isnan(x) & np.isnan(y)) | (np.isinf(x) & (x == y)) | zero | finite | rounded
        )


# Targets.


def _traced(program: Program, column: str):
    inputs = [np.asarray(x) for x in program.columns[column]]
    names = iter("abcdefgh")
    specs = {}
    for i, x in enumerate(inputs):
        shape = [next(names) if program.symbolic and i == 0 else n for n in x.shape]
        specs[f"x{i}"] = export.spec(", ".join(map(str, shape)), str(x.dtype))
    return export.program(lambda params, *arrays: program.f(*arrays), {}, **specs), inputs


def _sizes(program, inputs):
    return dict(zip("abcdefgh", inputs[0].shape)) if program.symbolic else {}


def _described(traced):
    """Returns (the program in stable form as JSON, its constants and weights, in the order in which
    it reads them)."""
    entry = traced.entries["predict"]
    stable, constants = _stable.stable(entry.closed)
    stable = json.loads(json.dumps(stable))
    return stable, constants, [np.asarray(traced.weights[name]) for name in entry.weights]


def _numpy(program, column):
    traced, inputs = _traced(program, column)
    stable, constants, weights = _described(traced)
    sizes = _sizes(program, inputs)
    return lambda *inputs: _interpret.run(stable, constants, [*weights, *inputs], sizes)


def _jax(program, column):
    traced, inputs = _traced(program, column)
    stable, constants, weights = _described(traced)
    run = _evaluate.sized(stable, constants, _sizes(program, inputs))
    compiled = (
        jax.jit(lambda *arrays: run.body(stable, list(arrays))).lower(*weights, *inputs).compile()
    )
    return lambda *inputs: [np.asarray(y) for y in compiled(*weights, *inputs)]


def _onnx(program, column):
    path = _folder() / f"{next(_NUMBERS)}.onnx"
    traced, _ = _traced(program, column)
    traced.onnx(path, check=False)
    return lambda *inputs: _worker().run(path, inputs)


def _litert(program, column):
    path = _folder() / "m.tflite"
    traced, inputs = _traced(program, column)
    traced.litert(path, check=False, sizes=_sizes(program, inputs))
    from ai_edge_litert import interpreter

    runner = interpreter.Interpreter(model_path=str(path), num_threads=1).get_signature_runner(
        "predict"
    )
    known = runner.get_input_details()

    def run(*inputs):
        results = runner(**{f"x{i}": x for i, x in enumerate(inputs) if f"x{i}" in known})
        return [results[name] for name in sorted(results, key=lambda name: (len(name), name))]

    return run


def _written(target: str, program: Program, column: str) -> tuple[Callable, list[str]]:
    """Exports a program for the shapes of a column. Returns (a function that runs the file, the
    warnings)."""
    key = (
        target,
        id(program),
        tuple((np.shape(x), np.asarray(x).dtype) for x in program.columns[column]),
    )
    if key not in _LAST:
        if key[:2] != _LAST.get("key", ())[:2]:
            _LAST.clear()
        _LAST["key"] = key
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                run = _RUNS[target](program, column)
            except Exception as error:
                run = error
        _LAST[key] = run, [str(w.message) for w in caught]
    run, messages = _LAST[key]
    if isinstance(run, Exception):
        raise run
    return run, messages


_RUNS = {"onnx": _onnx, "numpy": _numpy, "jax": _jax, "litert": _litert}
_LAST: dict = {}  # what was exported last, because consecutive columns often have the same shapes
_NUMBERS = itertools.count()


@functools.cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


_WORKER = """
import sys
import numpy as np, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level, options.intra_op_num_threads = 4, 1
loaded = None
for line in sys.stdin:
    model, inputs, outputs = line.strip().split(chr(9))
    try:
        if model != loaded:
            loaded = None
            session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            loaded = model
        data = np.load(inputs)
        known = [value.name for value in session.get_inputs()]
        results = session.run(None, {name: data[name] for name in data if name in known})
        np.savez(outputs, **{f"y{i}": y for i, y in enumerate(results)})
        print("done", flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace(chr(10), " "), flush=True)
"""


class _Worker:
    """onnxruntime in another process, because it ends the process at an integer division by zero."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        atexit.register(self.process.kill)

    def run(self, model, inputs):
        given, results = _folder() / "in.npz", _folder() / "out.npz"
        np.savez(given, **{f"x{i}": x for i, x in enumerate(inputs)})
        try:
            self.process.stdin.write(f"{model}\t{given}\t{results}\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if not answer:
            _worker.cache_clear()
            raise RuntimeError("onnxruntime ends the process")
        if answer != "done":
            raise RuntimeError(answer)
        data = np.load(results)
        return [data[f"y{i}"] for i in range(len(data))]


@functools.cache
def _worker() -> _Worker:
    return _Worker()


# The command.


def counts(target: str, chosen=None, report: Callable | None = None) -> dict[tuple, str]:
    """Returns the worst state of each cell (operation, dtype, column) of the table. `report` is
    called with each program, column and outcome."""
    order = [EQUAL, REFUSED, WARNED, WRONG]
    cells: dict[tuple, str] = {}
    for program in programs() if chosen is None else chosen:
        for column in program.columns:
            result = outcome(target, program, column)
            key = program.operation, program.dtype, column
            cells[key] = max(cells.get(key, EQUAL), result.state, key=order.index)
            if report is not None:
                report(program, column, result)
    return cells


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=["onnx", "numpy", "jax"])
    parser.add_argument("--only", help="operations, separated by commas")
    parser.add_argument("--wrong", action="store_true", help="list what is wrong")
    parser.add_argument("--columns", action="store_true", help="print the counts for each column")
    args = parser.parse_args()
    names = args.only and args.only.split(",")
    chosen = [p for p in programs() if not names or p.operation in names]

    def report(program, column, result):
        cases[result.state] += 1
        if args.wrong and result.state in (WRONG, WARNED):
            print(f"{target}: {program} {column}: {result.state}: {result.detail}", flush=True)

    print(f"{len(chosen)} programs, {sum(len(p.columns) for p in chosen)} cases", flush=True)
    rows = []
    for target in args.targets:
        cases: collections.Counter = collections.Counter()
        cells = counts(target, chosen, report)
        total = collections.Counter(cells.values())
        rows.append(
            f"{target:8}"
            + "".join(f"{total[s]:>8} ({cases[s]:>5})" for s in (EQUAL, REFUSED, WARNED, WRONG))
        )
        if args.columns:
            for column in COLUMNS:
                some = collections.Counter(
                    state for key, state in cells.items() if key[-1] == column
                )
                rows.append(
                    f"  {column:14}"
                    + "".join(f"{some[s]:>8}" for s in (EQUAL, REFUSED, WARNED, WRONG))
                )
    print("cells: operation x dtype x column (in parentheses: cases, that is, with every variant)")
    print("target  " + "".join(f"{s:>16}" for s in ("equal", "refused", "warned", "wrong")))
    print("\n".join(rows))


if __name__ == "__main__":
    main()
