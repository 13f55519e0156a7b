"""WordPiece: BERT's tokenizer, from its vocab.txt."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from fnet.models import _tokenizer_config
from fnet.models._files import SMALL, check_count, contents
from fnet.models._tokenizers import in_range

# Code points that BERT takes for Chinese characters, each a word by itself.
_IDEOGRAPHS = ((0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F),
               (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F))
_LONGEST = 100    # characters of a word; longer ones are [UNK]
_CONTROL = ("Cc", "Cf", "Co", "Cs")    # Cn too in some versions, but what is assigned depends on the version of Unicode


class WordPiece:
    """Words cut into the longest pieces that the vocabulary has, from left to right.

    The text is first normalized as in BERT: control characters are removed, white space becomes one space, Chinese
    characters become words of their own, accents are removed and letters become lower-case, as the options say. It is
    then split at spaces and around every punctuation mark. Pieces after the first begin with ##. A word that cannot be
    split into pieces is [UNK].

        words = WordPiece.read("vocab.txt")
        words.encode("Unaffable!")               # [CLS] una ##ffa ##ble ! [SEP]

    Args:
        vocabulary: every token, in the order of their numbers; [UNK], [CLS], [SEP] and [PAD] among them.
        lowercase: whether letters become lower-case: True for the models called "uncased".
        strip_accents: whether accents are removed; None: if `lowercase`.
        tokenize_chinese_chars: whether each Chinese character is a word of its own.

    Special tokens are what `encode` adds: written in a text, they are text.

    Raises:
        ValueError: where the vocabulary lacks one of the four, or has a token twice.

    Source: Wu et al. (2016), Google's Neural Machine Translation System, section 4.1; Devlin et al. (2019), BERT, and
    its tokenization.py.
    """

    SPECIAL: ClassVar = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")

    def __init__(self, vocabulary: Sequence[str], *, lowercase: bool = True, strip_accents: bool | None = None,
                 tokenize_chinese_chars: bool = True):
        self.vocabulary = tuple(vocabulary)
        self.lowercase = lowercase
        self.strip_accents = lowercase if strip_accents is None else strip_accents
        self.tokenize_chinese_chars = tokenize_chinese_chars
        self._numbers = {token: number for number, token in enumerate(self.vocabulary)}
        lacking = [token for token in self.SPECIAL if token not in self._numbers]
        if lacking:
            raise ValueError(f"a WordPiece vocabulary has {', '.join(self.SPECIAL)}; this one of "
                             f"{len(self.vocabulary)} tokens lacks {', '.join(lacking)}")
        if len(self._numbers) < len(self.vocabulary):
            twice = next(token for number, token in enumerate(self.vocabulary) if self._numbers[token] != number)
            raise ValueError(f"the vocabulary has {twice!r} more than once")
        self._unknown, self._begin, self._end = (self._numbers[token] for token in self.SPECIAL[1:])
        self._longest = max(map(len, self.vocabulary))
        self.stop = (self._end,)

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @classmethod
    def read(cls, path: str | os.PathLike, *, lowercase: bool | None = None) -> WordPiece:
        """From a vocab.txt: a token on each line.

        Args:
            path: the file.
            lowercase: as above; None: as tokenizer_config.json and tokenizer.json beside the file say. If neither is
                there, a vocabulary without the letters A to Z is lowercase. If given, these files are not read.

        Raises:
            ValueError: where the file is something else; where one of the other two describes another tokenizer, or
                has a field that fnet does not know.
        """
        text = contents(path, most=SMALL)
        check_count(path, text.count("\n"))
        lines = text.split("\n")
        if lines[-1] == "":
            lines.pop()
        vocabulary = [line.removesuffix("\r") for line in lines]
        try:
            words = cls(vocabulary, lowercase=True if lowercase is None else lowercase)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return words if lowercase is not None else cls(
            vocabulary, **_tokenizer_config.wordpiece(Path(path).parent, words._numbers))

    def encode(self, text: str, max_length: int | None = None) -> np.ndarray:
        """[CLS], the pieces of the text, [SEP]: [tokens], int32.

        Args:
            text: the text.
            max_length: how many tokens at most, the two included; what is beyond is left out.
        """
        if max_length is not None and max_length < 2:
            raise ValueError(f"max_length counts [CLS] and [SEP] too; got {max_length}")
        pieces = [piece for word in self.words(text) for piece in self._pieces(word)]
        if max_length is not None:
            pieces = pieces[:max_length - 2]
        return np.array([self._begin, *pieces, self._end], np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """The words with spaces between them, without special tokens; the spelling of the text is not kept.

        Raises:
            ValueError: for a token outside the vocabulary.
        """
        known = [self.vocabulary[token] for token in in_range(tokens, self.vocab_size)]
        return " ".join(token for token in known if token not in self.SPECIAL).replace(" ##", "")

    def words(self, text: str) -> list[str]:
        """The text normalized and cut at spaces and around punctuation, before it is cut into pieces."""
        text = "".join(_cleaned(char, self.tokenize_chinese_chars) for char in text)
        if self.strip_accents:
            text = "".join(char for char in unicodedata.normalize("NFD", text) if unicodedata.category(char) != "Mn")
        if self.lowercase:
            text = "".join(char.lower() for char in text)    # one by one: Python's own lower looks at neighbors
        return "".join(f" {char} " if _is_punctuation(char) else char for char in text).split()

    def _pieces(self, word):
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
    """One character after BERT's cleaning, with spaces around Chinese ones if `split`."""
    if char in "\t\n\r":
        return " "
    if char in "\0\ufffd" or unicodedata.category(char) in _CONTROL:
        return ""
    if char.isspace():
        return " "
    point = ord(char)
    return f" {char} " if split and any(low <= point <= high for low, high in _IDEOGRAPHS) else char


def _is_punctuation(char):
    """Unicode's punctuation, and all of ASCII that is neither letter, digit nor space."""
    return (33 <= ord(char) <= 126 and not char.isalnum()) or unicodedata.category(char).startswith("P")
