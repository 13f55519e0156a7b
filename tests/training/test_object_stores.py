"""Runs in an object store: as in a folder, through errors of the server, and with one run to a prefix."""

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import s3

from fnet import training as tr
from fnet.training import _append, _cache, _lease, _storage
from fnet.training._checkpoint import Checkpoints

pytestmark = [pytest.mark.skipif(bool(s3.MISSING), reason=s3.REASON), pytest.mark.usefixtures("quickly")]
TX = optax.adam(0.1)
TREE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "n": 7}
DATA = {"x": np.linspace(0, 1, 32, dtype=np.float32)}


def step(state, batch):
    value, grads = jax.value_and_grad(lambda params: jnp.square(params["w"] * batch["x"] - 1).mean())(state.params)
    return state.apply(TX, grads), {"loss": value}


def start():
    return tr.TrainState.create({"w": jnp.zeros(())}, TX)


def fit(workdir, steps=6, **options):
    measure = lambda state, batch: {"loss": tr.mean(jnp.square(state.params["w"] * batch["x"] - 1), batch["weight"])}
    options = {"config": {"rate": 0.1}, "best": "v/loss", "best_mode": "min", "tune": False, "every": 2, "log_every": 1,
               "evaluate": {"v": tr.evaluator(measure, DATA, batch_size=8)}} | options
    return tr.fit(step, start(), tr.Batches(DATA, batch_size=8, seed=0), steps=steps, workdir=workdir, **options)


def rows(workdir):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in tr.read_metrics(workdir)]


def saved(where, steps=(1, 2), **options):
    with Checkpoints(where, **options) as checkpoints:
        for number in steps:
            checkpoints.save(number, TREE | {"n": number}, metrics={"loss": number})
    return checkpoints


def test_conditional_writes_of_the_server(store):
    """Of eight writers at the same time one succeeds; that nothing else holds is what the tests below rest on."""
    for number in range(5):
        path = _storage.location(f"{store}/{number}")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            made = [meta for meta in pool.map(lambda i, path=path: path.create(b"%d" % i), range(8)) if meta]
            assert len(made) == 1 and path.create(b"x") is None
            before = path.meta()
            again = list(pool.map(lambda i, path=path, before=before: path.replace(b"a%d" % i, before), range(8)))
        assert len([meta for meta in again if meta]) == 1 and path.replace(b"x", before) is None
        assert path.read_bytes() == b"a%d" % [meta is not None for meta in again].index(True)


# As in a folder.

def test_a_run_is_what_it_is_in_a_folder(store, tmp_path):
    """Interrupted and resumed: the same bits, lines, best and last state; and nothing is left when it is cleared."""
    workdir = f"{store}/run//"
    fit(workdir, steps=4)
    state, plain = fit(workdir), fit(tmp_path / "run")
    assert jax.tree.map(lambda a, b: bool((a == b).all()), state, plain) == jax.tree.map(lambda _: True, plain)
    assert rows(workdir) == rows(tmp_path / "run") and len(rows(workdir)) == 9
    for which in ("best", "last", 4):
        here, there = tr.load(workdir, which), tr.load(tmp_path / "run", which)
        assert (here.step, here.params, here.metrics, here.config) == (
            there.step, there.params, there.metrics, {"rate": 0.1})
    assert int(tr.restore(workdir, like=start(), which=4).step) == 4
    assert json.loads(_storage.location(f"{workdir}/config.json").read_text()) == {"rate": 0.1}
    keys = _storage.location(workdir).keys()
    assert len([key for key in keys if key.startswith("tensorboard/events.out.tfevents.")]) == 2
    assert [key for key in keys if key.startswith("checkpoints/") and key.endswith("manifest.json")] == [
        f"checkpoints/{number}/manifest.json" for number in (2, 4, 6)]
    with pytest.raises(tr.ConfigError, match=r"rate was 0\.1, is 0\.2"):
        fit(workdir, config={"rate": 0.2})
    fit(workdir, steps=2, restart=True)
    assert [row["step"] for row in rows(workdir)] == [1, 2, 2]
    tr.clear(workdir)
    assert _storage.location(workdir).keys() == []


def test_tensorboard_reads_each_object(store, monkeypatch):
    monkeypatch.setattr(_append, "_FULL", 400)
    with_events = tr.Logger(store)
    for number in range(20):
        with_events.write(number, {"loss": 0.5})
    events = _storage.location(f"{store}/tensorboard")
    assert len(events.keys()) > 2 and events.keys()[0].count(".") + 1 == events.keys()[1].count(".")
    steps = []
    from tensorboardX.proto.event_pb2 import Event

    for key in events.keys():
        raw = (events / key).read_bytes()
        while raw:                                         # a record: its length, 4 bytes, the event, 4 bytes
            size = int.from_bytes(raw[:8], "little")
            event = Event.FromString(raw[12:12 + size])
            steps += [event.step] if event.HasField("summary") else []
            raw = raw[16 + size:]
    assert steps == list(range(20))


