"""CIFAR-10's archive: complete, damaged and hostile ones, and compressed files that unpack to too
much."""

import gzip
import io
import tarfile

import numpy as np
import pytest
from dataset_files import cifar_archive, cifar_files, idx, one_sentence
from hypothesis import given, settings
from hypothesis import strategies as st

from fnet.training.data import _datasets as datasets
from fnet.training.data import _image_formats as formats

# CIFAR-10


@pytest.mark.parametrize("form", ["archive", "dotted archive", "folder", "files"])
def test_cifar10(tmp_path, form):
    files = cifar_files()
    if "archive" in form:
        folder = "./cifar-10-batches-bin/" if "dotted" in form else "cifar-10-batches-bin/"
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(cifar_archive(files, folder=folder))
    else:
        folder = tmp_path / "cifar10" / ("cifar-10-batches-bin" if form == "folder" else "")
        folder.mkdir(parents=True)
        for name, blob in files.items():
            (folder / name).write_bytes(blob)
    data = datasets.load("cifar10", tmp_path, download=False)
    assert data.train_images.shape == (15, 32, 32, 3) and data.test_images.shape == (3, 32, 32, 3)
    assert data.train_images.flags.c_contiguous and data.test_images.flags.c_contiguous
    row = np.frombuffer(files["data_batch_2.bin"], np.uint8)[3073 : 2 * 3073]
    assert data.train_labels[4] == row[0]
    for channel in range(3):  # red, green, blue planes, each row-major
        plane = row[1 + 1024 * channel : 1 + 1024 * (channel + 1)].reshape(32, 32)
        np.testing.assert_array_equal(data.train_images[4, :, :, channel], plane)
    assert data.classes == tuple("abcdefghij")


def test_cifar10_without_its_list_of_names(tmp_path):
    files = cifar_files()
    del files["batches.meta.txt"]
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(cifar_archive(files))
    assert datasets.load("cifar10", tmp_path, download=False).classes[6] == "frog"


def cifar_error(tmp_path, blob):
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(blob)
    with pytest.raises(ValueError) as error:
        datasets.load("cifar10", tmp_path, download=False)
    one_sentence(error, str(path))
    return error


@pytest.mark.parametrize(
    "change, needle",
    [
        ({"data_batch_3.bin": bytes(100)}, "data_batch_3.bin: has 100 bytes, but needs a multiple"),
        ({"test_batch.bin": b""}, "test_batch.bin: has 0 bytes, but needs a multiple of 3073"),
        ({"test_batch.bin": b"\xff" + bytes(3072)}, "holds label 255, but the ten classes are 0"),
        ({"data_batch_1.bin": bytes(3073 * 10001)}, "has over 30730000 bytes, but needs"),
        (
            {"batches.meta.txt": b"cat dog"},
            "names 2 classes, but CIFAR-10 has 10; download it again",
        ),
    ],
)
def test_cifar10_errors(tmp_path, change, needle):
    one_sentence(cifar_error(tmp_path, cifar_archive(cifar_files() | change)), needle)


