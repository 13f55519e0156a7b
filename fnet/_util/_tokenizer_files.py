"""The names of the files of a tokenizer."""

from __future__ import annotations

import fnmatch
from pathlib import Path

# What generation and conversations need beside the vocabulary is here, too.
NAMES = (
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
# fnet's own, and that of llama2.c, which transformers does not read.
OTHERS = "characters.json", "tokenizer.bin"


def is_file_of_a_tokenizer(name: str) -> bool:
    """Whether a path, relative to a folder, is that of a file of a tokenizer.

    >>> is_file_of_a_tokenizer("tokenizer.json"), is_file_of_a_tokenizer("model.safetensors")
    (True, False)
    """
    inside = ".." not in name.split("/")
    return inside and any(fnmatch.fnmatchcase(name, each) for each in (*NAMES, *OTHERS))


def in_folder(folder: Path) -> dict[str, Path]:
    """Returns {name: file} of the files of a tokenizer in a folder."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    return {
        name: path
        for name, path in files.items()
        if path.is_file() and is_file_of_a_tokenizer(name)
    }
