"""The table of a safetensors file, beside the library safetensors."""

import json
import random

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, deserialize
from safetensors import numpy as library

from fnet._util import _safetensors

MOST = 1 << 23
ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "scalar": np.array(3, np.float64),
    "empty": np.zeros((0, 4), np.int8),
    "ß/1": np.array([True, False]),
}


def read(raw, **options):
    table = _safetensors.read(raw, **{"total": len(raw), "most": MOST} | options)
    return table.arrays(raw), table.metadata


def test_what_the_library_writes_is_read():
    raw = library.save(ARRAYS, {"format": "pt"})
    arrays, metadata = read(raw)
    assert metadata == {"format": "pt"} and set(arrays) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)
    inside = b"before" + raw + b"behind"
    arrays = _safetensors.read(inside, start=6, total=len(raw), most=MOST).arrays(inside)
    np.testing.assert_array_equal(arrays["a"], ARRAYS["a"])


@pytest.mark.parametrize("alignment", [8, 64])
def test_what_is_written_is_read_by_the_library(alignment):
    entries = {
        name: (_safetensors.CODES[array.dtype.name], array.shape, array.nbytes)
        for name, array in ARRAYS.items()
    }
    head = _safetensors.header(entries, alignment)
    assert len(head) % alignment == 0
    tensors = dict(deserialize(head + b"".join(array.tobytes() for array in ARRAYS.values())))
    assert set(tensors) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert _safetensors.DTYPES[tensors[name]["dtype"]] == array.dtype.name
        assert tuple(tensors[name]["shape"]) == array.shape
        assert bytes(tensors[name]["data"]) == array.tobytes()


def hostile(entries, body, head=None):
    head = json.dumps(entries).encode() if head is None else head
    return len(head).to_bytes(8, "little") + head + bytes(body)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "it states a header of 0 bytes"),
        (b"\x10\0\0\0\0\0\0\0{}", "it states a header of 16 bytes"),
        (hostile({}, 0, b"[]"), "its header is a JSON list, expected an object"),
        (hostile({}, 0, b'{"a":' * 100_000), "its header is nested too deeply"),
        (hostile({}, 0, b'{"a":[' + b"[]," * 500_000 + b"[]]}"), "more than 500,000 lists"),
        (hostile({}, 0, b'{"a":1,"a":1}'), "its header has a name twice"),
        (hostile({"__metadata__": {"a": 1}}, 0), "__metadata__ must be an object of texts"),
        (hostile({"a": 3}, 0), "'a' needs a dtype, a shape and two data_offsets"),
        (hostile({"a": entry([1], 0, 4, "F99")}, 4), "'a' has the unknown dtype 'F99'"),
        (hostile({"a": entry([1], 0, 4, ["F32"])}, 4), "'a' has the unknown dtype"),
        (hostile({"a": entry([1.0], 0, 4)}, 4), r"'a' has shape \(1.0,\), which is not possible"),
        (hostile({"a": entry([1 << 47, 1 << 47, 0], 0, 0)}, 0), "'a' has shape .*, which is not"),
        (hostile({"a": entry({}, 0, 4)}, 4), "'a' needs a dtype, a shape and two data_offsets"),
        (hostile({"a": entry("", 0, 4)}, 4), "'a' needs a dtype, a shape and two data_offsets"),
        (hostile({"a": {**entry([1], 0, 4), "x": float("nan")}}, 4), "its header contains NaN"),
        (hostile({"\ud800": entry([1], 0, 4)}, 4), "a lone surrogate"),
        (hostile({"__metadata__": {"a": "\ud800"}}, 0), "a lone surrogate"),
        (hostile({"a": entry([True], 0, 4)}, 4), r"'a' has shape \(True,\), which is not possible"),
        (hostile({"a": entry([1] * 33, 0, 4)}, 4), r"'a' has shape \(1, 1, .*, which is not"),
        (hostile({"a": entry([1], "0", 4)}, 4), "'a' lies at 0 to 4"),
        (hostile({"a": entry([1], 4, 8)}, 8), "'a' has 4 bytes at 4; expected 4 at 0"),
        (hostile({"a": entry([3], 0, 8)}, 8), "'a' has 8 bytes at 0; expected 12 at 0"),
        (hostile({"a": entry([2], 0, 8)}, 9), "bytes; its tensors end at"),
    ],
)
def test_damage_is_named(raw, text):
    with pytest.raises(ValueError, match=text) as caught:
        read(raw)
    assert len(str(caught.value)) < 200


def test_a_known_dtype_without_a_use_is_told_apart():
    with pytest.raises(_safetensors.Unsupported, match="'a' has dtype F4, which fnet does not"):
        read(hostile({"a": entry([4], 0, 2, "F4")}, 2))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_read_that_the_library_refuses(seed):
    """Headers of which a few bytes are others: mostly numbers, which decide what is read."""
    rng, whole = random.Random(seed), library.save(ARRAYS, {"format": "pt"})
    end = 8 + int.from_bytes(whole[:8], "little")
    outcomes = {True: 0, False: 0}
    for _ in range(3000):
        raw = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(end)
            raw[at] = rng.choice(b'0123456789[]{},:"' + bytes([raw[at] ^ 1]))
        raw = bytes(raw)
        try:
            arrays, _ = read(raw)
        except ValueError:
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        try:
            expected = dict(deserialize(raw))
        except SafetensorError as error:
            pytest.fail(f"{raw[:end]!r} is read, but the library says {error}")
        assert {name: array.tobytes() for name, array in arrays.items()} == {
            name: bytes(tensor["data"]) for name, tensor in expected.items()
        }
    assert outcomes[True] > 50 and outcomes[False] > 1000
