"""Tokenizers against those that others wrote, and against files that nobody should trust.

tests/reference/tokenizers.json holds what Hugging Face's tokenizers and llama2.c make of the same
texts.
"""

import base64
import itertools
import json
import os
import pathlib
import struct
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnet import models

HELD = json.loads(
    (pathlib.Path(__file__).parents[1] / "reference" / "tokenizers.json").read_text(
        encoding="utf-8"
    )
)
WORDPIECE, LLAMA = HELD["wordpiece"], HELD["llama_bpe"]
TEXTS = settings(max_examples=150, deadline=None)
SPECIAL = [b"<unk>", b"\n<s>\n", b"\n</s>\n"]


def wordpiece(**options):
    return models.WordPiece(WORDPIECE["vocabulary"], **options)


def pieces(old=False):
    single = [chr(byte).encode() if old else b"<0x%02X>" % byte for byte in range(256)]
    return [*SPECIAL, *single, *(piece.encode() for piece in LLAMA["pieces"])], [0.0] * 259 + LLAMA[
        "scores"
    ]


def tokenizer_bin(pieces, scores):
    raw = struct.pack("<i", max(map(len, pieces)))
    return raw + b"".join(
        struct.pack("<fi", score, len(piece)) + piece for piece, score in zip(pieces, scores)
    )


@TEXTS
@given(st.text())
def test_bytes(text):
    words = models.ByteTokenizer()
    if not any(0xD800 <= ord(char) < 0xE000 for char in text):
        tokens = words.encode(text)
        assert tokens.dtype == np.int32 and tokens.tolist() == list(text.encode())
        assert words.decode(tokens) == text
    assert words.decode([255, 65]) == "\ufffdA"


@TEXTS
@given(st.text(min_size=1))
def test_characters(text):
    words = models.CharTokenizer(text)
    tokens = words.encode(text)
    assert tokens.dtype == np.int32 and words.vocab_size == len(set(text))
    assert words.decode(tokens) == text
    order = sorted(set(text))
    assert tokens.tolist() == [order.index(char) for char in text]


def test_characters_in_a_file(tmp_path):
    words = models.CharTokenizer("to be or not tö be")
    words.write(tmp_path / "characters.json")
    again = models.read_tokenizer(tmp_path)
    assert isinstance(again, models.CharTokenizer) and again.characters == words.characters
    with pytest.raises(
        ValueError,
        match="the character 'x' at 3 is not one of the 8 characters of this CharTokenizer",
    ):
        words.encode("be x")
    with pytest.raises(
        ValueError, match="expected a text with all characters of the vocabulary, got an empty one"
    ):
        models.CharTokenizer("")
    for text in ('["a"]', '"ba"', '"aa"', '""', "{", "[" * 100_000):
        (tmp_path / "characters.json").write_text(text)
        with pytest.raises(
            ValueError, match="is not a vocabulary of characters: expected a JSON string of sorted"
        ):
            models.read_tokenizer(tmp_path)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("case", ["lower", "cased"])
@pytest.mark.parametrize("number", range(len(WORDPIECE["texts"])))
def test_wordpiece_is_hugging_faces(case, number):
    tokens = wordpiece(lowercase=case == "lower").encode(WORDPIECE["texts"][number])
    assert tokens.tolist() == WORDPIECE[case][number]


@pytest.mark.parametrize("number", range(len(LLAMA["texts"])))
def test_llama_bpe_is_llama2cs(number):
    words = models.LlamaBPE(*pieces())
    tokens = words.encode(LLAMA["texts"][number])
    assert tokens.tolist() == LLAMA["tokens"][number]
    assert words.decode(tokens) == LLAMA["texts"][number]


@TEXTS
@given(st.text(st.sampled_from("abeht é汉\t🙂<0x41>")))
def test_llama_bpe_merges_the_best_pair_first(text):
    """Against the definition: look at every pair, merge the best, begin again."""
    words = models.LlamaBPE(*pieces(old=True))
    number = {piece: i for i, piece in reversed(list(enumerate(words.pieces))) if i >= 259}
    row = []
    for char in " " * bool(text) + text:
        row += (
            [number[char.encode()]]
            if char.encode() in number
            else [byte + 3 for byte in char.encode()]
        )
    while True:
        pairs = [
            (words.scores[made], -i, made)
            for i, (a, b) in enumerate(itertools.pairwise(row))
            if (made := number.get(words.pieces[a] + words.pieces[b])) is not None
        ]
        if not pairs:
            break
        _, at, made = max(pairs)
        row[-at : 2 - at] = [made]
    assert words.encode(text, bos=False).tolist() == row
    assert words.encode(text, eos=True).tolist() == [1, *row, 2]
    assert words.encode(text, eos=True, special_tokens=False).tolist() == row
    assert words.decode(words.encode(text)) == text


