"""benchmarks.gpu: a rehearsal of every part at a small size on the CPU, failing parts, and the end
of the time."""

import json
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

from benchmarks import _accelerator_steps as steps
from benchmarks import gpu
from benchmarks.peers import _workloads as spec
from fnet import models

TINY = steps.Size(
    spec.GPT(2, 16, 16, 1, 2, 31, True),
    spec.ResNet(2, 32, (1, 1, 1, 1), 8, True, True, 5),
    models.Decoder(31, 16, 2, 2, 1, 24, context=64, tied=True),
    64,
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", gpu.PARTS)
def test_rehearsal(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu, "pytorch", lambda workload, seconds: {})
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):  # Optax needs both
        found = gpu.run({name: gpu.PARTS[name]}, TINY, minutes=0.01, path=tmp_path / "gpu.json")
    assert found["failed"] == {} and json.loads((tmp_path / "gpu.json").read_text())["parts"][name]
    for row in found["parts"][name].values():
        assert row["seconds"] > 0 and row.get("loss", 1) > 0
    assert f"**{name}**" in capsys.readouterr().out


def test_a_failing_part_does_not_end_the_session(tmp_path, capsys):
    def broken(size, seconds):
        raise MemoryError("out of memory")

    parts = {"broken": broken, "good": lambda size, seconds: {"row": {"seconds": 1.0}}}
    parts["good"].__doc__ = "Good."
    found = gpu.run(parts, TINY, minutes=1, path=tmp_path / "gpu.json")
    assert (
        found["failed"] == {"broken": "MemoryError: out of memory"}
        and found["parts"]["good"]["row"]["seconds"] == 1
    )
    assert gpu.run(parts, TINY, minutes=0, path=tmp_path / "gpu.json")["skipped"] == [
        "broken",
        "good",
    ]
