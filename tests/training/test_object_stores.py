"""Runs in an object store: as in a folder."""

import concurrent.futures
import json

import jax
import numpy as np
import pytest
import s3
from store_runs import TREE, fit, rows, saved, start

from fnet import training as tr
from fnet.training.checkpoints import _append, _storage
from fnet.training.checkpoints._checkpoint import Checkpoints
from fnet.training.data import _cache

pytestmark = [
    pytest.mark.skipif(bool(s3.MISSING), reason=s3.REASON),
    pytest.mark.usefixtures("quickly"),
]


def test_conditional_writes_of_the_server(store):
    """Of eight writers at the same time one succeeds; that nothing else holds is what the tests
    below rest on."""
    for number in range(5):
        path = _storage.location(f"{store}/{number}")
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            made = [
                meta
                for meta in pool.map(lambda i, path=path: path.create(b"%d" % i), range(8))
                if meta
            ]
            assert len(made) == 1 and path.create(b"x") is None
            before = path.meta()
            again = list(
                pool.map(
                    lambda i, path=path, before=before: path.replace(b"a%d" % i, before), range(8)
                )
            )
        assert len([meta for meta in again if meta]) == 1 and path.replace(b"x", before) is None
        assert path.read_bytes() == b"a%d" % [meta is not None for meta in again].index(True)


# As in a folder.


def test_a_run_is_what_it_is_in_a_folder(store, tmp_path):
    """Interrupted and resumed: the same bits, lines, best and last state; and nothing is left when
    it is cleared."""
    workdir = f"{store}/run//"
    fit(workdir, steps=4)
    state, plain = fit(workdir), fit(tmp_path / "run")
    assert jax.tree.map(lambda a, b: bool((a == b).all()), state, plain) == jax.tree.map(
        lambda _: True, plain
    )
    assert rows(workdir) == rows(tmp_path / "run") and len(rows(workdir)) == 9
    for which in ("best", "last", 4):
        here, there = tr.load(workdir, which), tr.load(tmp_path / "run", which)
        assert (here.step, here.params, here.metrics, here.config) == (
            there.step,
            there.params,
            there.metrics,
            {"rate": 0.1},
        )
    assert int(tr.restore(workdir, like=start(), which=4).step) == 4
    assert json.loads(_storage.location(f"{workdir}/config.json").read_text()) == {"rate": 0.1}
    keys = _storage.location(workdir).keys()
    assert len([key for key in keys if key.startswith("tensorboard/events.out.tfevents.")]) == 2
    assert [
        key for key in keys if key.startswith("checkpoints/") and key.endswith("manifest.json")
    ] == [f"checkpoints/{number}/manifest.json" for number in (2, 4, 6)]
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
        while raw:  # a record: its length, 4 bytes, the event, 4 bytes
            size = int.from_bytes(raw[:8], "little")
            event = Event.FromString(raw[12 : 12 + size])
            steps += [event.step] if event.HasField("summary") else []
            raw = raw[16 + size :]
    assert steps == list(range(20))


def test_metrics_go_on_in_further_objects(store, monkeypatch):
    """And are cut where the run is resumed, in whichever object that is."""
    monkeypatch.setattr(_append, "_FULL", 100)
    log = tr.Logger(store, tensorboard=False)
    for number in range(1, 13):
        log.write(number, {"loss": number})
    names = [key for key in _storage.location(store).keys()]
    assert (
        names == ["metrics.jsonl", *(f"metrics.jsonl.{i:04}" for i in range(1, len(names)))]
        and len(names) > 3
    )
    assert [row["step"] for row in tr.read_metrics(store)] == list(range(1, 13))
    log = tr.Logger(store, step=5, tensorboard=False)
    assert [row["step"] for row in tr.read_metrics(store)] == list(range(1, 6))
    log.write(6, {"loss": 0})
    assert [row["step"] for row in tr.read_metrics(store)] == list(range(1, 7))
    path = _storage.location(f"{store}/metrics.jsonl")
    path.write_bytes(b"\xff\n" + path.read_bytes())
    with pytest.raises(
        ValueError, match=r"metrics.jsonl, line 1 is not JSON with an integer 'step'"
    ):
        tr.read_metrics(store)
    with pytest.warns(
        tr.LogWarning,
        match=r"metrics.jsonl: 1 damaged lines were left out.*kept as metrics.jsonl.dam",
    ):
        tr.Logger(store, step=6, tensorboard=False)
    assert [row["step"] for row in tr.read_metrics(store)] == list(range(1, 7))
    tr.Logger(store)
    assert tr.read_metrics(store) == []


