"""Files of weights: shards, damage, malice, and pickles."""

import json
import pathlib
import pickle
import re
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from fnet._util import _safetensors
from fnet.models.weights import _tensors

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(4, dtype=np.float16)


def refused(path, text, error=ValueError):
    with pytest.raises(error, match=text) as caught:
        _tensors.read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def sharded(folder, **index):
    save_file({"a": A}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": B}, folder / "model-00002-of-00002.safetensors", {"format": "pt"})
    where = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / _tensors.INDEX).write_text(json.dumps({"weight_map": where | index}))
    return folder / _tensors.INDEX


def test_dtypes_and_shapes(tmp_path):
    arrays = {
        name: np.ones((2, 3), dtype)
        for name, dtype in _safetensors.DTYPES.items()
        if name != "F8_E5M2"
    }
    arrays |= {"scalar": np.array(3, np.float64), "empty": np.zeros((0, 4), np.float32)}
    _tensors.write(tmp_path / "new" / "x.safetensors", arrays, {"format": "pt"})
    read = _tensors.read(tmp_path / "new")
    assert read.metadata == {"format": "pt"} and set(read.arrays) == set(arrays)
    for key, array in arrays.items():
        assert read.arrays[key].dtype == array.dtype
        np.testing.assert_array_equal(read.arrays[key], array)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["x.safetensors"]


def test_shards(tmp_path):
    index = sharded(tmp_path)
    for path in (tmp_path, index):
        tensors = _tensors.read(path)
        assert tensors.path == index and tensors.metadata == {"format": "pt"}
        np.testing.assert_array_equal(tensors.arrays["a"], A)
        np.testing.assert_array_equal(tensors.arrays["b"], B)


def test_shards_that_are_not_what_the_index_says(tmp_path):
    index = sharded(tmp_path, b="model-00001-of-00002.safetensors")
    with pytest.raises(
        ValueError,
        match=r"places 'b' in model-00001-of-00002.safetensors, which does not contain it",
    ):
        _tensors.read(index)
    sharded(tmp_path, c="model-00001-of-00002.safetensors")
    refused(index, "places 'c' in model-00001-of-00002.safetensors, which does not contain it")
    sharded(tmp_path, a="model-00002-of-00002.safetensors", c="model-00001-of-00002.safetensors")
    with pytest.raises(
        ValueError, match=r"contains 'a', but model.safetensors.index.json places it in model-00002"
    ):
        _tensors.read(tmp_path)
    sharded(tmp_path, c="model-00003-of-00003.safetensors")
    refused(index, "names 3 shards; model-00003-of-00003.safetensors is missing", FileNotFoundError)
    for text in (
        "{",
        "[]",
        '{"weight_map": {"a": "../../secret.safetensors"}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": 3}',
        '{"weight_map": ' + "[" * 100_000,
    ):
        index.write_text(text)
        refused(index, "is not an index of shards: ")
    index.write_text("[" + "{}," * 2000)
    refused(index, "is not an index of shards: it contains more than 1,000 lists and objects")
    with index.open("wb") as file:
        file.truncate((1 << 24) + 1)
    refused(
        index, "is not an index of shards: it has 16,777,217 bytes, expected at most 16,777,216"
    )


def header(**tensors):
    return json.dumps(tensors).encode()


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("head", "body", "length"),
    [
        pytest.param(header(a=entry([4], 0, 16)), 4, None, id="beyond the file"),
        pytest.param(header(a=entry([4], 0, 16), b=entry([4], 8, 24)), 24, None, id="overlap"),
        pytest.param(header(a=entry([4], 4, 20)), 20, None, id="gap"),
        pytest.param(header(a=entry([4], 0, 16)), 20, None, id="more behind"),
        pytest.param(header(a=entry([5], 0, 16)), 16, None, id="shape and size"),
        pytest.param(header(a=entry([1 << 62, 1 << 62], 0, 16)), 16, None, id="overflow"),
        pytest.param(header(a=entry([-4], 0, 16)), 16, None, id="negative"),
        pytest.param(header(a=entry([4], 0, 16, "F99")), 16, None, id="unknown dtype"),
        pytest.param(
            header(a=entry([4], 0, 16))[:-1]
            + b',"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
            16,
            None,
            id="a key twice",
        ),
        pytest.param(b"{}", 0, 1 << 40, id="huge header"),
        pytest.param(b"{}", 0, 1 << 63, id="negative header"),
        pytest.param(b"[" * 100_000, 0, None, id="deep"),
        pytest.param(b"\x80\x04", 0, None, id="no JSON"),
    ],
)
def test_a_hostile_header_is_refused(tmp_path, head, body, length):
    file = tmp_path / "x.safetensors"
    file.write_bytes(
        struct.pack("<Q", len(head) if length is None else length) + head + bytes(body)
    )
    refused(file, "is not a complete safetensors file: ")


def test_damaged_files(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"a": A}, file)
    whole = file.read_bytes()
    for cut in (0, 4, 20, len(whole) - 1):
        file.write_bytes(whole[:cut])
        refused(file, "is not a complete safetensors file: ")
    head = header(a=entry([4], 0, 2, "F4"))
    file.write_bytes(struct.pack("<Q", len(head)) + head + bytes(2))
    refused(file, "'a' has dtype F4, which fnet does not support")
    for shape in ([2**63, 0], [2**62, 0, 4], [0] * 70):
        head = header(a=entry(shape, 0, 0))
        file.write_bytes(struct.pack("<Q", len(head)) + head)
        refused(file, r"'a' has shape \(")
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", 1 << 24))
        opened.truncate(1 << 25)
    refused(file, "its header has 16,777,216 bytes, expected at most 8,388,608")


