"""The format of llama2.c's model.bin, version 0: seven integers, then all arrays in float32, with
stacked layers.

Source: Karpathy's llama2.c, run.c (Config, TransformerWeights, memory_map_weights) and export.py
(legacy_export).
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fnet._util._files import replacing


class Header(NamedTuple):
    """The fields of `Config` in run.c of llama2.c. If `tied` is False, `vocab_size` is negative in
    the file."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    tied: bool = True


def shapes(header: Header) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the arrays in the order of a model.bin, with the names in run.c of
    llama2.c."""
    d, h, n, heads, kv, v, s, tied = header
    kv_dim, head_dim = d // heads * kv, d // heads
    known = {
        "token_embedding_table": (v, d),
        "rms_att_weight": (n, d),
        "wq": (n, d, d),
        "wk": (n, kv_dim, d),
        "wv": (n, kv_dim, d),
        "wo": (n, d, d),
        "rms_ffn_weight": (n, d),
        "w1": (n, h, d),
        "w2": (n, d, h),
        "w3": (n, h, d),
        "rms_final_weight": (d,),
        "freq_cis_real": (s, head_dim // 2),
        "freq_cis_imag": (s, head_dim // 2),
    }
    return known if tied else known | {"wcls": (v, d)}


def header(file: Path) -> Header:
    """Reads the header of a model.bin.

    Raises:
        ValueError: the file is not a model.bin, or its size does not match its header.
    """
    size = os.path.getsize(file)
    with file.open("rb") as opened:
        raw = opened.read(28)
    if len(raw) == 28:
        *numbers, vocab, length = np.frombuffer(raw, "<i4").tolist()
        if (
            min(numbers) > 0
            and vocab
            and length > 0
            and not numbers[0] % numbers[3]
            and not numbers[3] % numbers[4]
        ):
            made = Header(*numbers, abs(vocab), length, vocab > 0)
            if 28 + 4 * sum(map(math.prod, shapes(made).values())) == size:
                return made
    raise ValueError(
        f"{file} is neither a safetensors file nor a model.bin of llama2.c, version 0 (seven "
        f"integers, "
        f"then as many floats as they imply; this file has {size} bytes); convert it to safetensors"
    )


def read(file: Path) -> dict[str, np.ndarray]:
    """Returns the arrays as views of the memory-mapped file, with the names in run.c of llama2.c."""
    known = shapes(header(file))
    mapped = np.memmap(file, "<f4", "r", 28)
    arrays, at = {}, 0
    for name, shape in known.items():
        count = math.prod(shape)
        arrays[name] = mapped[at : at + count].reshape(shape)
        at += count
    return arrays


def write(file: Path, head: Header, arrays) -> None:
    """Writes a model.bin atomically. The tables of the rotary embedding are computed from the
    header."""
    vocab = head.vocab_size if head.tied else -head.vocab_size
    arrays = _rotary(head) | dict(arrays)
    with replacing(file) as partial:
        with partial.open("wb") as opened:
            opened.write(np.array([*head[:5], vocab, head.seq_len], "<i4").tobytes())
            for name, shape in shapes(head).items():
                array = np.asarray(arrays[name])
                if array.shape != shape:
                    raise ValueError(
                        f"{name!r}: expected shape {shape} for a model.bin with {head}, got "
                        f"{array.shape}"
                    )
                opened.write(np.ascontiguousarray(array, "<f4").tobytes())


def _rotary(head):
    """Returns the cosines and sines of the rotary embedding, which old versions of run.c read from
    the file."""
    dim = head.dim // head.n_heads
    angles = np.outer(np.arange(head.seq_len), 10000.0 ** (-np.arange(0, dim, 2)[: dim // 2] / dim))
    return {"freq_cis_real": np.cos(angles), "freq_cis_imag": np.sin(angles)}
