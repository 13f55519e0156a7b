"""The static page: one draws a digit, and onnxruntime-web classifies it in headless Chromium."""

import functools
import http.server
import itertools
import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from browser import chromium

from fnet import cli, export

pytestmark = pytest.mark.usefixtures("quickly")
ROOT = pathlib.Path(__file__).parents[2]
STROKES = {  # of digits in a square of size 1, as one draws them
    0: [
        [
            (0.5, 0),
            (0.2, 0.15),
            (0.1, 0.5),
            (0.2, 0.85),
            (0.5, 1),
            (0.8, 0.85),
            (0.9, 0.5),
            (0.8, 0.15),
            (0.5, 0),
        ]
    ],
    1: [[(0.35, 0.2), (0.55, 0), (0.55, 1)]],
    3: [[(0.2, 0.1), (0.5, 0), (0.75, 0.2), (0.45, 0.45), (0.8, 0.7), (0.5, 1), (0.2, 0.9)]],
    4: [[(0.55, 0), (0.2, 0.6), (0.8, 0.6)], [(0.55, 0.35), (0.55, 1)]],
    7: [[(0.2, 0), (0.8, 0), (0.45, 1)], [(0.3, 0.5), (0.75, 0.5)]],
}


def installed():
    """The folder of onnxruntime-web, which `make verify-export` installs."""
    folder = pathlib.Path(
        os.environ.get("FNET_ONNXRUNTIME_WEB", ROOT / "node_modules" / "onnxruntime-web")
    )
    if not folder.exists():
        pytest.skip(
            "needs onnxruntime-web: make verify-export, or its folder in FNET_ONNXRUNTIME_WEB"
        )
    return folder


def program():
    kernel = jax.random.normal(jax.random.key(0), (64, 10))
    return export.program(
        lambda kernel, x: x.reshape(x.shape[0], 64) @ kernel, kernel, x=export.spec("b, 8, 8, 1")
    )


@pytest.fixture
def fake(tmp_path):
    """A folder with the names of the files of onnxruntime-web."""
    (tmp_path / "package" / "dist").mkdir(parents=True)
    for name in ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"):
        (tmp_path / "package" / "dist" / name).write_text(name)
    return tmp_path / "package"


def test_the_folder_is_complete(fake, tmp_path):
    pytest.importorskip("onnxruntime")
    prepared = program().entry(
        "preprocess",
        lambda params, image: image.astype(jnp.float32) / 255,
        image=export.spec("b, 8, 8, 1", "uint8"),
    )
    export.web(
        prepared,
        tmp_path / "site",
        labels=[*"012345678", "</script>"],
        title="<Digits>",
        runtime=fake,
    )
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == [
        "index.html",
        "model.onnx",
        "ort-wasm-simd-threaded.wasm",
        "ort.wasm.bundle.min.mjs",
        "preprocess.onnx",
    ]
    page = (tmp_path / "site" / "index.html").read_text()
    assert "<title>&lt;Digits&gt;</title>" in page and page.count("</script>") == 2
    for name in ("CONFIGURATION", "RUNTIME", "TITLE", "http:", "https:"):
        assert name not in page


def test_errors(fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError,
        match=r"export.web: found no onnxruntime-web .* in node_modules of .* and "
        r"the folders above it; install it with npm install onnxruntime-web, "
        r"or name its folder with runtime=",
    ):
        export.web(program(), "site")
    with pytest.raises(FileNotFoundError, match=r"found no onnxruntime-web .* in missing;"):
        export.web(program(), "site", runtime="missing")
    with pytest.raises(ValueError, match=r"export.web: 3 labels for a model of 10 classes"):
        export.web(program(), "site", labels="abc", runtime=fake)
    with pytest.raises(
        ValueError, match=r"export.web: margin=0.5: expected a number in \[0, 0.5\)"
    ):
        export.web(program(), "site", margin=0.5, runtime=fake)
    for shape in ("b, 8", "b, h, w, 3", "b, 8, 8, 2"):
        f = lambda params, x: x.reshape(x.shape[0], -1)[:, :1]
        with pytest.raises(
            ValueError,
            match=r"export.web: expected a program from one image, such as float32\[b, 28, "
            r"28, 1\], to scores \[b, classes\]; got float32\[b, .*\] to float32\[b",
        ):
            export.web(export.program(f, {}, x=export.spec(shape)), "site", runtime=fake)
    assert not (tmp_path / "site").exists()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The page of the network of `make demo`."""
    runtime, folder = installed(), tmp_path_factory.mktemp("run") / "digits"
    for name in ("sklearn", "matplotlib", "onnxruntime"):
        pytest.importorskip(name)
    demo = ROOT / "experiments" / "image_classification.py"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))
    }
    subprocess.run(
        [sys.executable, demo, f"--workdir={folder}"],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        env={**environment, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
    )
    assert cli.main(["export", str(folder), "--to=web", f"--runtime={runtime}"]) == 0
    return folder / "web"


@pytest.fixture
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        log_message = lambda self, *arguments: None

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def draw(page, digit):
    """Draws with the mouse; returns the class that the page shows."""
    page.click("document.getElementById('clear')")
    x, y = page.js("(r => [r.x, r.y])(document.getElementById('canvas').getBoundingClientRect())")
    event = lambda kind, at: page.call(
        "Input.dispatchMouseEvent",
        type=kind,
        x=x + 60 + 160 * at[0],
        y=y + 60 + 160 * at[1],
        button="left",
        buttons=int(kind != "mouseReleased"),
    )
    for stroke in STROKES[digit]:
        event("mousePressed", stroke[0])
        for start, end in itertools.pairwise(stroke):
            for i in range(1, 6):
                event("mouseMoved", [a + (b - a) * i / 5 for a, b in zip(start, end)])
        event("mouseReleased", stroke[-1])
    for _ in range(100):
        page.js("new Promise(done => setTimeout(done, 20))")
        if page.js("!busy && !waiting"):
            break
    return page.js("document.getElementById('answer').textContent")


@pytest.mark.exhaustive
def test_drawn_digits_are_recognized(address, tmp_path):
    with chromium() as page:
        page.visit(address)
        while page.js("document.body.dataset.ready") != "yes":
            assert page.js("document.getElementById('error').textContent") == ""
            page.js("new Promise(done => setTimeout(done, 50))")
        assert {digit: draw(page, digit) for digit in STROKES} == {
            digit: str(digit) for digit in STROKES
        }
        rows = page.js("[...document.querySelectorAll('#classes tr')].map(row => row.innerText)")
        assert len(rows) == 10 and all(row.split()[2] == "%" for row in rows)
        page.screenshot(pathlib.Path(os.environ.get("FNET_SCREENSHOTS", tmp_path)) / "web.png")
        assert all(url.startswith((address, "data:", "blob:")) for url in page.requests), (
            page.requests
        )
        page.check()
        page.click("document.getElementById('clear')")
        assert page.js("document.getElementById('answer').textContent") == ""
