"""The notebooks are stored without outputs. tests/release/test_release.py runs them in a new
environment."""

import pathlib

import pytest

nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


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
