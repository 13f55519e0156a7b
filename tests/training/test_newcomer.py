"""The program with a CSV file in docs/training.md, as it is written: it learns, and a killed run
ends with the same weights."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from fnet import training as tr

sklearn = pytest.importorskip("sklearn.datasets")
ROOT = Path(__file__).parents[2]
PROGRAM = next(
    block
    for block in re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL
    )
    if "iris.csv" in block
)

# Kills its own process when it has written the metrics of step 75, which no checkpoint holds yet.
KILLED = """
import os, signal
from fnet.training.record import _logs
write = _logs.Logger.write
def killing(self, step, values):
    write(self, step, values)
    if step >= 75:
        os.kill(os.getpid(), signal.SIGKILL)
_logs.Logger.write = killing
"""


def table(folder):
    """Writes iris.csv."""
    iris = sklearn.load_iris()
    rows = [
        ",".join([*map(str, row), iris.target_names[kind]])
        for row, kind in zip(iris.data, iris.target)
    ]
    (folder / "iris.csv").write_text(
        "\n".join(["sepal length,sepal width,petal length,petal width,species", *rows])
    )


def test_it_has_at_most_thirty_lines():
    assert len(PROGRAM.splitlines()) <= 30


def test_it_learns_and_survives_a_kill(tmp_path, monkeypatch, capsys):
    shown = {}
    for name in ("whole", "parts"):
        (folder := tmp_path / name).mkdir()
        table(folder)
        monkeypatch.chdir(folder)
        if name == "parts":
            path = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            killed = subprocess.run(
                [sys.executable, "-c", path + KILLED + PROGRAM], capture_output=True, timeout=300
            )
            assert killed.returncode == -9, killed.stderr.decode()
        exec(PROGRAM, {})
        shown[name] = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\['(setosa|versicolor|virginica)'( '\w+'){4}\]", shown["whole"][-1])
    assert "resumed at step" in shown["parts"][0] and shown["parts"][-1] == shown["whole"][-1]
    runs = [tmp_path / name / "runs" / "iris" for name in ("whole", "parts")]
    for which in ("last", "best"):
        a, b = (tr.load(run, which) for run in runs)
        assert a.step == b.step
        jax.tree.map(np.testing.assert_array_equal, a.params, b.params)
    assert b.metrics["validation/accuracy"] >= 0.9 and list((runs[0] / "tensorboard").iterdir())
    rows = [
        [
            {k: v for k, v in row.items() if not k.startswith("time/")}
            for row in tr.read_metrics(run)
        ]
        for run in runs
    ]
    assert rows[0] == rows[1]
