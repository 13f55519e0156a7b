"""Writes the parameters of a Decoder to a GGUF file of llama.cpp."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fnet import compress
from fnet._util._files import replacing
from fnet.layers._spec import leaves
from fnet.models.language.decoder._decoder import Decoder
from fnet.models.language.decoder._gguf import ROPE_FREQS
from fnet.models.weights import _hub, _match
from fnet.models.weights._gguf import opened


def save_gguf(
    model: Decoder,
    params: Mapping,
    path: str | os.PathLike,
    *,
    like: str | os.PathLike,
    format: str | None = None,
) -> Path:
    """Writes the parameters of a Decoder to a GGUF file for llama.cpp, such as fine-tuned ones.

        model, params, _ = pretrained.load_gguf("llama-q8_0.gguf")
        params = tuned(compress.materialize(params))                       # your own function
        pretrained.save_gguf(model, params, "tuned.gguf", like="llama-q8_0.gguf")

    The new file has all fields of `like`, tokenizer included, which llama.cpp needs.

    Args:
        model: the model that `load_gguf(like)` returns.
        params: its parameters. Implicit arrays, such as quantized ones, are written as the arrays
            that they represent.
        path: the *.gguf file to write.
        like: the GGUF file of the original model.
        format: the format of the matrices, such as "F16", "Q8_0" or "Q4_0". Default None: the
            format of each matrix in `like`. Vectors keep theirs.

    Returns:
        The path of the file.

    Raises:
        FileNotFoundError: there is no file `like`.
        ValueError: `like` has another model, the arrays do not match it, or the package gguf cannot
            write the format (it only reads K-quants).
        ImportError: the package gguf is not installed.

    >>> from fnet.models import pretrained
    >>> try:
    ...     pretrained.save_gguf(models.Decoder.preset("stories260k"), {}, "new.gguf", like="./no/old.gguf")
    ... except FileNotFoundError as error:
    ...     print(error)
    no/old.gguf: no such file or folder
    """
    source, path = opened(_hub.find(like)), Path(path).expanduser()
    if model != source.model:
        raise ValueError(
            f"pretrained.save_gguf: expected the model of {like}, {source.model}; got {model}"
        )
    params = compress.materialize(params)
    model.check(params, *_match.inputs_of(model), state={})
    arrays = {}
    held = {"/".join(place): leaf for place, leaf in leaves(params)}
    for entry in source.key_map.reads:
        arrays |= _arrays(model, entry, np.asarray(held[entry.paths[0]], np.float32))
    with replacing(path) as new:
        _write(new, source, arrays, format)
    return path


def _arrays(model, entry, array) -> dict[str, np.ndarray]:
    """Returns the arrays of the file for an array of the model."""
    if entry.paths[0].endswith("/scale"):
        array = array + model.norm_offset
    parts = array.reshape(len(entry.keys), *array.shape[len(entry.copies) :])
    transposed = entry.rule.layout.name == "dense"
    return {key: part.T if transposed else part for key, part in zip(entry.keys, parts)}


def _write(path: Path, source: Any, arrays: Mapping[str, np.ndarray], format: str | None) -> None:
    import gguf

    fields = source.metadata
    writer = gguf.GGUFWriter(path, fields["general.architecture"].contents())
    for name, field in fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *_ = field.types
        part = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=part)
    for name, tensor in source.tensors.items():
        kind = tensor.tensor_type
        if name == ROPE_FREQS:
            writer.add_tensor(name, np.asarray(tensor.data), raw_dtype=kind)
            continue
        array = np.ascontiguousarray(arrays[name])
        kind = _kind(format) if format is not None and array.ndim == 2 else kind
        writer.add_tensor(name, _encoded(name, array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(format: str) -> Any:
    import gguf

    if format not in gguf.GGMLQuantizationType.__members__:
        raise ValueError(
            f"pretrained.save_gguf: format={format!r}: expected a format of GGUF, such as 'F16' or "
            "'Q8_0'"
        )
    return gguf.GGMLQuantizationType[format]


def _encoded(name: str, array: np.ndarray, kind: Any) -> np.ndarray:
    import gguf

    try:
        return gguf.quants.quantize(array, kind)
    except (NotImplementedError, gguf.quants.QuantError) as error:
        raise ValueError(
            f"pretrained.save_gguf: the package gguf cannot write {name}, {list(array.shape)}, as "
            f"{kind.name} ({error or 'it only reads this format'}): pass another format, such as "
            "format='Q8_0' or 'F16'"
        ) from None
