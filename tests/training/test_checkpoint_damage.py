"""Damage done to checkpoints: found, named, set aside, never used, never deleted."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import training as tr
from fnet.training.checkpoints import _folder, _manifest, _writing

TREE = {
    "a": jnp.ones((2, 3)),
    "b": jnp.arange(64, dtype=jnp.float32),
    "empty": jnp.zeros((0, 2)),
    "n": 7,
}


def checkpoints_of(folder, steps=(1, 2)):
    with tr.Checkpoints(folder) as checkpoints:
        for step in steps:
            checkpoints.save(step, TREE | {"n": step}, notes={"step": step})
    return checkpoints


@pytest.fixture
def saved(tmp_path):
    return checkpoints_of(tmp_path / "c")


def files(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file())


def test_no_flipped_bit_passes(saved):
    """Every byte of the manifest and of the arrays, one random bit of each."""
    rng, tried = np.random.default_rng(0), 0
    for file in files(saved.folder / "2"):
        sound = file.read_bytes()
        for place in range(len(sound)):
            damaged = bytearray(sound)
            damaged[place] ^= 1 << int(rng.integers(8))
            file.write_bytes(damaged)
            with pytest.raises(
                tr.CheckpointError, match=rf"2: this checkpoint is damaged \(.*{_named(file)}"
            ):
                saved.verify(2)
            tried += 1
        file.write_bytes(sound)
    assert tried > 1000 and saved.verify() == 2


def _named(file):
    return "manifest.json" if file.name == "manifest.json" else r"(arrays-0.safetensors|'[ab]'|'n')"


def test_the_damaged_is_set_aside_and_the_one_before_it_used(saved):
    file = saved.folder / "2" / "arrays-0.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-30] ^= 4
    file.write_bytes(raw)
    for number in ("", "-2"):
        text = rf"step 2 is damaged \('b' .*checksum.*set aside as 2.damaged{number}; going on from step 1, the newest"
        with pytest.warns(tr.CheckpointWarning, match=text):
            assert saved.restore(TREE)["n"] == 1
        assert (saved.folder / f"2.damaged{number}" / "arrays-0.safetensors").read_bytes() == raw
        assert saved.latest() == 1
        shutil.copytree(saved.folder / "2.damaged", saved.folder / "2")
    assert saved.damaged() == ["2.damaged", "2.damaged-2"]
    saved.close()


def damages():
    def truncated(file):
        file.write_bytes(file.read_bytes()[:-1])

    def emptied(file):
        file.write_bytes(b"")

    def longer(file):
        file.write_bytes(file.read_bytes() + b"\0")

    def deleted(file):
        file.unlink()

    def of_another_step(file):
        shutil.copy(file.parent.parent / "1" / file.name, file)

    def a_folder(file):
        file.unlink()
        file.mkdir()

    def a_link(file):
        other = file.parent.parent / "elsewhere"
        shutil.move(file, other)
        file.symlink_to(other)

    def a_pipe(file):
        file.unlink()
        os.mkfifo(file)

    return [truncated, emptied, longer, deleted, of_another_step, a_folder, a_link, a_pipe]


@pytest.mark.parametrize("damage", damages(), ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["manifest.json", "arrays-0.safetensors"])
def test_a_file_that_is_not_what_it_was(saved, name, damage):
    damage(saved.folder / "2" / name)
    with pytest.warns(tr.CheckpointWarning, match=r"step 2 is damaged .*going on from step 1"):
        assert saved.restore(TREE)["n"] == 1
    saved.close()


def test_folders_that_changed_places(saved):
    folder = saved.folder
    (folder / "1").rename(folder / "x")
    (folder / "2").rename(folder / "1")
    (folder / "x").rename(folder / "2")
    with pytest.raises(
        tr.CheckpointError, match=r"can be read: step 2 is damaged .*that of step 1"
    ):
        saved.restore(TREE)
    saved.close()


def test_none_good_is_an_error_today_and_tomorrow(saved):
    for step in ("1", "2"):
        (saved.folder / step / "manifest.json").unlink()
    with pytest.raises(
        tr.CheckpointError,
        match=r"step 2 is damaged .*; step 1 is .* start again from the first step",
    ):
        saved.restore(TREE)
    saved.close()
    with pytest.raises(tr.CheckpointError, match=r"set aside: 1\.damaged, 2\.damaged"):
        tr.Checkpoints(saved.folder).restore(TREE)


def test_a_damaged_step_that_was_asked_for_by_number_stays(saved):
    (saved.folder / "2" / "manifest.json").unlink()
    with pytest.raises(
        tr.CheckpointError, match=r"damaged \(manifest.json is missing\); there are also steps 1$"
    ):
        saved.restore(TREE, 2)
    assert saved.steps() == [1, 2]


def test_while_another_run_writes_nothing_is_renamed(saved):
    (saved.folder / "2" / "manifest.json").unlink()
    with tr.Checkpoints(saved.folder) as other:
        other.lock()
        with pytest.warns(
            tr.CheckpointWarning, match=r"step 2 is damaged \(manifest.json is missing\); going on"
        ):
            assert saved.restore(TREE)["n"] == 1
    assert saved.steps() == [1, 2]


def test_what_a_manifest_may_not_say(saved):
    """Sealed as it should be, and still held to what the files hold: nobody vouches for who wrote
    it."""
    folder = saved.folder / "2"
    sound = _manifest.read_manifest(folder)
    for where, value, text in [
        (("leaves", "a", "shape"), [1 << 40, 3], "'a' has 24 bytes"),
        (("leaves", "a", "dtype"), "object", "KeyError: 'object'"),
        (("leaves", "a", "pieces", 0, "at"), [0, 1 << 40], "'a' lies outside"),
        (("leaves", "a", "pieces", 0, "file"), "../1/arrays-0.safetensors", "KeyError"),
        (
            ("leaves", "b", "pieces", 0, "at"),
            sound["leaves"]["a"]["pieces"][0]["at"],
            "'b' has 24 bytes",
        ),
        (
            ("files",),
            {"/etc/passwd": {"bytes": 3, "crc32": 3}},
            "'/etc/passwd' is not a file of a checkpoint",
        ),
        (("version",), 2, "version 2; this fnet reads"),
        (("step",), -1, "-1 is no count"),
    ]:
        broken = json.loads(
            json.dumps({key: value for key, value in sound.items() if key != "blake2b"})
        )
        place = broken
        for key in where[:-1]:
            place = place[key]
        place[where[-1]] = value
        body = json.dumps(broken).encode()[:-1] + b", "
        digest = _manifest.hashlib.blake2b(body, digest_size=32).hexdigest().encode()
        (folder / "manifest.json").write_bytes(body + b'"blake2b": "%s"}\n' % digest)
        with pytest.raises(tr.CheckpointError, match=text):
            saved.verify(2)


def test_checksums_are_joined_as_zlib_would_go_on():
    rng = np.random.default_rng(0)
    for size in (1 << 18, (1 << 18) + 1, 1_234_567, 8_388_608):
        first, second = rng.bytes(1000), rng.bytes(size)
        own = zlib.crc32(second)
        assert _manifest.joined(zlib.crc32(first), own, second) == zlib.crc32(first + second)


# Saving where it cannot be done.


def test_a_full_disk(saved, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_manifest, "write_arrays", full)
    saved.save(3, TREE)
    with pytest.raises(
        tr.CheckpointError,
        match=r"step 3 could not be saved \(No space left on device\); the "
        "checkpoint of step 2 is whole",
    ):
        saved.wait()
    assert sorted(path.name for path in saved.folder.iterdir()) == [".lock", "1", "2"]
    monkeypatch.undo()
    saved.save(3, TREE)  # once there is room again
    saved.close()
    assert saved.steps() == [1, 2, 3]


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    def read_only(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(_folder, "Lock", read_only)
    with pytest.raises(
        tr.CheckpointError, match=r"nothing can be saved here \(Read-only file system\): choose"
    ):
        tr.Checkpoints(tmp_path).save(1, TREE)


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "c").write_text("")
    with pytest.raises(tr.CheckpointError, match=r"c: nothing can be saved here \(File exists\)"):
        tr.Checkpoints(tmp_path / "c").save(1, TREE)


def test_what_killed_saves_left_is_cleared_away(saved):
    folder = saved.folder
    (folder / ".saving-9").mkdir()
    (folder / ".deleting-8").mkdir()
    shutil.copytree(
        folder / "2", folder / ".replaced-2"
    )  # replaced, and the old one not yet removed
    (folder / "1").rename(
        folder / ".replaced-1"
    )  # moved away, and the new one not yet in its place
    assert saved.steps() == [2]
    saved.lock()
    assert saved.steps() == [1, 2] and saved.restore(TREE, 1)["n"] == 1
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "1", "2"]
    saved.close()


def test_two_runs_in_one_folder(saved):
    saved.lock()
    other = tr.Checkpoints(saved.folder)
    with pytest.raises(
        tr.CheckpointError,
        match=rf"another run is using this folder \(process {os.getpid()}\): wait",
    ):
        other.save(3, TREE)
    assert other.restore(TREE)["n"] == 2  # reading is free
    saved.close()
    other.save(3, TREE)
    other.close()


@pytest.mark.exhaustive
def test_the_lock_ends_with_its_process_and_not_with_its_child(tmp_path):
    """A forked child, which shares the parent's open files, outlives it."""
    program = (
        "import os, sys, time\nfrom fnet.training.checkpoints._lock import Lock\nimport pathlib\n"
        f"lock = Lock(pathlib.Path({str(tmp_path)!r}))\nchild = os.fork()\n"
        "if child == 0: time.sleep(60)\nprint(child, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        child = int(process.stdout.readline())
        try:
            with pytest.raises(tr.CheckpointError, match="another run"):
                tr.Checkpoints(tmp_path).lock()
            process.kill()
            process.wait()
            deadline = time.monotonic() + 10
            with tr.Checkpoints(tmp_path) as free:
                while True:
                    try:
                        free.lock()
                        break
                    except tr.CheckpointError:
                        assert time.monotonic() < deadline
                        time.sleep(0.05)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_save_waits_for_nobody_in_vain(tmp_path, monkeypatch):
    """Of two processes one is gone: the other says so, and leaves what was there."""
    checkpoints_of(tmp_path, (1,))
    monkeypatch.setattr(_writing, "_PATIENCE", 0.1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        tr.CheckpointError,
        match=r"step 2 could not be saved \(.*not all processes wrote their part",
    ):
        with tr.Checkpoints(tmp_path) as checkpoints:
            checkpoints._shared = True  # it has been locked before
            checkpoints.save(2, TREE)
    assert tr.Checkpoints(tmp_path).steps() == [1]
