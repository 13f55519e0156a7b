"""Errors of the server of an object store: passing ones do no harm, lasting ones are one line."""

import subprocess
import sys
import time

import pytest
import s3
from store_runs import TREE, fit, rows, saved

from fnet import training as tr
from fnet.training.checkpoints import _lease, _storage
from fnet.training.checkpoints._checkpoint import Checkpoints

pytestmark = [
    pytest.mark.skipif(bool(s3.MISSING), reason=s3.REASON),
    pytest.mark.usefixtures("quickly"),
]


@pytest.fixture
def once(monkeypatch):
    """An error that lasts is not waited for."""
    monkeypatch.setattr(_storage, "_RETRIES", 0)
    monkeypatch.setattr(_storage, "_PAUSE", 0.0)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503, "count": 3},
        {"status": 500, "method": "PUT", "count": 2},
        {"status": 429, "count": 2},
        {"reset": "before", "count": 2},
        {"reset": "before", "match": "manifest", "count": 2},
        {"reset": "after", "match": "manifest", "method": "PUT", "count": 2},
        {"reset": "after", "match": "arrays", "method": "PUT"},
        {"reset": "after", "match": ".lock", "method": "PUT"},
        {"status": 503, "match": "list-type", "count": 2},
        {"reset": "after", "method": "DELETE"},
    ],
    ids=str,
)
def test_a_passing_error_does_no_harm(store, server, fault):
    server.faults(fault)
    checkpoints = saved(store, (1, 2, 3), keep=2)
    assert checkpoints.steps() == [2, 3] and checkpoints.verify(2) == 2
    server.faults({"status": 503, "method": "GET", "count": 2})
    assert checkpoints.restore(TREE)["n"] == 3


@pytest.mark.parametrize("match", ["arrays", "manifest"])
def test_a_lasting_error_is_one_line_and_loses_nothing(store, server, once, match):
    with Checkpoints(store, best="loss") as checkpoints:
        checkpoints.save(1, TREE, metrics={"loss": 1.0})
        checkpoints.wait()
        server.faults({"status": 503, "match": match, "method": "PUT", "count": 9999})
        checkpoints.save(2, TREE)
        with pytest.raises(
            tr.CheckpointError,
            match=rf": step 2 could not be saved \(s3://bucket/.*{match}.*: the "
            r"server answered 503[^)]*\); the checkpoint of step 1 is whole$",
        ):
            checkpoints.wait()
        server.faults()
        assert checkpoints.steps() == [1] and checkpoints.verify() == 1
        checkpoints.save(2, TREE)  # once it answers again
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
        server.faults(
            {"status": 500, "count": 9999}
        )  # nothing answers: that is no damage, nothing is set aside
        for call in (
            lambda: checkpoints.restore(TREE),
            checkpoints.steps,
            checkpoints.best,
            lambda: tr.load(store),
        ):
            with pytest.raises(
                tr.CheckpointError, match=r"^s3://.*the server answered 500"
            ) as error:
                call()
            assert "\n" not in str(error.value)
        checkpoints.save(3, TREE)
        with pytest.raises(
            tr.CheckpointError,
            match=r"step 3 could not be saved .*the checkpoint of step 2 is whole",
        ):
            checkpoints.wait()
        server.faults({"status": 500, "method": "POST", "count": 9999})  # nothing can be deleted
        checkpoints._keep = 1
        checkpoints.save(4, TREE)
        with pytest.raises(
            tr.CheckpointError, match="step 4 was saved, but older checkpoints could not be removed"
        ):
            checkpoints.wait()
        server.faults()
        assert (
            checkpoints.latest() == 4 and checkpoints.verify(4) == 4 and not checkpoints.damaged()
        )


def test_the_best_is_not_removed_while_its_manifest_cannot_be_read(store, server, once):
    saved(store, (1,))
    with Checkpoints(store, keep=1, best="loss", mode="min") as checkpoints:
        checkpoints.lock()
        server.faults({"status": 500, "method": "GET", "match": "1/manifest", "count": 9999})
        checkpoints.save(2, TREE, metrics={"loss": 2})
        with pytest.raises(
            tr.CheckpointError, match="step 2 was saved, but older checkpoints could not be removed"
        ):
            checkpoints.wait()
        server.faults()
        assert checkpoints.steps() == [1, 2] and checkpoints.best() == 1


