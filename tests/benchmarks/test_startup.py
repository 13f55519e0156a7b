"""The benchmark of the start measures what it says."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks import startup


@pytest.mark.exhaustive
def test_the_second_start_is_faster(capsys, monkeypatch):
    monkeypatch.setenv("JAX_NUMPY_DTYPE_PROMOTION", "standard")  # Optax needs both
    monkeypatch.setenv("JAX_NUMPY_RANK_PROMOTION", "allow")
    startup.main(["mlp", "--size=small", "--peers=fnet,jax", "--rounds=1"])
    rows = re.findall(
        r"\| mlp \| ([^|]+) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \| [\d.]+ \|", capsys.readouterr().out
    )
    assert [name for name, *_ in rows] == ["fnet, first start", "fnet, second start", "jax"]
    (first, first_end), (second, second_end), (plain, plain_end) = [
        map(float, times) for _, *times in rows
    ]
    assert (
        0 < second < first <= first_end and second <= second_end < first_end and plain <= plain_end
    )
