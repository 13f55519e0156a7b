"""WordPiece, BERT's tokenizer, from its vocab.txt."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from fnet.models.tokenizers import _tokenizer_config
from fnet.models.tokenizers._common import clean_up, in_range, library
from fnet.models.weights._files import SMALL, check_count, contents

_LONGEST = 100  # characters of a word; longer words are [UNK]
_SURROGATES = re.compile("[\ud800-\udfff]")


class WordPiece:
    """BERT's tokenizer: words, split from left to right into the longest pieces of a vocabulary.

        tokenizer = WordPiece.read("vocab.txt")
        tokenizer.encode("Unaffable!")               # [CLS] una ##ffa ##ble ! [SEP]

    It needs Hugging Face's library tokenizers (`pip install tokenizers`). The text is normalized as
    in BERT: control characters are removed, and white space becomes spaces; options make each
    Chinese character a word, remove accents, and lowercase. Words end at spaces and around every
    punctuation mark. All pieces of a word but the first begin with ##, and a word that cannot be
    split becomes [UNK]. The string of a special token within a text, such as [MASK], is encoded as
    that token.

    Args:
        vocabulary: all tokens in the order of their indices, including [UNK], [CLS], [SEP] and
            [PAD].
        lowercase: whether letters become lowercase, as for models called "uncased". Default: True.
        strip_accents: whether accents are removed. Default: the value of `lowercase`.
        tokenize_chinese_chars: whether each Chinese character is a separate word.
        clean_up: whether `decode` removes the spaces in contractions and around single quotes.
            Default: False. It always removes the space before a period, comma, question mark or
            exclamation mark.

    Raises:
        ModuleNotFoundError: the library tokenizers is not installed.
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
        self._numbers = _numbers(self.vocabulary)
        self._begin, self._end = self._numbers["[CLS]"], self._numbers["[SEP]"]
        self._special = [token for token in self.SPECIAL if token in self._numbers]
        self._split = re.compile(f"({'|'.join(map(re.escape, self._special))})").split
        self._tokenizer = self._build(library("WordPiece"))
        self.stop = (self._end,)

    def _build(self, tokenizers):
        made = tokenizers.Tokenizer(
            tokenizers.models.WordPiece(
                self._numbers, unk_token="[UNK]", max_input_chars_per_word=_LONGEST
            )
        )
        made.normalizer = tokenizers.normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=self.tokenize_chinese_chars,
            strip_accents=self.strip_accents,
            lowercase=self.lowercase,
        )
        made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        made.decoder = tokenizers.decoders.WordPiece(cleanup=True)
        made.add_special_tokens(self._special)
        return made

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @classmethod
    def read(cls, path: str | os.PathLike, *, lowercase: bool | None = None) -> WordPiece:
        """Reads a vocab.txt with one token on each line.

        Args:
            path: the file.
            lowercase: whether letters become lowercase. Default: what tokenizer_config.json or
                tokenizer.json in the same folder says, or, without either, True if the vocabulary
                contains none of the letters A to Z. If you pass it, neither file is read.

        Raises:
            ValueError: the file is not a vocab.txt; tokenizer_config.json or tokenizer.json
                describes another tokenizer, or has an unknown field; or no file states the case,
                and the vocabulary has upper-case words, but none with the letters A to Z.
        """
        library(path)
        text = contents(path, most=SMALL)
        check_count(path, text.count("\n"))
        lines = text.split("\n")
        if lines[-1] == "":
            lines.pop()
        vocabulary = [line.removesuffix("\r") for line in lines]
        try:
            numbers = _numbers(vocabulary)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if lowercase is not None:
            return cls(vocabulary, lowercase=lowercase)
        return cls(vocabulary, **_tokenizer_config.wordpiece(Path(path).parent, numbers))

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
        pieces = self._tokenizer.encode(_unicode(text), add_special_tokens=False).ids
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
        tokens = in_range(tokens, self.vocab_size).tolist()
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return clean_up(text) if self.clean_up else text

    def words(self, text: str) -> list[str]:
        """Normalizes a text and splits it at spaces and around punctuation into words, without
        splitting the words into pieces.

        Each special token in the text is kept as one word.
        """
        found = []
        for at, part in enumerate(self._split(_unicode(text))):
            # Text and special tokens alternate.
            found += [part] if at % 2 else self._words(part)
        return found

    def _words(self, text):
        normal = self._tokenizer.normalizer.normalize_str(text)
        return [word for word, _ in self._tokenizer.pre_tokenizer.pre_tokenize_str(normal)]


def _numbers(vocabulary):
    """Returns {token: its index}, after checking that the vocabulary is one of WordPiece."""
    numbers = {token: number for number, token in enumerate(vocabulary)}
    needed = WordPiece.SPECIAL[:4]  # all but [MASK]
    lacking = [token for token in needed if token not in numbers]
    if lacking:
        raise ValueError(
            f"WordPiece: expected a vocabulary with {', '.join(needed)}; this one of "
            f"{len(vocabulary)} tokens lacks {', '.join(lacking)}"
        )
    if len(numbers) < len(vocabulary):
        twice = next(token for number, token in enumerate(vocabulary) if numbers[token] != number)
        raise ValueError(f"WordPiece: the vocabulary contains {twice!r} more than once")
    return numbers


def _unicode(text):
    """Replaces surrogates, which the library refuses, by a control character, which it removes."""
    return _SURROGATES.sub("\0", text)