def test_a_run_ends_with_one_error_and_goes_on(store, server, once, tmp_path):
    """The log cannot be written, then the checkpoints: the same command goes on to the same end."""
    for match, kind in (("metrics", OSError), ("manifest", tr.CheckpointError)):
        server.faults({"status": 503, "match": match, "method": "PUT", "skip": 2, "count": 9999})
        with pytest.raises(kind, match="answered 503"):
            fit(store, tensorboard=False)
        server.faults()
    fit(store, tensorboard=False)
    fit(tmp_path, tensorboard=False)
    assert rows(store) == rows(tmp_path) and tr.load(store).params == tr.load(tmp_path).params


def test_a_kill_during_a_save_leaves_the_step_before(store, server):
    """SIGKILL after the arrays and before the manifest; the next run takes the lock at once, and
    goes on."""
    program = (
        "import os, sys, numpy as np\nfrom fnet import training as tr\n"
        "from fnet.training.checkpoints import _storage\n"
        "create = _storage.StorePath.create\n"
        "def harmed(self, data):\n    if '2/manifest' in str(self): os.kill(os.getpid(), 9)\n"
        "    return create(self, data)\n_storage.StorePath.create = harmed\n"
        "checkpoints = tr.Checkpoints(sys.argv[1])\nfor n in (1, 2):\n"
        "    checkpoints.save(n, {'a': np.arange(6, dtype=np.float32).reshape(2, 3), 'n': n})\n"
        "checkpoints.wait()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, store], timeout=120, capture_output=True, text=True
    )
    assert done.returncode == -9, done.stderr
    keys = _storage.location(store).keys()
    assert (
        any(key.startswith("2/arrays") for key in keys)
        and "2/manifest.json" not in keys
        and ".lock" in keys
    )
    began = time.monotonic()
    checkpoints = saved(store, (3,))
    assert time.monotonic() - began < _lease.EXPIRY / 2
    assert checkpoints.steps() == [1, 3] and checkpoints.restore(TREE, 1)["n"] == 1
    assert not any(key.startswith(("2/", ".lock")) for key in checkpoints.folder.keys())


# Invalid input.


@pytest.mark.parametrize(
    "url, text",
    [
        (
            "ftp://bucket/run",
            "ftp://bucket/run: the scheme 'ftp' is not supported; use a local path, "
            "s3://bucket/prefix",
        ),
        ("file:///tmp/run", "the scheme 'file' is not supported"),
        ("s3://", "s3://: expected the name of a bucket after s3://; use a local path"),
        ("s3:///run", "expected the name of a bucket"),
        ("s3://key:secret@bucket/run", "expected the name of a bucket"),
        ("s3://bucket/a/../b", "cannot be part of a key"),
        ("s3://bucket/a\nb", "cannot be part of a key"),
    ],
    ids=["ftp", "file", "empty", "no-bucket", "secret", "dots", "newline"],
)
def test_what_is_no_url_of_a_store(url, text):
    for call in (tr.Checkpoints, tr.load, tr.read_metrics, tr.clear, lambda where: fit(where)):
        with pytest.raises(ValueError, match=text) as error:
            call(url)
        assert "\n" not in str(error.value).replace(url, "")


def test_a_path_cannot_hold_a_url(tmp_path):
    import pathlib

    with pytest.raises(
        ValueError, match=r"a pathlib.Path cannot hold a URL; pass 's3://bucket/run' as a string"
    ):
        tr.load(pathlib.Path("s3://bucket/run"))


def test_no_such_bucket_and_no_such_run(store):
    with pytest.raises(
        tr.CheckpointError, match=r"^s3://nowhere/run/checkpoints/.lock: there is no such bucket"
    ):
        fit("s3://nowhere/run")
    with pytest.raises(FileNotFoundError, match="no checkpoint here"):
        tr.load(store)


def test_access_that_is_refused_says_what_to_set(store, server, monkeypatch):
    server.faults({"status": 403, "count": 9999})
    with pytest.raises(
        tr.CheckpointError,
        match=r"access was refused \(the server answered 403[^)]*\). Set "
        r"AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
    ):
        fit(store)
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        OSError, match=r"^az://container: .*Set AZURE_STORAGE_ACCOUNT_NAME and AZURE"
    ):
        tr.load("az://container/run")


def test_without_obstore_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"^gs://bucket: object stores need the package obstore .*: pip install obstore$",
    ):
        fit("gs://bucket/run")
