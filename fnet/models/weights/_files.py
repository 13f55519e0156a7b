"""Reads vocabularies and configurations from files, with limits on their size."""

from __future__ import annotations

import os
import stat
from pathlib import Path

# Limits for untrusted files, several times the size of the largest published vocabularies.
LARGEST = 1 << 26  # bytes of a tokenizer.json; Gemma 3's has 33 million
# Bytes of the other files; BERT's vocab.txt has 230,000, Llama's tokenizer.bin 434,000.
SMALL = 1 << 24
MOST = 1 << 20  # tokens, and lists and objects of a JSON file


def contents(path: str | os.PathLike, *, text: bool = True, most: int = LARGEST):
    """Returns the content of a file: text in UTF-8, or bytes.

    Raises:
        ValueError: the file is not a regular file, is larger than `most` bytes, or is not UTF-8.
    """
    path = Path(path)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file")  # reading a pipe may never end
    if status.st_size > most:
        raise ValueError(f"{path} has {status.st_size:,} bytes, expected at most {most:,}")
    raw = path.read_bytes()
    if not text:
        return raw
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def check_count(path: str | os.PathLike, count: int) -> None:
    """Raises an error if a vocabulary has too many tokens, before objects for these tokens are
    created."""
    if count > MOST:
        raise ValueError(f"{path} contains more than {MOST:,} tokens")
