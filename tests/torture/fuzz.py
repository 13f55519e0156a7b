"""Fuzz test of the readers of untrusted files: each returns an array or raises ValueError, within
limits of time and memory."""

import dataclasses
import functools
import gzip
import hashlib
import io
import json
import resource
import signal
import struct
import sys
import tarfile
import time
import warnings
from pathlib import Path

import numpy as np

from fnet import training as tr
from fnet.models.weights import _tensors
from fnet.training.checkpoints import _manifest
from fnet.training.data import _image_formats

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import llama2c

MEMORY = 1 << 30  # bytes that the reader may ask for beyond what the process has
SECONDS = 10
NUMBERS = [
    0,
    1,
    7,
    255,
    256,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63,
    2**64 - 1,
]


def idx(rng):
    raw = b"\0\0\x08\3" + struct.pack(">3I", 4, 3, 2) + bytes(range(24))
    return gzip.compress(raw, mtime=0) if rng.random() < 0.3 else raw


def cifar(rng):
    return b"".join(bytes([i % 10]) + rng.randbytes(3072) for i in range(2))


@functools.cache
def _archive():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as made:
        for name in (
            *_image_formats.CIFAR_TRAIN,
            _image_formats.CIFAR_TEST,
            "../../escape",
            "/etc/escape",
        ):
            member = tarfile.TarInfo(
                f"cifar-10-batches-bin/{name}" if name[0] not in "./" else name
            )
            blob = bytes(3073)
            member.size = len(blob)
            made.addfile(member, io.BytesIO(blob))
    return out.getvalue()


def archive(rng):
    return _archive()


def safetensors(rng):
    head = json.dumps(
        {
            "__metadata__": {"a": "b"},
            "x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "y": {"dtype": "U8", "shape": [8], "data_offsets": [24, 32]},
        }
    ).encode()
    return len(head).to_bytes(8, "little") + head + bytes(range(32))


def llama(rng):
    head = llama2c.Header(4, 8, 1, 2, 1, 5, 3)
    floats = sum(int(np.prod(shape)) for shape in head.shapes().values())
    return struct.pack("<7i", 4, 8, 1, 2, 1, 5, 3) + bytes(4 * floats)


def config(rng):
    return json.dumps(
        {"steps": 100, "name": "a", "rate": 1e-3, "flag": True, "none": None}
    ).encode()


def manifest(rng):
    return _MANIFEST


Run = dataclasses.make_dataclass(
    "Run",
    [
        ("steps", int, 1),
        ("name", str, ""),
        ("rate", float, 0.0),
        ("flag", bool, False),
        ("none", int | None, None),
    ],
)


def read_manifest(path):
    """Computes the checksum of a mutated manifest again, so that its contents are read."""
    raw = path.read_bytes()
    for text in (raw, sealed(raw)):
        (path.parent / "manifest.json").write_bytes(text)
        try:
            content = _manifest.read_manifest(path.parent)
            _manifest.read_leaves(path.parent, content)
        except _manifest.Damaged:
            pass


def sealed(raw):
    body = raw[: -len(_manifest._SEAL % (b"0" * 64))]
    return body + _manifest._SEAL % hashlib.blake2b(body, digest_size=32).hexdigest().encode()


READERS = {
    "IDX": (idx, _image_formats.read_idx),
    "CIFAR-10": (cifar, lambda path: _image_formats._parse_cifar(path, path.read_bytes())),
    "CIFAR-10's archive": (archive, _image_formats._read_archive),
    "safetensors": (safetensors, lambda path: _tensors._mapped(path)),
    "llama2.c": (llama, lambda path: llama2c.read(path)),
    "config.json": (config, lambda path: tr.load_config(Run, path)),
    "manifest.json": (manifest, read_manifest),
}
WEIGHTS = {
    "IDX": 4,
    "CIFAR-10": 2,
    "CIFAR-10's archive": 1,
    "safetensors": 4,
    "llama2.c": 4,
    "config.json": 3,
    "manifest.json": 4,
}
_MANIFEST = b""


def mutant(raw, rng):
    """Changes, removes, duplicates or exchanges a few bytes, numbers or ranges."""
    raw = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 3, 8])):
        if not raw:
            return bytes(raw)
        # Most of what a reader decides stands at the beginning.
        at = (
            min(int(rng.expovariate(1 / 40)), len(raw) - 1)
            if rng.random() < 0.7
            else rng.randrange(len(raw))
        )
        kind = rng.randrange(9)
        if kind == 0:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            raw[at] = rng.randrange(256)
        elif kind == 2:
            del raw[at : at + rng.randint(1, 16)]
        elif kind == 3:
            raw[at:at] = rng.randbytes(rng.randint(1, 16))
        elif kind == 4:
            del raw[at:]
        elif kind == 5:
            number, form = rng.choice(NUMBERS), rng.choice(["<I", ">I", "<Q", ">Q", "<i"])
            size = struct.calcsize(form)
            raw[at : at + size] = struct.pack(
                form, number % 2 ** (31 if form == "<i" else 8 * size)
            )
        elif kind == 6:
            digits = [i for i, byte in enumerate(raw[:5000]) if 48 <= byte < 58]
            if digits:
                i, value = (
                    rng.choice(digits),
                    rng.choice([*NUMBERS, -1, 1.5, "null", "[]", '"a"', "1e400"]),
                )
                raw[i : i + 1] = str(value).encode()
        elif kind == 7:
            raw[at:at] = raw[at : at + rng.randint(1, 64)]
        else:
            raw[at:at] = rng.choice(
                [b"[" * 2000, b'{"a":' * 500, bytes(64), b"\xff" * 64, b'"__metadata__"', b"../x"]
            )
    return bytes(raw)


class Hang(BaseException):
    pass


def ring(*_):
    raise Hang


def run(count, folder, rng):
    """Runs `count` inputs through all readers. Crashes, hangs and excessive memory count as lost."""
    global _MANIFEST
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    with tr.Checkpoints(folder / "c") as checkpoints:
        checkpoints.save(1, {"a": np.arange(6.0).reshape(2, 3), "n": 3, "b": np.zeros(4, np.int8)})
    place = folder / "c" / "1"
    _MANIFEST = (place / "manifest.json").read_bytes()
    signal.signal(signal.SIGALRM, ring)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, -1))
    names = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
    lost, slowest, refused = [], 0.0, 0
    for number in range(count):
        name = names[number % len(names)]
        make, read = READERS[name]
        blob = mutant(make(rng), rng)
        path = place / "mutant" if name == "manifest.json" else folder / "mutant"
        path.write_bytes(blob)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        began = time.perf_counter()
        try:
            read(path)
        except ValueError:
            refused += 1
        except BaseException as error:
            kept = folder / f"lost{len(lost)}"
            kept.write_bytes(blob)
            lost.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            if len(lost) > 30:
                break
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        slowest = max(slowest, time.perf_counter() - began)
    escaped = [path for path in (folder.parent / "escape", Path("/etc/escape")) if path.exists()]
    lost += [f"written outside: {path}" for path in escaped]
    return (
        count,
        count - len(lost),
        [*lost, f"note: {refused} refused, the slowest took {slowest:.2f} s"],
    )
