"""One run to a prefix of an object store: its lock, which other machines respect."""

import json
import os
import signal
import time

import pytest
import s3
from store_runs import TREE, fit, saved

from fnet import training as tr
from fnet.training.checkpoints import _lease, _storage
from fnet.training.checkpoints._checkpoint import Checkpoints

pytestmark = [
    pytest.mark.skipif(bool(s3.MISSING), reason=s3.REASON),
    pytest.mark.usefixtures("quickly"),
]


def foreign_lock(store, **changes):
    lock = _storage.location(store) / ".lock"
    lock.write_bytes(
        json.dumps({"owner": "other", "host": "node7", "process": 12} | changes).encode()
    )
    return lock


def test_two_runs_of_one_machine(store):
    with saved(store) as checkpoints:
        checkpoints.lock()
        other = Checkpoints(store)
        with pytest.raises(
            tr.CheckpointError,
            match=rf"another run is using this folder \(process {os.getpid()} on ",
        ):
            other.save(3, TREE)
        assert other.restore(TREE)["n"] == 2  # reading is free
    other.save(3, TREE)
    other.close()
    assert other.steps() == [1, 2, 3]


def test_a_lock_of_another_machine_expires(store, monkeypatch):
    monkeypatch.setattr(_lease, "EXPIRY", 1.5)
    foreign_lock(store)
    assert saved(store).steps() == [1, 2]


def test_a_lock_that_another_machine_renews_is_respected(store, monkeypatch):
    foreign_lock(store)
    pause, beats = time.sleep, iter(range(9))

    def renewing(seconds):
        foreign_lock(store, beat=next(beats))
        pause(0.01)

    monkeypatch.setattr(_lease.time, "sleep", renewing)
    with pytest.raises(
        tr.CheckpointError, match=r"another run is using this folder \(process 12 on node7\)"
    ):
        saved(store)


def test_a_lock_is_renewed_and_its_loss_is_noticed(store, monkeypatch):
    monkeypatch.setattr(_lease, "BEAT", 0.05)
    with Checkpoints(store) as checkpoints:
        checkpoints.save(1, TREE)
        checkpoints.wait()
        lock = _storage.location(store) / ".lock"
        deadline = time.monotonic() + 20
        while json.loads(lock.read_bytes()).get("beat", 0) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        foreign_lock(store)
        with pytest.raises(
            tr.CheckpointError, match="folder was removed or replaced, or another run took it over"
        ):
            checkpoints.save(2, TREE)  # the thread may not know yet; then the save itself asks
            checkpoints.wait()
    assert checkpoints.steps() == [1] and json.loads(lock.read_bytes())["owner"] == "other"


def test_a_signal_ends_the_wait_for_a_lock(store, monkeypatch):
    foreign_lock(f"{store}/checkpoints")
    monkeypatch.setattr(_lease.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(
        tr.Interrupted,
        match=r"^SIGTERM: stopped while waiting for the lock of s3://.*nothing was tra",
    ):
        fit(store)
