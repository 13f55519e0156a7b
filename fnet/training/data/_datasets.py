"""Four image data sets, read from the files that their authors publish: digits, MNIST,
Fashion-MNIST, CIFAR-10."""

import hashlib
import http.client
import importlib.util
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fnet._util import _missing
from fnet._util._files import replacing
from fnet._util._nearest import nearest
from fnet.training.data._cache import data_folder
from fnet.training.data._image_formats import (
    CIFAR_FOLDER,
    CIFAR_NAMES,
    CIFAR_TEST,
    CIFAR_TRAIN,
    checked_labels,
    read_cifar10,
    read_idx,
)

__all__ = ["NAMES", "Dataset", "load", "load_digits", "read_idx"]

_CHUNK = 1 << 20
_TIMEOUT = 8  # seconds to wait for a server; with two mirrors, a failed download takes less than 20


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels, split into a training set and a test set.

    Attributes:
        name: the name of the data set: "digits", "mnist", "fashion_mnist" or "cifar10".
        train_images: the training images, uint8 [n, height, width, channels]; 0 is black.
        train_labels: the training labels, int32 [n], indices into `classes`.
        test_images: the test images, uint8 [m, height, width, channels].
        test_labels: the test labels, int32 [m], indices into `classes`.
        classes: the names of the classes, a tuple of strings.

    >>> tr.datasets.load("digits").train_images.shape    # needs scikit-learn
    (1437, 8, 8, 1)
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: tuple[str, ...]


@dataclass(frozen=True)
class _File:
    """A file of a data set. The size in bytes and the MD5 checksum of the file show whether a
    download is complete."""

    name: str
    size: int
    md5: str


@dataclass(frozen=True)
class _Source:
    addresses: tuple[str, ...]
    files: tuple[_File, ...]
    classes: tuple[str, ...]


