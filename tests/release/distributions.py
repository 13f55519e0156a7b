"""The wheel and the source distribution, of which two builds have the same bytes."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
OLDEST = 315532800  # 1980-01-01, the first second that a zip archive can state


def build(folder: Path) -> list[Path]:
    """Builds both in `folder`, with the installed setuptools. Returns [wheel, source distribution].

    They are built from a copy of what they contain, so that no other file of a checkout is in them.
    """
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "fnet", source / "fnet", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, source)
    (source / "MANIFEST.in").write_text("include CHANGELOG.md\n")
    time_of_files = epoch()
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(time_of_files)},
    )
    if done.returncode:
        raise RuntimeError(done.stdout)
    shutil.rmtree(source)
    [wheel], [archive] = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    normalize_wheel(wheel, time_of_files)
    normalize_source(archive, time_of_files)
    return [wheel, archive]


def epoch() -> int:
    """Returns the time that all files in the distributions have, in seconds since 1970: the
    variable SOURCE_DATE_EPOCH, the time of the last commit, or 1980."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return max(int(given), OLDEST)
    command = ["git", "log", "-1", "--format=%ct"]
    try:
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return OLDEST
    return max(int(commit.stdout), OLDEST)


def normalize_wheel(path: Path, seconds: int) -> None:
    """Rewrites a wheel with sorted files, one time, and the modes of files without owner."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(files, key=lambda name: (".dist-info/" in name, name)):
            info = zipfile.ZipInfo(name, time.gmtime(seconds)[:6])
            info.create_system = 3  # Unix, whose modes follow
            info.external_attr = 0o100644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, files[name], compresslevel=9)


def normalize_source(path: Path, seconds: int) -> None:
    """Rewrites a .tar.gz with sorted files, one time, and the modes of files without owner."""
    with tarfile.open(path) as archive:
        files = {each.name: archive.extractfile(each).read() for each in archive if each.isfile()}
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(data), seconds, 0o644
            archive.addfile(info, io.BytesIO(data))
    with (
        path.open("wb") as file,
        gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=seconds) as outer,
    ):
        outer.write(inner.getvalue())
