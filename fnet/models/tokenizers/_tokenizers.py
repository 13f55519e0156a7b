"""Tokenizers for bytes and characters, the tokenizers of Hugging Face's library, and
`read_tokenizer`."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fnet._util import _files
from fnet.models.tokenizers import _tokenizer_config, _vocabularies
from fnet.models.tokenizers._common import clean_up, in_range, library
from fnet.models.weights._config import Config, read
from fnet.models.weights._files import MOST, SMALL, contents

# Limits for untrusted files, several times the size of the largest published vocabularies.
_STEPS = 10_000  # number of values in a tokenizer.json that describe the processing before and after the model
_GROWTH = 1024  # factor by which this processing may lengthen a text


class ByteTokenizer:
    """A tokenizer whose 256 tokens are the bytes of a text in UTF-8. It needs no file.

    >>> ByteTokenizer().encode("né")
    array([110, 195, 169], dtype=int32)
    >>> ByteTokenizer().decode([110, 195, 169])
    'né'
    """

    vocab_size = 256
    stop = ()

    def encode(self, text: str, *, special_tokens: bool = True) -> np.ndarray:
        """Converts text to its bytes, an int32 array [bytes].

        The tokenizer has no special tokens, so the argument `special_tokens` has no effect.
        """
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Converts tokens to text. Invalid UTF-8 becomes U+FFFD.

        Raises:
            ValueError: a token is outside 0 .. 255.
        """
        return bytes(in_range(tokens, 256).astype(np.uint8)).decode(errors="replace")