_TEN = tuple("0123456789")
_SOURCES = {
    # The authors' page no longer serves the files; these two mirrors have identical copies.
    "mnist": _Source(
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        (
            _File("train-images-idx3-ubyte.gz", 9912422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            _File("train-labels-idx1-ubyte.gz", 28881, "d53e105ee54ea40749a09fcbcd1e9432"),
            _File("t10k-images-idx3-ubyte.gz", 1648877, "9fb629c4189551a2d022fa330f9573f3"),
            _File("t10k-labels-idx1-ubyte.gz", 4542, "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        _TEN,
    ),
    # https://github.com/zalandoresearch/fashion-mnist, section "Get the Data"
    "fashion_mnist": _Source(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        (
            _File("train-images-idx3-ubyte.gz", 26421880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            _File("train-labels-idx1-ubyte.gz", 29515, "25c81989df183df01b3e8a0aad5dffbe"),
            _File("t10k-images-idx3-ubyte.gz", 4422102, "bef4ecab320f06d8554ea6380940ec79"),
            _File("t10k-labels-idx1-ubyte.gz", 5148, "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        (
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
    ),
    # https://www.cs.toronto.edu/~kriz/cifar.html, "CIFAR-10 binary version"
    "cifar10": _Source(
        ("https://www.cs.toronto.edu/~kriz/",),
        (_File("cifar-10-binary.tar.gz", 170052171, "c32a1d4ab5d03f1284b67883e8d87530"),),
        (
            *("airplane", "automobile", "bird", "cat", "deer"),
            *("dog", "frog", "horse", "ship", "truck"),
        ),
    ),
}
NAMES = ("digits", *_SOURCES)


def load(
    name: str,
    data_dir: str | os.PathLike | None = None,
    *,
    split: str = "random",
    download: bool = True,
    base_url: str | None = None,
    announce: Callable[[str], None] | None = None,
) -> Dataset:
    """Returns a data set of images, and downloads its files if they are missing.

    `load` looks in `data_dir/name`, then in `data_dir`, for files with the names under which the
    authors publish them, and downloads into `data_dir/name`. A download gets its name only when its
    size and MD5 checksum are the published ones. See docs/data.md.

    Args:
        name: "digits", "mnist", "fashion_mnist" or "cifar10".
        data_dir: the folder of the files. Default None: the folder that the environment variable
          `FNET_DATA` names, or ~/.cache/fnet. Not used for "digits", which is in the package
          `scikit-learn`.
        split: how to divide the 1,797 images of "digits", which comes without a test set: "random",
          a fixed 80/20 split, stratified by class, or "last20", the common choice of the last 20 %.
          See `load_digits`. Default "random".
        download: whether `load` may download missing files. Default True.
        base_url: the URL to download from. Default None: the published ones.
        announce: a function that gets a message (str) before each download. Default None.

    Returns:
        A `Dataset`.

    Raises:
        ValueError: the name or the split is unknown, or a file does not have the expected content.
        FileNotFoundError: a file is not on disk and cannot be downloaded.

    >>> load("digits").test_images.shape
    (360, 8, 8, 1)
    """
    if name not in NAMES:
        known = ", ".join(NAMES)
        near = nearest(str(name).lower().replace("-", "_"), NAMES, 3)
        hint = f"did you mean {' or '.join(near)}? There are {known}" if near else f"use {known}"
        raise ValueError(f"unknown dataset {name!r}: {hint}")
    if name == "digits":
        return load_digits(split)
    if split != "random":
        raise ValueError(f"{name} has a fixed split: split={split!r} is only for digits")
    base = data_folder(name, data_dir, "pass data_dir or set FNET_DATA")
    find, read = {"cifar10": (_find_cifar10, _load_cifar10)}.get(name, (_find_idx, _load_idx))
    found, missing = find(name, base / name)
    if missing:
        elsewhere, lacking = find(name, base)
        if not lacking:
            found, missing = elsewhere, []
    if missing and not download:
        raise FileNotFoundError(
            f"{name}: {_list(missing)} not found in {base / name} or {base}; "
            f"{_by_hand(name, base / name)}, or allow the download"
        )
    for file in _SOURCES[name].files:
        if file.name in missing:
            _download(name, file, base / name, base_url=base_url, announce=announce)
    if missing:
        found, _ = find(name, base / name)
    return read(name, found)


def load_digits(split: str = "random") -> Dataset:
    """Returns scikit-learn's 1,797 scans of handwritten digits, 8×8 pixels.

    Their gray levels, 0 (black) to 16, become round(255 · level / 16), so that they range from 0 to
    255 as in the other data sets.

    Args:
        split: "random" draws the test images from each class, the same in every call: 360 images,
          20 % of each class to within one, which leaves 1,437 for training. "last20" takes the last
          20 % of the file, also 360 images. Default "random".

    Returns:
        A `Dataset`.

    Raises:
        ValueError: the split is unknown.
        ModuleNotFoundError: scikit-learn is not installed.

    >>> len(tr.datasets.load_digits().test_labels)    # needs scikit-learn
    360
    """
    if split not in ("random", "last20"):
        raise ValueError(f"unknown split {split!r} of digits: use random or last20")
    levels, labels = _read_digits()
    images = np.round(levels * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    order = np.arange(len(labels))
    test = order >= 1437
    if split == "random":
        # NumPy guarantees the stream of RandomState forever, but not that of default_rng (NEP 19).
        order = np.random.RandomState(0).permutation(len(labels))
        order = order[np.argsort(labels[order], kind="stable")]
        test = np.arange(len(labels)) % 5 == 0
    # Back to the order of the file: sorted by class, an unshuffled batch would have only one class.
    train, test = np.sort(order[~test]), np.sort(order[test])
    return Dataset("digits", images[train], labels[train], images[test], labels[test], _TEN)


def _read_digits():
    """Returns the gray levels [n, 64] and the labels [n] of scikit-learn's file. Does not import
    scikit-learn if the file is in its usual folder, because importing scikit-learn takes one
    second."""
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise ModuleNotFoundError(_missing.message("digits needs", "scikit-learn"))
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        table = np.loadtxt(path, delimiter=",")
        return table[:, :-1], table[:, -1]
    import sklearn.datasets

    return sklearn.datasets.load_digits(return_X_y=True)


def _find_idx(name, folder):
    """Returns the files of an IDX data set as a dict {published name: path}, and a list of the
    names of missing
    files."""
    names = [file.name for file in _SOURCES[name].files]
    # Of two paths of one file, the compressed one.
    found = {
        each: path
        for each in names
        for path in (folder / each.removesuffix(".gz"), folder / each)
        if path.is_file()
    }
    return found, [each for each in names if each not in found]


def _load_idx(name, found):
    arrays = []
    train_images, train_labels, test_images, test_labels = found.values()
    for images_path, labels_path in ((train_images, train_labels), (test_images, test_labels)):
        images, labels = read_idx(images_path), read_idx(labels_path)
        if images.dtype != np.uint8 or images.ndim != 3:
            raise ValueError(
                f"{images_path}: holds {images.dtype} {images.shape}, "
                "but images are uint8 [n, height, width]; put the authors' file in its place"
            )
        if labels.dtype != np.uint8 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{labels_path}: holds {labels.dtype} {labels.shape}, but the {len(images)} images "
                f"of {images_path.name} need uint8 ({len(images)},); download both again"
            )
        arrays += [images[..., None], checked_labels(labels_path, labels)]
    if arrays[0].shape[1:] != arrays[2].shape[1:]:
        raise ValueError(
            f"{test_images}: holds images of {arrays[2].shape[1:3]} pixels, but "
            f"{train_images.name} of {arrays[0].shape[1:3]}; download both again"
        )
    return Dataset(name, *arrays, _SOURCES[name].classes)


def _find_cifar10(name, folder):
    """Returns two values: a dict {name: path} of the files of CIFAR-10, and a list of the names of
    missing files. The files of CIFAR-10 may be unpacked, or packed in one archive."""
    for place in (folder / CIFAR_FOLDER, folder):
        files = {n: place / n for n in (*CIFAR_TRAIN, CIFAR_TEST, CIFAR_NAMES)}
        found = {n: path for n, path in files.items() if path.is_file()}
        if len(found.keys() - {CIFAR_NAMES}) == 6:
            return found, []
    archive = _SOURCES[name].files[0].name
    if (folder / archive).is_file():
        return {archive: folder / archive}, []
    return {}, [archive]


def _load_cifar10(name, found):
    archive = found.get(_SOURCES[name].files[0].name)
    *arrays, classes = read_cifar10(archive or found)
    return Dataset(name, *arrays, classes or _SOURCES[name].classes)


class _Damaged(Exception):
    """The downloaded bytes are not those that were published."""


# pooch would need requests for what the standard library does, writes to stderr, and takes a reply of
# any length: 300 MB arrived for a file of 4,542 bytes before it compared the checksum.
def _download(name, file, folder, *, base_url, announce):
    """Downloads one file into `folder` under its published name. If the download fails, no partial
    file remains in `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileNotFoundError(
            f"{name}: {file.name} is missing and {folder} cannot be created ({error.strerror}); "
            "choose another data_dir"
        ) from None
    failures, damaged = [], False
    for address in (base_url,) if base_url else _SOURCES[name].addresses:
        url = f"{address.rstrip('/')}/{file.name}"
        if announce:
            announce(f"downloading {url} ({file.size / 1e6:.1f} MB)")
        try:
            with (
                replacing(folder / file.name) as temporary,
                urllib.request.urlopen(url, timeout=_TIMEOUT) as reply,
                open(temporary, "wb") as out,
            ):
                size, md5 = _copy(reply, out, file.size)
                if (size, md5) != (file.size, file.md5):
                    raise _Damaged(
                        f"{url} gave {f'over {file.size}' if size > file.size else size} bytes "
                        f"with MD5 {md5}, but {file.size} bytes with MD5 {file.md5} were published"
                    )
            return
        except _Damaged as error:
            damaged = True
            failures.append(str(error))
        except urllib.error.HTTPError as error:
            error.close()
            failures.append(f"{url}: {error}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            failures.append(f"{url}: {getattr(error, 'reason', error)}")
    raise (ValueError if damaged else FileNotFoundError)(
        f"{name}: {file.name} could not be downloaded ({'; '.join(failures)}); "
        f"{_by_hand(name, folder)}"
    )


def _copy(reply, out, limit):
    """Copies `reply` to the file `out`, and returns the number of bytes and their MD5 checksum.
    Stops after `limit` + 1 bytes, because a file of more than `limit` bytes is too large."""
    size, md5 = 0, hashlib.md5(usedforsecurity=False)
    while size <= limit and (chunk := reply.read(min(_CHUNK, limit + 1 - size))):
        size += len(chunk)
        md5.update(chunk)
        out.write(chunk)
    return size, md5.hexdigest()


def _by_hand(name, folder):
    source = _SOURCES[name]
    return f"put {_list([f.name for f in source.files])} from {source.addresses[0]} into {folder}"


def _list(names):
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
