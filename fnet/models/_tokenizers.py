"""Text as tokens and back: bytes, characters, and whatever vocabulary lies beside a model's weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_LARGEST = 1 << 26    # bytes that a vocabulary may have; the field's largest have a few million


class ByteTokenizer:
    """The bytes of a text in UTF-8: 256 tokens, every text, no file.

    >>> ByteTokenizer().encode("né")
    array([110, 195, 169], dtype=int32)
    >>> ByteTokenizer().decode([110, 195, 169])
    'né'
    """

    vocab_size = 256
    stop = ()

    def encode(self, text: str) -> np.ndarray:
        """[bytes], int32."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; what is no UTF-8 becomes U+FFFD.

        Raises:
            ValueError: for a token outside 0 .. 255.
        """
        return bytes(in_range(tokens, 256).astype(np.uint8)).decode(errors="replace")


class CharTokenizer:
    """The characters of a text, numbered in the order of their code points.

    >>> chars = CharTokenizer("to be or not to be")
    >>> chars.vocab_size, chars.encode("boot").tolist(), chars.decode([1, 4, 4, 6])
    (7, [1, 4, 4, 6], 'boot')

    Args:
        text: holds every character that there will be.
    """

    stop = ()

    def __init__(self, text: str):
        self.characters = "".join(sorted(set(text)))
        self._points = _points(self.characters)
        if not text:
            raise ValueError("CharTokenizer takes a text that holds every character; this one is empty")

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """[characters], int32.

        Raises:
            ValueError: for a character that is none of the vocabulary's.
        """
        points = _points(text)
        tokens = np.searchsorted(self._points, points)
        wrong = np.flatnonzero(self._points[np.minimum(tokens, self.vocab_size - 1)] != points)
        if wrong.size:
            raise ValueError(f"the character {text[wrong[0]]!r} at {wrong[0]} is none of the {self.vocab_size} that "
                             f"this CharTokenizer knows ({self.characters[:80]!r})")
        return tokens.astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text.

        Raises:
            ValueError: for a token outside the vocabulary.
        """
        return self._points[in_range(tokens, self.vocab_size)].astype("<u4").tobytes().decode("utf-32-le")

    @classmethod
    def read(cls, path: str | os.PathLike) -> CharTokenizer:
        """From the file that `write` made: a JSON string of the characters.

        Raises:
            ValueError: where the file is something else.
        """
        try:
            characters = json.loads(contents(path))
        except (json.JSONDecodeError, RecursionError):
            characters = None
        if not isinstance(characters, str) or not characters or "".join(sorted(set(characters))) != characters:
            raise ValueError(f"{path} is no vocabulary of characters: a JSON string of them, in order, each once")
        return cls(characters)

    def write(self, path: str | os.PathLike) -> None:
        Path(path).write_text(json.dumps(self.characters) + "\n", encoding="utf-8")


class HuggingFaceTokenizer:
    """A tokenizer.json, read and run by Hugging Face's own library (`pip install tokenizers`).

    For vocabularies that fnet does not read itself, such as GPT-2's and Llama 3's byte-level BPE.
    """

    def __init__(self, path: str | os.PathLike):
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise ModuleNotFoundError(f"{path} is read by the library tokenizers, which is missing: pip install "
                                      "tokenizers") from None
        text = contents(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:    # the library raises Exception itself
            raise ValueError(f"{path} is no tokenizer.json: {error}") from None
        ends = map(self._tokenizer.token_to_id, ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"))
        self.stop = tuple(number for number in ends if number is not None)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """[tokens], int32."""
        return np.array(self._tokenizer.encode(text).ids, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._tokenizer.decode(np.asarray(tokens).tolist())


def read_tokenizer(path: str | os.PathLike):
    """The tokeniser of a file, or of the folder where a model's weights lie.

    Args:
        path: vocab.txt (`WordPiece`), tokenizer.bin (`LlamaBPE`), characters.json (`CharTokenizer`), tokenizer.json
            (`HuggingFaceTokenizer`), or a folder with one of them, in this order.

    Returns:
        What has `encode(text) -> int32 [tokens]`, `decode(tokens) -> text`, `vocab_size`, and `stop`, the tokens that
        end a text.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: where the file is damaged.
    """
    from fnet.models._llama_bpe import LlamaBPE
    from fnet.models._wordpiece import WordPiece

    readers = {"vocab.txt": WordPiece.read, "tokenizer.bin": LlamaBPE.read, "characters.json": CharTokenizer.read,
               "tokenizer.json": HuggingFaceTokenizer}
    path = Path(path).expanduser()
    if path.is_dir():
        for name, read in readers.items():
            if (path / name).is_file():
                return read(path / name)
    elif path.name in readers and path.exists():
        return readers[path.name](path)
    raise FileNotFoundError(f"{path}: no tokeniser there; one of {', '.join(readers)}, or a folder with one")


def contents(path: str | os.PathLike, *, text: bool = True):
    """A vocabulary's file, whole: text in UTF-8, or bytes.

    Raises:
        ValueError: where it is too large for one, or no UTF-8.
    """
    path = Path(path)
    size = path.stat().st_size
    if size > _LARGEST:
        raise ValueError(f"{path} has {size:,} bytes: a vocabulary has at most {_LARGEST:,}")
    raw = path.read_bytes()
    if not text:
        return raw
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from None


def in_range(tokens, count) -> np.ndarray:
    """Tokens as an array of integers, each in 0 .. count - 1."""
    tokens = np.asarray(tokens if hasattr(tokens, "__len__") else list(tokens))
    if not tokens.size:
        return np.zeros(0, np.int64)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"decode takes one row of integer tokens; got {tokens.dtype}{list(tokens.shape)}")
    if tokens.min() < 0 or tokens.max() >= count:
        wrong = tokens[(tokens < 0) | (tokens >= count)][0]
        raise ValueError(f"the token {wrong} is outside the vocabulary, 0 to {count - 1}")
    return tokens


def _points(text):
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
