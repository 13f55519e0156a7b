"""Text as tokens and back: bytes, characters, and whatever vocabulary lies beside a model's weights."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fnet.models import _tokenizer_config
from fnet.models._config import Config
from fnet.models._files import MOST, SMALL, contents

# Limits for untrusted files: each is several times what the largest published vocabularies need.
_STEPS = 10_000        # values that describe the steps before and after the model in a tokenizer.json
_GROWTH = 1024         # by how much these steps may multiply the length of a text


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
        """Reads the file that `write` made, a JSON string of the characters.

        Raises:
            ValueError: the file is something else.
        """
        raw = contents(path, most=SMALL).strip()
        try:
            characters = json.loads(raw) if raw[:1] == '"' else None    # nothing else is parsed, of any size or depth
        except ValueError:
            characters = None
        if not isinstance(characters, str) or not characters or "".join(sorted(set(characters))) != characters:
            raise ValueError(f"{path} is no vocabulary of characters: a JSON string of them, in order, each once")
        _tokenizer_config.values(Path(path).parent, Config({}))    # none of its fields has a meaning here
        return cls(characters)

    def write(self, path: str | os.PathLike) -> None:
        Path(path).write_text(json.dumps(self.characters) + "\n", encoding="utf-8")


class HuggingFaceTokenizer:
    """A tokenizer.json, read and run by Hugging Face's library (`pip install tokenizers`).

    Use it for vocabularies that fnet does not read itself, such as the byte-level BPE of GPT-2 and Llama 3. The padding
    and the truncation that the file describes are not applied: `encode` returns the tokens of the whole text. If a
    tokenizer_config.json is beside it, the two are compared, and its eos_token is one of `stop`.

    Raises:
        ModuleNotFoundError: the library is not installed.
        ValueError: the file is not a tokenizer.json, or describes steps that no tokenizer needs; tokenizer_config.json
            contradicts it. `encode` and `decode` raise it when the library fails on a text.
    """

    def __init__(self, path: str | os.PathLike):
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise ModuleNotFoundError(f"{path} is read by the library tokenizers, which is missing: pip install "
                                      "tokenizers") from None
        self._path, text = path, contents(path)
        description = _check_tokenizer(path, text)
        self._tokenizer = self._run(tokenizers.Tokenizer.from_str, text)
        self._tokenizer.no_padding()       # to 2^40 tokens would end the process
        self._tokenizer.no_truncation()
        ends = map(self._tokenizer.token_to_id, ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"))
        more = ()
        if os.path.lexists(Path(path).parent / _tokenizer_config.NAME):
            more = _tokenizer_config.hugging_face(Path(path).parent, self._tokenizer, self.encode, description)
        self.stop = tuple(dict.fromkeys(number for number in (*ends, *more) if number is not None))

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """[tokens], int32."""
        return self._run(lambda text: np.array(self._tokenizer.encode(text).ids, np.int32), text)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._run(self._tokenizer.decode, np.asarray(tokens).tolist())

    def _run(self, function, argument):
        """Calls the library, whose errors are plain Exceptions and whose panics are not even those."""
        try:
            return function(argument)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{self._path} is not a usable tokenizer.json: {error}") from None


def _check_tokenizer(path, text):
    """The content of a tokenizer.json, unless Hugging Face's library would run out of memory with it.

    Raises:
        ValueError: it is not JSON, a table of characters claims more bytes than it has, or replacements make a text
            more than 1024 times as long.
    """
    wrong = f"{path} is not a usable tokenizer.json: "
    if text.count("[") + text.count("{") > MOST:
        raise ValueError(f"{wrong}it holds more than {MOST:,} lists and objects")
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{wrong}{error}") from None
    if not isinstance(held, dict):
        raise ValueError(f"{wrong}it holds a JSON {type(held).__name__}, expected an object")
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        growth, count, pending = 1, 0, [held.get(part)]
        while pending and count <= _STEPS:
            step, count = pending.pop(), count + 1
            pending.extend(step.values() if isinstance(step, dict) else step if isinstance(step, list) else ())
            if not isinstance(step, dict):
                continue
            if isinstance(table := step.get("precompiled_charsmap"), str):
                try:
                    raw = base64.b64decode(table)
                except (binascii.Error, ValueError):
                    raw = b""
                if len(raw) < 4 or int.from_bytes(raw[:4], "little") > len(raw) - 4:
                    raise ValueError(f"{wrong}the table of characters in its {part} is damaged")
            if isinstance(content := step.get("content"), str) and "pattern" in step:
                growth *= 1 + len(content)
        if count > _STEPS:
            raise ValueError(f"{wrong}its {part} has more than {_STEPS:,} values")
        if growth > _GROWTH:
            raise ValueError(f"{wrong}the replacements of its {part} can make a text {growth:,} times as long")
    return held


def read_tokenizer(path: str | os.PathLike):
    """The tokenizer of a file, or of the folder where a model's weights lie.

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
        for name, reader in readers.items():
            if (path / name).is_file():
                return reader(path / name)
    elif path.name in readers and path.exists():
        return readers[path.name](path)
    raise FileNotFoundError(f"{path}: no tokenizer there; one of {', '.join(readers)}, or a folder with one")


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
