"""llama2.c's model.bin (version 0): seven integers, then every array in float32, layers stacked.

Source: Karpathy's llama2.c, run.c (Config, TransformerWeights, memory_map_weights) and export.py (legacy_export).
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Header(NamedTuple):
    """run.c's Config. `vocab_size` is negative in the file where the classifier has weights of its own."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    tied: bool = True


def shapes(header: Header) -> dict[str, tuple[int, ...]]:
    """The arrays in the order of the file, by run.c's names."""
    d, h, n, heads, kv, v, s, tied = header
    kv_dim, head_dim = d // heads * kv, d // heads
    known = {
        "token_embedding_table": (v, d), "rms_att_weight": (n, d),
        "wq": (n, d, d), "wk": (n, kv_dim, d), "wv": (n, kv_dim, d), "wo": (n, d, d),
        "rms_ffn_weight": (n, d), "w1": (n, h, d), "w2": (n, d, h), "w3": (n, h, d), "rms_final_weight": (d,),
        "freq_cis_real": (s, head_dim // 2), "freq_cis_imag": (s, head_dim // 2),
    }
    return known if tied else known | {"wcls": (v, d)}


def header(file: Path) -> Header:
    """The file's configuration.

    Raises:
        ValueError: where the file is none of this kind, or its size is not what its header says.
    """
    size = os.path.getsize(file)
    with file.open("rb") as opened:
        raw = opened.read(28)
    if len(raw) == 28:
        *numbers, vocab, length = np.frombuffer(raw, "<i4").tolist()
        if min(numbers) > 0 and vocab and length > 0 and not numbers[0] % numbers[3] and not numbers[3] % numbers[4]:
            made = Header(*numbers, abs(vocab), length, vocab > 0)
            if 28 + 4 * sum(map(math.prod, shapes(made).values())) == size:
                return made
    raise ValueError(f"{file} is no safetensors file, and no model.bin of llama2.c's version 0 (seven integers, then "
                     f"as many floats as they say; this has {size} bytes): convert it to safetensors")


def read(file: Path) -> dict[str, np.ndarray]:
    """Views of the mapped file by run.c's names."""
    known = shapes(header(file))
    mapped = np.memmap(file, "<f4", "r", 28)
    arrays, at = {}, 0
    for name, shape in known.items():
        count = math.prod(shape)
        arrays[name] = mapped[at:at + count].reshape(shape)
        at += count
    return arrays


def write(file: Path, head: Header, arrays) -> None:
    """Writes a model.bin, under another name until it is whole. The tables of the rotary embedding are its own."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    vocab = head.vocab_size if head.tied else -head.vocab_size
    arrays = _rotary(head) | dict(arrays)
    try:
        with partial.open("wb") as opened:
            opened.write(np.array([*head[:5], vocab, head.seq_len], "<i4").tobytes())
            for name, shape in shapes(head).items():
                array = np.asarray(arrays[name])
                if array.shape != shape:
                    raise ValueError(f"{name!r} must be {shape} in a model.bin of {head}; got {array.shape}")
                opened.write(np.ascontiguousarray(array, "<f4").tobytes())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _rotary(head):
    """The two tables that old readers look angles up in, as export.py makes them."""
    dim = head.dim // head.n_heads
    angles = np.outer(np.arange(head.seq_len), 10000.0 ** (-np.arange(0, dim, 2)[:dim // 2] / dim))
    return {"freq_cis_real": np.cos(angles), "freq_cis_imag": np.sin(angles)}
