"""Compiles the kernels with the system's C++ compiler, and loads them."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from fnet._util import _files
from fnet._util._cache import cache_folder
from fnet.hardware._cpu import read_cpu

SOURCE = Path(__file__).parent / "source"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fPIC",
)
HANDLERS = (  # the symbols that the sources export
    "fnet_convolution",
    "fnet_packed",
    "fnet_skinny",
    "fnet_lstm",
    "fnet_lstm_gradient",
    "fnet_gru",
    "fnet_gru_gradient",
)
_SECONDS = 300  # after this time, the compiler is stopped


@dataclasses.dataclass(frozen=True)
class Library:
    """The kernels of this machine.

    Attributes:
        path: the file of the compiled kernels, or None.
        reason: why there are no kernels, or "".
        version: a hash of everything on which the compiled code depends. It is a part of the names
            under which programs call the kernels, so that JAX's cache of compiled programs
            recompiles a program whose kernels have changed.
    """

    path: Path | None
    reason: str
    version: str

    def __bool__(self) -> bool:
        return self.path is not None

    def target(self, handler: str) -> str:
        """Returns the name under which programs call a handler, such as "fnet_convolution"."""
        return f"{handler}_{self.version}"


@functools.cache
def library() -> Library:
    """Returns this machine's kernels. The first call on a machine compiles them, which takes some
    seconds; later processes load the file from the cache folder.

    >>> kernels = library()
    >>> bool(kernels) == (kernels.reason == "")
    True
    """
    compiler = _compiler()
    if compiler is None:
        return _without("there is no C++ compiler: install g++ or clang, or set CXX")
    version = _version(compiler)
    folder = cache_folder() / "native"
    path = folder / f"{version}.so"
    try:
        if not path.exists():
            _build(compiler, path)
        if reason := _unsafe(folder) or _unsafe(path):
            return _without(reason)
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError:  # a damaged file
            _build(compiler, path)
            loaded = ctypes.CDLL(str(path))
        _register(loaded, version)
    except subprocess.CalledProcessError as error:
        first = next(iter(error.stderr.strip().splitlines()), f"exit status {error.returncode}")
        return _without(f"{shlex.join(compiler)} cannot compile the kernels: {first}")
    except subprocess.TimeoutExpired:
        return _without(f"{shlex.join(compiler)} did not finish in {_SECONDS} s")
    except (OSError, AttributeError) as error:
        return _without(f"the kernels cannot be loaded: {error}")
    return Library(path, "", version)


def missing() -> tuple[str, ...]:
    """Returns a line that says why the kernels are not used, if a program asked for them in vain."""
    asked = library.cache_info().currsize
    reason = library().reason if asked else ""
    return (f"fnet's kernels are not used: {reason}",) if reason else ()


def _without(reason: str) -> Library:
    return Library(None, reason, "")


def _compiler() -> list[str] | None:
    """Returns the command of the C++ compiler: $CXX, or the first one on the path."""
    if given := shlex.split(os.environ.get("CXX", "")):
        return given if shutil.which(given[0]) else None
    found = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    return [found] if found else None


def _sources() -> list[Path]:
    return sorted(path for path in SOURCE.iterdir() if path.suffix in (".cpp", ".h"))


def _version(compiler: list[str]) -> str:
    """Returns a hash of the sources, the compiler, this CPU, and the interface to XLA."""
    cpu, file = read_cpu(), Path(shutil.which(compiler[0]) or compiler[0]).resolve()
    status = file.stat()
    interface = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    parts: list[bytes] = [path.read_bytes() for path in (*_sources(), interface)]
    about = cpu.model, cpu.flags, FLAGS, compiler, str(file), status.st_size, status.st_mtime_ns
    parts.append(repr(about).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _build(compiler: list[str], path: Path) -> None:
    """Compiles the kernels to a file, all sources at the same time. Other processes never see an
    incomplete file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sources = [file for file in _sources() if file.suffix == ".cpp"]

    def run(*arguments: str) -> None:
        command = [*compiler, *FLAGS, *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        objects = [str(Path(folder, f"{file.stem}.o")) for file in sources]
        include = "-isystem", jax.ffi.include_dir()
        one = lambda file, built: run(*include, "-c", str(file), "-o", built)
        list(pool.map(one, sources, objects))
        with _files.replacing(path, durable=True) as new:
            run("-shared", *objects, "-o", str(new))


def _unsafe(path: Path) -> str | None:
    """Returns why a file or folder may have been written by somebody else, or None. Code is loaded
    only from files that this user alone can write."""
    status = path.stat()
    if status.st_uid != os.getuid():
        return f"{path} belongs to another user: set FNET_CACHE to a folder of your own"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write {path}: set FNET_CACHE to a folder that only you can write"
    return None


def _register(loaded: ctypes.CDLL, version: str) -> None:
    for handler in HANDLERS:
        jax.ffi.register_ffi_target(
            f"{handler}_{version}", jax.ffi.pycapsule(getattr(loaded, handler)), platform="cpu"
        )
