"""The notebooks on a machine that has Colab's Python, and its versions of the packages that fnet needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import nbclient
import nbformat

from tests.release import notebooks, trial

PYTHON = "3.13"
PACKAGES = Path(__file__).with_name("colab.txt")
REPLACED = "absl-py", "flax", "jax", "jaxlib"


def machine(python: str, folder: Path) -> Path:
    """Creates an environment with Colab's packages. Returns its Python."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    inside = folder / "bin" / "python"
    pip = [inside, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:"]
    trial.run([*pip, "-r", PACKAGES], folder)
    return inside


def try_out(wheel: Path, python: str, folder: Path) -> str:
    """Runs both notebooks: the first cell in a session that imported jax, and after a restart all cells.

    Returns the lines in which the first cell says what pip replaced.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error, other than the first time.
        AssertionError: a notebook printed something else than on other machines.
    """
    inside = machine(python, folder / "environment")
    first = notebooks.read("quickstart")
    first.cells.insert(0, nbformat.v4.new_code_cell("import flax, jax\nprint(jax.__version__)"))
    try:
        notebooks.session(first, inside, wheel, folder / "first")
    except nbclient.exceptions.CellExecutionError as error:
        assert "restart the session once" in str(error), error
    else:
        raise AssertionError("the first cell did not ask for a restart")
    before, output = (
        "".join(each.get("text", "") for each in cell.outputs if each.get("name") == "stdout")
        for cell in [cell for cell in first.cells if cell.cell_type == "code"][:2]
    )
    lines = [line for line in output.splitlines() if line.startswith("replaced: ")]
    for name in REPLACED:
        assert any(line.startswith(f"replaced: {name} ") for line in lines), output
    assert f"replaced: jax {before.strip()} -> " in output, output

    again = notebooks.read("quickstart")
    notebooks.session(again, inside, wheel, folder / "quickstart")
    assert "replaced:" not in notebooks.outputs(again)[0]
    notebooks.check_quickstart(again)
    pod = notebooks.read("tpu_pod_training")
    eight = "--xla_force_host_platform_device_count=8"
    notebooks.session(pod, inside, wheel, folder / "pod", XLA_FLAGS=eight)
    notebooks.check_tpu_pod_training(pod)
    where = trial.run([inside, "-I", "-c", "import fnet; print(fnet.__file__)"], folder)
    assert Path(where.strip()).is_relative_to(inside.parent.parent), where
    return "\n".join(lines)
