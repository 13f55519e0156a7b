"""Reads and writes the weights of Karpathy's llama2.c, and converts them for `pretrained.load`.

    python experiments/llama2c.py stories15M.bin FOLDER            # config.json and model.safetensors
    python experiments/llama2c.py ~/.cache/fnet/stories15m/model.bin     # beside the file itself

`pretrained.load` reads the folder, like any folder of transformers. Put the tokenizer.bin of the
weights into it, and generate.py --weights=FOLDER continues texts. generate.py and finetune.py also
read a model.bin as it is. The script needs no other file of the experiments.

A model.bin, version 0, has seven integers, then all arrays in float32, with stacked layers. Source:
llama2.c, run.c (Config, TransformerWeights, memory_map_weights) and export.py (legacy_export).
"""

import dataclasses
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fnet import compress, models
from fnet.models import pretrained

KERNELS = {
    "attention/query": "wq",
    "attention/key": "wk",
    "attention/value": "wv",
    "attention/out": "wo",
    "gate": "w1",
    "down": "w2",
    "up": "w3",
}
NORMS = {"norm1": "rms_att_weight", "norm2": "rms_ffn_weight"}


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

    def model(self):
        """Returns the model that the header describes."""
        return models.Decoder(
            self.vocab_size,
            self.dim,
            self.n_layers,
            self.n_heads,
            self.n_kv_heads,
            self.hidden_dim,
            context=self.seq_len,
            tied=self.tied,
            interleaved=True,
        )

    def shapes(self):
        """Returns the shapes of the arrays in the order of the file, with the names in run.c."""
        d, h, n, heads, kv, v, s, tied = self
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


def is_file(path):
    """Whether a path is that of a model.bin, or the folder of one without other weights. A file
    with the name of PyTorch's pickles is none."""
    path = Path(path)
    if path.is_dir():
        return (path / "model.bin").is_file() and not any(path.glob("*.safetensors"))
    return path.suffix == ".bin" and path.is_file() and not path.name.startswith("pytorch_model")


def model_of(path):
    """Returns the model that the header of a model.bin describes."""
    return header(_file(path)).model()


def load(path):
    """Returns (model, params) of a model.bin, or of a folder that contains one.

    Raises:
        ValueError: the file is not a model.bin, or its size does not match its header.
    """
    file = _file(path)
    head = header(file)
    arrays = read(file)
    kernel = lambda name: jnp.asarray(arrays[name].swapaxes(-1, -2))  # [..., out, in] in the file
    scale = lambda name: {"scale": jnp.asarray(arrays[name])}
    blocks = {"attention": {}}
    for place, name in KERNELS.items():
        parent, _, layer = place.rpartition("/")
        (blocks[parent] if parent else blocks)[layer] = {"kernel": kernel(name)}
    for place, name in NORMS.items():
        blocks[place] = scale(name)
    params = {
        "embed": {"embedding": jnp.asarray(arrays["token_embedding_table"])},
        "blocks": blocks,
        "norm": scale("rms_final_weight"),
    }
    if not head.tied:
        params["head"] = {"kernel": kernel("wcls")}
    return head.model(), params


def save(model, params, path):
    """Writes a model.bin, to a file or into a folder, and returns the path of the file. Implicit
    arrays, such as quantized ones, are written as the arrays that they represent.

    Raises:
        ValueError: run.c cannot run this model.
    """
    path = Path(path)
    file = path / "model.bin" if path.is_dir() or not path.suffix else path
    head = Header(
        model.width,
        model.hidden,
        model.depth,
        model.heads,
        model.kv_heads,
        model.vocab_size,
        model.context,
        model.tied,
    )
    representable = head.model()
    other = [
        field.name
        for field in dataclasses.fields(model)
        if getattr(model, field.name) != getattr(representable, field.name)
    ]
    if other:
        values = ", ".join(f"{name}={getattr(representable, name)!r}" for name in other)
        raise ValueError(f"{file}: llama2.c runs a Decoder with {values} alone")
    params = compress.materialize(params)
    model.check(params, model.example())
    kernel = lambda layer: np.asarray(layer["kernel"]).swapaxes(-1, -2)
    blocks = params["blocks"]
    arrays = {
        "token_embedding_table": params["embed"]["embedding"],
        "rms_final_weight": params["norm"]["scale"],
    }
    for place, name in KERNELS.items():
        parent, _, layer = place.rpartition("/")
        arrays[name] = kernel((blocks[parent] if parent else blocks)[layer])
    for place, name in NORMS.items():
        arrays[name] = blocks[place]["scale"]
    if not model.tied:
        arrays["wcls"] = kernel(params["head"])
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, head, arrays)
    return file