def test_llama_bpe_merges_the_leftmost_of_equal_pairs():
    """As llama2.c; the library tokenizers prefers the pair whose token has the smaller number."""
    end = [b"c", b"ab", b"bc"], [0.0, -1.0, -1.0]
    for names, scores in (end, [each[::-1] for each in end]):
        held = [*pieces()[0][:259], b" ", b"a", b"b", *names]
        words = models.LlamaBPE(held, [0.0] * 262 + scores)
        tokens = words.encode("abc", bos=False)
        assert [held[token] for token in tokens] == [b" ", b"ab", b"c"]


def test_wordpiece_in_a_file(tmp_path):
    (tmp_path / "vocab.txt").write_text(
        "\r\n".join(WORDPIECE["vocabulary"]) + "\r\n", encoding="utf-8", newline=""
    )
    words = models.read_tokenizer(tmp_path)
    assert isinstance(words, models.WordPiece) and words.vocab_size == len(WORDPIECE["vocabulary"])
    whole = words.encode("The Tempest: our revels now are ended.")
    assert words.decode(whole) == "the tempest : our revels now are ended."
    assert words.encode("now", special_tokens=False).tolist() == words.encode("now")[1:-1].tolist()
    assert len(words.encode("The Tempest", 1, special_tokens=False)) == 1
    short = words.encode("The Tempest: our revels now are ended.", max_length=6)
    assert short.tolist() == [*whole[:5], whole[-1]]
    assert words.decode(words.encode("☃ now")) == "now"  # what it does not know is no text
    assert words.words("[SEP] is[PAD]a token, [sep] is text") == [
        "[SEP]",
        "is",
        "[PAD]",
        "a",
        "token",
        ",",
        "[",
        "sep",
        "]",
        "is",
        "text",
    ]
    assert words.encode("now [SEP]now").tolist().count(words._end) == 2
    with pytest.raises(
        ValueError, match=r"max_length includes \[CLS\] and \[SEP\], so it must be >= 2; got 1"
    ):
        words.encode("x", max_length=1)


def test_tokenizer_bin(tmp_path):
    for old in (False, True):
        (tmp_path / "tokenizer.bin").write_bytes(tokenizer_bin(*pieces(old)))
        words = models.read_tokenizer(tmp_path)
        assert isinstance(words, models.LlamaBPE) and words.vocab_size == len(pieces()[0])
        assert words.encode(LLAMA["texts"][-1]).tolist() == LLAMA["tokens"][-1]
        assert words.decode([1, 3 + 0xE6, 3 + 0xB1, 3 + 0x89, 2]) == "汉"
        assert words.decode([3 + 0xE6]) == "\ufffd"


def hostile():
    """Files that are no vocabulary, and what is said of them."""
    good = tokenizer_bin(*pieces())
    yield "tokenizer.bin", b"", "this one of 0 tokens has others"
    yield "tokenizer.bin", good[:-1], "end of the file"
    yield "tokenizer.bin", good[:7], r"token 0, at byte 4, has the score nan and the length -1"
    yield (
        "tokenizer.bin",
        good + struct.pack("<fi", 0, 2**31 - 1),
        r"the length 2147483647; expected lengths",
    )
    yield "tokenizer.bin", good + struct.pack("<fi", 0, -5) + b"xxxxx", "the length -5"
    yield "tokenizer.bin", good + struct.pack("<fi", 0, 0), "the length 0"
    yield "tokenizer.bin", good + struct.pack("<fi", float("nan"), 1) + b"x", "the score nan"
    yield (
        "tokenizer.bin",
        tokenizer_bin(*(each[3:] for each in pieces())),
        "tokens 3 to 258 of a Llama vocabulary",
    )
    yield "vocab.txt", b"[PAD]\n[UNK]\n[CLS]\n", r"this one of 3 tokens lacks \[SEP\]"
    yield "vocab.txt", b"", r"this one of 0 tokens lacks \[PAD\], \[UNK\], \[CLS\], \[SEP\]"
    yield (
        "vocab.txt",
        b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na\nb\na\n",
        "the vocabulary contains 'a' more than once",
    )
    yield "vocab.txt", b"[PAD]\n\xff\xfe\n", "is not UTF-8 text"
    yield "vocab.txt", b"\n" * (1 << 20 | 1), "contains more than 1,048,576 tokens"
    yield "characters.json", b"[" * 10**6, "is not a vocabulary of characters"
    yield "characters.json", b'{"a":' * 10**5, "is not a vocabulary of characters"
    yield "characters.json", b"[{},{},{}" * 10**6, "is not a vocabulary of characters"
    yield "characters.json", b'"\xff"', "is not UTF-8 text"


