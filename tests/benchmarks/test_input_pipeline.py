"""benchmarks.input_pipeline: a rehearsal with small photos, without PyTorch."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks import input_pipeline


def test_a_batch_is_a_function_of_the_step(tmp_path):
    input_pipeline.write_photos(tmp_path, 6)
    photos = input_pipeline.Photos(tmp_path, batch=4, size=24)
    first, again, other = photos(3), photos(3), photos(4)
    assert first["x"].shape == (4, 24, 24, 3) and first["x"].dtype == np.float32
    assert 0 <= first["x"].min() < 0.5 < first["x"].max() <= 1
    np.testing.assert_array_equal(first["x"], again["x"])
    assert not np.array_equal(first["x"], other["x"])


@pytest.mark.exhaustive
def test_the_table(capsys, monkeypatch):
    monkeypatch.setenv("JAX_NUMPY_DTYPE_PROMOTION", "standard")  # Optax needs both
    monkeypatch.setenv("JAX_NUMPY_RANK_PROMOTION", "allow")
    input_pipeline.main(
        [
            "--photos=4",
            "--batch=2",
            "--rounds=1",
            "--steps=1",
            "--peers=fnet",
            "--model=resnet18",
            "--size=32",
        ]
    )
    out = capsys.readouterr().out
    rate = re.search(r"^\| fnet \| [\d.]+ \| [\d.]+ \| [\d.]+ \| 1\.00 \| (\d+) \|$", out, re.M)
    assert rate and int(rate[1]) > 0
    waited = re.search(r"waits for batches ([\d.]+) % of the time", out)
    assert waited and 0 <= float(waited[1]) <= 100
