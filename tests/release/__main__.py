"""Builds the wheel and the source distribution twice, compares the builds, and tries them out.

    make dist                                # in an empty environment of each supported Python
    make dist ARGS=--pythons=3.12            # of this one alone

Each environment is empty but for what pip installs with the distribution, from an index and without
constraints, as for a new user. pip also resolves the extras of users, each in one command. The notebooks
run where Colab's Python is, with Colab's packages. That takes minutes, so CI tests only the parts of
this program.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.release import colab, distributions, trial

ROOT = distributions.ROOT
DEVELOPERS = "dev", "docs", "bench", "programs", "verify"  # extras of those who work on fnet
ACCELERATORS = "cuda12", "cuda13", "tpu", "tpu-plan"  # pip downloads gigabytes to resolve these
ALONE = ("litert",)  # which needs an older typing_extensions than others may


def supported() -> list[str]:
    """The versions of Python that have a file in constraints/."""
    versions = [path.stem[2:] for path in (ROOT / "constraints").glob("py3.*.txt")]
    return sorted(versions, key=lambda version: int(version.split(".")[1]))


def interpreter(version: str) -> str | None:
    """Returns an interpreter of this version that runs and creates environments, or None. Version
    managers leave shims of absent versions on the path."""
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT", home / ".pyenv"))
    candidates = [
        shutil.which(f"python{version}"),
        f"/usr/bin/python{version}",
        *pyenv.glob(f"versions/{version}*/bin/python"),
        *home.glob(f".local/share/uv/python/cpython-{version}*/bin/python"),
    ]
    program = f"import sys, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for candidate in filter(None, candidates):
        try:
            done = subprocess.run([candidate, "-c", program], capture_output=True)
        except OSError:
            continue
        if done.returncode == 0:
            return str(candidate)
    return None


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def built(folder: Path) -> list[Path]:
    """Builds twice, in folders of different names, and returns the first build."""
    first, second = (distributions.build(folder / name) for name in ("one", "another"))
    for path, again in zip(first, second):
        if digest(path) != digest(again):
            sys.exit(f"two builds of {path.name} differ")
    return first


def check(file: Path, python: str, folder: Path) -> None:
    """Installs `file` with one command in an empty environment, and tries it out."""
    subprocess.run([python, "-m", "venv", folder / "environment"], check=True)
    inside = folder / "environment" / "bin" / "python"
    trial.run([inside, "-m", "pip", "install", "--quiet", file], folder)
    trial.try_out(inside, folder / "empty")


def commands() -> list[str]:
    """Returns the extras of users, such as "grain,onnx", in as many groups as pip needs commands.
    Those that add only the libraries of accelerators to JAX are left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    extras -= {*DEVELOPERS, *ACCELERATORS, *ALONE}
    return [*ALONE, ",".join(sorted(extras))]


def resolve(file: Path, python: str, folder: Path) -> None:
    """Lets pip find versions, with wheels, of all that the extras of users need in an empty
    environment. Nothing is installed."""
    subprocess.run([python, "-m", "venv", folder / "environment"], check=True)
    inside = folder / "environment" / "bin" / "python"
    pip = [inside, "-m", "pip", "install", "--quiet", "--dry-run", "--only-binary=:all:"]
    for extras in commands():
        trial.run([*pip, f"{file}[{extras}]"], folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make dist")
    parser.add_argument(
        "--pythons",
        default=",".join(supported()),
        help="versions to try, separated by commas; empty: none (default: %(default)s)",
    )
    versions = [version for version in parser.parse_args().pythons.split(",") if version]
    results = ROOT / "dist"
    with tempfile.TemporaryDirectory() as temporary:
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir()
        files = [Path(shutil.copy(path, results)) for path in built(Path(temporary))]
    for path in files:
        print(f"{digest(path)}  {path.relative_to(ROOT)}", flush=True)
    for version in versions:
        python = interpreter(version)
        if python is None:
            print(f"Python {version}: no interpreter found that runs, so not tried")
            continue
        for path in files:
            with tempfile.TemporaryDirectory() as temporary:
                check(path, python, Path(temporary))
            print(f"Python {version}: {path.name} installs and runs", flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            resolve(files[0], python, Path(temporary))
        print(f"Python {version}: pip resolves [{'], ['.join(commands())}]", flush=True)
        if version == colab.PYTHON:
            with tempfile.TemporaryDirectory() as temporary:
                print(colab.try_out(files[0], python, Path(temporary)))
            print(f"Python {version}: the notebooks run on Colab's packages, after one restart")
    print(f"Install it with:  pip install '{files[0].relative_to(ROOT)}'")


if __name__ == "__main__":
    main()
