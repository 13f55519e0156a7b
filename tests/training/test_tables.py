"""Data frames, CSV files, nested trees and splits: the same numbers, or one clear error."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnet import training as tr
from tests.training import frames


@pytest.fixture(params=["stand-in", "pandas"])
def pd(request):
    return frames if request.param == "stand-in" else pytest.importorskip("pandas")


def test_a_frame_is_a_dict_of_its_columns(pd):
    table = pd.DataFrame(
        {"age": np.array([3, 1, 2]), "size": np.array([0.5, 1.5, 2.5], np.float32), 7: [True] * 3}
    )
    batch = tr.Batches(table, 3, shuffle=False)(0)
    assert {name: column.tolist() for name, column in batch.items()} == {
        "age": [3, 1, 2],
        "size": [0.5, 1.5, 2.5],
        "7": [True] * 3,
    }
    x, y = tr.Batches((table[["age", "size"]], table["age"]), 2, shuffle=False)(1)
    assert x["age"].tolist() == y.tolist() == [2, 3] and set(x) == {"age", "size"}


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (
            lambda pd: ["a", "b", "c"],
            r"'x' holds text or objects \(.*\): pass numbers, for example those of classes, ",
        ),
        (lambda pd: [{}, 1, "c"], r"'x' holds text or objects \(object\)"),
        (
            lambda pd: [1.0, np.nan, np.nan],
            r"column 'x' has 2 missing values, the first in row 1: fill them \(table.filln",
        ),
        (lambda pd: ["a", None, "c"], r"column 'x' has 1 missing values, the first in row 1"),
        (
            lambda pd: pd.Categorical(["a", "b", "a"]),
            r"column 'x' holds categories: pass .* table\['x'\]\.cat\.codes$",
        ),
        (
            lambda pd: np.array(["2020-01-01"] * 3, "datetime64[s]"),
            r"'x' holds dates or durations \(datetime64\[s\]\)",
        ),
    ],
    ids=["text", "objects", "missing", "missing text", "categories", "dates"],
)
def test_columns_that_are_no_numbers(pd, column, text):
    with pytest.raises(TypeError, match="Batches: .*" + text):
        tr.Batches(pd.DataFrame({"y": [1, 2, 3], "x": column(pd)}), 2)


def test_nullable_and_repeated_columns_of_pandas():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame(
        {"n": pd.array([1, 2, 3], "Int64"), "b": pd.array([True, False, True], "boolean")}
    )
    batch = tr.Batches(table, 3, shuffle=False)(0)
    assert (
        batch["n"].dtype == np.int64
        and batch["b"].dtype == bool
        and batch["b"].tolist() == [True, False, True]
    )
    with pytest.raises(
        TypeError, match=r"Batches: the table has several columns called \['n'\]: rename them"
    ):
        tr.Batches(pd.concat([table, table], axis=1)[["n"]], 2)
    with pytest.raises(TypeError, match="column 'n' has 1 missing values, the first in row 1"):
        tr.Batches(pd.DataFrame({"n": pd.array([1, None, 3], "Int64")}), 2)


def test_trees_keep_their_structure():
    Point = types.SimpleNamespace
    data = {
        "a": (np.arange(4), [np.arange(4) * 10, {"b": np.arange(4) * 100}]),
        "c": [1, 2, 3, 4],
        "none": None,
    }
    batch = tr.Batches(data, 4, shuffle=True, seed=5)(0)
    a, (b, c) = batch["a"]
    np.testing.assert_array_equal(b, a * 10)
    np.testing.assert_array_equal(c["b"], a * 100)
    np.testing.assert_array_equal(batch["c"], a + 1)
    assert batch["none"] is None and isinstance(batch["a"], tuple)
    assert tr.Batches(np.arange(6), 3, shuffle=False)(1).tolist() == [3, 4, 5]
    assert tr.Batches(jnp.arange(6), 3, shuffle=False)(1).tolist() == [3, 4, 5]
    with pytest.raises(TypeError, match="'' holds text or objects"):
        tr.Batches(Point(x=np.arange(3)), 3)


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (
            (np.zeros(3), np.zeros((4, 2))),
            ValueError,
            r"one length, at least 1, got lengths {'0': 3, '1': 4}",
        ),
        (
            {"x": np.zeros(3), "y": {"z": 2.0}},
            ValueError,
            "'y/z' is a single value: expected an array with one row",
        ),
        (
            {"x": np.array([2**40])},
            TypeError,
            "'x' holds 1099511627776, which does not fit into 32 bits",
        ),
        (
            {"x": np.ma.masked_less(np.arange(3), 1)},
            TypeError,
            r"'x' has masked values: fill them, array.filled\(value\)",
        ),
        (
            np.zeros(3, [("a", "f4")]),
            TypeError,
            "is an array of records: pass its fields as a dict",
        ),
        (None, ValueError, "one or more arrays of one length"),
    ],
    ids=["lengths", "scalar", "wide", "masked", "records", "nothing"],
)
def test_trees_that_are_no_data_sets(data, error, text):
    with pytest.raises(error, match=text):
        tr.Batches(data, 2)


def test_evaluators_take_the_same_data():
    x, y = np.arange(5, dtype=np.float32), np.arange(5, dtype=np.float32) * 2
    forms = {
        "dict": ({"x": x, "y": y}, lambda b: (b["y"] - b["x"], b["weight"])),
        "tuple": ((x, y), lambda b: (b[1] - b[0], b[2])),
        "array": (x, lambda b: b),
    }
    for data, parts in forms.values():
        measured = tr.evaluator(
            lambda state, b, parts=parts: {"m": tr.mean(*parts(b))}, data, batch_size=2
        )
        assert measured({}) == {"m": 2.0}
    with pytest.raises(
        ValueError, match="'weight' is the name of the weights that mark padding: rename"
    ):
        tr.evaluator(lambda state, b: {}, {"weight": x}, batch_size=2)


# CSV


def written(tmp_path, text, **options):
    (tmp_path / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return tr.read_csv(tmp_path / "t.csv", **options)


def test_the_columns_of_a_csv_file(tmp_path):
    table = written(
        tmp_path,
        '\ufeffn, x,big,flag,name,code\r\n1,0.5,3000000000,true,"a, ""b""\nc",1_0\r\n\r\n'
        "-2, 1e-3 ,1,False,NA,2\r\n",
    )
    assert {
        name: (column.dtype.name, column.tolist())
        for name, column in table.items()
        if name != "name"
    } == {
        "n": ("int32", [1, -2]),
        "x": ("float32", [0.5, np.float32(1e-3)]),
        "big": ("int64", [3000000000, 1]),
        "flag": ("bool", [True, False]),
        "code": ("str96", ["1_0", "2"]),
    }
    assert table["name"].tolist() == ['a, "b"\nc', "NA"]


def test_csv_and_batches_in_two_lines(tmp_path):
    table = written(tmp_path, "x,label\n1.5,0\n2.5,1\n")
    batch = tr.Batches({"x": table["x"], "label": table["label"]}, 2, shuffle=False)(0)
    assert batch["x"].tolist() == [1.5, 2.5] and batch["label"].tolist() == [0, 1]


def test_missing_values(tmp_path):
    text = "a;b\n1;x\n;NA\nnan;z\n4;w\n"
    with pytest.raises(
        ValueError,
        match=r"t\.csv, line 3: column 'a' has a missing value, '': pass missing={'a': 0}",
    ):
        written(tmp_path, text, delimiter=";")
    table = written(tmp_path, text, delimiter=";", missing="drop")
    assert (
        table["a"].tolist() == [1, 4]
        and table["a"].dtype == np.int32
        and table["b"].tolist() == ["x", "w"]
    )
    assert written(tmp_path, text, delimiter=";", missing={"a": -1})["a"].tolist() == [1, -1, -1, 4]
    filled = written(tmp_path, text, delimiter=";", missing=float("nan"))["a"]
    assert filled.dtype == np.float32 and np.isnan(filled).tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("cells", "dtype"),
    [
        (["1700000000.5", "1700000001.5", ""], np.float64),  # Unix times
        (["1700000000.5", "1400000003.5", "1500000000"], np.float64),
        (["1234567890", "1234567891", ""], np.float64),  # identifiers with a missing value
        (["16777217", "1", ""], np.float64),
        (["16777216", "1", ""], np.float32),
        (["123456700000", "0.5", "1"], np.float64),
        (
            ["52.52000661", "52.52000662", "52.52000663"],
            np.float64,
        ),  # degrees that differ by a millimeter
        (["2020.25", "1990.5", "1985.75"], np.float32),
        (["0.12345678901234567", "-0.7654321098765432", "0.1"], np.float32),
        (["1.5e10", "6.02e23", "1e-5"], np.float32),
        (["6.02214076e23", "1", "2"], np.float64),
        (["1e-50", "0.5", "0"], np.float64),
        (["inf", "-inf", "0.5"], np.float32),
        (["true", "false", ""], np.float32),
        (["9007199254740990", "", "1"], np.float64),
        (["-0.0", "0.5", ""], np.float32),
    ],
)
def test_the_dtype_of_columns_with_fractions_or_missing_values(tmp_path, cells, dtype):
    column = written(tmp_path, "x\n" + "\n".join(cell or "NA" for cell in cells), missing=np.nan)[
        "x"
    ]
    exact = [
        np.nan if not cell else float({"true": 1, "false": 0}.get(cell, cell)) for cell in cells
    ]
    assert column.dtype == dtype
    np.testing.assert_array_equal(column, np.array(exact).astype(dtype))


@pytest.mark.parametrize(
    "cells", [["9007199254740993", ""], ["9007199254740993", "0.5"], ["-9223372036854775807", ""]]
)
def test_integers_that_float64_rounds(tmp_path, cells):
    with pytest.raises(
        ValueError,
        match=rf"line 2: column 'x' holds the integer {cells[0]}, and fractions or missing",
    ):
        written(tmp_path, "x\n" + "\n".join(cell or "NA" for cell in cells), missing=np.nan)
    assert written(tmp_path, "x\n" + cells[0] + "\n")["x"].tolist() == [int(cells[0])]


def test_integers_of_more_than_64_bits_and_dates_are_text(tmp_path):
    table = written(tmp_path, "a,b\n18446744073709551615,2024-01-01\n1,2024-01-02\n")
    assert table["a"].tolist() == ["18446744073709551615", "1"] and table["b"].tolist() == [
        "2024-01-01",
        "2024-01-02",
    ]


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        (1.7e9 + np.arange(3), True),  # JAX would make all of them equal
        (
            np.stack([np.arange(3.0), 1.7e9 + np.arange(3)], 1),
            True,
        ),  # also beside a column of other numbers
        (np.array([np.nan, 1.7e9, 1.7e9 + 1]), True),
        (1.7e9 + 1e8 * np.arange(3), False),
        (np.full(3, 0.1), False),
        (np.array([0.1 + 0.2, 0.3, 0.3]), False),  # rounding errors
        (np.array([1e300, 0.0, 1.0]), False),
        (np.array([np.inf, 1.7e9, 1.7e9 + 1]), False),
        (np.array([np.nan, np.nan]), False),
        (np.zeros((3, 0)), False),
    ],
    ids=range(10),
)
def test_float64_values_that_float32_makes_equal(values, refused):
    if not refused:
        tr.Batches(values, 2)
        return
    with pytest.raises(
        TypeError, match=r"Batches: 'x' holds values from .* which float32 rounds to mult"
    ):
        tr.Batches({"x": values}, 2)
    with jax.enable_x64(True):
        tr.Batches({"x": values}, 2)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, r"t\.csv has no line of values"),
        ("a,b\n", {}, "has no line of values"),
        ("a,b\n1,2\n\n1\n", {}, r"t\.csv, line 4: expected 2 cells \(a, b\), got 1"),
        ('a,b\n"1\n2",2\n1,2,3\n', {}, "line 4: expected 2 cells .* got 3"),
        ("a,a\n1,2\n", {}, "line 1: the name 'a' of column 2 is used twice"),
        ("a,\n1,2\n", {}, "line 1: column 2 has no name"),
        (
            "1,2\n3,4\n",
            {},
            r"line 1: expected the names of the columns, got numbers: .* pass names=\[...\]",
        ),
        ("a;b\n1;2\n", {}, "line 1: there is one column, 'a;b': pass delimiter=';'"),
        ('a,b\n1,"2\n', {}, "t.csv, line 2: unexpected end of data"),
        (b"a,b\n1,\xff\n", {}, "t.csv, after line 0: the file is not in UTF-8"),
        ("a,b\nNA,2\n1,1e5000\n", {"missing": "drop"}, "line 3: column 'b' holds 1e5000, more"),
        (
            "a,b\n1,1e40\n",
            {},
            "t.csv, line 2: column 'b' holds 1e40, more than float32 can hold: scale the column",
        ),
        ("a,b\n1,\n", {"missing": "drop"}, "every line has a missing value"),
        (
            "a,b\n1,NA\n2,3\n",
            {"missing": "mean"},
            "missing='mean' for column 'b': expected a number",
        ),
        (
            "a,b\n1,NA\n2,3\n",
            {"missing": {"c": 1}},
            r"missing= names \['c'\], but the columns are \['a', 'b'\]",
        ),
        ("1,2\n", {"names": ["a", "a"]}, r"names=\['a', 'a'\]: expected different names"),
        ("1,2\n", {"names": ["a"]}, r"line 1: expected 1 cells \(a\), got 2"),
    ],
    ids=range(17),
)
def test_files_that_are_no_tables(tmp_path, text, options, message):
    with pytest.raises(ValueError, match=message):
        written(tmp_path, text, **options)


def test_infinity_is_a_number(tmp_path):
    assert written(tmp_path, "a\ninf\n-Infinity\n")["a"].tolist() == [float("inf"), -float("inf")]


def test_a_file_without_names(tmp_path):
    assert written(tmp_path, "1,2\n3,4\n", names=["a", "b"])["b"].tolist() == [2, 4]


# Splits


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 60), st.data())
def test_parts_are_disjoint_and_complete(n, data):
    sizes = data.draw(
        st.lists(st.integers(1, n), min_size=2, max_size=4).filter(lambda s: sum(s) <= n)
    )
    sizes[0] += n - sum(sizes)
    labels = np.array(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    stratify = data.draw(st.sampled_from([None, labels]))
    x = np.arange(n)
    parts = tr.split({"x": x, "l": labels}, sizes, seed=n, stratify=stratify)
    assert [len(part["x"]) for part in parts] == sizes
    assert sorted(np.concatenate([part["x"] for part in parts])) == list(range(n))
    for part, size in zip(parts, sizes):
        np.testing.assert_array_equal(part["l"], labels[part["x"]])
        for label in np.unique(labels) if stratify is not None else ():
            assert abs((part["l"] == label).sum() - (labels == label).sum() * size / n) < len(sizes)
    again = tr.split({"x": x, "l": labels}, sizes, seed=n, stratify=stratify)
    jax.tree.map(np.testing.assert_array_equal, parts, again)


def test_a_split_depends_on_its_seed_and_draws_from_everywhere():
    x = np.arange(1000)
    one, two = (tr.split(x, 0.2, seed=seed)[1] for seed in (0, 1))
    assert len(one) == 200 and len(set(one) & set(two)) < 100
    assert abs(one.mean() - 500) < 60 and len(set(np.diff(one))) > 5  # not every fifth
    train, validation, test = tr.split((x, x), (0.5, 0.3, 0.2))
    assert [len(part[0]) for part in (train, validation, test)] == [500, 300, 200]


def test_a_split_frame_is_a_frame(pd):
    table = pd.DataFrame({"x": np.arange(10), "name": [f"n{i}" for i in range(10)]})
    train, validation = tr.split(table, 3, stratify=np.arange(10) % 2)
    assert isinstance(train, pd.DataFrame) and (len(train), len(validation)) == (7, 3)
    both = [*train["name"].to_numpy(), *validation["name"].to_numpy()]
    assert sorted(both) == sorted(table["name"].to_numpy())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"sizes": 0.0},
            r"sizes=0.0: expected a fraction such as 0.2, a number of examples below 10, or "
            r"fractions with",
        ),
        (
            {"sizes": 10},
            "sizes=10: expected .* or numbers of examples with the sum 10 for two parts",
        ),
        ({"sizes": (0.5, 0.4)}, r"sizes=\(0.5, 0.4\): expected"),
        ({"sizes": (10,)}, r"sizes=\(10,\): expected"),
        ({"sizes": float("nan")}, "sizes=nan: expected"),
        ({"sizes": 0.01}, r"of 10 examples leave a part without any: it has \[10, 0\]"),
        (
            {"sizes": 2, "stratify": np.zeros(9)},
            r"stratify= expects one label for each of 10 examples, got shape \(9,\)",
        ),
    ],
    ids=range(7),
)
def test_wrong_splits(options, text):
    with pytest.raises(ValueError, match="split: .*" + text):
        tr.split(np.arange(10), **options)


def test_a_split_of_arrays_of_different_lengths():
    with pytest.raises(ValueError, match=r"split needs arrays of one length, got lengths \[3, 4\]"):
        tr.split((np.zeros(3), np.zeros(4)), 0.5)


@pytest.mark.parametrize("kind", ["few", "tiny", "own", "text"])
def test_stratified_parts_of_any_number(kind):
    """Each class in each part: the exact proportional number, rounded up or down; nothing is lost
    or repeated."""
    rng = np.random.default_rng(0)
    for trial in range(60):
        n = int(rng.integers(8, 60))
        labels = {
            "few": rng.integers(0, 4, n),
            "tiny": rng.integers(0, n, n),
            "own": np.arange(n),
            "text": rng.choice(["a", "b", "c"], n),
        }[kind]
        shares = rng.dirichlet(np.full(int(rng.integers(2, 7)), 4.0))
        counts = np.maximum(rng.multinomial(n - len(shares), shares) + 1, 1).tolist()
        parts = tr.split(np.arange(n), counts, seed=trial, stratify=labels)
        assert (
            sorted(np.concatenate(parts)) == list(range(n))
            and [len(part) for part in parts] == counts
        )
        assert all((np.diff(part) > 0).all() for part in parts)
        for part in parts:
            for label in set(labels.tolist()):
                exact = (labels == label).sum() * len(part) / n
                assert abs((labels[part] == label).sum() - exact) < 1


def test_stratified_parts_are_drawn_without_bias():
    """Over many seeds, the mean of the rounded numbers is the exact proportional number."""
    labels = np.repeat(np.arange(3), [5, 3, 3])
    counts = np.zeros((3, 3))
    for seed in range(400):
        for p, part in enumerate(tr.split(np.arange(11), [4, 4, 3], seed=seed, stratify=labels)):
            counts[:, p] += np.bincount(labels[part], minlength=3)
    np.testing.assert_allclose(counts / 400, np.outer([5, 3, 3], [4, 4, 3]) / 11, atol=0.09)
