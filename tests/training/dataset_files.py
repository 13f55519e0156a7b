"""Files of data sets made for tests: IDX files, CIFAR-10's archive, and the check of their one-line
errors."""

import gzip
import io
import struct
import tarfile

import numpy as np

from fnet.training.data import _datasets as datasets
from fnet.training.data import _image_formats as formats

CODES = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13, "float64": 14}
IDX_NAMES = [f.name for f in datasets._SOURCES["mnist"].files]


def idx(array, *, shape=None, code=None):
    shape = array.shape if shape is None else shape
    head = bytes([0, 0, code or CODES[array.dtype.name], len(shape)])
    values = array.astype(array.dtype.newbyteorder(">")).tobytes()
    return head + struct.pack(f">{len(shape)}I", *shape) + values


def images_and_labels(n, seed=0, pixels=(5, 4)):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, *pixels), np.uint8)
    return images, (np.arange(n) % 10).astype(np.uint8)


def write_idx_set(folder, *, zipped=True, n=12, seed=0):
    folder.mkdir(parents=True, exist_ok=True)
    blobs = [idx(a) for a in (*images_and_labels(n, seed), *images_and_labels(n // 2, seed + 1))]
    for name, blob in zip(IDX_NAMES, blobs):
        name = name if zipped else name.removesuffix(".gz")
        (folder / name).write_bytes(gzip.compress(blob, mtime=0) if zipped else blob)


def cifar_files(n=3):
    rng = np.random.default_rng(0)
    names = [*formats.CIFAR_TRAIN, formats.CIFAR_TEST]
    files = {}
    for name in names:
        rows = rng.integers(0, 256, (n, 3073), np.uint8)
        rows[:, 0] %= 10
        files[name] = rows.tobytes()
    files[formats.CIFAR_NAMES] = ("\n".join("abcdefghij") + "\n\n").encode()
    return files


def cifar_archive(files, *, folder="cifar-10-batches-bin/", extra=()):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, blob in [*((folder + n, b) for n, b in files.items()), *extra]:
            member = tarfile.TarInfo(name)
            member.size = len(blob)
            archive.addfile(member, io.BytesIO(blob))
    return out.getvalue()


def one_sentence(error, *needles):
    text = str(error.value)
    assert "\n" not in text
    for needle in needles:
        assert needle in text, text
