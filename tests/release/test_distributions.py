"""The parts of `make dist` that need no build: archives whose bytes depend on their files alone, the
interpreters that it finds, and what it takes for a failure."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

from tests.release import __main__ as make_dist
from tests.release import colab, distributions, trial

FILES = {"fnet/a.py": b"a = 1\n", "fnet/b.py": b"", "package-1.dist-info/RECORD": b"fnet/a.py"}


def wheel(path, names, year, mode):
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            info = zipfile.ZipInfo(name, (year, 1, 2, 3, 4, 6))
            info.external_attr = mode << 16
            archive.writestr(info, FILES[name])
    distributions.normalize_wheel(path, 1_000_000_000)
    return path.read_bytes()


def source(path, folder, names, mode):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(FILES[name])
        (folder / name).chmod(mode)
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.add(folder / name, name)
    distributions.normalize_source(path, 1_000_000_000)
    return path.read_bytes()


def test_a_wheel_depends_on_its_files_alone(tmp_path):
    data = wheel(tmp_path / "one.whl", FILES, 2020, 0o100600)
    assert data == wheel(tmp_path / "another.whl", reversed(FILES), 2024, 0o100775)
    with zipfile.ZipFile(tmp_path / "one.whl") as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == FILES
        assert archive.namelist()[-1].endswith("RECORD")
        assert {info.date_time[0] for info in archive.infolist()} == {2001}
        assert {info.external_attr >> 16 for info in archive.infolist()} == {0o100644}


def test_a_source_distribution_depends_on_its_files_alone(tmp_path):
    data = source(tmp_path / "one.tar.gz", tmp_path / "one", list(FILES), 0o600)
    (tmp_path / "elsewhere").mkdir()
    again = tmp_path / "elsewhere" / "another.tar.gz"
    assert data == source(again, tmp_path / "another", list(reversed(FILES)), 0o664)
    with tarfile.open(again) as archive:
        assert {each.name: archive.extractfile(each).read() for each in archive} == FILES
        assert {(each.mtime, each.mode, each.uid, each.uname) for each in archive} == {
            (1_000_000_000, 0o644, 0, "")
        }


def test_the_time_of_the_files(monkeypatch, tmp_path):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    assert distributions.epoch() == 1_000_000_000
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "5")
    assert distributions.epoch() == distributions.OLDEST
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    monkeypatch.setattr(distributions, "ROOT", tmp_path)  # where no commit is
    assert distributions.epoch() == distributions.OLDEST


def test_builds_that_differ_are_refused(monkeypatch, tmp_path):
    def build(folder):
        folder.mkdir()
        (folder / "f.whl").write_text(folder.name)
        return [folder / "f.whl"]

    monkeypatch.setattr(distributions, "build", build)
    with pytest.raises(SystemExit, match=r"two builds of f\.whl differ"):
        make_dist.built(tmp_path)


def test_an_interpreter_that_does_not_run_is_none(monkeypatch, tmp_path):
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert here in make_dist.supported()
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    shim = tmp_path / "python3.98"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    assert make_dist.interpreter("3.98") is None
    folder = tmp_path / "versions" / f"{here}.7" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    assert make_dist.interpreter(here) in (f"/usr/bin/python{here}", str(folder / "python"))


def test_every_extra_of_users_is_resolved_in_one_command(monkeypatch, tmp_path):
    project = tomllib.loads((make_dist.ROOT / "pyproject.toml").read_text())["project"]
    *alone, together = make_dist.commands()
    left_out = *make_dist.DEVELOPERS, *make_dist.ACCELERATORS
    every = [*left_out, *alone, *together.split(",")]
    assert sorted(every) == sorted(project["optional-dependencies"])
    assert {"grain", "onnx", "search"} <= set(together.split(",")) and "litert" in alone
    ran = []
    monkeypatch.setattr(trial, "run", lambda command, folder: ran.append(command))
    monkeypatch.setattr(subprocess, "run", lambda command, check: None)
    make_dist.resolve(tmp_path / "f.whl", sys.executable, tmp_path)
    assert [command[-1] for command in ran] == [
        f"{tmp_path / 'f.whl'}[{extras}]" for extras in make_dist.commands()
    ]
    assert all("--dry-run" in command for command in ran)


def test_the_notebooks_run_on_colabs_python_and_packages(monkeypatch, tmp_path, capsys):
    ran = []
    (tmp_path / "f.whl").write_text("")
    monkeypatch.setattr(make_dist, "ROOT", tmp_path / "root")
    monkeypatch.setattr(make_dist, "commands", lambda: [])
    (tmp_path / "root").mkdir()
    monkeypatch.setattr(make_dist, "built", lambda folder: [tmp_path / "f.whl"])
    monkeypatch.setattr(make_dist, "check", lambda *arguments: None)
    monkeypatch.setattr(make_dist, "resolve", lambda *arguments: None)
    monkeypatch.setattr(make_dist, "interpreter", lambda version: f"python{version}")
    monkeypatch.setattr(
        colab, "try_out", lambda *arguments: ran.append(arguments[:2]) or "replaced: jax"
    )
    monkeypatch.setattr(sys, "argv", ["make dist", f"--pythons=3.12,{colab.PYTHON}"])
    make_dist.main()
    assert ran == [(tmp_path / "root" / "dist" / "f.whl", f"python{colab.PYTHON}")]
    printed = capsys.readouterr().out
    assert "replaced: jax\nPython 3.13: the notebooks run on Colab's packages" in printed
    monkeypatch.setattr(make_dist, "interpreter", lambda version: None)
    make_dist.main()
    assert len(ran) == 1
    assert (
        f"Python {colab.PYTHON}: no interpreter found that runs, so not tried"
        in capsys.readouterr().out
    )


def test_colabs_packages_are_those_that_fnet_replaces():
    pinned = {
        line.split("==")[0] for line in colab.PACKAGES.read_text().splitlines() if "==" in line
    }
    project = tomllib.loads((make_dist.ROOT / "pyproject.toml").read_text())["project"]
    assert set(colab.REPLACED) < pinned
    assert colab.PYTHON in make_dist.supported()
    # Colab does not have the only other package that fnet requires.
    assert {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]} - pinned == {
        "tensorboardX"
    }


def test_a_distribution_without_fnet_fails_its_trial(tmp_path):
    command = [sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"]
    subprocess.run(command, check=True)
    with pytest.raises(RuntimeError, match="No module named 'fnet'"):
        trial.try_out(tmp_path / "environment" / "bin" / "python", tmp_path / "empty")


def test_a_trial_does_not_see_the_repository(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    assert "PYTHONPATH" not in trial.clean() and trial.clean()["JAX_PLATFORMS"] == "cpu"
    assert "jax.jit" in trial.example()
