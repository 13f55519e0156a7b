"""The wheel and the source distribution build, install and import in an empty environment.

It has the declared dependencies and nothing else, as links to installed packages, so that no test uses the network.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.release import environment

pytestmark = pytest.mark.exhaustive
pytest.importorskip("build")
pytest.importorskip("setuptools", minversion="77")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED, EXTRA = PROJECT["dependencies"], PROJECT["optional-dependencies"]["experiments"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the two files: the source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("release")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "fnet", folder / "source" / "fnet", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / "source")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", folder / "source"],
                   check=True, capture_output=True)
    return folder / "dist"


def clean():
    """The environment variables of a user, without those of the tests."""
    drop = ("PYTHONPATH", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION", "XLA_FLAGS")
    return {**{name: value for name, value in os.environ.items() if name not in drop}, "JAX_PLATFORMS": "cpu"}


def run(command, folder):
    return subprocess.run(command, capture_output=True, text=True, env=clean(), cwd=folder)


def test_both_files_have_the_package(dist):
    wheel, source = sorted(dist.iterdir(), key=lambda path: path.suffix == ".gz")
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "fnet").rglob("*.py")}
    files |= {"fnet/py.typed", "fnet/hardware/chips.json"}
    assert files <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(source) as archive:
        assert files <= {name.split("/", 1)[-1] for name in archive.getnames()}
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(("tests", "experiments", "docs"))]


def test_the_wheel_installs_and_imports_in_an_empty_environment(dist, tmp_path):
    python = environment.create(tmp_path / "env", REQUIRED)
    assert "No module named 'fnet'" in run([python, "-I", "-c", "import fnet"], tmp_path).stderr
    environment.install(python, next(dist.glob("*.whl")))
    program = """
import importlib, pkgutil
import fnet, jax, numpy as np, optax
assert "site-packages" in fnet.__file__
for info in pkgutil.walk_packages(fnet.__path__, "fnet."):
    try:
        importlib.import_module(info.name)
    except ModuleNotFoundError as error:
        assert error.name == "jinja2", error    # of the extra "chat", imported when a chat template is rendered
from fnet import layers as nn, training as tr
x, y = np.ones((32, 8), np.float32), np.arange(32) % 3
state = tr.train(nn.Dense(3), tr.Batches((x, y), 8), optax.softmax_cross_entropy_with_integer_labels, optax.sgd(0.1),
                 epochs=1, workdir="run")
print("trained to step", tr.load("run").step)
"""
    done = run([python, "-I", "-c", program], tmp_path)
    assert done.stdout.endswith("trained to step 4\n"), done.stderr
    chips = run([tmp_path / "env" / "bin" / "fnet", "chips", "TPU v5e"], tmp_path)
    assert "TPU v5e" in chips.stdout, chips.stderr


@pytest.mark.parametrize("name", ["quickstart", "tpu_pod_training"])
def test_a_notebook_installs_fnet_and_runs(dist, tmp_path, monkeypatch, name):
    """The wheel is beside the notebook, as after an upload to Colab."""
    python = environment.create(tmp_path / "env", [*REQUIRED, *EXTRA, "ipykernel", "pip"])
    environment.kernel(tmp_path / "jupyter", python)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(next(dist.glob("*.whl")), folder)
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    where = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, kernel_name="fresh", timeout=600, resources=where)
    client.execute(env={**clean(), "IPYTHONDIR": str(tmp_path / "ipython"), "PIP_NO_INDEX": "1", "FNET_PROBE": "0"})
    installed = run([python, "-I", "-c", "import fnet; print(fnet.__file__)"], tmp_path)
    assert str(tmp_path / "env") in installed.stdout
