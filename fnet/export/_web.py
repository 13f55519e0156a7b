"""The web page on which the user draws an image, which an ONNX model classifies in the browser."""

from __future__ import annotations

import html
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fnet._util import _page
from fnet._util._files import write
from fnet.export._program import Program

_PACKAGE = "onnxruntime-web"
_MODULE, _BINARY = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
_PIXELS = "float32", "uint8"
_ALLOW = {  # onnxruntime-web and the model, from the folder of the page
    "script-src": "'self' 'wasm-unsafe-eval'",
    "connect-src": "'self'",
    "worker-src": "'self' blob:",
}


def web(
    program: Program,
    folder: str | os.PathLike,
    *,
    labels: Iterable[Any] | None = None,
    margin: float = 0.0,
    title: str = "Draw an image",
    runtime: str | os.PathLike | None = None,
) -> None:
    """Writes a folder with a web page on which the user draws an image and the model classifies it.

        export.web(program, "site", labels=range(10))       # npm install onnxruntime-web
        # python -m http.server --directory site

    The page runs the model in the browser: the folder holds the program as an ONNX file, and
    onnxruntime-web. All files are static, so any web server will do, and nothing is loaded from
    other hosts. Needs the packages onnx and onnxruntime, and the npm package onnxruntime-web.

    Args:
        program: "predict" maps images [batch, height, width, channels] to scores [batch, classes].
            Images are float32 or uint8, with 1 or 3 channels. The page scales the drawing to their
            height and width, with values from 0 to 1 for float32 and from 0 to 255 for uint8. With
            an entry point "preprocess", it calls this first, with values from 0 to 255, and
            "predict" with the result.
        folder: the folder to write. It is created if necessary.
        labels: the names of the classes. Default: 0, 1, 2, ...
        margin: the empty margin at each edge of the training images, as a fraction of their size,
            in [0, 0.5): 0 for scikit-learn's digits (the default), 0.14 (4 of 28 pixels) for MNIST.
            The drawing is centered and scaled to fill the area within.
        title: the title of the page. Default "Draw an image".
        runtime: the folder of the npm package onnxruntime-web. Default: the first
            node_modules/onnxruntime-web in the working directory and the directories above it.

    Raises:
        FileNotFoundError: onnxruntime-web was not found.
        ValueError: the program does not map images [batch, height, width, channels] to scores of
            classes, or an argument is not valid.

    >>> import pathlib, tempfile
    >>> kernel, predict = jnp.ones((64, 10)), lambda kernel, x: x.reshape(x.shape[0], 64) @ kernel
    >>> program = export.program(predict, kernel, x=export.spec("b, 8, 8, 1"))
    >>> with tempfile.TemporaryDirectory() as folder:      # with empty files instead of onnxruntime-web
    ...     for name in ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"):
    ...         pathlib.Path(folder, name).touch()
    ...     export.web(program, f"{folder}/site", runtime=folder)
    ...     sorted(path.name for path in pathlib.Path(folder, "site").iterdir())
    ['index.html', 'model.onnx', 'ort-wasm-simd-threaded.wasm', 'ort.wasm.bundle.min.mjs']
    """
    height, width, channels, classes, dtype = _image(program)
    labels = [str(label) for label in (range(classes) if labels is None else labels)]
    if len(labels) != classes:
        raise ValueError(f"export.web: {len(labels)} labels for a model of {classes} classes")
    if not 0 <= margin < 0.5:
        raise ValueError(f"export.web: margin={margin}: expected a number in [0, 0.5)")
    distribution, folder = _runtime(runtime), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Opset 20, because the version of onnxruntime-web is the user's: the earliest that know
    # opset 23 are of 2025.
    program.onnx(folder / "model.onnx", opset=20, external=False)
    prepared = "preprocess" in program.entries
    if prepared:
        program.onnx(folder / "preprocess.onnx", entry="preprocess", opset=20, external=False)
    for name in (_MODULE, _BINARY):
        shutil.copyfile(distribution / name, folder / name)
    page = _page.page(
        title,
        _page.fill("fnet.export/web.html", title=html.escape(title)),
        style="fnet.export/web.css",
        script="fnet.export/web.js",
        data={
            "runtime": _MODULE,
            "height": height,
            "width": width,
            "channels": channels,
            "labels": labels,
            "margin": margin,
            "preprocess": prepared,
            "dtype": dtype,
        },
        allow=_ALLOW,
    )
    write(folder / "index.html", page)


def _image(program) -> tuple[int, int, int, int, str]:
    """Returns (height, width, channels, classes, dtype) of a program that classifies images."""
    entry = program.entries["predict"]
    inputs, output = [tree for _, tree in entry.inputs], entry.output
    if len(inputs) == 1 and "shape" in inputs[0] and "shape" in output:
        shape, classes = inputs[0]["shape"], output["shape"][-1:]
        fixed = [*shape[1:], *classes]
        if (
            len(shape) == 4
            and len(output["shape"]) == 2
            and all(isinstance(n, int) for n in fixed)
            and shape[3] in (1, 3)
            and shape[0] in (1, output["shape"][0])
            and inputs[0]["dtype"] in _PIXELS
        ):
            return (*fixed, inputs[0]["dtype"])
    raise ValueError(
        "export.web: expected a program from one image, such as float32[b, 28, 28, 1], to scores "
        f"[b, classes]; got {' and '.join(map(_text, inputs))} to {_text(output)}"
    )


def _text(tree) -> str:
    return (
        f"{tree['dtype']}[{', '.join(map(str, tree['shape']))}]"
        if "shape" in tree
        else "a tree of arrays"
    )


def _runtime(folder) -> Path:
    """Returns the folder that contains the distribution files of onnxruntime-web."""
    here = Path.cwd()
    candidates = (
        [Path(folder)]
        if folder is not None
        else [parent / "node_modules" / _PACKAGE for parent in (here, *here.parents)]
    )
    for candidate in candidates:
        for distribution in (candidate / "dist", candidate):
            if all((distribution / name).is_file() for name in (_MODULE, _BINARY)):
                return distribution
    where = (
        f"in {folder}"
        if folder is not None
        else f"in node_modules of {here} and the folders above it"
    )
    raise FileNotFoundError(
        f"export.web: found no {_PACKAGE} ({_MODULE} and {_BINARY}) {where}; install it with npm "
        f"install {_PACKAGE}, or name its folder with runtime="
    )
