"""The first cell of the notebooks, which installs fnet: what it prints, and when it asks for a restart.

The packages are small wheels of the names and versions that matter, in new environments without network access.
`make dist` runs the notebooks with the real packages.
"""

import json
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.release import environment, trial

ROOT = Path(__file__).parents[2]
NAME = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
SESSION = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell()
for source in json.loads(sys.stdin.read()):
    done = shell.run_cell(source, silent=True)
    print("DONE", repr(done.error_before_exec or done.error_in_exec))
"""


def cell():
    """The source of the cell, which is the same in all notebooks."""
    sources = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        sources.append("".join(next(c["source"] for c in cells if c["cell_type"] == "code")))
    assert len(sources) == 2 and len(set(sources)) == 1
    return sources[0]


def wheel(folder, name, version, module, requires=(), extras=()):
    """Writes a wheel with one module, which states its version."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    files = {
        f"{module}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *lines, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    folder.mkdir(exist_ok=True)
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
    return path


@pytest.fixture
def machine(tmp_path):
    """A Python with jax 0.7.2, flax 0.11.2 and libtpu 0.0.21, and a folder with a wheel of fnet and newer packages."""
    pytest.importorskip("IPython")
    pytest.importorskip("pip")
    python = environment.create(tmp_path / "env", ["ipython", "pip"])
    [site] = (tmp_path / "env").glob("lib/python3*/site-packages")
    old = tmp_path / "old"
    for name, version in (("jax", "0.7.2"), ("flax", "0.11.2"), ("libtpu", "0.0.21")):
        with zipfile.ZipFile(wheel(old, name, version, name)) as archive:
            archive.extractall(site)
    folder = tmp_path / "folder"
    wheel(folder, "jax", "0.12.0.1", "jax")
    wheel(folder, "flax", "0.12.9", "flax", ["jax>=0.10"])
    wheel(folder, "libtpu", "0.0.40", "libtpu")
    wheel(folder, "tensorboardX", "2.6.5", "tensorboardX")
    needs = ["jax>=0.10.2", "flax>=0.12.8", "tensorboardX", 'libtpu>=0.0.40; extra == "tpu"']
    wheel(folder, NAME, "0.1.0", "fnet", needs, ["experiments", "tpu", "cuda12", "cuda13"])
    return python, folder


def session(python, folder, *sources):
    """Runs cells in one session of IPython. Returns (output, error or "None") of each."""
    done = subprocess.run(
        [python, "-c", SESSION],
        cwd=folder,
        input=json.dumps(sources),
        capture_output=True,
        text=True,
        env={**trial.clean(), "IPYTHONDIR": str(folder.parent / "ipython"), "PIP_NO_INDEX": "1"},
    )
    results, output = [], []
    for line in done.stdout.splitlines():
        if line.startswith("DONE "):
            results.append(("\n".join(output), line.removeprefix("DONE ")))
            output = []
        else:
            output.append(line)
    assert len(results) == len(sources), done.stdout + done.stderr
    return results


REPLACED = "replaced: flax 0.11.2 -> 0.12.9", "replaced: jax 0.7.2 -> 0.12.0.1"
USE = "import fnet, jax; print('uses', jax.__version__)"


def test_a_session_that_imported_a_replaced_package_is_restarted_once(machine):
    first, again = session(*machine, "import jax", cell(), cell())[1:]
    assert all(line in first[0] for line in REPLACED)
    assert f"added: {NAME} 0.1.0, tensorboardx 2.6.5" in first[0]
    assert "\nno restart" not in first[0]
    assert "restart the session once (Colab: Runtime > Restart session)" in first[1]
    assert "had imported jax 0.7.2 before" in first[1] and "flax" not in first[1]
    assert "replaced:" not in again[0] and again[1] == first[1]  # until the session is restarted
    [(output, error), used] = session(*machine, cell(), USE)
    assert "replaced:" not in output and error == "None" and used == ("uses 0.12.0.1", "None")


@pytest.mark.exhaustive
def test_another_session_goes_on_without_a_restart(machine):
    [(output, error), used, (later, fine)] = session(*machine, cell(), USE, cell())
    assert all(line in output for line in REPLACED) and error == "None"
    assert "\nno restart is needed" in output
    assert used == ("uses 0.12.0.1", "None")
    assert "replaced:" not in later and fine == "None"


@pytest.mark.exhaustive
def test_the_plugin_of_the_device_is_replaced_with_jax(machine):
    [(output, error)] = session(*machine, cell())
    assert "replaced: libtpu 0.0.21 -> 0.0.40" in output and error == "None"


@pytest.mark.exhaustive
def test_the_wheel_is_in_a_data_set_of_kaggle_or_uploaded_to_colab(machine, tmp_path):
    python, folder = machine
    empty = tmp_path / "empty"
    empty.mkdir()
    [(_, error)] = session(python, empty, cell())
    assert "found no fnet*.whl beside this notebook: put the wheel of make dist" in error
    upload = f"""
import pathlib, shutil, sys, types
def upload():
    for path in pathlib.Path({str(folder)!r}).glob("*.whl"):
        shutil.copy(path, ".")
    return {{path.name: b"" for path in pathlib.Path().glob("fnet*.whl")}}
colab = types.ModuleType("google.colab")
colab.files = types.SimpleNamespace(upload=upload)
sys.modules.update({{"google": types.ModuleType("google"), "google.colab": colab}})
"""
    [_, (output, error), used] = session(python, empty, upload, cell(), USE)
    assert all(line in output for line in REPLACED) and error == "None" and used[1] == "None"
    uninstall = "%pip uninstall -q -y " + NAME
    (tmp_path / "kaggle").mkdir()
    folder.rename(tmp_path / "kaggle" / "wheels")
    source = cell().replace("/kaggle/input", str(tmp_path / "kaggle"))
    (tmp_path / "working").mkdir()
    [_, (output, error), used] = session(python, tmp_path / "working", uninstall, source, USE)
    assert f"added: {NAME} 0.1.0" in output and error == "None" and used[1] == "None"


@pytest.mark.exhaustive
def test_a_failure_of_pip_stops_the_notebook(machine):
    python, folder = machine
    next(folder.glob("flax*.whl")).unlink()
    [(output, error)] = session(python, folder, cell())
    assert "flax>=0.12.8" in output
    assert "pip did not install fnet" in error and "messages above" in error
