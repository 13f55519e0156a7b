"""Runs notebooks with the Python of another environment, from a folder in which the wheel lies beside them."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import nbclient
import nbformat
import numpy as np

from tests.release import environment, trial

NAMES = "quickstart", "tpu_pod_training"


def read(name: str) -> Any:
    return nbformat.read(trial.ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def session(notebook: Any, python: Path, wheel: Path, folder: Path, **variables: str) -> Any:
    """Runs the cells of a notebook in a new session, and returns the notebook with their outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    environment.kernel(folder / "jupyter", python)
    place = folder / "folder"
    place.mkdir(parents=True)
    shutil.copy(wheel, place)
    where = {"metadata": {"path": str(place)}}
    client = nbclient.NotebookClient(notebook, kernel_name="fresh", timeout=600, resources=where)
    own = {"IPYTHONDIR": str(folder / "ipython"), "FNET_PROBE": "0"}
    with mock.patch.dict(os.environ, JUPYTER_PATH=str(folder / "jupyter")):
        client.execute(env={**trial.clean(), **own, **variables})
    return notebook


def outputs(notebook: Any) -> tuple[str, int]:
    """Returns the text that a notebook printed, and the number of its pictures."""
    each = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    errors = [output["text"] for output in each if output.get("name") == "stderr"]
    assert not [text for text in errors if "Error" in text], errors
    text = "".join(output["text"] for output in each if output.get("name") == "stdout")
    return text, sum("image/png" in output.get("data", {}) for output in each)


def check_quickstart(notebook: Any) -> None:
    text, pictures = outputs(notebook)
    assert pictures == 2 and "parameters float32, compute " in text
    [accuracy] = re.findall(r"test accuracy (\d\.\d+)", text)
    assert float(accuracy) > 0.95
    recited = text[text.index("Shall I compare thee") :]
    assert "Sometime too hot the eye of heaven shines," in recited
    assert recited.rstrip().endswith("untrimm'd;")


def check_tpu_pod_training(notebook: Any) -> None:
    """For eight devices: XLA_FLAGS=--xla_force_host_platform_device_count=8."""
    text, pictures = outputs(notebook)
    assert pictures == 1 and "8 devices, 8 of them at this host, 1 hosts" in text
    alone, together = (
        np.array(re.findall(rf"{name} +\[(.*)\]", text)[0].split(), float)
        for name in ("on one device", "on 8 devices")
    )
    assert alone[0] != alone[3]
    np.testing.assert_allclose(together, alone, atol=1e-4)
    [found] = re.findall(r"loss (\S+) at the first step, (\S+) at the last five of 40", text)
    first, last = map(float, found)
    assert last < 3.5 < 5.3 < first
    assert "MFU" in text and "def " in text.split("bytes/s")[1]