def test_memory_is_a_store_too():
    url = "memory://test_memory"  # without a prefix
    checkpoints = saved(url, keep=1, best="loss", mode="min")
    assert (
        checkpoints.steps() == [1, 2]
        and checkpoints.best() == 1
        and checkpoints.restore(TREE)["n"] == 2
    )
    tr.save_config({"a": 1}, f"{url}/")
    assert _storage.location(url).keys()[-1] == "config.json"


def test_a_large_leaf_is_written_in_parts(store, server, monkeypatch):
    monkeypatch.setattr(_storage, "_CHUNK", 5 << 20)
    big = {"x": np.random.default_rng(0).normal(size=(3, 1 << 18))}
    server.requests()
    with Checkpoints(store) as checkpoints:
        checkpoints.save(1, big)
        checkpoints.wait()
        assert (
            sum("partNumber" in path for method, path, _ in server.requests() if method == "PUT")
            == 2
        )
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
    """And is removed when the prefix is locked: arrays without a manifest, and those that a
    manifest does not name."""
    checkpoints = saved(store)
    (checkpoints.folder / "3" / "arrays-0-0123456789abcdef.safetensors").write_bytes(b"half")
    (checkpoints.folder / "3" / ".part-1.json").write_bytes(b"{}")
    (checkpoints.folder / "2" / "arrays-0-0123456789abcdef.safetensors").write_bytes(b"half")
    assert checkpoints.steps() == [1, 2] and checkpoints.restore(TREE)["n"] == 2
    with checkpoints:
        checkpoints.lock()
    names = [key.partition("-")[0] for key in checkpoints.folder.keys()]
    assert (
        names == ["1/arrays", "1/manifest.json", "2/arrays", "2/manifest.json"]
        and checkpoints.verify() == 2
    )


def test_damage_is_set_aside(store):
    checkpoints = saved(store)
    name = next(key for key in checkpoints.folder.keys() if key.startswith("2/arrays"))
    raw = bytearray((checkpoints.folder / name).read_bytes())
    raw[-3] ^= 1
    (checkpoints.folder / name).write_bytes(raw)
    with pytest.raises(
        tr.CheckpointError, match=r"2: this checkpoint is damaged \('a' does not have .*steps 1$"
    ):
        checkpoints.restore(TREE, 2)
    with pytest.warns(
        tr.CheckpointWarning,
        match=r"step 2 is damaged .*set aside as 2.damaged; going on from step 1",
    ):
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
    with pytest.raises(
        tr.CheckpointError, match=r"holds files that are not of checkpoints \(thesis.tex\)"
    ):
        tr.clear(store)


# Data.


def test_tokens_and_tables_are_read_through_a_copy(store, server, monkeypatch, tmp_path):
    monkeypatch.setenv("FNET_DATA", str(tmp_path))
    monkeypatch.setattr(_cache, "_CHUNK", 1000)
    tokens = np.random.default_rng(0).integers(0, 60000, 5000).astype("<u2")
    source = _storage.location(f"{store}/train.bin")
    source.write_bytes(tokens.tobytes())
    for harm, ranges in (
        (None, 10),
        (None, 0),
        (lambda raw: b"\1" + raw[1:], 10),
        (lambda raw: raw[:-2], 10),
    ):
        if harm is not None:
            (copy,) = (tmp_path / "objects").glob("*-train.bin")
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
    assert not list((tmp_path / "objects").glob("*.partial"))
