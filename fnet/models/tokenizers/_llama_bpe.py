"""llama2.c's tokenizer: SentencePiece's byte-pair encoding, from a tokenizer.bin."""

from __future__ import annotations

import heapq
import math
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fnet.models.tokenizers import _tokenizer_config
from fnet.models.tokenizers._common import in_range
from fnet.models.weights._files import SMALL, check_count, contents

_BEGIN, _END, _BYTES = 1, 2, 3  # <s>, </s>, and the first of the 256 single bytes
_FIRST = _BYTES + 256  # the first piece of text


class LlamaBPE:
    """The tokenizer of llama2.c: byte-pair encoding, which merges the best-scoring neighbors first.

        tokenizer = LlamaBPE.read("tokenizer.bin")
        tokenizer.encode("Once upon a time")         # 1, 9038, 2501, 263, 931

    Of pairs with equal scores, the leftmost is merged first. A space is added before the text. A
    character that is not in the vocabulary becomes its bytes in UTF-8.

    Args:
        pieces: all tokens in the order of their indices: <unk>, <s>, </s>, 256 tokens for the
            bytes, then the pieces of text. The bytes are named <0x00> to <0xFF>, or in old files by
            the characters with the code points 0 to 255.
        scores: for each token in `pieces`, the score of a merge that results in it.

    Raises:
        ValueError: the tokens 3 to 258 are not the 256 tokens for single bytes, or `pieces` and
            `scores` have different lengths.

    Source: Karpathy's llama2.c, run.c (encode, decode) and tokenizer.py; Sennrich, Haddow and Birch
    (2016), Neural Machine Translation of Rare Words with Subword Units; Kudo and Richardson (2018),
    SentencePiece.

    >>> pieces = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
    >>> pieces += [b" ", b"a", b"b", b" a", b"ab"]
    >>> tokenizer = models.LlamaBPE(pieces, [0.0] * 262 + [-2.0, -1.0])
    >>> [pieces[token] for token in tokenizer.encode("ab")], tokenizer.decode(tokenizer.encode("ab"))
    ([b'<s>', b' ', b'ab'], 'ab')
    """

    bos, eos, stop = _BEGIN, _END, (_BEGIN, _END)

    def __init__(self, pieces: Sequence[bytes], scores: Sequence[float]):
        self.pieces, self.scores = tuple(pieces), tuple(scores)
        held = self.pieces[_BYTES:_FIRST]
        if len(held) < 256 or any(
            piece not in (b"<0x%02X>" % i, chr(i).encode()) for i, piece in enumerate(held)
        ):
            raise ValueError(
                "expected the bytes <0x00> to <0xFF> as tokens 3 to 258 of a Llama vocabulary; "
                f"this one of {len(self.pieces)} tokens has others"
            )
        if len(self.scores) != len(self.pieces):
            raise ValueError(
                f"expected one score for each of {len(self.pieces)} tokens, got {len(self.scores)}"
            )
        # Of equal pieces, the first is used. Pieces below 259 are used only if no other piece
        # matches.
        self._numbers = {
            self.pieces[number]: number for number in range(len(self.pieces) - 1, _FIRST - 1, -1)
        }

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @classmethod
    def read(cls, path: str | os.PathLike) -> LlamaBPE:
        """Reads a tokenizer.bin.

        A tokenizer.bin contains the length of the longest token, and after it the score, the length
        and the bytes of each token.

        Raises:
            ValueError: the file is not a tokenizer.bin, or a tokenizer_config.json next to it
                describes another tokenizer.
        """
        _tokenizer_config.llama(Path(path).parent)
        raw = contents(path, text=False, most=SMALL)
        pieces, scores, at = [], [], 4
        longest = struct.unpack_from("<i", raw)[0] if len(raw) >= 4 else 0
        while at < len(raw):
            score, length = (
                struct.unpack_from("<fi", raw, at) if at + 8 <= len(raw) else (math.nan, -1)
            )
            if not 0 < length <= min(longest, len(raw) - at - 8) or not math.isfinite(score):
                raise ValueError(
                    f"{path} is not a tokenizer.bin of llama2.c: token {len(pieces)}, at byte "
                    f"{at}, has the score {score} and the length {length}; expected lengths from 1 "
                    f"to {longest} up to the end of the file"
                )
            pieces.append(raw[at + 8 : at + 8 + length])
            scores.append(score)
            at += 8 + length
            check_count(path, len(pieces))
        try:
            return cls(pieces, scores)
        except ValueError as error:
            raise ValueError(f"{path} is not a tokenizer.bin of llama2.c: {error}") from None

    def encode(
        self, text: str, *, bos: bool = True, eos: bool = False, special_tokens: bool = True
    ) -> np.ndarray:
        """Converts text to tokens, an int32 array [tokens].

        Args:
            text: the text.
            bos: whether to start with <s>.
            eos: whether to end with </s>.
            special_tokens: if False, `bos` and `eos` have no effect: the tokens <s> and </s> are
                not added.
        """
        tokens = []
        for char in " " + text if text else "":
            raw = char.encode(errors="replace")
            known = self._numbers.get(raw)
            tokens.extend([byte + _BYTES for byte in raw] if known is None else [known])
        bos, eos = bos and special_tokens, eos and special_tokens
        return np.array([_BEGIN] * bos + self._merged(tokens) + [_END] * eos, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Converts tokens to text, without <s>, </s> and the space after <s>. Invalid UTF-8 becomes
        U+FFFD.

        Raises:
            ValueError: a token is outside the vocabulary.
        """
        raw, before = [], None
        for token in in_range(tokens, self.vocab_size).tolist():
            if token not in (_BEGIN, _END):
                one = _BYTES <= token < _FIRST
                piece = bytes([token - _BYTES]) if one else self.pieces[token]
                raw.append(piece.removeprefix(b" ") if before == _BEGIN else piece)
            before = token
        return b"".join(raw).decode(errors="replace")

    # The library tokenizers cannot merge these pairs: it gives every merge a rank of its own, so of
    # two pairs with equal scores it takes that of the smaller rank instead of the leftmost one (with
    # the pieces bc and ab, it splits "abc" into a and bc).
    def _merged(self, tokens):
        """Merges pairs of tokens until no two neighbors form another token."""
        right = list(range(1, len(tokens) + 1))
        left = list(range(-1, len(tokens) - 1))
        queue = []

        def offer(at):
            """Adds the pair of tokens that begins at index `at` to the queue of merges, if the pair
            forms a token."""
            if at < 0 or right[at] >= len(tokens):
                return
            pair = tokens[at], tokens[right[at]]
            made = self._numbers.get(self.pieces[pair[0]] + self.pieces[pair[1]])
            if made is not None:
                heapq.heappush(queue, (-self.scores[made], at, made, pair))

        for at in range(len(tokens)):
            offer(at)
        while queue:
            _, at, made, pair = heapq.heappop(queue)
            after = right[at]
            if tokens[at] is None or after >= len(tokens) or (tokens[at], tokens[after]) != pair:
                continue  # one of the two has been merged with another token since
            tokens[at], tokens[after] = made, None
            right[at] = right[after]
            if right[at] < len(tokens):
                left[right[at]] = at
            offer(left[at])
            offer(at)
        return [token for token in tokens if token is not None]
