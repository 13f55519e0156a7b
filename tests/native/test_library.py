"""How the kernels are compiled, kept and loaded, and what happens where they cannot be."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fnet.native import _library

ROOT = Path(__file__).parents[2]
needs_a_compiler = pytest.mark.skipif(
    _library._compiler() is None, reason="there is no C++ compiler"
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A machine on which nothing was compiled. The process may load kernels twice."""
    monkeypatch.setenv("FNET_CACHE", str(tmp_path / "cache"))
    _library.library.cache_clear()
    yield tmp_path / "cache" / "native"
    _library.library.cache_clear()


def few_sources(monkeypatch, tmp_path, text):
    (tmp_path / "source").mkdir(exist_ok=True)
    # XLA refuses another handler of the same name, so that each test has its own version.
    (tmp_path / "source" / "one.cpp").write_text(f"// {tmp_path}\n{text}")
    monkeypatch.setattr(_library, "SOURCE", tmp_path / "source")
    monkeypatch.setattr(_library, "HANDLERS", ("fnet_nothing",))


NOTHING = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error nothing(ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }
#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(fnet_nothing, nothing, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
#pragma GCC visibility pop
"""


@needs_a_compiler
def test_is_compiled_once_and_again_for_other_sources(fresh, monkeypatch, tmp_path):
    few_sources(monkeypatch, tmp_path, NOTHING)
    first = _library.library()
    assert first, first.reason
    assert first.path == fresh / f"{first.version}.so" and first.target("f") == f"f_{first.version}"
    written = first.path.stat().st_mtime_ns
    _library.library.cache_clear()
    assert _library.library() == first and first.path.stat().st_mtime_ns == written
    few_sources(monkeypatch, tmp_path, NOTHING + "// another version\n")
    _library.library.cache_clear()
    second = _library.library()
    assert second and second.version != first.version
    assert sorted(fresh.iterdir()) == sorted((first.path, second.path))


@needs_a_compiler
def test_a_damaged_file_is_compiled_again(fresh, monkeypatch, tmp_path):
    few_sources(monkeypatch, tmp_path, NOTHING)
    version = _library._version(_library._compiler())
    fresh.mkdir(mode=0o700, parents=True)
    (fresh / f"{version}.so").write_bytes(b"\x7fELF, but no more")
    kernels = _library.library()
    assert kernels and kernels.path.stat().st_size > 1000


@needs_a_compiler
def test_files_that_others_can_write_are_not_loaded(fresh, monkeypatch, tmp_path):
    few_sources(monkeypatch, tmp_path, NOTHING)
    assert _library.library()
    for mode, path in ((0o777, fresh), (0o772, _library.library().path)):
        path.chmod(mode)
        _library.library.cache_clear()
        refused = _library.library()
        assert not refused
        assert refused.reason == (
            f"others can write {path}: set FNET_CACHE to a folder that only you can write"
        )
        path.chmod(0o700)


def test_without_a_compiler(fresh, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not _library.library() and not fresh.exists()
    assert _library.missing() == (
        "fnet's kernels are not used: there is no C++ compiler: install g++ or clang, or set CXX",
    )


def test_nothing_is_missing_before_a_program_asks(fresh):
    assert _library.missing() == ()


@needs_a_compiler
def test_an_error_of_the_compiler_is_the_reason(fresh, monkeypatch, tmp_path):
    few_sources(monkeypatch, tmp_path, "not C++")
    assert "cannot compile the kernels: " in _library.library().reason
    assert [path for path in fresh.iterdir() if path.suffix == ".so"] == []


def test_a_compiler_that_hangs_is_stopped(fresh, monkeypatch, tmp_path):
    compiler = tmp_path / "slow"
    compiler.write_text("#!/bin/sh\nsleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(_library, "_SECONDS", 0.1)
    assert _library.library().reason == f"{compiler} did not finish in 0.1 s"


@needs_a_compiler
def test_a_cache_folder_that_cannot_be_written(fresh, monkeypatch, tmp_path):
    few_sources(monkeypatch, tmp_path, NOTHING)
    monkeypatch.setenv("FNET_CACHE", os.devnull)
    assert "cannot be loaded" in _library.library().reason


@needs_a_compiler
def test_several_processes_compile_at_once(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one.cpp").write_text(NOTHING)
    program = (
        "import pathlib, sys; from fnet.native import _library; "
        "_library.SOURCE, _library.HANDLERS = pathlib.Path(sys.argv[1]), ('fnet_nothing',); "
        "kernels = _library.library(); print(bool(kernels), kernels)"
    )
    environment = {**os.environ, "FNET_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, tmp_path / "source"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(3)
    ]
    outputs = [child.communicate(timeout=300)[0] for child in children]
    assert len({*outputs}) == 1 and outputs[0].startswith("True "), outputs
    assert len(list((tmp_path / "cache" / "native").iterdir())) == 1
