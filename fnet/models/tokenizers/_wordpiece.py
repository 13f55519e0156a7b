"""WordPiece, BERT's tokenizer, from its vocab.txt."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from fnet.models.tokenizers import _tokenizer_config
from fnet.models.tokenizers._common import clean_up, in_range
from fnet.models.tokenizers._unicode import category, decomposed, lower
from fnet.models.weights._files import SMALL, check_count, contents

# Code points that are Chinese characters, each a separate word, for the library tokenizers. (BERT's
# file has 0x2B820.)
_IDEOGRAPHS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
_LONGEST = 100  # characters of a word; longer words are [UNK]
_CONTROL = ("Cc", "Cf", "Co", "Cs")  # not Cn (unassigned), which depends on the Unicode version


class WordPiece:
    """BERT's tokenizer, which splits each word from left to right into the longest pieces in the
    vocabulary.

    First, the text is normalized as in BERT. Control characters are removed, and each white-space
    character becomes a space. Depending on the options of the tokenizer, Chinese characters become
    separate words, accents are removed and letters become lowercase. The normalized text is split
    into words at spaces and around every punctuation mark. All pieces of a word except the first
    begin with ##. A word that cannot be split into pieces becomes [UNK]. If a text contains the
    string of a special token, such as [MASK], this string is encoded as that token.

        tokenizer = WordPiece.read("vocab.txt")
        tokenizer.encode("Unaffable!")               # [CLS] una ##ffa ##ble ! [SEP]

    Args:
        vocabulary: all tokens in the order of their indices, including [UNK], [CLS], [SEP] and
            [PAD].
        lowercase: whether letters become lowercase, as for models called "uncased". Default: True.
        strip_accents: whether accents are removed. Default: the value of `lowercase`.
        tokenize_chinese_chars: whether each Chinese character is a separate word.
        clean_up: whether `decode` removes the spaces in contractions and around single quotes.
            Default: False. For both values of `clean_up`, `decode` removes the space before a
            period, comma, question mark or exclamation mark.

    Raises:
        ValueError: the vocabulary lacks [UNK], [CLS], [SEP] or [PAD], or contains a token twice.

    Source: Wu et al. (2016), Google's Neural Machine Translation System, section 4.1; Devlin et al.
    (2019), BERT, and its tokenization.py.

    >>> from fnet import models
    >>> tokenizer = models.WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##able"])
    >>> tokenizer.encode("Unable").tolist()
    [2, 4, 5, 3]
    """

    SPECIAL: ClassVar = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

    def __init__(
        self,
        vocabulary: Sequence[str],
        *,
        lowercase: bool = True,
        strip_accents: bool | None = None,
        tokenize_chinese_chars: bool = True,
        clean_up: bool = False,
    ):
        self.vocabulary = tuple(vocabulary)
        self.lowercase = lowercase
        self.strip_accents = lowercase if strip_accents is None else strip_accents
        self.tokenize_chinese_chars = tokenize_chinese_chars
        self.clean_up = clean_up
        self._numbers = {token: number for number, token in enumerate(self.vocabulary)}
        needed = self.SPECIAL[:4]  # all but [MASK]
        lacking = [token for token in needed if token not in self._numbers]
        if lacking:
            raise ValueError(
                f"WordPiece: expected a vocabulary with {', '.join(needed)}; this one of "
                f"{len(self.vocabulary)} tokens lacks {', '.join(lacking)}"
            )
        if len(self._numbers) < len(self.vocabulary):
            twice = next(
                token
                for number, token in enumerate(self.vocabulary)
                if self._numbers[token] != number
            )
            raise ValueError(f"WordPiece: the vocabulary contains {twice!r} more than once")
        self._unknown, self._begin, self._end = (self._numbers[token] for token in needed[1:])
        self._special = [token for token in self.SPECIAL if token in self._numbers]
        self._split = re.compile(f"({'|'.join(map(re.escape, self._special))})").split
        self._longest = max(map(len, self.vocabulary))
        self.stop = (self._end,)

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @classmethod
    def read(cls, path: str | os.PathLike, *, lowercase: bool | None = None) -> WordPiece:
        """Reads a vocab.txt with one token on each line.

        Args:
            path: the file.
            lowercase: whether letters become lowercase. Default: the setting in
                tokenizer_config.json or tokenizer.json in the same folder. Without
                tokenizer_config.json and tokenizer.json, `lowercase` is True if the vocabulary
                contains none of the letters A to Z. If you pass `lowercase`, tokenizer_config.json
                and tokenizer.json are not read.

        Raises:
            ValueError: the file is not a vocab.txt; or tokenizer_config.json or tokenizer.json
                describes another tokenizer, or has an unknown field. Also if no file states the
                case, and the vocabulary has upper-case words, but none with the letters A to Z.
        """
        text = contents(path, most=SMALL)
        check_count(path, text.count("\n"))
        lines = text.split("\n")
        if lines[-1] == "":
            lines.pop()
        vocabulary = [line.removesuffix("\r") for line in lines]
        try:
            tokenizer = cls(vocabulary, lowercase=True if lowercase is None else lowercase)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return (
            tokenizer
            if lowercase is not None
            else cls(
                vocabulary, **_tokenizer_config.wordpiece(Path(path).parent, tokenizer._numbers)
            )
        )

    def encode(
        self, text: str, max_length: int | None = None, *, special_tokens: bool = True
    ) -> np.ndarray:
        """Converts text to tokens, an int32 array [tokens]: [CLS], the pieces of the text, and
        [SEP].

        Args:
            text: the text.
            max_length: the maximum number of tokens, including [CLS] and [SEP]. If a text has more
                than `max_length` tokens, the last tokens before [SEP] are dropped. By default, the
                number of tokens is not limited.
            special_tokens: whether to add [CLS] and [SEP].
        """
        if max_length is not None and max_length < 2 * special_tokens:
            raise ValueError(
                f"max_length includes [CLS] and [SEP], so it must be >= 2; got {max_length}"
            )
        pieces = [piece for word in self.words(text) for piece in self._pieces(word)]
        if max_length is not None:
            pieces = pieces[: max_length - 2 * special_tokens]
        return np.array([self._begin, *pieces, self._end] if special_tokens else pieces, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Converts tokens to words with spaces between them, without special tokens. Case is not
        restored.

        The returned text has no space before a period, comma, question mark or exclamation mark.

        Raises:
            ValueError: a token is outside the vocabulary.
        """
        held = [self.vocabulary[token] for token in in_range(tokens, self.vocab_size)]
        held = [token for token in held if token not in self._special]
        text = "".join(
            clean_up(token[2:] if token.startswith("##") else f" {token}") for token in held[1:]
        )
        text = clean_up(held[0]) + text if held else ""
        return clean_up(text) if self.clean_up else text

    def words(self, text: str) -> list[str]:
        """Normalizes a text and splits it at spaces and around punctuation into words, without
        splitting the words into pieces.

        Each special token in the text is kept as one word.
        """
        parts = self._split(text)  # text and special tokens alternate
        return [
            word
            for at, part in enumerate(parts)
            for word in ([part] if at % 2 else self._words(part))
        ]

    def _words(self, text):
        text = "".join(_cleaned(char, self.tokenize_chinese_chars) for char in text)
        if self.strip_accents:
            text = "".join(char for char in decomposed(text) if category(char) != "Mn")
        if self.lowercase:
            text = lower(text)
        return "".join(f" {char} " if _is_punctuation(char) else char for char in text).split()

    def _pieces(self, word):
        if word in self._special:
            return [self._numbers[word]]
        if len(word) > _LONGEST:
            return [self._unknown]
        found, start = [], 0
        while start < len(word):
            mark = "##" if start else ""
            for end in range(min(len(word), start + self._longest), start, -1):
                number = self._numbers.get(mark + word[start:end])
                if number is not None:
                    break
            else:
                return [self._unknown]
            found.append(number)
            start = end
        return found


def _cleaned(char, split):
    """Applies BERT's cleaning to one character. Adds spaces around a Chinese character if `split`
    is True."""
    if char in "\t\n\r":
        return " "
    if char in "\0\ufffd" or category(char) in _CONTROL:
        return ""
    if char.isspace():
        return " "
    point = ord(char)
    return f" {char} " if split and any(low <= point <= high for low, high in _IDEOGRAPHS) else char


def _is_punctuation(char):
    """Whether a character is punctuation: in a category P of Unicode, or a visible ASCII character
    except letters and digits."""
    return (33 <= ord(char) <= 126 and not char.isalnum()) or category(char).startswith("P")
