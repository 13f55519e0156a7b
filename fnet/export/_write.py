"""Writes bundles: zip archives with the programs and the weights of a model."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import struct
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fnet
from fnet import _jax, jaxpr
from fnet._util import _missing, _safetensors
from fnet._util import _tokenizer_files as _tokenizer
from fnet._util._files import replacing
from fnet.export import _examples, _stable
from fnet.export._entry import PLATFORMS
from fnet.export.standalone import (
    _interpret,
    _loaded,
    _outputs,
    _reader,
    _rounding,
    _signature,
    _sizes,
)

WINDOW = datetime.timedelta(days=180)  # JAX guarantees six months
_ALIGNMENT = 64  # of the weights in the file
_LARGEST_TEST = 1 << 22  # elements in the random inputs of a check, such as caches


def save(
    program: Any,
    path: str | os.PathLike,
    *,
    labels: Iterable[Any] | None = None,
    tokenizer: Any = None,
    tests: Mapping[str, Mapping[str, Any]] | None = None,
    differentiable: bool = False,
    kernels: Sequence[str] = (),
    about: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a program, its weights and other files to a bundle. `Program.save` documents the
    arguments."""
    path = Path(path)
    unknown = set(kernels) - set(PLATFORMS)
    if unknown:
        raise ValueError(
            f"Program.save: kernels={tuple(kernels)!r}: expected platforms among "
            f"{', '.join(PLATFORMS)}"
        )
    weights = dict(program.weights)
    files: dict[str, bytes] = dict(files or {})
    entries, checks = {}, {}
    for name, entry in program.entries.items():
        programs = {"portable": entry.portable}
        for kind in kernels:
            with _jax.kernels_in_exports(True):
                programs[kind] = entry.exported((kind,))
        for kind, exported in programs.items():
            files[f"programs/{name}.{kind}.jax"] = _serialized(exported, differentiable)
        description = {
            "inputs": entry.inputs,
            "output": entry.output,
            "constraints": entry.constraints,
            "weights": entry.weights,
            "constants": [],
            "custom_calls": {
                kind: sorted(_custom_calls(exported)) for kind, exported in programs.items()
            },
        }
        stable = None
        try:
            stable, constants = _stable.stable(entry.closed)
        except _stable.Unsupported as error:
            description["not_stable"] = str(error)
        else:
            description["constants"] = [f"constants/{name}/{i}" for i in range(len(constants))]
            weights |= zip(description["constants"], constants)
            files[f"programs/{name}.json"] = _json(stable)
        entries[name] = description
        description["tolerance"] = _outputs.tolerance(
            a.dtype
            for eqn in jaxpr.equations(entry.closed.jaxpr)
            for a in (v.aval for v in eqn.outvars)
            if hasattr(a, "dtype")
        )
        if not isinstance(tests or {}, Mapping):
            raise ValueError(
                "Program.save: expected tests as {entry point: {input: array}}, such as "
                f"{{'predict': {{'x': array}}}}; got a {type(tests).__name__}"
            )
        given = (tests or {}).get(name)
        if given is None:
            cases = _examples.cases(description, stable)
        elif isinstance(given, list):
            cases = given
        else:
            cases = [_signature.bound(path, name, description, (), given)[0]]
        for i, inputs in enumerate(cases):
            if given is None and sum(x.size for x in inputs) > _LARGEST_TEST:
                continue
            checks |= _test(program, name, i, inputs)
    tokenizer = program.tokenizer if tokenizer is None else tokenizer
    held = _tokenizer_files(tokenizer)
    files |= {f"tokenizer/{name}": content for name, content in held.items()} | _readers()
    today = datetime.date.today()
    manifest = {
        "format": _reader.FORMAT,
        "version": _reader.VERSION,
        "created": today.isoformat(),
        "read_until": (today + WINDOW).isoformat(),
        "versions": {
            "fnet": fnet.__version__,
            **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        },
        "requires": {
            "portable": list(PLATFORMS),
            **{kind: _requirements(kind) for kind in kernels},
        },
        "provenance": {
            "python": platform.python_version(),
            "system": platform.platform(),
            **(about or {}),
        },
        "labels": None if labels is None else [str(label) for label in labels],
        "differentiable": differentiable,
        "entries": entries,
    }
    write(path, manifest, files, {_reader.WEIGHTS: weights, _reader.TESTS: checks})