def test_metrics_go_on_in_further_objects(store, monkeypatch):
    """And are cut where the run is resumed, in whichever object that is."""
    monkeypatch.setattr(_append, "_FULL", 100)
    log = tr.Logger(store, tensorboard=False)
    for number in range(1, 13):
        log.write(number, {"loss": number})
    names = [key for key in _storage.location(store).keys()]
    assert names == ["metrics.jsonl", *(f"metrics.jsonl.{i:04}" for i in range(1, len(names)))] and len(names) > 3
    assert [row["step"] for row in tr.read_metrics(store)] == list(range(1, 13))
    log = tr.Logger(store, step=5, tensorboard=False)
    assert [row["step"] for row in tr.read_metrics(store)] == list(range(1, 6))
    log.write(6, {"loss": 0})
    assert [row["step"] for row in tr.read_metrics(store)] == list(range(1, 7))
    path = _storage.location(f"{store}/metrics.jsonl")
    path.write_bytes(b"\xff\n" + path.read_bytes())
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1 is not JSON with an integer 'step'"):
        tr.read_metrics(store)
    with pytest.warns(tr.LogWarning, match=r"metrics.jsonl: 1 damaged lines were left out.*kept as metrics.jsonl.dam"):
        tr.Logger(store, step=6, tensorboard=False)
    assert [row["step"] for row in tr.read_metrics(store)] == list(range(1, 7))
    tr.Logger(store)
    assert tr.read_metrics(store) == []


def test_memory_is_a_store_too():
    url = "memory://test_memory"                           # without a prefix
    checkpoints = saved(url, keep=1, best="loss", mode="min")
    assert checkpoints.steps() == [1, 2] and checkpoints.best() == 1 and checkpoints.restore(TREE)["n"] == 2
    tr.save_config({"a": 1}, f"{url}/")
    assert _storage.location(url).keys()[-1] == "config.json"


def test_a_large_leaf_is_written_in_parts(store, server, monkeypatch):
    monkeypatch.setattr(_storage, "_CHUNK", 5 << 20)
    big = {"x": np.random.default_rng(0).normal(size=(3, 1 << 18))}
    server.requests()
    with Checkpoints(store) as checkpoints:
        checkpoints.save(1, big)
        checkpoints.wait()
        assert sum("partNumber" in path for method, path, _ in server.requests() if method == "PUT") == 2
        np.testing.assert_array_equal(checkpoints.restore(big)["x"], big["x"])


def test_a_step_saved_again_is_replaced_by_its_manifest(store):
    with Checkpoints(store) as checkpoints:
        for value in (1, 2):
            checkpoints.save(5, TREE | {"n": value})
        checkpoints.wait()
        assert checkpoints.restore(TREE)["n"] == 2
        assert len([key for key in checkpoints.folder.keys() if key.startswith("5/")]) == 2


# What is left half done, and damage.

def test_what_has_no_manifest_is_no_checkpoint(store):
    """And is removed when the prefix is locked: arrays without a manifest, and those that a manifest does not name."""
    checkpoints = saved(store)
    (checkpoints.folder / "3" / "arrays-0-0123456789abcdef.safetensors").write_bytes(b"half")
    (checkpoints.folder / "3" / ".part-1.json").write_bytes(b"{}")
    (checkpoints.folder / "2" / "arrays-0-0123456789abcdef.safetensors").write_bytes(b"half")
    assert checkpoints.steps() == [1, 2] and checkpoints.restore(TREE)["n"] == 2
    with checkpoints:
        checkpoints.lock()
    names = [key.partition("-")[0] for key in checkpoints.folder.keys()]
    assert names == ["1/arrays", "1/manifest.json", "2/arrays", "2/manifest.json"] and checkpoints.verify() == 2


def test_damage_is_set_aside(store):
    checkpoints = saved(store)
    name = next(key for key in checkpoints.folder.keys() if key.startswith("2/arrays"))
    raw = bytearray((checkpoints.folder / name).read_bytes())
    raw[-3] ^= 1
    (checkpoints.folder / name).write_bytes(raw)
    with pytest.raises(tr.CheckpointError, match=r"2: this checkpoint is damaged \('a' does not have .*steps 1$"):
        checkpoints.restore(TREE, 2)
    with pytest.warns(tr.CheckpointWarning, match=r"step 2 is damaged .*set aside as 2.damaged; going on from step 1"):
        assert checkpoints.restore(TREE)["n"] == 1
    checkpoints.close()
    assert (checkpoints.steps(), checkpoints.damaged()) == ([1], ["2.damaged"])
    assert (checkpoints.folder / name.replace("2/", "2.damaged/")).read_bytes() == raw
    manifest = checkpoints.folder / "1" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with pytest.raises(tr.CheckpointError, match="no checkpoint here can be read: step 1 is dam"):
        checkpoints.restore(TREE)
    checkpoints.close()


