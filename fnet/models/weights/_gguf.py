"""Reads a Decoder from a GGUF file of llama.cpp, with its quantized kernels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from fnet._util import _missing
from fnet.compress import Int4, Int8, Quantized
from fnet.layers._spec import put
from fnet.models.language.decoder._decoder import Decoder
from fnet.models.language.decoder._gguf import ARCHITECTURES, NAMES, ROPE_FREQS, decoder
from fnet.models.weights import _hub, _key_map, _match
from fnet.models.weights._config import Configuration
from fnet.models.weights._weights import Weights

# Fields about the file, its origin and its tokenizer, which `load_gguf` does not read.
_ASIDE = "GGUF.", "general.", "tokenizer.", "quantize.", "split."
_FORMATS = {"Q8_0": Int8(32), "Q4_0": Int4(32)}


def load_gguf(path: str | os.PathLike) -> tuple[Decoder, dict, dict]:
    """Reads a Decoder from a GGUF file of llama.cpp, with its quantized matrices.

        model, params, _ = pretrained.load_gguf("llama-q4_0.gguf")
        logits = ft.use_implicit_arrays(model)(params, tokens)

    Matrices in the formats Q8_0 and Q4_0 stay quantized, as `compress.Quantized` leaves with the
    codes and scales of the file. Other formats, such as Q6_K, are decoded to float32. The tokenizer
    in the file is not read.

    Args:
        path: a *.gguf file whose architecture is "llama" (Llama 1 to 3, Mistral, SmolLM 2, ...),
            "qwen2", "qwen3", "gemma2" or "gemma3".

    Returns:
        (model, params, state). The state is `{}`.

    Raises:
        FileNotFoundError: the file `path` does not exist.
        ValueError: the file is damaged, has another architecture, lacks arrays of the model, or has
            fields or arrays that the model does not have.
        ImportError: the package gguf is not installed.

    Source: the specification of GGUF and the block formats of ggml (ggml-quants.c).

    >>> import gguf, tempfile
    >>> sizes = {"block_count": 1, "context_length": 8, "embedding_length": 4, "feed_forward_length": 6,
    ...          "attention.head_count": 2, "attention.head_count_kv": 2}
    >>> shapes = {"token_embd": (10, 4), "output": (10, 4), "output_norm": (4,)}
    >>> shapes |= {f"blk.0.attn_{name}": (4, 4) for name in ("q", "k", "v", "output")}
    >>> shapes |= {"blk.0.ffn_gate": (6, 4), "blk.0.ffn_up": (6, 4), "blk.0.ffn_down": (4, 6)}
    >>> shapes |= {"blk.0.attn_norm": (4,), "blk.0.ffn_norm": (4,)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     writer = gguf.GGUFWriter(f"{folder}/tiny.gguf", "llama")
    ...     for name, size in sizes.items():
    ...         writer.add_uint32(f"llama.{name}", size)
    ...     writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    ...     for name, shape in shapes.items():
    ...         writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    ...     writer.write_header_to_file()
    ...     writer.write_kv_data_to_file()
    ...     writer.write_tensors_to_file()
    ...     writer.close()
    ...     model, params, _ = models.pretrained.load_gguf(f"{folder}/tiny.gguf")
    >>> model.width, model.depth, params["head"]["kernel"].shape
    (4, 1, (4, 10))
    """
    weights = opened(_hub.find(path))
    params: dict[str, Any] = {}
    for entry in weights.key_map.reads:
        tensors = [weights.tensors[key] for key in entry.keys]
        array = _array(weights.path, entry, tensors)
        if entry.paths[0].endswith("/scale") and weights.model.norm_offset:
            array = array - weights.model.norm_offset  # the file has the sum
        put(params, entry.paths[0].split("/"), array)
    return weights.model, params, {}


def opened(file: Path) -> Weights:
    """Returns the weights in a file, whose fields describe the model. The metadata are the fields."""
    reader = _reader(file)
    read = lambda name: reader.fields[name].contents() if name in reader.fields else None
    architecture = read("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{file}: expected the architecture {', '.join(map(repr, ARCHITECTURES))}; got "
            f"{architecture!r}"
        )
    prefix = f"{architecture}."
    fields = {
        name.removeprefix(prefix): _plain(read(name))
        for name in reader.fields
        if name.startswith(prefix)
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    model = decoder(file, architecture, fields, tensors)
    if other := [name for name in reader.fields if not name.startswith((prefix, *_ASIDE))]:
        raise ValueError(f"{file} has fields that fnet does not know: {', '.join(other[:4])}")
    _, leaves = _match.leaves_of(model)
    key_map = _key_map.key_map(NAMES, "", leaves, "Decoder (gguf)")
    wanted = key_map.keys()
    for what, names in (
        ("lacks", wanted.keys() - tensors.keys()),
        ("also contains", tensors.keys() - wanted.keys() - {ROPE_FREQS}),
    ):
        if names:
            raise ValueError(
                f"{file} {what} the arrays {', '.join(sorted(names)[:4])}"
                + (" ..." if len(names) > 4 else "")
            )
    return Weights(file, tensors, reader.fields, Configuration(file.parent), model, key_map=key_map)


def _plain(value: Any) -> Any:
    """Returns, for example, 1e-5 instead of the float32 value 9.99999974e-6."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _reader(file: Path):
    """Opens a file with the class `GGUFReader` of the package gguf. Raises ValueError if the file
    is damaged, for example if a field extends beyond the end of the file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(
            _missing.message("pretrained.load_gguf needs", "gguf", error=error)
        ) from None

    class Reader(GGUFReader):
        def _get(self, offset, dtype, count=1, override_order=None):
            if not 0 <= int(offset) + int(count) * np.dtype(dtype).itemsize <= len(self.data):
                raise ValueError("a field extends beyond the end of the file")
            return super()._get(offset, dtype, count, override_order)

    try:
        return Reader(file)
    except Exception as error:
        raise ValueError(
            f"{file} is not a GGUF file that can be read ({type(error).__name__}: {error})"
        ) from None


def _array(file, entry, tensors) -> Any:
    """Returns the model's array for `entry`, from one tensor of the file or from one tensor for
    each layer.

    The result is a `Quantized` if all tensors have the same supported quantized format.
    """
    (shape,), lead = {spec.shape for spec in entry.specs}, len(entry.copies)
    transposed = entry.rule.layout.name == "dense"
    rows = shape[lead:][::-1] if transposed else shape[lead:]
    for tensor in tensors:
        if (got := tuple(map(int, tensor.shape[::-1]))) != rows:
            raise ValueError(f"{file}: {tensor.name}: expected shape {rows}; got {got}")
    kinds = {tensor.tensor_type.name for tensor in tensors}
    if len(kinds) == 1 and len(rows) == 2 and (kind := next(iter(kinds))) in _FORMATS:
        parts = [_blocks(tensor.data, kind) for tensor in tensors]
        codes, scale = (
            np.stack([part[i] for part in parts]).reshape(*entry.copies, *parts[0][i].shape)
            for i in (0, 1)
        )
        if transposed:
            codes, scale = codes.swapaxes(-1, -2), scale.swapaxes(-1, -2)
        axes = (-2,) if transposed else (-1,)
        result = Quantized(
            jnp.asarray(codes), jnp.asarray(scale), _FORMATS[kind], axes, jnp.dtype(jnp.float32)
        )
        return Quantized(result.pack(result.codes), result.scale, result.format, axes, result.dtype)
    from gguf.quants import dequantize

    try:
        arrays = [
            np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
            for tensor in tensors
        ]
    except NotImplementedError:
        raise ValueError(
            f"{file}: {tensors[0].name} has the format {', '.join(sorted(kinds))}, which the "
            "package gguf cannot decode"
        ) from None
    arrays = [array.T if transposed else array for array in arrays]
    return jnp.asarray(np.stack(arrays).reshape(shape))


def _blocks(data, kind):
    """Converts the quantized data of a tensor to a tuple (codes [rows, n], scales [rows, n / 32]).
    Each row of `data` consists of blocks, and each block contains a float16 scale and 32 codes."""
    blocks = np.asarray(data).reshape(len(data), -1, 34 if kind == "Q8_0" else 18)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    codes = blocks[..., 2:]
    if kind == "Q8_0":
        codes = np.ascontiguousarray(codes).view(np.int8)
    else:  # the first 16 values are in the low halves of the bytes
        codes = np.concatenate([codes & 15, codes >> 4], -1)
    return codes.reshape(len(data), -1), scale
