"""benchmarks.pairs: intervals of ratios, and a rehearsal with small models, without PyTorch."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import pairs

ROOT = pathlib.Path(__file__).parents[2]


def read(cell):
    return [
        float(part) for part in cell.replace("(", "").replace(")", "").replace("to ", "").split()
    ]


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        _, low, high = read(pairs.interval([*np.exp(rng.normal(0.1, 0.05, 6))]))
        inside += low <= np.exp(0.1) <= high
    assert 0.92 <= inside / 400 <= 0.98
    assert pairs.interval([2.0, 2.0, 2.0]) == "2.000 (2.000 to 2.000)"
    assert pairs.interval([1.5]) == "1.500"


@pytest.mark.exhaustive
def test_a_table():
    drop = ("XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")
    command = "mlp --peers=fnet-tuned,jax --size=small --children=2 --budget=0.1".split()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.pairs", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in drop},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    head, _, row = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert head.count("|") == row.count("|") == 11
    cells = row.strip("| ").split(" | ")
    assert cells[:3] == ["mlp", "train", "float32"]
    for cell in (cells[4], cells[7]):
        middle, low, high = read(cell)
        assert 0 < low <= middle <= high


def test_errors():
    with pytest.raises(SystemExit):
        pairs.main(["cnn", "--peers=fnet"])