def test_other_objects_are_not_removed(store):
    (_storage.location(store) / "checkpoints" / "thesis.tex").write_bytes(b"")
    with pytest.raises(tr.CheckpointError, match=r"holds files that are not of checkpoints \(thesis.tex\)"):
        tr.clear(store)


# Errors of the server.

@pytest.fixture
def once(monkeypatch):
    """An error that lasts is not waited for."""
    monkeypatch.setattr(_storage, "_RETRIES", 0)
    monkeypatch.setattr(_storage, "_PAUSE", 0.0)



@pytest.mark.parametrize("fault", [
    {"status": 503, "count": 3}, {"status": 500, "method": "PUT", "count": 2}, {"status": 429, "count": 2},
    {"reset": "before", "count": 2}, {"reset": "before", "match": "manifest", "count": 2},
    {"reset": "after", "match": "manifest", "method": "PUT", "count": 2},
    {"reset": "after", "match": "arrays", "method": "PUT"}, {"reset": "after", "match": ".lock", "method": "PUT"},
    {"status": 503, "match": "list-type", "count": 2}, {"reset": "after", "method": "DELETE"}], ids=str)
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
        with pytest.raises(tr.CheckpointError, match=rf": step 2 could not be saved \(s3://bucket/.*{match}.*: the "
                                                     r"server answered 503[^)]*\); the checkpoint of step 1 is whole$"):
            checkpoints.wait()
        server.faults()
        assert checkpoints.steps() == [1] and checkpoints.verify() == 1
        checkpoints.save(2, TREE)                          # once it answers again
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
        server.faults({"status": 500, "count": 9999})      # nothing answers: that is no damage, nothing is set aside
        for call in (lambda: checkpoints.restore(TREE), checkpoints.steps, checkpoints.best, lambda: tr.load(store)):
            with pytest.raises(tr.CheckpointError, match=r"^s3://.*the server answered 500") as error:
                call()
            assert "\n" not in str(error.value)
        checkpoints.save(3, TREE)
        with pytest.raises(tr.CheckpointError, match=r"step 3 could not be saved .*the checkpoint of step 2 is whole"):
            checkpoints.wait()
        server.faults({"status": 500, "method": "POST", "count": 9999})      # nothing can be deleted
        checkpoints._keep = 1
        checkpoints.save(4, TREE)
        with pytest.raises(tr.CheckpointError, match="step 4 was saved, but older checkpoints could not be removed"):
            checkpoints.wait()
        server.faults()
        assert checkpoints.latest() == 4 and checkpoints.verify(4) == 4 and not checkpoints.damaged()


