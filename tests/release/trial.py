"""What a new user does first, in an environment that has fnet and nothing else of its repository."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = ("PYTHONPATH", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION", "XLA_FLAGS")


def clean() -> dict[str, str]:
    """The environment variables of a user, without those of the tests."""
    kept = {name: value for name, value in os.environ.items() if name not in OWN}
    return {**kept, "JAX_PLATFORMS": "cpu"}


def example() -> str:
    """The program in README."""
    [program] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return program


def run(command: list, folder: Path) -> str:
    """Runs a command in `folder`, and returns what it prints.

    Raises:
        RuntimeError: the command failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, env=clean(), cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def try_out(python: Path, folder: Path) -> None:
    """Imports fnet, shows the manual of a function and the chips, and runs README's example, all in
    the empty folder `folder`.

    Raises:
        RuntimeError: one of them failed.
        AssertionError: one of them printed something else.
    """
    folder.mkdir()
    where = run([python, "-I", "-c", "import fnet; print(fnet.__file__)"], folder)
    assert Path(where.strip()).is_relative_to(python.parent.parent), where
    manual = run([python, "-I", "-c", "import fnet; help(fnet.transforms.tune)"], folder)
    assert "tune(" in manual and "Args:" in manual, manual
    assert "TPU v5e" in run([python.parent / "fnet", "chips"], folder)
    (folder / "example.py").write_text(example())
    loss = run([python, "example.py"], folder)
    assert 0 < float(loss) < 3, loss