class Trap:
    """A pickle that leaves a trace when it is opened."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return pathlib.Path.touch, (self.trace,)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "weights.pt", "resnet50.pth", "last.ckpt", "weights"]
)
def test_pickles_are_never_opened(tmp_path, name):
    trace, file = tmp_path / "trace", tmp_path / name
    file.write_bytes(pickle.dumps(Trap(trace)))
    refused(
        file,
        r"is a pickle, which can run arbitrary code .*; convert it to safetensors with PyTorch: "
        rf"import torch, safetensors.torch as s; s.save_file\(torch.load\('{name}', "
        rf"weights_only=True\), "
        r"'model.safetensors'\)",
    )
    assert not trace.exists()


def test_folders_without_weights(tmp_path):
    refused(
        tmp_path, r"contains no weights \(model.safetensors, .*\); found nothing", FileNotFoundError
    )
    (tmp_path / "notes.txt").write_text("")
    refused(tmp_path, "found notes.txt", FileNotFoundError)
    (tmp_path / "model.h5").write_text("HDF")
    refused(
        tmp_path / "model.h5",
        r"is not a safetensors file \(\*.safetensors, or .*\); convert it",
    )
    refused(tmp_path / "gone", "no such file or folder", FileNotFoundError)
    for name in ("a", "b"):
        save_file({"a": A}, tmp_path / f"{name}.safetensors")
    refused(
        tmp_path,
        r"contains 2 safetensors files \(a.safetensors, b.safetensors\) and no "
        r"model.safetensors.index",
    )
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").unlink()
    with pytest.raises(ValueError, match=r"pytorch_model.bin is a pickle"):
        _tensors.read(tmp_path)


SHARD = "model-00001-of-00003.safetensors"


@pytest.mark.parametrize(
    ("start", "beside", "named"),
    [
        ("shards", ["model.safetensors"], "model.safetensors.index.json, model.safetensors"),
        ("shards", [SHARD], f"model.safetensors.index.json, {SHARD}"),
        ("shards", ["adapter_model.safetensors"], "index.json, adapter_model.safetensors"),
        ("shards", ["other.safetensors.index.json"], "index.json, other.safetensors.index.json"),
        (
            "shards, of which one is missing",
            ["model.safetensors"],
            "model.safetensors.index.json, model.safetensors",
        ),
        ("file", [SHARD], f"model.safetensors, {SHARD}"),
        ("file", ["consolidated.00.safetensors"], "model.safetensors, consolidated.00.safetensors"),
        ("file", ["consolidated.safetensors"], "model.safetensors, consolidated.safetensors"),
        ("file", ["adapter_model.safetensors"], "load_adapter applies adapter_model.safetensors"),
    ],
)
def test_several_sets_of_weights(start, beside, named, tmp_path):
    (
        sharded
        if start.startswith("shards")
        else lambda folder: save_file({"a": A}, folder / "model.safetensors")
    )(tmp_path)
    if "missing" in start:
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
    for name in beside:
        if name.endswith(".index.json"):
            (tmp_path / name).write_text(json.dumps({"weight_map": {"a": "other-1.safetensors"}}))
        else:
            save_file({"a": A + 1}, tmp_path / name)
    refused(tmp_path, f"contains more than one set of weights: .*{re.escape(named)}")
    names = [name for name in beside if name.endswith(".safetensors")]
    for name in names:
        np.testing.assert_array_equal(_tensors.read(tmp_path / name).arrays["a"], A + 1)


def test_files_that_leave_no_doubt(tmp_path):
    index = sharded(tmp_path)
    for name in "consolidated.00.safetensors", "pytorch_model.bin", "notes.safetensors":
        save_file({"a": A + 1}, tmp_path / name)
    (tmp_path / "pytorch_model.bin.index.json").write_text("{}")
    assert _tensors.read(tmp_path).path == index
    other = tmp_path / "other"
    other.mkdir()
    for name in (
        "model.safetensors",
        "pytorch_model.bin",
        "model.fp16.safetensors",
        "optimizer.safetensors",
    ):
        save_file({"a": A}, other / name)
    assert _tensors.read(other).path == other / "model.safetensors"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))  # an index of one file
    for name in "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors":
        (tmp_path / name).unlink()
    save_file({"a": A}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(_tensors.read(tmp_path).arrays["a"], A)


@pytest.mark.parametrize("suffix", ["incomplete", "part", "crdownload", "aria2"])
def test_what_is_left_of_a_download(suffix, tmp_path):
    sharded(tmp_path)
    left = tmp_path / f"model-00002-of-00002.safetensors.{suffix}"
    left.write_bytes(b"")
    refused(
        tmp_path,
        f"safetensors.{suffix} is left of a download of model-00002-of-00002.safetensors, which "
        f"may not",
    )
    left.unlink()
    (tmp_path / f"notes.safetensors.{suffix}").write_bytes(b"")
    _tensors.read(tmp_path)


def test_an_adapter_is_no_model(tmp_path):
    save_file({"a": A}, tmp_path / "adapter_model.safetensors")
    refused(tmp_path, "has no weights of a model, only the LoRA adapter adapter_model.safetensors")


def test_a_model_bin_of_llama2c_says_who_reads_it(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(struct.pack("<7i", 8, 12, 2, 4, 2, 5, 6) + bytes(100))
    for path in (file, tmp_path):
        with pytest.raises(
            ValueError,
            match=r"model.bin is not a safetensors file. If it is a model.bin of llama2.c, "
            r"experiments/llama2c.py in fnet's repository converts it: python llama2c.py "
            rf"{re.escape(str(file))} FOLDER",
        ):
            _tensors.read(path)
    save_file({"a": A}, tmp_path / "model.safetensors")  # what the conversion leaves
    np.testing.assert_array_equal(_tensors.read(tmp_path).arrays["a"], A)