def hostile_json():
    """Files named tokenizer.json that would end the process, exhaust the memory or raise something
    else."""
    step = lambda **step: json.dumps(
        {"normalizer": {"type": "Sequence", "normalizers": [step]}}
    ).encode()
    charsmap = lambda raw: step(
        type="Precompiled", precompiled_charsmap=base64.b64encode(raw).decode()
    )
    damaged = "the table of characters in its normalizer is damaged"
    yield b"[" * 10**6, "recursion"
    yield b'{"normalizer":' * 10**5, "recursion"
    yield b"[{}]" * 10**6, "it contains more than 1,048,576 lists and objects"
    yield b"[]", "expected a JSON object, got a list"
    yield b"{} {}", "Extra data"
    yield b"1" * 5000, "Exceeds the limit|digits"
    yield b"\xff", "is not UTF-8 text"
    yield charsmap(b""), damaged
    yield charsmap(b"\xff\xff\xff\xff\0\0\0\0"), damaged  # claims a table of 4 GiB
    yield step(type="Precompiled", precompiled_charsmap="&"), damaged
    replace = dict(type="Replace", pattern={"String": "a"})
    yield step(**replace, content="a" * 2000), "its normalizer can make a text 2,001 times as long"
    ten = [replace | {"content": "a" * 10}] * 30
    yield json.dumps({"decoder": ten}).encode(), "the replacements of its decoder can make a text"
    yield step(values=[0] * 10**5), "its normalizer has more than 10,000 values"


@pytest.mark.parametrize(("raw", "text"), list(hostile_json()))
def test_a_hostile_tokenizer_json_never_reaches_the_library(raw, text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=None))
    path = tmp_path / "tokenizer.json"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=text) as error:
        models.read_tokenizer(tmp_path)
    assert str(path) in str(error.value)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "vocab.txt")
    with pytest.raises(ValueError, match=r"vocab\.txt is not a regular file"):
        models.read_tokenizer(tmp_path / "vocab.txt")


@pytest.mark.parametrize(("name", "raw", "text"), list(hostile()))
def test_hostile_files(name, raw, text, tmp_path):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=text) as error:
        models.read_tokenizer(tmp_path)
    assert str(tmp_path / name) in str(error.value)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "vocab.txt").open("wb") as file:
        file.truncate(2**24 + 1)  # sparse: it takes no room
    with pytest.raises(ValueError, match="has 16,777,217 bytes, expected at most 16,777,216"):
        models.read_tokenizer(tmp_path / "vocab.txt")


def test_no_tokenizer_there(tmp_path):
    for path in (tmp_path, tmp_path / "vocab.txt", tmp_path / "words.model"):
        with pytest.raises(
            FileNotFoundError, match=r"no tokenizer found; expected one of vocab\.txt, "
        ):
            models.read_tokenizer(path)


@pytest.mark.parametrize(
    "words",
    [models.ByteTokenizer(), models.CharTokenizer("abc"), wordpiece(), models.LlamaBPE(*pieces())],
    ids=lambda words: type(words).__name__,
)
def test_decoding_what_is_no_token(words):
    assert words.decode([]) == words.decode(iter(())) == ""
    for token in (words.vocab_size, -1):
        with pytest.raises(
            ValueError, match=f"expected tokens from 0 to {words.vocab_size - 1}; got {token}"
        ):
            words.decode([0, token])
    with pytest.raises(
        ValueError, match=r"decode: expected integer tokens \[time\]; got float64\[1\]"
    ):
        words.decode([0.5])