def test_the_best_is_not_removed_while_its_manifest_cannot_be_read(store, server, once):
    saved(store, (1,))
    with Checkpoints(store, keep=1, best="loss", mode="min") as checkpoints:
        checkpoints.lock()
        server.faults({"status": 500, "method": "GET", "match": "1/manifest", "count": 9999})
        checkpoints.save(2, TREE, metrics={"loss": 2})
        with pytest.raises(tr.CheckpointError, match="step 2 was saved, but older checkpoints could not be removed"):
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
    """SIGKILL after the arrays and before the manifest; the next run takes the lock at once, and goes on."""
    program = ("import os, sys, numpy as np\nfrom fnet import training as tr\nfrom fnet.training import _storage\n"
               "create = _storage.StorePath.create\n"
               "def harmed(self, data):\n    if '2/manifest' in str(self): os.kill(os.getpid(), 9)\n"
               "    return create(self, data)\n_storage.StorePath.create = harmed\n"
               "checkpoints = tr.Checkpoints(sys.argv[1])\nfor n in (1, 2):\n"
               "    checkpoints.save(n, {'a': np.arange(6, dtype=np.float32).reshape(2, 3), 'n': n})\n"
               "checkpoints.wait()")
    done = subprocess.run([sys.executable, "-c", program, store], timeout=120, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    keys = _storage.location(store).keys()
    assert any(key.startswith("2/arrays") for key in keys) and "2/manifest.json" not in keys and ".lock" in keys
    began = time.monotonic()
    checkpoints = saved(store, (3,))
    assert time.monotonic() - began < _lease.EXPIRY / 2
    assert checkpoints.steps() == [1, 3] and checkpoints.restore(TREE, 1)["n"] == 1
    assert not any(key.startswith(("2/", ".lock")) for key in checkpoints.folder.keys())


# One run to a prefix.

def foreign_lock(store, **changes):
    lock = _storage.location(store) / ".lock"
    lock.write_bytes(json.dumps({"owner": "other", "host": "node7", "process": 12} | changes).encode())
    return lock


def test_two_runs_of_one_machine(store):
    with saved(store) as checkpoints:
        checkpoints.lock()
        other = Checkpoints(store)
        with pytest.raises(tr.CheckpointError, match=rf"another run is using this folder \(process {os.getpid()} on "):
            other.save(3, TREE)
        assert other.restore(TREE)["n"] == 2               # reading is free
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
    with pytest.raises(tr.CheckpointError, match=r"another run is using this folder \(process 12 on node7\)"):
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
        with pytest.raises(tr.CheckpointError, match="folder was removed or replaced, or another run took it over"):
            checkpoints.save(2, TREE)                      # the thread may not know yet; then the save itself asks
            checkpoints.wait()
    assert checkpoints.steps() == [1] and json.loads(lock.read_bytes())["owner"] == "other"


def test_a_signal_ends_the_wait_for_a_lock(store, monkeypatch):
    foreign_lock(f"{store}/checkpoints")
    monkeypatch.setattr(_lease.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(tr.Interrupted, match=r"^SIGTERM: stopped while waiting for the lock of s3://.*nothing was tra"):
        fit(store)


# Data.

def test_tokens_and_tables_are_read_through_a_copy(store, server, monkeypatch, tmp_path):
    monkeypatch.setenv("FNET_DATA", str(tmp_path))
    monkeypatch.setattr(_cache, "_CHUNK", 1000)
    tokens = np.random.default_rng(0).integers(0, 60000, 5000).astype("<u2")
    source = _storage.location(f"{store}/train.bin")
    source.write_bytes(tokens.tobytes())
    for harm, ranges in ((None, 10), (None, 0), (lambda raw: b"\1" + raw[1:], 10), (lambda raw: raw[:-2], 10)):
        if harm is not None:
            copy, = (tmp_path / "objects").glob("*-train.bin")
            copy.write_bytes(harm(copy.read_bytes()))
        server.requests()
        back = tr.read_tokens(str(source))
        assert isinstance(back, np.memmap) and (back == tokens).all()
        assert sum(bool(span) for *_, span in server.requests()) == ranges
    source.write_bytes(tokens[:100].tobytes())
    assert len(tr.read_tokens(str(source))) == 100
    source.write_bytes(b"a,b\n1,2.5\n")
    assert tr.read_csv(str(source))["b"].tolist() == [2.5]
    with pytest.raises(FileNotFoundError, match=r"no\.bin: no such object"):
        tr.read_tokens(f"{store}/no.bin")
    assert not list((tmp_path / "objects").glob("*.new"))


# Invalid input.

@pytest.mark.parametrize("url, text", [
    ("ftp://bucket/run", "ftp://bucket/run: the scheme 'ftp' is not supported; use a local path, s3://bucket/prefix"),
    ("file:///tmp/run", "the scheme 'file' is not supported"),
    ("s3://", "s3://: expected the name of a bucket after s3://; use a local path"),
    ("s3:///run", "expected the name of a bucket"),
    ("s3://key:secret@bucket/run", "expected the name of a bucket"),
    ("s3://bucket/a/../b", "cannot be part of a key"),
    ("s3://bucket/a\nb", "cannot be part of a key"),
], ids=["ftp", "file", "empty", "no-bucket", "secret", "dots", "newline"])
def test_what_is_no_url_of_a_store(url, text):
    for call in (tr.Checkpoints, tr.load, tr.read_metrics, tr.clear, lambda where: fit(where)):
        with pytest.raises(ValueError, match=text) as error:
            call(url)
        assert "\n" not in str(error.value).replace(url, "")


def test_a_path_cannot_hold_a_url(tmp_path):
    import pathlib

    with pytest.raises(ValueError, match=r"a pathlib.Path cannot hold a URL; pass 's3://bucket/run' as a string"):
        tr.load(pathlib.Path("s3://bucket/run"))


def test_no_such_bucket_and_no_such_run(store):
    with pytest.raises(tr.CheckpointError, match=r"^s3://nowhere/run/checkpoints/.lock: there is no such bucket"):
        fit("s3://nowhere/run")
    with pytest.raises(FileNotFoundError, match="no checkpoint here"):
        tr.load(store)


def test_access_that_is_refused_says_what_to_set(store, server, monkeypatch):
    server.faults({"status": 403, "count": 9999})
    with pytest.raises(tr.CheckpointError, match=r"access was refused \(the server answered 403[^)]*\). Set "
                                                 r"AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION"):
        fit(store)
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError, match=r"^az://container: .*Set AZURE_STORAGE_ACCOUNT_NAME and AZURE"):
        tr.load("az://container/run")


def test_without_obstore_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ModuleNotFoundError, match=r"^gs://bucket: object stores need .* pip install 'fnet\[cloud\]'"):
        fit("gs://bucket/run")