class CharTokenizer:
    """A tokenizer whose tokens are the characters of a text, in the order of their code points.

    >>> chars = CharTokenizer("to be or not to be")
    >>> chars.vocab_size, chars.encode("boot").tolist(), chars.decode([1, 4, 4, 6])
    (7, [1, 4, 4, 6], 'boot')

    Args:
        text: a text that contains all characters of the vocabulary.
    """

    stop = ()

    def __init__(self, text: str):
        self.characters = "".join(sorted(set(text)))
        self._points = _points(self.characters)
        if not text:
            raise ValueError(
                "CharTokenizer: expected a text with all characters of the vocabulary, got an "
                "empty one"
            )

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str, *, special_tokens: bool = True) -> np.ndarray:
        """Converts text to tokens, an int32 array [characters].

        The tokenizer has no special tokens, so the argument `special_tokens` has no effect.

        Raises:
            ValueError: a character is not in the vocabulary.
        """
        points = _points(text)
        tokens = np.searchsorted(self._points, points)
        wrong = np.flatnonzero(self._points[np.minimum(tokens, self.vocab_size - 1)] != points)
        if wrong.size:
            raise ValueError(
                f"the character {text[wrong[0]]!r} at {wrong[0]} is not one of the "
                f"{self.vocab_size} characters of this CharTokenizer ({self.characters[:80]!r})"
            )
        return tokens.astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Converts tokens to text.

        Raises:
            ValueError: a token is outside the vocabulary.
        """
        return (
            self._points[in_range(tokens, self.vocab_size)]
            .astype("<u4")
            .tobytes()
            .decode("utf-32-le")
        )

    @classmethod
    def read(cls, path: str | os.PathLike) -> CharTokenizer:
        """Reads a vocabulary from a file that `write` wrote, a JSON string of the characters.

        Raises:
            ValueError: the file is not a JSON string of sorted, distinct characters.
        """
        raw = contents(path, most=SMALL).strip()
        try:
            # Other JSON may be too large or too deep.
            characters = json.loads(raw) if raw[:1] == '"' else None
        except ValueError:
            characters = None
        if (
            not isinstance(characters, str)
            or not characters
            or "".join(sorted(set(characters))) != characters
        ):
            raise ValueError(
                f"{path} is not a vocabulary of characters: expected a JSON string of sorted, "
                "distinct characters"
            )
        _tokenizer_config.values(Path(path).parent, Config({}))  # no field is supported here
        return cls(characters)

    def write(self, path: str | os.PathLike) -> None:
        _files.write(Path(path), json.dumps(self.characters) + "\n")


class HuggingFaceTokenizer:
    """A tokenizer that runs in Hugging Face's library tokenizers (`pip install tokenizers`).

    `encode` returns the tokens of the whole text, whatever padding and truncation the file sets.
    The string of a special or added token within a text is encoded as that token. `stop` contains
    the eos_token. `bos` and `eos` are the tokens that tokenizer_config.json calls bos_token and
    eos_token, or None.

    Args:
        path: one of these files. Related files in the same folder are also read.

            - tokenizer.json. A tokenizer_config.json beside it must not contradict it.
            - vocab.json, next to merges.txt: the byte-level BPE of GPT-2, RoBERTa and Qwen.
            - a SentencePiece model (tokenizer.model, spiece.model, sentencepiece.bpe.model) of
              Llama, Gemma, T5 or XLM-R, which the library sentencepiece reads
              (`pip install sentencepiece protobuf`).

            For the last two, the class and the special tokens come from tokenizer_config.json,
            special_tokens_map.json and added_tokens.json, and a class that none of them states from
            the `model_type` in config.json.

    Raises:
        ModuleNotFoundError: the library tokenizers or sentencepiece is not installed.
        ValueError: the file is damaged, describes too many processing steps, contradicts
            tokenizer_config.json, or belongs to an unknown class of tokenizers. `encode` and
            `decode` raise ValueError if the library fails.

    >>> import tempfile, tokenizers
    >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "to": 1, "be": 2}, unk_token="?"))
    >>> words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     words.save(f"{folder}/tokenizer.json")
    ...     tokenizer = models.HuggingFaceTokenizer(f"{folder}/tokenizer.json")
    >>> tokenizer.encode("to be or").tolist()
    [1, 2, 0]
    """

    def __init__(self, path: str | os.PathLike):
        tokenizers = library(path)
        self._path, folder, more = path, Path(path).parent, ()
        described = Path(path).name in ("vocab.json", *_vocabularies.SENTENCEPIECE)
        self._kind = "vocabulary" if described else "tokenizer.json"
        description, end = _vocabularies.describe(Path(path)) if described else (None, None)
        text = json.dumps(description) if described else contents(path)
        description = _check_tokenizer(f"{path} is not a usable {self._kind}: ", text)
        self._tokenizer = self._run(tokenizers.Tokenizer.from_str, text)
        self._tokenizer.no_padding()  # padding to 2^40 tokens would exhaust the memory
        self._tokenizer.no_truncation()
        ends = map(
            self._tokenizer.token_to_id, ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
        )
        config = (
            read(folder / _tokenizer_config.NAME)
            if os.path.lexists(folder / _tokenizer_config.NAME)
            else {}
        )
        if described:
            more = () if end is None else (self._tokenizer.token_to_id(end),)
        elif config:
            more = _tokenizer_config.hugging_face(
                folder, self._tokenizer, self._encoding, description
            )
        # As in transformers, this does not apply to byte-pair encodings.
        self._clean_up = (
            config.get("clean_up_tokenization_spaces") is True
            and (description.get("model") or {}).get("type") != "BPE"
        )
        self.stop = tuple(dict.fromkeys(number for number in (*ends, *more) if number is not None))
        named = (_tokenizer_config._content(config.get(f"{name}_token")) for name in ("bos", "eos"))
        self.bos, self.eos = (
            None if token is None else self._tokenizer.token_to_id(token) for token in named
        )

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, *, special_tokens: bool = True) -> np.ndarray:
        """Converts text to tokens, an int32 array [tokens].

        Args:
            text: the text.
            special_tokens: whether to add the tokens that the tokenizer puts before and after a
                text.
        """
        return self._run(
            lambda text: np.array(
                self._tokenizer.encode(text, add_special_tokens=special_tokens).ids, np.int32
            ),
            text,
        )

    def _encoding(self, text):
        return self._run(lambda text: self._tokenizer.encode(text, add_special_tokens=True), text)

    def decode(self, tokens: Iterable[int]) -> str:
        """Converts tokens to text, without special tokens."""
        text = self._run(self._tokenizer.decode, np.asarray(tokens).tolist())
        return clean_up(text) if self._clean_up else text

    def _run(self, function, argument):
        """Calls the library, and converts its errors (Exception) and panics (BaseException) to
        ValueError."""
        try:
            return function(argument)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"{self._path} is not a usable {self._kind}: {error}") from None


def _check_tokenizer(wrong, text):
    """Returns the content of a tokenizer.json. Raises an error if the file could exhaust the memory
    in Hugging Face's library.

    Raises:
        ValueError: the file is not JSON, its table of character replacements
            (`precompiled_charsmap`) is damaged, or its string replacements can lengthen a text by a
            factor of more than 1024.
    """
    if text.count("[") + text.count("{") > MOST:
        raise ValueError(f"{wrong}it contains more than {MOST:,} lists and objects")
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{wrong}{error}") from None
    if not isinstance(held, dict):
        raise ValueError(f"{wrong}expected a JSON object, got a {type(held).__name__}")
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        growth, count, pending = 1, 0, [held.get(part)]
        while pending and count <= _STEPS:
            step, count = pending.pop(), count + 1
            pending.extend(
                step.values() if isinstance(step, dict) else step if isinstance(step, list) else ()
            )
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
            raise ValueError(
                f"{wrong}the replacements of its {part} can make a text {growth:,} times as long"
            )
    return held


def read_tokenizer(path: str | os.PathLike) -> Any:
    """Reads the tokenizer from a folder of weights, or from a file.

        tokenizer = models.read_tokenizer(pretrained.find("HuggingFaceTB/SmolLM2-135M"))
        tokens = tokenizer.encode("Once upon a time")

    Of generation_config.json, only eos_token_id is read; pass the rest, such as temperature, to
    `generate`.

    Args:
        path: a folder or a file. A folder is searched in this order: vocab.txt (`WordPiece`),
            tokenizer.bin (`LlamaBPE`), characters.json (`CharTokenizer`), and, all for
            `HuggingFaceTokenizer`, tokenizer.json, vocab.json, tokenizer.model, spiece.model,
            sentencepiece.bpe.model. A file must have one of these names.

    Returns:
        A tokenizer. `encode(text)` returns an int32 array [tokens], and `decode(tokens)` a text.
        `encode(text, special_tokens=False)` adds no tokens before and after the text. `vocab_size`
        is the number of tokens, `stop` contains those that end a text, and `path` is the argument.
        From a folder, `stop` includes eos_token_id, and `chat_template` is a `ChatTemplate` or None.

    Raises:
        FileNotFoundError: there is no such file, or the folder contains none of a tokenizer.
        ModuleNotFoundError: the library tokenizers or sentencepiece is needed and not installed.
        ValueError: the file is damaged.

    >>> import json, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "characters.json").write_text(json.dumps("abc"))
    ...     models.read_tokenizer(folder).encode("cab").tolist()
    [2, 0, 1]
    """
    from fnet.models.tokenizers._chat import find
    from fnet.models.tokenizers._llama_bpe import LlamaBPE
    from fnet.models.tokenizers._wordpiece import WordPiece

    readers = {
        "vocab.txt": WordPiece.read,
        "tokenizer.bin": LlamaBPE.read,
        "characters.json": CharTokenizer.read,
        **dict.fromkeys(
            ("tokenizer.json", "vocab.json", *_vocabularies.SENTENCEPIECE), HuggingFaceTokenizer
        ),
    }
    path = Path(path).expanduser()
    if path.is_dir():
        for name, reader in readers.items():
            if (path / name).is_file():
                tokenizer = reader(path / name)
                ends = _ends(path / "generation_config.json", tokenizer)
                tokenizer.stop = tuple(dict.fromkeys((*tokenizer.stop, *ends)))
                tokenizer.chat_template, tokenizer.path = find(path), path
                return tokenizer
    elif path.name in readers and path.exists():
        tokenizer = readers[path.name](path)
        tokenizer.path = path
        return tokenizer
    raise FileNotFoundError(
        f"{path}: no tokenizer found; expected one of {', '.join(readers)}, or a folder with one"
    )


def _ends(path, tokenizer):
    """Returns the tokens that end a text according to the eos_token_id of generation_config.json."""
    if not path.is_file():
        return ()
    ends = read(path).get("eos_token_id")
    ends = () if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(token) is int and 0 <= token for token in ends):
        raise ValueError(
            f"{path}: expected tokens as eos_token_id, a number or a list of numbers; got {ends!r}"
        )
    return ends


def _points(text):
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
