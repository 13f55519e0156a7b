"""Damaged and crafted bundles: each is refused with the file's name, at once, and nothing in it is
executed."""

import hashlib
import io
import json
import struct
import time
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from fnet import export
from fnet.export import _write
from fnet.export.standalone import _reader

DRAW = np.random.default_rng(0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "f.fnet"
    export.program(
        lambda params, x: x @ params["kernel"],
        {"kernel": jnp.ones((20, 3))},
        x=export.spec("b, 20"),
    ).save(path)
    return path.read_bytes()


def refused(path, data, match="is not a complete bundle"):
    """Writes the file; loading it raises BundleError with its name within a second of processor
    time."""
    path.write_bytes(data)
    began = time.process_time()
    with pytest.raises(export.BundleError, match=match) as caught:
        export.load(path)
    assert time.process_time() - began < 1
    assert str(path) in str(caught.value)


def sealed(data: bytes) -> bytes:
    """A zip archive with the digest of its content, as a careful attacker writes it."""
    data = data[:-2] + struct.pack("<H", 71)
    return data + b"sha256:" + hashlib.sha256(data).hexdigest().encode()


def forged(files, manifest=None, kind=zipfile.ZIP_STORED):
    stream, sums = io.BytesIO(), {}
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in files:
            archive.writestr(name, data, kind)
            sums[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        described = {
            "format": _reader.FORMAT,
            "version": 1,
            "entries": {},
            "read_until": "2030-01-01",
            "files": sums,
        }
        archive.writestr("manifest.json", json.dumps(described | (manifest or {})))
    return sealed(stream.getvalue())


def tensors(header, data=b"\0" * 8, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_500_flipped_bits(whole, tmp_path):
    for _ in range(500):
        data = bytearray(whole)
        data[DRAW.integers(len(data))] ^= 1 << DRAW.integers(8)
        refused(tmp_path / "f.fnet", bytes(data))


def test_truncations_and_additions(whole, tmp_path):
    for size in (0, 1, 21, 22, 92, 93, 94, 1000, len(whole) // 2, len(whole) - 71, len(whole) - 1):
        refused(tmp_path / "f.fnet", whole[:size], "is not a complete bundle|is empty")
    refused(tmp_path / "f.fnet", whole + b"\0", "does not end with a bundle's digest")
    refused(tmp_path / "f.fnet", whole + whole[-93:])


def test_no_verification_reads_less_and_still_checks_small_files(whole, tmp_path):
    path = tmp_path / "f.fnet"
    path.write_bytes(whole)
    archive = _reader.Archive(path)
    _, start = archive._entries["programs/predict.json"]
    data = bytearray(whole)
    data[start + 5] ^= 1
    path.write_bytes(data)
    bundle = export.load(path, verify=False)
    with pytest.raises(export.BundleError, match=r"programs/predict.json"):
        bundle.stable("predict")


ONE = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
HEADERS = {
    "longer than the file": tensors(ONE, length=1 << 60),
    "shorter than JSON": tensors(ONE, length=0),
    "no JSON": tensors(b"{'x': }"),
    "a list": tensors(b"[1, 2]"),
    "nested": tensors(b'{"x":' * 100_000),
    "an unknown dtype": tensors({"x": {**ONE["x"], "dtype": "F1"}}),
    "a negative size": tensors({"x": {**ONE["x"], "shape": [-2, -1]}}),
    "a huge size": tensors({"x": {**ONE["x"], "shape": [1 << 62, 0]}}),
    "a size that is no integer": tensors({"x": {**ONE["x"], "shape": [2.0]}}),
    "a missing shape": tensors({"x": {"dtype": "F32", "data_offsets": [0, 8]}}),
    "an end outside of the file": tensors(
        {"x": {**ONE["x"], "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    ),
    "an overlap": tensors({**ONE, "y": ONE["x"]}),
    "a gap": tensors({"x": {**ONE["x"], "shape": [1], "data_offsets": [4, 8]}}),
    "fewer elements than bytes": tensors({"x": {**ONE["x"], "shape": [1]}}),
    "bytes of no tensor": tensors(ONE, b"\0" * 12),
    "offsets that are strings": tensors({"x": {**ONE["x"], "data_offsets": ["0", "8"]}}),
}


@pytest.mark.parametrize("name", HEADERS)
def test_crafted_headers_of_tensors(name, tmp_path):
    refused(
        tmp_path / "f.fnet",
        forged([("weights.safetensors", HEADERS[name])]),
        r"weights.safetensors",
    )


MANIFESTS = {
    "another format": {"format": "zip"},
    "a later version": {"version": 2},
    "a version that is no number": {"version": "1"},
    "no files": {"files": {}},
    "files that are a list": {"files": [1]},
    "entries that are a list": {"entries": [1]},
    "an incomplete entry": {"entries": {"predict": {"inputs": []}}},
    "another size": {"files": {"weights.safetensors": {"bytes": 3, "sha256": ""}}},
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_crafted_manifests(name, tmp_path):
    refused(tmp_path / "f.fnet", forged([("weights.safetensors", tensors(ONE))], MANIFESTS[name]))


@pytest.mark.parametrize(
    "name",
    ["../outside.json", "/etc/passwd", "a/../../b", "a\\..\\b", "C:\\f", "a//b", ".hidden", "a\nb"],
)
def test_names_outside_of_the_archive(name, tmp_path):
    data = forged([("weights.safetensors", tensors(ONE)), (name, b"{}")])
    refused(tmp_path / "f.fnet", data, "contains a file named")
    assert [path.name for path in tmp_path.iterdir()] == ["f.fnet"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_files_of_one_name(tmp_path):
    refused(
        tmp_path / "f.fnet",
        forged([("a.json", b"{}"), ("a.json", b"{}")]),
        r"contains a file named 'a.json'",
    )


def test_nested_json(tmp_path):
    for text in b'{"a":' * 1_000_000, b"[" * 3_000_000, b'{"a":[' + b"[]," * 1_000_000 + b"[]]}":
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("manifest.json", text, zipfile.ZIP_DEFLATED)
        refused(tmp_path / "f.fnet", sealed(stream.getvalue()), "is not a complete bundle")


def test_zip_bombs(tmp_path):
    """Sizes are checked before anything is decompressed: stated ones, and those that lie."""
    bomb = forged([("tokenizer/vocab.json", b"0" * (1 << 27))], kind=zipfile.ZIP_DEFLATED)
    assert len(bomb) < 1 << 18
    refused(
        tmp_path / "f.fnet", bomb, r"tokenizer/vocab.json has 134,217,728 bytes, expected at most"
    )
    refused(
        tmp_path / "f.fnet",
        forged([("weights.safetensors", tensors(ONE))], kind=zipfile.ZIP_DEFLATED),
        "is compressed; tensors must not be",
    )

    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("manifest.json", b"0" * (1 << 27), zipfile.ZIP_DEFLATED)
    data = bytearray(stream.getvalue())
    data[22:26] = struct.pack("<I", 1000)
    at = data.index(b"PK\1\2") + 24
    data[at : at + 4] = struct.pack("<I", 1000)
    refused(
        tmp_path / "f.fnet",
        sealed(bytes(data)),
        r"manifest.json has 1,001 bytes or more, expected 1,000",
    )


def test_overlapping_files(tmp_path):
    """The directory of a quine-like bomb names the same bytes several times."""
    data = forged([("a.json", b"{}"), ("b.json", b"{}")])
    start = data.index(b"PK\1\2", data.index(b"PK\1\2") + 1)  # the directory's entry of b.json
    data = bytearray(data[:-71])
    data[start + 42 : start + 46] = struct.pack("<I", 0)
    refused(tmp_path / "f.fnet", sealed(bytes(data)))


def test_a_directory_of_many_files(tmp_path):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for i in range(65_000):
            archive.writestr(zipfile.ZipInfo(f"tokenizer/a_long_name_of_a_small_file_{i}"), b"")
    refused(tmp_path / "f.fnet", sealed(stream.getvalue()), "its directory has")


def test_a_crafted_program_calls_nothing_that_the_manifest_does_not_state(tmp_path):
    import jax

    f = lambda params, x: jnp.linalg.cholesky(x @ x.T + jnp.eye(3) * params["a"])
    export.program(f, {"a": jnp.ones(())}, x=export.spec("3, b")).save(tmp_path / "f.fnet")
    archive = _reader.Archive(tmp_path / "f.fnet")
    assert archive.manifest["entries"]["predict"]["custom_calls"][
        "portable"
    ]  # LAPACK's, which JAX keeps stable
    export.load(tmp_path / "f.fnet", check=True)
    archive.manifest["entries"]["predict"]["custom_calls"] = {"portable": []}
    files = {
        name: archive.read(name)
        for name in archive.names()
        if name.endswith((".jax", ".json")) and name != "manifest.json"
    }
    _write.write(
        tmp_path / "g.fnet",
        archive.manifest,
        files,
        {name: archive.tensors(name) for name in ("weights.safetensors", "tests.safetensors")},
    )
    with pytest.raises(
        export.BundleError, match=r"g.fnet: programs/predict.portable.jax calls .*lapack_spotrf"
    ):
        export.load(tmp_path / "g.fnet")(jax.numpy.ones((3, 2)))


def test_files_that_are_no_bundles(tmp_path):
    refused(tmp_path / "f.fnet", b"", "is empty; expected a bundle")
    refused(tmp_path / "f.fnet", b"PK\3\4" + b"\0" * 1000)
    refused(tmp_path / "f.fnet", DRAW.bytes(100_000))
    with pytest.raises(FileNotFoundError):
        export.load(tmp_path / "absent.fnet")
