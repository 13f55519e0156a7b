"""Environments with other releases of JAX."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from fnet._util._cache import cache_folder


def interpreter(version: str) -> str:
    """Returns the Python of an environment with a release of jax, which is created if needed.

    Raises:
        ValueError: `version` is neither a version nor an interpreter, or cannot be installed.
    """
    if os.path.sep in version:
        if not os.access(version, os.X_OK):
            raise ValueError(f"{version} is not an interpreter")
        return version
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)+", version):
        raise ValueError(f"{version!r} is not a version of jax, such as 0.10.2")
    name = f"jax-{version}-python{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache_folder() / name
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return str(python)
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", f"jax=={version}"],
    )
    for command in steps:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ValueError(f"cannot be installed: {said}")
    (folder / "complete").touch()
    return str(python)
