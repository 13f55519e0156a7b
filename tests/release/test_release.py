"""The wheel and the source distribution build, install and import in an empty environment.

It has the declared dependencies and nothing else, as links to installed packages, so that no test
uses the network.
"""

import os
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.release import distributions, environment, trial
from tests.release.trial import clean

pytestmark = pytest.mark.exhaustive
pytest.importorskip("build")
pytest.importorskip("setuptools", minversion="77")
for module in ("nbformat", "nbclient", "ipykernel", "sklearn", "matplotlib"):
    pytest.importorskip(module)

from tests.release import notebooks  # noqa: E402  (imports nbclient)

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED, EXTRA = PROJECT["dependencies"], PROJECT["optional-dependencies"]["experiments"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """A folder with the two files: the source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("release")
    distributions.build(folder)
    return folder / "dist"


def run(command, folder):
    return subprocess.run(command, capture_output=True, text=True, env=clean(), cwd=folder)


def test_both_files_have_the_package_and_nothing_else(dist):
    [wheel], [source] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "fnet").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"fnet/py.typed", "fnet/hardware/chips.json", "fnet/_util/page.css"} <= files
    name = f"{PROJECT['name'].replace('-', '_')}-{PROJECT['version']}"
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        metadata = archive.read(f"{name}.dist-info/METADATA").decode()
    assert {path for path in inside if not path.startswith(f"{name}.dist-info/")} == files
    assert f"\nName: {PROJECT['name']}\n" in metadata
    with tarfile.open(source) as archive:
        inside = {member.split("/", 1)[-1] for member in archive.getnames()}
    assert files | {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= inside
    assert not [path for path in inside - files if path.startswith(("tests", "docs", "fnet/"))]


def test_another_build_has_the_same_bytes(dist, tmp_path):
    """Also with another umask."""
    umask = os.umask(0o077)
    try:
        again = distributions.build(tmp_path)
    finally:
        os.umask(umask)
    for path in again:
        assert path.read_bytes() == (dist / path.name).read_bytes(), path.name


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
        # Of the extra "chat", for chat templates, and of the plugin that pytest imports.
        assert error.name in ("jinja2", "pytest"), error
from fnet import layers as nn, training as tr
x, y = np.ones((32, 8), np.float32), np.arange(32) % 3
state = tr.train(nn.Dense(3), tr.Batches((x, y), 8), optax.softmax_cross_entropy_with_integer_labels, optax.sgd(0.1),
                 epochs=1, workdir="run")
print("trained to step", tr.load("run").step)
"""
    done = run([python, "-I", "-c", program], tmp_path)
    assert done.stdout.endswith("trained to step 4\n"), done.stderr
    trial.try_out(python, tmp_path / "empty")


def executed(name, dist, folder, **variables):
    """Runs a notebook in a new environment, with the wheel beside the notebook, as after an upload
    to Colab."""
    python = environment.create(folder / "env", [*REQUIRED, *EXTRA, "ipykernel", "pip"])
    notebook, [wheel] = notebooks.read(name), dist.glob("*.whl")
    notebooks.session(notebook, python, wheel, folder, PIP_NO_INDEX="1", **variables)
    where = run([python, "-I", "-c", "import fnet; print(fnet.__file__)"], folder).stdout
    assert str(folder / "env") in where
    return notebook


def test_quickstart_installs_fnet_and_runs(dist, tmp_path):
    notebook = executed("quickstart", dist, tmp_path)
    text = notebooks.outputs(notebook)[0]
    assert f"added: {PROJECT['name']} {PROJECT['version']}\n" in text and "replaced:" not in text
    notebooks.check_quickstart(notebook)


def test_tpu_pod_training_installs_fnet_and_runs(dist, tmp_path):
    eight = "--xla_force_host_platform_device_count=8"
    notebooks.check_tpu_pod_training(executed("tpu_pod_training", dist, tmp_path, XLA_FLAGS=eight))
