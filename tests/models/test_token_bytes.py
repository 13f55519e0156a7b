"""The bytes of single tokens."""

import numpy as np
import pytest

from fnet import models
from fnet.models.tokenizers._pieces import token_bytes

tokenizers = pytest.importorskip("tokenizers")
TEXT = "héllo 🎉 wörld"


def saved(folder, tokenizer):
    tokenizer.save(str(folder / "tokenizer.json"))
    return models.read_tokenizer(folder)


def test_byte_level_tokens_have_the_bytes_of_the_text(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<é>"],
        show_progress=False,
    )
    words.train_from_iterator(["héllo wörld hello world"], trainer)
    tokenizer = saved(tmp_path, words)
    of = token_bytes(tokenizer)
    tokens = tokenizer.encode(TEXT).tolist()
    assert b"".join(map(of, tokens)).decode() == TEXT and b"\xf0" in set(map(of, tokens))
    assert of(0) == "<é>".encode() and of(10_000) == b""
    alphabet = [of(words.token_to_id(c)) for c in tokenizers.pre_tokenizers.ByteLevel.alphabet()]
    assert sorted(alphabet) == [bytes([byte]) for byte in range(256)]


def test_tokens_of_sentencepiece_have_spaces_and_bytes(tmp_path):
    vocab = {"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "▁a": 3, "▁": 4, "a": 5}
    model = tokenizers.models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    words = tokenizers.Tokenizer(model)
    decoders = tokenizers.decoders
    words.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    words.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    of = token_bytes(saved(tmp_path, words))
    assert [of(token) for token in range(1, 6)] == [b"\xc3", b"\xa9", b" a", b" ", b"a"]


def test_other_tokenizers(tmp_path):
    assert [token_bytes(models.ByteTokenizer())(token) for token in (104, 255, 256)] == [
        b"h",
        b"\xff",
        b"",
    ]
    chars = models.CharTokenizer("aé")
    assert [token_bytes(chars)(token) for token in (0, 1, 2)] == [b"a", "é".encode(), b""]
    pieces = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256)), b" a"]
    llama = models.LlamaBPE(pieces, np.zeros(260).tolist())
    assert [token_bytes(llama)(token) for token in (3, 258, 259, 260)] == [
        b"\0",
        b"\xff",
        b" a",
        b"",
    ]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"to": 0, "be": 1}, unk_token="to"))
    assert token_bytes(saved(tmp_path, words))(1) == b"be"
