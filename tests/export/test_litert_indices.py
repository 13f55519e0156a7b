"""The compositions that LiteRT runs for gathers and scatters, evaluated by JAX, equal JAX's own; so
does LiteRT."""

import jax
import numpy as np
import pytest
import special_values

from fnet import export
from fnet.export import _evaluate
from fnet.export.litert import _indices

INDEXING = "gather", "scatter", "dynamic_slice", "dynamic_update_slice"
TABLE = [
    p
    for p in special_values.programs()
    if p.operation in INDEXING and p.dtype in ("float32", "int32", "bool")
]
QUICK = {
    "gather[a window, fill] float32",
    "gather[rows, clip] int32",
    "gather[vmap] float32",
    "scatter[add, rows, drop] float32",
    "scatter[add, elements, clip, index uint32] float32",
    "scatter[max, pairs, drop] float32",
    "scatter[mul, windows, clip] int32",
    "scatter[set, windows, drop] float32",
    "scatter[min, elements, drop] bool",
    "gather[vmap of windows] float32",
    "scatter[set, vmap of windows] float32",
    "dynamic_slice[index int64] float32",
}


@pytest.fixture(autouse=True)
def as_in_an_export():
    with jax.numpy_rank_promotion("allow"):
        yield


def composed(program, column):
    traced, inputs = special_values._traced(program, column)
    stable, constants, weights = special_values._described(traced)
    run = _evaluate.sized(
        stable,
        constants,
        special_values._sizes(program, inputs),
        {**_evaluate.OPERATIONS, **_indices.OPERATIONS},
    )
    f = jax.jit(lambda *inputs: run.body(stable, [*weights, *inputs]))
    return lambda *inputs: [np.asarray(y) for y in f(*inputs)]


def test_the_quick_programs_are_in_the_table():
    assert {*map(str, TABLE)} >= QUICK


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    "program",
    [
        program if str(program) in QUICK else pytest.param(program, marks=pytest.mark.exhaustive)
        for program in TABLE
    ],
    ids=str,
)
def test_compositions(program, monkeypatch):
    monkeypatch.setitem(special_values._RUNS, "jax", composed)
    special_values._LAST.clear()
    for column in program.columns:
        result = special_values.outcome("jax", program, column)
        assert result.state == special_values.EQUAL, f"{column}: {result.detail}"
    special_values._LAST.clear()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "program", [program for program in TABLE if str(program) in QUICK], ids=str
)
def test_in_litert(program):
    pytest.importorskip("ai_edge_litert.interpreter")
    pytest.importorskip("litert_converter")
    for column in program.columns:
        result = special_values.outcome("litert", program, column)
        assert result.state in (special_values.EQUAL, special_values.REFUSED), (
            f"{column}: {result.detail}"
        )


def test_too_many_updates_are_refused():
    program = export.program(
        lambda params, x, i, v: x.at[i].max(v),
        {},
        x=export.spec("20000"),
        i=export.spec("5000", "int32"),
        v=export.spec("5000"),
    )
    stable, constants, weights = special_values._described(program)
    run = _evaluate.sized(stable, constants, {}, {**_evaluate.OPERATIONS, **_indices.OPERATIONS})
    with pytest.raises(
        NotImplementedError,
        match="LiteRT: the operation 'scatter' of kind 'max' would compare 20000 "
        "positions with 5000 updates, which is too many",
    ):
        jax.eval_shape(
            lambda *inputs: run.body(stable, [*weights, *inputs]),
            *(
                jax.ShapeDtypeStruct((n,), kind)
                for n, kind in ((20000, "float32"), (5000, "int32"), (5000, "float32"))
            ),
        )