def test_llama_pieces_and_scores_go_together():
    with pytest.raises(ValueError, match=r"(\d+) tokens, got 3"):
        models.LlamaBPE(pieces()[0], [0.0] * 3)


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "vocab.json"])
def test_without_the_library(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / name).write_text("\n".join(models.WordPiece.SPECIAL))
    with pytest.raises(ModuleNotFoundError) as error:
        models.read_tokenizer(tmp_path)
    assert str(error.value) == (
        f"{tmp_path / name} needs the package tokenizers, which is not installed: "
        "pip install tokenizers"
    )
    with pytest.raises(ModuleNotFoundError, match=r"^WordPiece needs the package tokenizers"):
        models.WordPiece(models.WordPiece.SPECIAL)


def test_a_tokenizer_json(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")

    class PanicException(BaseException):
        """What a panic of the library's Rust code becomes: not an Exception."""

    class Tokenizer:
        """As much of the library's class as is used."""

        @classmethod
        def from_str(cls, text):
            if text != "{}":
                raise Exception("missing field `model`")
            return cls()

        token_to_id = {"</s>": 5}.get
        padding = truncation = True

        def no_padding(self):
            self.padding = False

        def no_truncation(self):
            self.truncation = False

        def encode(self, text, add_special_tokens):
            assert not self.padding and not self.truncation
            if text == "panic":
                raise PanicException("no entry found for key")
            if text == "large":
                return types.SimpleNamespace(ids=[2**32 - 1])
            return types.SimpleNamespace(ids=[len(text), 7][: 1 + add_special_tokens])

        decode = staticmethod(repr)
        get_vocab_size = staticmethod(lambda: 9)

    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=Tokenizer))
    words = models.read_tokenizer(tmp_path)
    assert words.encode("abc", special_tokens=False).tolist() == [3]
    assert words.encode("abc").tolist() == [3, 7] and words.encode("").dtype == np.int32
    assert (
        words.decode(np.array([3, 7])) == "[3, 7]" and words.vocab_size == 9 and words.stop == (5,)
    )
    with pytest.raises(
        ValueError, match=r"tokenizer\.json is not a usable tokenizer\.json: no entry found for key"
    ):
        words.encode("panic")
    with pytest.raises(
        ValueError,
        match=r"tokenizer\.json is not a usable tokenizer\.json: Python integer 4294967295",
    ):
        words.encode("large")
    path.write_text('{"a": 1}')
    with pytest.raises(
        ValueError, match=r"tokenizer\.json is not a usable tokenizer\.json: missing field `model`"
    ):
        models.read_tokenizer(path)


def test_stop_tokens_of_generation_config(tmp_path):
    (tmp_path / "characters.json").write_text('"abcdef"')
    for ends, stop in (("null", ()), ("3", (3,)), ("[5, 2]", (5, 2)), ("[]", ())):
        (tmp_path / "generation_config.json").write_text(
            f'{{"eos_token_id": {ends}, "temperature": 0.6}}'
        )
        assert models.read_tokenizer(tmp_path).stop == stop
    assert models.CharTokenizer("ab").stop == ()  # of other tokenizers unchanged
    for ends in ("true", '"</s>"', "[1.5]", "-1", "[[1]]"):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
        with pytest.raises(
            ValueError,
            match=r"generation_config.json: expected tokens as eos_token_id, a number or a",
        ):
            models.read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\u061db", ["a\u061db"]),  # punctuation since Unicode 14: not split
        ("a\u166db", ["a", "\u166d", "b"]),  # punctuation until Unicode 11
        ("a\u1734b", ["ab"]),  # an accent until Unicode 13
        ("a\u0898b", ["a\u0898b"]),  # an accent since Unicode 14
        ("\u1c89", ["\u1c8a"]),  # lowercase letters since Unicode 16
        ("a\U00011938e\u0301", ["a\U00011938e"]),  # not decomposed before Unicode 13
        ("a\U0002b820b\U0002b920c", ["a\U0002b820b", "\U0002b920", "c"]),
    ],
)
def test_wordpiece_does_not_depend_on_the_unicode_version_of_python(text, words):
    """Words of the library tokenizers 0.23.3."""
    assert models.WordPiece(models.WordPiece.SPECIAL).words(text) == words


def test_wordpiece_removes_surrogates():
    """The library refuses texts with half a character, as json.loads makes them."""
    words = models.WordPiece([*models.WordPiece.SPECIAL, "ab"])
    assert words.encode("a\ud83db [SEP]").tolist() == [2, 5, 3, 3]
    assert words.words("a\udfffb") == ["ab"] and words.encode("\ud800").tolist() == [2, 3]
