"""benchmarks.compiling: a table of plain and tuned, for each workload and type."""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks import compiling


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quickly")
def test_tables(capsys):
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):  # Optax needs both
        compiling.main(["mlp", "--size=small", "--dtype=float32,mixed", "--rounds=2"])
    out = capsys.readouterr().out
    assert "`python -m benchmarks.compiling mlp --size=small" in out and "allocator: default" in out
    assert "**mlp**, train, mixed, small size, fnet" in out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert lines[0] == "| peer | median s | min | max | ratio to plain | trace s | compile s |"
    for cells in (
        line.strip("| ").split(" | ") for line in lines if line.startswith(("| plain", "| tuned"))
    ):
        low, median, high, trace, rest = (float(cells[i]) for i in (2, 1, 3, 5, 6))
        assert 0 < low <= median <= high and 0 < trace < high and 0 < rest < high
    assert len(lines) == 8
