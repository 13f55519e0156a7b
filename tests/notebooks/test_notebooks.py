"""The notebooks run from the first cell to the last on this machine's CPU, and are kept without outputs."""

import os
import pathlib
import re

import numpy as np
import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
STRICT = ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")


def executed(name, folder, monkeypatch):
    """What the notebook printed, cell by cell, and how many pictures it drew: run as a user runs it, in `folder`."""
    for variable in STRICT:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    notebook = nbformat.read(FOLDER / name, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, kernel_name="python3", timeout=300, resources=where)
    client.execute(env=dict(os.environ))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
    assert not [output["text"] for output in outputs if output.get("name") == "stderr" and "Error" in output["text"]]
    return text, sum("image/png" in output.get("data", {}) for output in outputs)


def test_there_are_the_two():
    assert [path.name for path in NOTEBOOKS] == ["quickstart.ipynb", "tpu_pod_training.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_stripped(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, cell.source
        assert cell.metadata == {}, cell.source


@pytest.mark.exhaustive
def test_quickstart(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")                             # a user's one device
    text, pictures = executed("quickstart.ipynb", tmp_path, monkeypatch)
    assert pictures == 2 and "parameters float32, compute " in text
    assert float(re.search(r"test accuracy (\d\.\d+)", text)[1]) > 0.95
    recited = text[text.index("Shall I compare thee"):]
    assert "Sometime too hot the eye of heaven shines," in recited and recited.rstrip().endswith("untrimm'd;")


@pytest.mark.exhaustive
def test_tpu_pod_training(tmp_path, monkeypatch):
    """On eight devices, which conftest.py makes of the CPU."""
    text, pictures = executed("tpu_pod_training.ipynb", tmp_path, monkeypatch)
    assert pictures == 1 and "8 devices, 8 of them at this host, 1 hosts" in text
    alone, together = (np.array(re.search(rf"{name} +\[(.*)\]", text)[1].split(), float)
                       for name in ("on one device", "on 8 devices"))
    assert alone[0] != alone[3]
    np.testing.assert_allclose(together, alone, atol=1e-4)
    first, last = map(float, re.search(r"loss (\S+) at the first step, (\S+) at the last five of 40", text).groups())
    assert last < 3.5 < 5.3 < first
    assert "MFU" in text and "def " in text.split("bytes/s")[1]
