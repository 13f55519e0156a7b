"""benchmarks.generation: a rehearsal with small models, without PyTorch."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments):
    drop = ("XLA_FLAGS", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.generation", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in drop},
        timeout=240,
    )


@pytest.mark.exhaustive
def test_a_table():
    done = run("--size=small", "--peers=fnet", "--rows=1,3", "--rounds=2")
    assert done.returncode == 0, done.stderr
    lines = [
        line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")
    ]
    assert lines[0] == [
        "model",
        "rows",
        "fnet tokens/s",
        "ratio to fnet",
        "equal tokens",
        "ms to the first token",
        "ms for a further one",
        "share of the bandwidth",
    ]
    assert [line[:2] for line in lines[1:]] == [
        ["smollm-135m", "1"],
        ["smollm-135m", "3"],
        ["stories15m", "1"],
        ["stories15m", "3"],
    ]
    for line in lines[1:]:
        median, low, high = map(
            float, line[2].replace("(", "").replace(")", "").replace(" to", "").split()
        )
        assert 0 < low <= median <= high and line[3:5] == ["1.00", "100%"]
        assert float(line[5]) >= 0 and re.fullmatch(r"-?\d+% of [1-9]\d* GB/s", line[7])
    assert (
        "`python -m benchmarks.generation --size=small --peers=fnet --rows=1,3 --rounds=2`"
        in done.stdout
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gpt"], "no 'gpt' among smollm-135m, stories15m"),
        (["--peers=jax"], "no 'jax' among fnet, torch"),
        (["--peers=torch"], "expected fnet as the first of --peers"),
        (["--rows=0"], "of at least 1"),
    ],
)
def test_wrong_arguments(arguments, text, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import generation

    with pytest.raises(SystemExit):
        generation.main(arguments)
    assert text in capsys.readouterr().err