def test_archives_that_are_not_the_authors(tmp_path):
    needle = "not the archive that CIFAR-10's authors publish ("
    good = cifar_archive(cifar_files())
    one_sentence(
        cifar_error(tmp_path, b"<html>404</html>"), needle, "delete it and download it again"
    )
    one_sentence(cifar_error(tmp_path, good[: len(good) // 2]), needle)
    one_sentence(cifar_error(tmp_path, gzip.compress(b"not a tar" * 99)), needle)
    files = cifar_files()
    del files["data_batch_5.bin"]
    one_sentence(cifar_error(tmp_path, cifar_archive(files)), "holds no data_batch_5.bin; delete")


def test_damage_after_the_last_image_is_noticed(tmp_path):
    """tarfile takes a damaged header for the end of the archive, and does not read gzip's checksum."""
    good = cifar_archive(cifar_files())
    checksum = bytearray(good)
    checksum[-6] ^= 1
    one_sentence(cifar_error(tmp_path, bytes(checksum)), "CRC check failed")
    header = bytearray(gzip.decompress(good))
    with tarfile.open(fileobj=io.BytesIO(good)) as archive:
        last = archive.getmembers()[-1]
    assert last.name.endswith("batches.meta.txt")
    header[last.offset + 100] ^= 1
    one_sentence(cifar_error(tmp_path, gzip.compress(header)), "a member's header is damaged")


@pytest.mark.parametrize("kind", [b"g", b"x", b"L", b"K"])
def test_no_header_of_an_archive_makes_the_reader_allocate(tmp_path, kind):
    import tracemalloc

    blob = gzip.compress(member(kind=kind, size=40 << 20) + bytes(40 << 20), 1)
    tracemalloc.start()
    try:
        cifar_error(tmp_path, blob)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_hostile_archive_writes_nothing_and_stops(tmp_path):
    hostile = [("../../escaped.bin", b"x"), ("/tmp/fnet-escaped.bin", b"x")]
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    blob = cifar_archive(cifar_files(), extra=hostile)
    (place / "cifar-10-binary.tar.gz").write_bytes(blob)
    datasets.load("cifar10", place, download=False)
    assert [p.name for p in tmp_path.rglob("*.bin")] == []
    bomb = io.BytesIO()
    with gzip.GzipFile(fileobj=bomb, mode="wb", compresslevel=1) as out:
        member = tarfile.TarInfo("padding")
        member.size = 300 << 20
        out.write(member.tobuf())
        for _ in range(300):
            out.write(bytes(1 << 20))
    one_sentence(cifar_error(tmp_path, bomb.getvalue()), "it unpacks to more than CIFAR-10 could")


def test_a_link_in_an_archive_is_not_followed(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, blob in cifar_files().items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(blob)
            if name == "test_batch.bin":
                member.type, member.linkname, member.size = tarfile.SYMTYPE, "/etc/hostname", 0
            archive.addfile(member, io.BytesIO(blob))
    one_sentence(cifar_error(tmp_path, out.getvalue()), "holds no test_batch.bin; delete it")


def member(name=b"x", size=0, kind=b"0", field=None):
    """A tar header as GNU tar writes it."""
    head = bytearray(512)
    head[: len(name)], head[124:136], head[156:157] = name, field or b"%011o\0" % size, kind
    head[257:263], head[148:156] = b"ustar\0", b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


HOSTILE = "not the archive that CIFAR-10's authors publish ("


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize(
    "raw, needle",
    [
        (
            member(kind=b"L", size=600) * 20_000,
            "holds no data_batch_1.bin",
        ),  # long names of long names
        (member(kind=b"L") * 20_000, "holds no data_batch_1.bin"),
        (member(kind=b"x") * 20_000, "holds no data_batch_1.bin"),
        (member(kind=b"x", size=1 << 32), HOSTILE + "it unpacks to more than CIFAR-10 could)"),
        (member(kind=b"g", size=100 << 20) + bytes(100 << 20), "holds no data_batch_1.bin"),
        (
            member(field=b"\x80" + bytes(10) + b"\7"),
            HOSTILE + "it unpacks to more than CIFAR-10 could)",
        ),
        (member(field=b"-0000000001\0"), HOSTILE + "a member's header is damaged)"),
        (member(field=b"0_1        \0"), HOSTILE + "a member's header is damaged)"),
        (
            member(kind=b"S", size=512) + bytes(range(256)) * 4,
            HOSTILE + "a member's header is damaged)",
        ),
        (member(b"test_batch.bin", 3073)[:-1], HOSTILE + "a member's header is damaged)"),
        (member(b"test_batch.bin", 3073) + bytes(99), HOSTILE + "it ends within test_batch.bin)"),
        (
            2 * (member(b"test_batch.bin", 3073) + bytes(7 * 512)),
            HOSTILE + "it holds test_batch.bin twice)",
        ),
        (
            member(b"batches.meta.txt", 2 << 20) + bytes(2 << 20),
            "batches.meta.txt: has 2097152 bytes, but needs",
        ),
        (bytes(250 << 20), HOSTILE + "it unpacks to more than CIFAR-10 could)"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[-30:],
)
def test_hostile_archives(tmp_path, raw, needle):
    one_sentence(cifar_error(tmp_path, gzip.compress(raw, 1, mtime=0)), needle)


def test_headers_of_gnu_tar_and_pax_are_skipped(tmp_path):
    """What tarfile writes by default: a pax header before each member whose time is not whole, and
    links."""
    out, files = io.BytesIO(), cifar_files()
    with tarfile.open(fileobj=out, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name, blob in files.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size, entry.mtime, entry.pax_headers = len(blob), 1.5, {"comment": "c" * 3000}
            archive.addfile(entry, io.BytesIO(blob))
        entry = tarfile.TarInfo("a" * 300)
        entry.type, entry.linkname = tarfile.SYMTYPE, "b" * 300
        archive.addfile(entry)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(out.getvalue())
    data = datasets.load("cifar10", tmp_path, download=False)
    rows = np.frombuffer(files["test_batch.bin"], np.uint8).reshape(-1, 3073)
    np.testing.assert_array_equal(data.test_labels, rows[:, 0])


def test_a_small_compressed_file_cannot_unpack_to_a_large_array(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(
        gzip.compress(idx(np.zeros(0, np.uint8), shape=(65 << 20,)) + bytes(65 << 20), 9)
    )
    with pytest.raises(ValueError) as error:
        datasets.read_idx(path)
    one_sentence(error, f"{path}: ", "but max_bytes=67108864; raise it if the file is trusted")
    assert datasets.read_idx(path, max_bytes=65 << 20).nbytes == 65 << 20


@settings(deadline=None, max_examples=60)
@given(data=st.binary(max_size=300), at=st.integers(0, 700), patch=st.binary(max_size=40))
def test_any_archive_is_read_or_refused(tmp_path_factory, data, at, patch):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("é" * 120)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    blob = bytearray(out.getvalue())
    blob[at : at + len(patch)] = patch
    path = tmp_path_factory.mktemp("tar") / "file.tar.gz"
    path.write_bytes(gzip.compress(bytes(blob), 1))
    with pytest.raises(ValueError):
        formats.read_cifar10(path)