def converted(model, params):
    """Returns (model, params) with the rotary embedding of transformers.

    llama2.c rotates the features (0, 1), (2, 3), ... of each head, transformers the features (i, i +
    head_dim / 2). With the features of queries and keys in another order, both compute the same.
    """
    blocks = params["blocks"]
    attention = dict(blocks["attention"])
    for name in ("query", "key"):
        kernel = attention[name]["kernel"]  # [layers, in, heads * head_dim]
        pairs = kernel.reshape(*kernel.shape[:2], -1, model.width // model.heads // 2, 2)
        attention[name] = {"kernel": pairs.swapaxes(-1, -2).reshape(kernel.shape)}
    params = {**params, "blocks": {**blocks, "attention": attention}}
    return dataclasses.replace(model, interleaved=False), params


def header(file):
    """Reads the header of a model.bin.

    Raises:
        ValueError: the file is not a model.bin, or its size does not match its header.
    """
    size = os.path.getsize(file)
    with file.open("rb") as opened:
        raw = opened.read(28)
    if len(raw) == 28:
        *numbers, vocab, length = np.frombuffer(raw, "<i4").tolist()
        dim, _, _, heads, kv_heads = numbers
        if min(numbers) > 0 and vocab and length > 0 and not dim % heads and not heads % kv_heads:
            head = Header(*numbers, abs(vocab), length, vocab > 0)
            if 28 + 4 * sum(map(math.prod, head.shapes().values())) == size:
                return head
    raise ValueError(
        f"{file} is not a model.bin of llama2.c, version 0 (seven integers, then as many floats as "
        f"they imply; this file has {size} bytes)"
    )


def read(file):
    """Returns the arrays as views of the memory-mapped file, with the names in run.c of llama2.c."""
    shapes = header(file).shapes()
    mapped = np.memmap(file, "<f4", "r", 28)
    arrays = {}
    begin = 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape)
        arrays[name] = mapped[begin:end].reshape(shape)
        begin = end
    return arrays


def write(file, head, arrays):
    """Writes a model.bin atomically. The tables of the rotary embedding are computed from the
    header."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    vocab = head.vocab_size if head.tied else -head.vocab_size
    arrays = rotary(head) | dict(arrays)
    try:
        with partial.open("wb") as opened:
            opened.write(np.array([*head[:5], vocab, head.seq_len], "<i4").tobytes())
            for name, shape in head.shapes().items():
                array = np.asarray(arrays[name])
                if array.shape != shape:
                    raise ValueError(
                        f"{name!r}: expected shape {shape} for a model.bin with {head}, got "
                        f"{array.shape}"
                    )
                opened.write(np.ascontiguousarray(array, "<f4").tobytes())
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def rotary(head):
    """Returns the cosines and sines of the rotary embedding, which old versions of run.c read from
    the file."""
    dim = head.dim // head.n_heads
    angles = np.outer(np.arange(head.seq_len), 10000.0 ** (-np.arange(0, dim, 2)[: dim // 2] / dim))
    return {"freq_cis_real": np.cos(angles), "freq_cis_imag": np.sin(angles)}


def _file(path):
    path = Path(path).expanduser()
    return path / "model.bin" if path.is_dir() else path


def main(arguments):
    if not 1 <= len(arguments) <= 2:
        ends("usage: python experiments/llama2c.py MODEL.BIN [FOLDER]")
    file = _file(arguments[0])
    folder = Path(arguments[-1]).expanduser() if len(arguments) == 2 else file.parent
    try:
        model, params = converted(*load(file))
        written = pretrained.save(model, params, {}, folder, names="huggingface")
    except (OSError, ValueError) as error:
        ends(f"llama2c.py: {error}")
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{written}: {count:,} parameters")


def ends(message):
    print(message, file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
