"""An environment with the declared dependencies of fnet and nothing else, created without network
access."""

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from packaging.requirements import Requirement


def closure(names):
    """Returns the distributions that the requirements `names` need, with the markers and extras of
    this Python."""
    found, queue = {}, [Requirement(name) for name in names]
    while queue:
        requirement = queue.pop()
        key = requirement.name.lower().replace("_", "-"), tuple(sorted(requirement.extras))
        if key in found:
            continue
        found[key] = distribution = importlib.metadata.distribution(requirement.name)
        assert requirement.specifier.contains(distribution.version, prereleases=True), requirement
        for text in distribution.requires or ():
            needed = Requirement(text)
            extras = [{"extra": extra} for extra in requirement.extras] or [{"extra": ""}]
            if needed.marker is None or any(needed.marker.evaluate(extra) for extra in extras):
                queue.append(needed)
    return list(
        {distribution.metadata["Name"]: distribution for distribution in found.values()}.values()
    )


def create(folder: Path, names) -> Path:
    """Creates a virtual environment in which links to these distributions are the only packages.
    Returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)})
    )
    for distribution in closure(names):
        for file in distribution.files:
            top, target = file.parts[0], site / file.parts[0]
            if top not in ("..", "__pycache__") and not target.exists():
                target.symlink_to(Path(distribution.locate_file(top)).resolve())
    return folder / "bin" / "python"


def install(python: Path, wheel: Path) -> None:
    """Installs the wheel with pip. It needs no index, because all requirements are installed."""
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }  # may contain fnet
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            wheel,
        ],
        check=True,
        env=environment,
    )


def kernel(folder: Path, python: Path) -> None:
    """Makes `python` a kernel of Jupyter with the name "fresh", for JUPYTER_PATH=folder."""
    path = folder / "kernels" / "fresh" / "kernel.json"
    path.parent.mkdir(parents=True)
    path.write_text(
        json.dumps(
            {
                "argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                "display_name": "fresh",
                "language": "python",
            }
        )
    )
