"""Files that are written whole or not at all."""

import os
import stat
import subprocess
import sys

import pytest

from fnet._util import _files
from fnet._util._files import replacing, synced, write, write_json


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_a_file_is_replaced_as_a_whole(tmp_path, durable, alone):
    path = tmp_path / "metrics.json"
    path.write_bytes(b"old")
    with replacing(path, durable=durable, alone=alone) as new:
        new.write_bytes(b"new")
        assert path.read_bytes() == b"old" and new.parent == tmp_path
        assert new.name.startswith(".") and new.name.endswith(".partial")
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["metrics.json"]


def test_text_is_utf8_and_json_is_for_people(tmp_path):
    write(tmp_path / "text", "größer\n")
    assert (tmp_path / "text").read_bytes() == "größer\n".encode()
    write_json(tmp_path / "json", {"a": [1]})
    assert (tmp_path / "json").read_text() == '{\n  "a": [\n    1\n  ]\n}\n'


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_the_old_file_is_left_alone(tmp_path, error):
    path = tmp_path / "weights"
    path.write_bytes(b"old")
    with pytest.raises(error, match="stopped"), replacing(path, durable=True) as new:
        new.write_bytes(b"half")
        raise error("stopped")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["weights"]


def test_an_error_of_the_rename_leaves_no_temporary_file(tmp_path):
    (tmp_path / "weights" / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        write(tmp_path / "weights", b"new")
    assert os.listdir(tmp_path) == ["weights"]


def test_the_error_of_the_block_is_raised_even_if_it_wrote_nothing(tmp_path):
    with pytest.raises(ValueError, match="nothing"), replacing(tmp_path / "weights"):
        raise ValueError("nothing")
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "missing" / "weights", b"")


def test_two_writers_do_not_share_a_temporary_file_unless_a_lock_keeps_one_out(tmp_path):
    path = tmp_path / "report.html"
    with replacing(path) as first, replacing(path) as second:
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert path.read_bytes() == b"first"
    with replacing(path, alone=True) as first:
        first.write_bytes(b"")
        assert first == tmp_path / ".report.html.partial"


def test_a_killed_writer_leaves_the_old_file_and_the_next_one_takes_its_place(tmp_path):
    path = tmp_path / "manifest"
    path.write_bytes(b"old")
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, pathlib, sys\n"
            "from fnet._util._files import replacing\n"
            "with replacing(pathlib.Path(sys.argv[1]), durable=True, alone=True) as new:\n"
            "    new.write_bytes(b'half of a long text')\n"
            "    os.kill(os.getpid(), 9)\n",
            path,
        ],
        check=False,
    )
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == [".manifest.partial", "manifest"]
    write(path, b"new", durable=True, alone=True)
    assert path.read_bytes() == b"new" and os.listdir(tmp_path) == ["manifest"]


def test_a_durable_file_is_synced_before_its_rename_and_its_folder_after(tmp_path, monkeypatch):
    calls = []
    sync, replace = os.fsync, os.replace

    def synced_now(number):
        folder = stat.S_ISDIR(os.fstat(number).st_mode)
        calls.append("folder" if folder else "file")
        sync(number)

    def replaced(*paths):
        calls.append("rename")
        replace(*paths)

    monkeypatch.setattr(_files.os, "fsync", synced_now)
    monkeypatch.setattr(_files.os, "replace", replaced)
    write(tmp_path / "a", b"1", durable=True)
    assert calls == ["file", "rename", "folder"]
    write(tmp_path / "a", b"2")
    assert calls == ["file", "rename", "folder", "rename"]
    with synced(tmp_path / "b") as file:
        file.write(b"3")
    assert calls[4:] == ["file"] and (tmp_path / "b").read_bytes() == b"3"


def test_the_new_file_has_the_permissions_of_any_new_file(tmp_path):
    """Temporary files of the module tempfile are readable by their owner alone."""
    (tmp_path / "plain").touch()
    write(tmp_path / "replaced", b"")
    mode = lambda name: (tmp_path / name).stat().st_mode
    assert mode("replaced") == mode("plain")
