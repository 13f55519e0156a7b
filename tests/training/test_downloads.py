"""Downloads of data sets from a server of this test: once, verified, and with one-line errors."""

import contextlib
import hashlib
import http.server
import math
import re
import socket
import threading

import numpy as np
import pytest
from dataset_files import (
    IDX_NAMES,
    cifar_archive,
    cifar_files,
    images_and_labels,
    one_sentence,
    write_idx_set,
)

from fnet.training.data import _datasets as datasets

# downloads


@pytest.fixture
def server():
    """Serves `pages`, {path: bytes, or (bytes, Content-Length)}, and counts what is asked for."""
    pages, asked = {}, []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path not in pages:
                return self.send_error(404)
            page = pages[self.path]
            body, length = page if isinstance(page, tuple) else (page, len(page))
            self.send_response(200)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{http_server.server_port}/data"
        yield type("Server", (), {"url": url, "pages": pages, "asked": asked})
        http_server.shutdown()
        thread.join()


@pytest.fixture
def small_mnist(tmp_path, server, monkeypatch):
    """A small set on the server, published with its right sizes and checksums."""
    write_idx_set(tmp_path / "origin")
    files = []
    for name in IDX_NAMES:
        blob = (tmp_path / "origin" / name).read_bytes()
        server.pages[f"/data/{name}"] = blob
        files.append(datasets._File(name, len(blob), hashlib.md5(blob).hexdigest()))
    source = datasets._Source((server.url,), tuple(files), tuple("0123456789"))
    monkeypatch.setitem(datasets._SOURCES, "mnist", source)
    return server


def downloading(tmp_path, server, *, kind):
    with pytest.raises(kind) as error:
        datasets.load("mnist", tmp_path / "to", base_url=server.url)
    by_hand = ", ".join(IDX_NAMES[:3]) + f" and {IDX_NAMES[3]} from {server.url} into "
    one_sentence(error, "mnist: ", by_hand + str(tmp_path / "to" / "mnist"))
    return error


def test_download_once_and_only_what_is_missing(tmp_path, small_mnist):
    said = []
    data = datasets.load("mnist", tmp_path / "to", announce=said.append)
    np.testing.assert_array_equal(data.train_images[..., 0], images_and_labels(12)[0])
    assert sorted(p.name for p in (tmp_path / "to" / "mnist").iterdir()) == sorted(IDX_NAMES)
    assert len(small_mnist.asked) == len(said) == 4
    assert re.fullmatch(rf"downloading {small_mnist.url}/{IDX_NAMES[0]} \(0.0 MB\)", said[0])
    datasets.load("mnist", tmp_path / "to")
    assert len(small_mnist.asked) == 4
    (tmp_path / "to" / "mnist" / IDX_NAMES[2]).unlink()
    datasets.load("mnist", tmp_path / "to", base_url=small_mnist.url + "/")
    assert small_mnist.asked[4:] == [f"/data/{IDX_NAMES[2]}"]


def test_download_of_an_archive(tmp_path, server, monkeypatch):
    blob = cifar_archive(cifar_files())
    server.pages["/data/cifar-10-binary.tar.gz"] = blob
    file = datasets._File("cifar-10-binary.tar.gz", len(blob), hashlib.md5(blob).hexdigest())
    source = datasets._Source((server.url,), (file,), tuple("0123456789"))
    monkeypatch.setitem(datasets._SOURCES, "cifar10", source)
    assert datasets.load("cifar10", tmp_path).train_images.shape == (15, 32, 32, 3)
    assert (tmp_path / "cifar10" / "cifar-10-binary.tar.gz").read_bytes() == blob


def test_a_second_address_is_tried(tmp_path, small_mnist, monkeypatch):
    source = datasets._SOURCES["mnist"]
    both = datasets._Source(
        (f"{small_mnist.url}/gone", small_mnist.url), source.files, "0123456789"
    )
    monkeypatch.setitem(datasets._SOURCES, "mnist", both)
    assert len(datasets.load("mnist", tmp_path / "to").train_labels) == 12
    assert len(small_mnist.asked) == 8


@pytest.mark.parametrize("damage", ["flipped", "longer", "shorter"])
def test_download_with_a_wrong_checksum(tmp_path, small_mnist, damage):
    page = f"/data/{IDX_NAMES[1]}"
    good = small_mnist.pages[page]
    small_mnist.pages[page] = {
        "flipped": good[:-1] + bytes([good[-1] ^ 1]),
        "longer": good + bytes(5000),
        "shorter": good[:-1],
    }[damage]
    gave = {"flipped": len(good), "longer": f"over {len(good)}", "shorter": len(good) - 1}[damage]
    error = downloading(tmp_path, small_mnist, kind=ValueError)
    one_sentence(error, f"{IDX_NAMES[1]} gave {gave} bytes with MD5 ")
    one_sentence(
        error, f"{len(good)} bytes with MD5 {hashlib.md5(good).hexdigest()} were published"
    )
    assert [p.name for p in (tmp_path / "to" / "mnist").iterdir()] == [IDX_NAMES[0]]


def test_a_connection_that_ends_early(tmp_path, small_mnist):
    page = f"/data/{IDX_NAMES[0]}"
    good = small_mnist.pages[page]
    small_mnist.pages[page] = good[:50], len(good)
    error = downloading(tmp_path, small_mnist, kind=ValueError)
    one_sentence(error, f"gave 50 bytes with MD5 {hashlib.md5(good[:50]).hexdigest()}, but ")
    assert not list((tmp_path / "to" / "mnist").iterdir())


def test_download_not_found(tmp_path, small_mnist):
    del small_mnist.pages[f"/data/{IDX_NAMES[3]}"]
    error = downloading(tmp_path, small_mnist, kind=FileNotFoundError)
    one_sentence(error, f"{IDX_NAMES[3]} could not be downloaded (", "HTTP Error 404: Not Found")


def test_download_without_a_network(tmp_path, small_mnist):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(FileNotFoundError) as error:
        datasets.load("mnist", tmp_path / "to", base_url=dead)
    one_sentence(error, f"could not be downloaded ({dead}/{IDX_NAMES[0]}: ", "refused")


def test_downloads_not_allowed(tmp_path, small_mnist):
    write_idx_set(tmp_path / "to" / "mnist")
    (tmp_path / "to" / "mnist" / IDX_NAMES[0]).unlink()
    with pytest.raises(FileNotFoundError) as error:
        datasets.load("mnist", tmp_path / "to", download=False)
    where = f"{tmp_path / 'to' / 'mnist'} or {tmp_path / 'to'}; put "
    one_sentence(error, f"mnist: {IDX_NAMES[0]} not found in {where}", "or allow the download")
    assert small_mnist.asked == []


def test_a_folder_that_cannot_be_made(tmp_path, small_mnist):
    (tmp_path / "to").write_text("a file")
    with pytest.raises(FileNotFoundError) as error:
        datasets.load("mnist", tmp_path / "to")
    one_sentence(
        error, f"{tmp_path / 'to' / 'mnist'} cannot be created (", "choose another data_dir"
    )


def test_published_sizes_are_plausible():
    for source in datasets._SOURCES.values():
        for file in source.files:
            assert re.fullmatch("[0-9a-f]{32}", file.md5)
    pixels = 60_000 * 28 * 28
    for name in ("mnist", "fashion_mnist"):
        sizes = [f.size for f in datasets._SOURCES[name].files]
        assert math.isclose(sizes[0], pixels / 3.5, rel_tol=0.6) and sizes[0] > sizes[2] > sizes[1]
