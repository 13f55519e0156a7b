"""Downloads from Hugging Face's hub, from a server on 127.0.0.1: which files, revisions,
interruptions, checksums."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import models
from fnet.models import pretrained

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from hub_server import Hub

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None,
    reason="needs huggingface_hub (the extra hub)",
)
MODEL = models.GPT(vocab_size=32, width=16, depth=1, heads=2, context=16)
NAME = "org/small-gpt"


def params_of(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32),
        MODEL.spec(MODEL.example()).params,
    )


def files_of(folder, seed=0, **options):
    """The files of a repository: what fnet needs, and what it must not download."""
    pretrained.save(MODEL, params_of(seed), {}, folder, **options)
    held = {path.name: path.read_bytes() for path in folder.iterdir()}
    return held | {
        "generation_config.json": b'{"eos_token_id": 3}',
        "tokenizer.json": b"{}",
        "README.md": b"text",
        "pytorch_model.bin": b"\x80\x02pickle",
        "onnx/model.onnx": b"onnx",
        "train.py": b"exit()",
        "onnx/model.safetensors": b"other",
    }


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    server = Hub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("FNET_CACHE", str(tmp_path / "own"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 10)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    yield server
    server.close()


def equal(params, seed):
    assert all(map(np.array_equal, jax.tree.leaves(params), jax.tree.leaves(params_of(seed))))


@pytest.mark.exhaustive
def test_a_repository_is_downloaded_once(hub, tmp_path):
    commit = hub.publish(NAME, files_of(tmp_path / "source"))
    model, params, state = pretrained.load(NAME)
    assert model == MODEL and state == {}
    equal(params, 0)
    snapshot = tmp_path / "hub" / "models--org--small-gpt" / "snapshots" / commit
    assert sorted(path.name for path in snapshot.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert pretrained.find(NAME) == snapshot
    assert pretrained.revision(NAME) == pretrained.revision(snapshot / "config.json") == commit
    assert not any(
        path.endswith((".bin", ".py", ".onnx", "README.md")) for _, path, _ in hub.requests
    )
    count = len(hub.requests)
    equal(pretrained.load(MODEL, NAME)[0], 0)
    hub.publish(NAME, files_of(tmp_path / "later", seed=1))
    equal(pretrained.load(NAME)[1], 0)  # what is in the cache
    assert len(hub.requests) == count
    from huggingface_hub import (
        try_to_load_from_cache,
    )  # its library finds the files in its own cache

    assert try_to_load_from_cache(NAME, "config.json", cache_dir=tmp_path / "hub") == str(
        snapshot / "config.json"
    )


@pytest.mark.exhaustive
def test_the_first_use_of_the_library_in_a_process(tmp_path):
    """Its modules are imported when they are used; here nothing else has imported them."""
    code = "from fnet.models.weights import _download; print(_download.unavailable())"
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.stdout == "None\n", run.stderr


def test_revisions(hub, tmp_path):
    first = hub.publish(NAME, files_of(tmp_path / "first", seed=1))
    second = hub.publish(NAME, files_of(tmp_path / "second", seed=2))
    hub.publish(NAME, files_of(tmp_path / "third", seed=3), branch="v1.0")
    equal(pretrained.load(NAME, revision=first)[1], 1)
    equal(pretrained.load(NAME, revision="v1.0")[1], 3)
    equal(pretrained.load(NAME, revision="main")[1], 2)
    assert (
        pretrained.revision(NAME) == second
        and pretrained.revision(pretrained.find(NAME, revision=first)) == first
    )
    count = len(hub.requests)
    for revision, seed in ((first, 1), ("v1.0", 3), ("main", 2), (None, 2)):
        equal(pretrained.load(NAME, revision=revision)[1], seed)
    assert len(hub.requests) == count
    assert pretrained.revision(tmp_path / "first") is None
    with pytest.raises(FileNotFoundError, match="org/small-gpt has no revision 'v9'"):
        pretrained.load(NAME, revision="v9")
    with pytest.raises(ValueError, match="a revision can be given for a repository"):
        pretrained.load(tmp_path / "first", revision="main")


def test_only_the_shards_of_the_index(hub, tmp_path):
    files = files_of(tmp_path / "source", max_shard_size=4000)
    shards = [name for name in files if name.startswith("model-")]
    commit = hub.publish(NAME, files | {"consolidated.safetensors": b"other"})
    hub.faults += [(shards[-1], 403)]
    with pytest.raises(
        OSError, match=r"the download of org/small-gpt stopped: .*Call again to continue it"
    ):
        pretrained.load(NAME)
    assert pretrained._hub._snapshot(NAME, None) is not None  # the first shards, and no index yet
    hub.requests.clear()
    equal(pretrained.load(NAME)[1], 0)
    assert (
        len([1 for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]) == 2
    )
    assert len(shards) > 2 and not (pretrained.find(NAME) / "consolidated.safetensors").exists()
    assert pretrained.revision(NAME) == commit


def test_an_interrupted_download_continues(hub, tmp_path):
    files = files_of(tmp_path / "source")
    size = len(files["model.safetensors"])
    hub.publish(NAME, files)
    hub.faults.append(
        ("model.safetensors", "cut")
    )  # within one call: from where the connection ended
    equal(pretrained.load(NAME)[1], 0)
    ranges = [
        asked
        for method, path, asked in hub.requests
        if method == "GET" and path.endswith("model.safetensors")
    ]
    assert ranges == [None, f"bytes={size // 2 // 1024 * 1024}-"]  # whole chunks
    first = hub.publish(NAME, files_of(tmp_path / "later", seed=1), branch="later")
    hub.faults.append(
        ("model.safetensors", 403)
    )  # over two calls: complete files are not read again
    with pytest.raises(
        OSError,
        match=r"the download of org/small-gpt at later stopped: .*Call again to continue it",
    ):
        pretrained.load(NAME, revision="later")
    hub.requests.clear()
    equal(pretrained.load(NAME, revision="later")[1], 1)
    assert [
        path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path
    ] == [f"/{NAME}/resolve/{first}/model.safetensors"]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_damaged_file_is_detected(hub, file, tmp_path):
    hub.publish(NAME, files_of(tmp_path / "source"))
    hub.faults.append((f"/{file}", "flip"))
    with pytest.raises(
        OSError,
        match=rf"{file} of org/small-gpt was damaged during the download and is deleted: its "
        r"checksum is [0-9a-f]+, expected [0-9a-f]+. Call again to download it",
    ):
        pretrained.load(NAME)
    equal(pretrained.load(NAME)[1], 0)


def test_offline(hub, monkeypatch, tmp_path):
    commit = hub.publish(NAME, files_of(tmp_path / "source"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        FileNotFoundError,
        match=r"\(HF_HUB_OFFLINE is set\): download it with 'hf download org/small",
    ):
        pretrained.load(NAME)
    with pytest.raises(FileNotFoundError, match=r"'hf download org/small-gpt --revision v1'"):
        pretrained.load(NAME, revision="v1")
    assert not hub.requests
    monkeypatch.delenv("HF_HUB_OFFLINE")
    pretrained.load(NAME)
    monkeypatch.setenv("HF_HUB_OFFLINE", "yes")
    hub.requests.clear()
    equal(pretrained.load(NAME)[1], 0)
    equal(pretrained.load(NAME, revision=commit)[1], 0)
    assert not hub.requests


def test_what_the_hub_does_not_have(hub, monkeypatch, tmp_path):
    hub.publish("org/pickle", {"config.json": b"{}", "pytorch_model.bin": b"\x80\x02"})
    with pytest.raises(
        ValueError,
        match=r"org/pickle has no safetensors files; it has config.json, pytorch_model.bin. "
        r"Pickles \(.bin, .pt\) are never downloaded",
    ):
        pretrained.load("org/pickle")
    with pytest.raises(FileNotFoundError, match="the hub has no public repository org/nothing"):
        pretrained.load("org/nothing")
    with pytest.raises(PermissionError, match="org/gated is gated: accept its conditions"):
        pretrained.load("org/gated")
    assert not list((tmp_path / "hub").rglob("*.bin"))
    hub.requests.clear()
    for name in (
        "resnet5000",
        "some/where/else",
        "folder/model.safetensors",
    ):  # not names of repositories
        with pytest.raises((FileNotFoundError, ValueError)):
            pretrained.load(name)
    assert not hub.requests
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        FileNotFoundError, match=r"\(the hub cannot be reached \(ConnectError.*\): download it with"
    ):
        pretrained.load("org/nothing")


def test_without_the_library(hub, monkeypatch, tmp_path):
    hub.publish(NAME, files_of(tmp_path / "source"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        FileNotFoundError,
        match=r"which is not installed: pip install huggingface_hub\): "
        "download it with 'hf download org/small-gpt'",
    ):
        pretrained.load(NAME)


def test_a_preset_is_downloaded_from_where_it_is_published(hub, monkeypatch, tmp_path):
    files = files_of(tmp_path / "source")
    hub.publish(NAME, files)
    monkeypatch.setattr(
        models.GPT,
        "PRESETS",
        {
            "tiny-gpt": {
                field: getattr(MODEL, field)
                for field in ("vocab_size", "width", "depth", "heads", "context")
            }
        },
    )
    monkeypatch.setattr(models.GPT, "HUB", {"tiny-gpt": (NAME,)})
    model, params, _ = pretrained.load("tiny-gpt")
    assert (
        model == MODEL
        and json.loads((pretrained.find("tiny-gpt") / "config.json").read_text())["n_embd"] == 16
    )
    equal(params, 0)
