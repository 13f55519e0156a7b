"""The bytes of single tokens, which may be parts of characters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from fnet.models.tokenizers._llama_bpe import LlamaBPE
from fnet.models.tokenizers._tokenizers import ByteTokenizer, HuggingFaceTokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"  # the space of SentencePiece


class Pieces(NamedTuple):
    """The bytes of all tokens, and those tokens that are no part of a text, such as its end."""

    bytes: list[bytes]
    special: frozenset[int]


def pieces(tokenizer: Any) -> Pieces:
    """Returns the bytes of each token of a vocabulary.

    >>> from fnet import models
    >>> pieces(models.CharTokenizer("ab"))
    Pieces(bytes=[b'a', b'b'], special=frozenset())
    """
    special, size = set(tokenizer.stop), tokenizer.vocab_size
    if isinstance(tokenizer, LlamaBPE):
        special |= {0, 1, 2}  # <unk>, <s>, </s>
    if isinstance(tokenizer, HuggingFaceTokenizer):
        added = tokenizer._tokenizer.get_added_tokens_decoder()
        special |= {token for token, each in added.items() if each.special}
        size = max(size, 1 + max(tokenizer._tokenizer.get_vocab().values()))  # there may be gaps
    of = token_bytes(tokenizer)
    return Pieces([of(token) for token in range(size)], frozenset(special))


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """Returns a function from a token to its bytes in UTF-8, with those of a special token's name.

    A text's tokens have the bytes of the text, but for what decoding changes between tokens, such
    as the space before the first word.

    >>> from fnet import models
    >>> list(map(token_bytes(models.ByteTokenizer()), [195, 169]))
    [b'\\xc3', b'\\xa9']
    """
    if isinstance(tokenizer, ByteTokenizer):
        return lambda token: bytes([token]) if 0 <= token < 256 else b""
    if isinstance(tokenizer, LlamaBPE):
        return lambda token: _llama(tokenizer.pieces, token)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _hugging_face(tokenizer._tokenizer)
    return lambda token: _decoded(tokenizer, token)


def _decoded(tokenizer, token):
    try:
        return tokenizer.decode([token]).encode()
    except ValueError:  # models may have more tokens than their tokenizers
        return b""


def _llama(pieces, token):
    if not 0 <= token < len(pieces):
        return b""
    named = _BYTE.fullmatch(pieces[token].decode(errors="replace"))
    return bytes([int(named[1], 16)]) if named else pieces[token]


def _hugging_face(tokenizer):
    steps = _steps(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder else {}
    added = {number: str(token) for number, token in tokenizer.get_added_tokens_decoder().items()}
    codes = {character: byte for byte, character in enumerate(_byte_characters())}
    falls_back = "ByteFallback" in steps

    def of(token):
        if token in added:
            return added[token].encode()
        piece = tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if "ByteLevel" in steps:
            return bytes(codes[c] for c in piece) if codes.keys() >= set(piece) else piece.encode()
        if falls_back and (named := _BYTE.fullmatch(piece)):
            return bytes([int(named[1], 16)])
        if falls_back or "Metaspace" in steps:
            return piece.replace(_SPACE, " ").encode()
        return tokenizer.decode([token], skip_special_tokens=False).encode()

    return of


def _steps(decoder):
    """Returns the types of a decoder and of those in it."""
    parts = decoder.get("decoders", ())
    return {decoder["type"]} | {kind for part in parts for kind in _steps(part)}


def _byte_characters() -> list[str]:
    """Returns the characters by which byte-level vocabularies name the 256 bytes: printable ones
    name themselves, and the others are numbered from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