def write(
    path: Path, manifest: dict, files: Mapping[str, bytes], tensors: Mapping[str, Mapping[str, Any]]
) -> None:
    """Writes the archive atomically.

    The archive contains the small files, the tensors, and manifest.json with the digests of all
    files. The comment at the end of the archive contains the SHA-256 digest of all bytes that
    precede the comment.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sums = {}
    with replacing(path, durable=True) as partial:
        with zipfile.ZipFile(partial, "w") as archive:
            for name, data in files.items():
                archive.writestr(_info(name, zipfile.ZIP_DEFLATED), data)
                sums[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, arrays in tensors.items():
                sums[name] = _tensors(archive, name, arrays)
            archive.writestr(
                _info(_reader.MANIFEST, zipfile.ZIP_DEFLATED), _json({**manifest, "files": sums})
            )
            archive.comment = b"sha256:" + b"0" * 64
        with partial.open("r+b") as opened:
            opened.seek(-64, os.SEEK_END)
            rest, digest = opened.tell() - len(b"sha256:"), hashlib.sha256()
            opened.seek(0)
            while rest:
                block = opened.read(min(rest, 1 << 22))
                digest.update(block)
                rest -= len(block)
            opened.seek(-64, os.SEEK_END)
            opened.write(digest.hexdigest().encode())


def _serialized(exported, differentiable) -> bytes:
    try:
        return bytes(exported.serialize(vjp_order=int(differentiable)))
    except ImportError as error:
        raise ImportError(_missing.message("bundles need", "flatbuffers", error=error)) from None


def _custom_calls(exported) -> set:
    return set(re.findall(_loaded.CALL, exported.mlir_module())) - {"shape_assertion"}


def _requirements(kind) -> str:
    if kind == "cuda":
        return "an NVIDIA GPU of the Ampere generation or newer, and cuDNN 9.5 or newer, as installed by jax[cuda12]"
    return f"a {kind} device, and jaxlib {importlib.metadata.version('jaxlib')} or newer"


def _data(x) -> np.ndarray:
    return np.asarray(
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else x
    )


def _test(program, entry, number, inputs) -> dict[str, np.ndarray]:
    """Returns the arrays of a test: the inputs and the outputs."""
    parts = {"inputs": map(_data, inputs), "outputs": map(_data, program.call(entry, *inputs))}
    return {
        f"{_reader.test_name(entry, number)}/{part}/{i}": x
        for part, arrays in parts.items()
        for i, x in enumerate(arrays)
    }


def _tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """Returns {name: content} of the files of a tokenizer: those of its folder that belong to one,
    a file, a list of files, or those from which a tokenizer of `fnet.models` was read."""
    if tokenizer is None:
        return {}
    path = getattr(tokenizer, "path", tokenizer)
    if hasattr(path, "decode"):
        return _written(tokenizer)
    if isinstance(path, (str, os.PathLike)):
        path = Path(path).expanduser()
        files = _tokenizer.in_folder(path) if path.is_dir() else {path.name: path}
        if not files:
            raise ValueError(
                f"Program.save: {path} has no file of a tokenizer; expected "
                f"{', '.join((*_tokenizer.NAMES, *_tokenizer.OTHERS))}"
            )
    elif isinstance(path, Iterable):
        files = {Path(file).name: Path(file) for file in path}
    else:
        raise ValueError(
            "Program.save: expected a tokenizer as its folder, its files or an object that "
            f"models.read_tokenizer returned; got a {type(tokenizer).__name__}"
        )
    for file in files.values():
        if (
            file.suffix not in (".json", ".txt", ".model", ".bin", ".jinja")
            or file.stat().st_size > _reader._SMALL
        ):
            raise ValueError(
                f"Program.save: {file} is no file of a tokenizer (.json, .txt, .model, .bin or "
                f".jinja, at most {_reader._SMALL:,} bytes)"
            )
    return {name: file.read_bytes() for name, file in files.items()}


def _written(tokenizer: Any) -> dict[str, bytes]:
    """The files of a tokenizer that was made from no file."""
    if isinstance(tokenizer, bytes) or not hasattr(tokenizer, "characters"):
        raise ValueError(
            f"Program.save: this {type(tokenizer).__name__} was made from no file; save it in a "
            "folder, and pass the folder"
        )
    return {"characters.json": json.dumps(tokenizer.characters).encode()}


def _readers() -> dict[str, bytes]:
    """Returns {name: content} of the Python files that load the bundle without fnet."""
    import flatbuffers

    ours = {
        "load.py": _loaded,
        "reader.py": _reader,
        "interpret.py": _interpret,
        "outputs.py": _outputs,
        "rounding.py": _rounding,
        "signature.py": _signature,
        "sizes.py": _sizes,
        "tensor_table.py": _safetensors,
    }
    files = {name: Path(module.__file__).read_bytes() for name, module in ours.items()}
    files["__main__.py"] = (
        b'"""Describes and checks this bundle: python FILE."""\n\nimport load\n\nload.main()\n'
    )
    # JAX reads its programs with flatbuffers (Apache License 2.0) and does not install it.
    folder = Path(flatbuffers.__file__).parent
    names = (
        "__init__",
        "_version",
        "builder",
        "compat",
        "encode",
        "number_types",
        "packer",
        "table",
        "util",
    )
    return files | {
        f"flatbuffers/{name}.py": (folder / f"{name}.py").read_bytes()
        for name in names
        if (folder / f"{name}.py").exists()
    }


def _json(data) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def _info(name: str, kind: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)  # with a fixed date, so that equal contents give equal bytes
    info.compress_type = kind
    return info


def _tensors(archive, name, arrays) -> dict:
    """Writes a safetensors file to the archive. The file is uncompressed and aligned, so that a
    reader can map it into memory."""
    order = sorted(arrays, key=lambda key: (-arrays[key].dtype.itemsize, key))
    entries = {}
    for key in order:
        shape, dtype = arrays[key].shape, arrays[key].dtype
        if str(dtype) not in _safetensors.CODES:
            raise ValueError(
                f"Program.save: {key!r} has dtype {dtype}, which safetensors files cannot hold"
            )
        entries[key] = _safetensors.CODES[str(dtype)], shape, math.prod(shape) * dtype.itemsize
    head = _safetensors.header(entries, _ALIGNMENT)
    total = len(head) + sum(size for _, _, size in entries.values())
    digest, info = hashlib.sha256(), _info(name, zipfile.ZIP_STORED)
    large = total >= zipfile.ZIP64_LIMIT
    start = archive.fp.tell() + 30 + len(name) + (20 if large else 0) + 4
    info.extra = struct.pack("<HH", 0xD935, -start % _ALIGNMENT) + b"\0" * (-start % _ALIGNMENT)
    info.file_size = total
    with archive.open(info, "w", force_zip64=large) as opened:
        parts = itertools.chain(
            [head],
            (
                np.ascontiguousarray(np.asarray(arrays[key])).reshape(-1).view(np.uint8).data
                for key in order
            ),
        )
        for part in parts:
            if len(part):
                digest.update(part)
                opened.write(part)
    return {"bytes": total, "sha256": digest.hexdigest()}
