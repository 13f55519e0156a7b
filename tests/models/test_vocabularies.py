"""vocab.json with merges.txt, and SentencePiece models, against what transformers makes of the same
folders.

tests/reference/make_tokenizer_fixtures.py wrote the folders. The libraries tokenizers and
sentencepiece run here.
"""

import importlib.util
import json
import pathlib
import shutil
import sys

import numpy as np
import pytest

from fnet import models

pytest.importorskip("tokenizers", reason="the library tokenizers is not installed")
HERE = pathlib.Path(__file__).parents[1] / "reference" / "tokenizers"
FOLDERS = sorted(path.name for path in HERE.iterdir())
PIECES = {
    "llama": "tokenizer.model",
    "gemma": "tokenizer.model",
    "llama_legacy": "tokenizer.model",
    "t5": "spiece.model",
    "xlm-roberta": "sentencepiece.bpe.model",
}
LIBRARY = pytest.mark.skipif(
    importlib.util.find_spec("sentencepiece") is None,
    reason="the library sentencepiece is not installed",
)
ALL = [pytest.param(name, marks=LIBRARY if name in PIECES else ()) for name in FOLDERS]


def copied(name, folder, change=None, **files):
    """A copy of a folder with other fields in tokenizer_config.json and other files (`vocab__json`:
    vocab.json)."""
    shutil.copytree(HERE / name, folder, dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | (change or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for file, value in files.items():
        (folder / file.replace("__", ".")).write_text(
            value if isinstance(value, str) else json.dumps(value)
        )
    return folder


@pytest.mark.parametrize("name", ALL)
def test_tokens_and_text_are_those_of_transformers(name):
    words = models.read_tokenizer(HERE / name)
    for case in json.loads((HERE / name / "expected.json").read_text()):
        assert words.encode(case["text"]).tolist() == case["tokens"], case["text"]
        assert words.decode(case["tokens"]) == case["decoded"], case["text"]
    assert words.encode("a").dtype == np.int32


@pytest.mark.parametrize(
    ("name", "begins", "ends", "stop"),
    [
        ("gpt2", [], [], ["<|endoftext|>"]),
        ("gpt2_adds_bos", ["<|begin|>"], [], ["<|endoftext|>"]),
        ("roberta", ["<s>"], ["</s>"], ["</s>"]),
        ("qwen2", [], [], ["<|endoftext|>", "<|im_end|>"]),
        *(
            pytest.param(*case, marks=LIBRARY)
            for case in (
                ("llama", ["<s>"], [], ["</s>"]),
                ("gemma", ["<bos>"], [], ["<eos>"]),
                ("llama_legacy", ["<s>"], ["</s>"], ["</s>"]),
                ("t5", [], ["</s>"], ["</s>"]),
                ("xlm-roberta", ["<s>"], ["</s>"], ["</s>"]),
            )
        ),
    ],
)
def test_special_tokens(name, begins, ends, stop):
    words = models.read_tokenizer(HERE / name)
    number = words._tokenizer.token_to_id
    plain = words.encode("our revels", special_tokens=False).tolist()
    assert words.encode("our revels").tolist() == [*map(number, begins), *plain, *map(number, ends)]
    assert set(words.stop) == {number(token) for token in stop}
    assert number(stop[-1]) in words.encode(
        f"our{stop[-1]} revels", special_tokens=False
    )  # in a text
    assert words.decode(words.encode(f"our{stop[-1]} revels")).split() == ["our", "revels"]


def test_files_by_name(tmp_path):
    assert models.read_tokenizer(HERE / "gpt2" / "vocab.json").encode("a").size
    copied("gpt2", tmp_path, {"tokenizer_class": "GPT2TokenizerFast"})
    assert (
        models.read_tokenizer(tmp_path).encode("now").tolist()
        == models.read_tokenizer(HERE / "gpt2").encode("now").tolist()
    )
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"merges\.txt"):
        models.read_tokenizer(tmp_path)


def test_the_class_comes_from_the_model(tmp_path):
    copied("roberta", tmp_path, config__json={"model_type": "roberta"}, tokenizer_config__json={})
    words, like = models.read_tokenizer(tmp_path), models.read_tokenizer(HERE / "roberta")
    assert words.encode("our revels").tolist() == like.encode("our revels").tolist()
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(
        ValueError,
        match=r"'tokenizer_class' is None, expected one of GPT2Tokenizer, RobertaTokenizer, "
        r"Qwen2Tokenizer for vocab\.json; convert other tokenizers to a tokenizer\.json",
    ):
        models.read_tokenizer(tmp_path)


@LIBRARY
def test_a_list_of_special_tokens_replaces_the_tokens_of_the_model(tmp_path):
    """Also an empty one; without a list, the pieces that a SentencePiece model defines are added
    tokens."""
    added = lambda change: {
        token.content: token.special
        for token in models.read_tokenizer(copied("gemma", tmp_path, change))
        ._tokenizer.get_added_tokens_decoder()
        .values()
    }
    named = dict.fromkeys(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"), True)
    turns = ["<start_of_turn>", "<end_of_turn>"]
    assert added({}) == added({"extra_special_tokens": turns}) == named | dict.fromkeys(turns, True)
    assert (
        added({"additional_special_tokens": []})
        == added({"additional_special_tokens": None})
        == named
    )
    config = json.loads((HERE / "gemma" / "tokenizer_config.json").read_text())
    del config["additional_special_tokens"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = models.read_tokenizer(tmp_path)
    assert {
        token.content: token.special
        for token in tokenizer._tokenizer.get_added_tokens_decoder().values()
    } == (named | dict.fromkeys((*turns, "\n\n", "  ", "<table>"), False))
    assert tokenizer.decode(tokenizer.encode("a<table>b")) == "a<table>b"


@LIBRARY
def test_the_class_and_the_tokens_of_gemma_come_from_the_model(tmp_path):
    like = models.read_tokenizer(HERE / "gemma")
    for kind in ("gemma", "gemma2", "gemma3_text"):
        copied(
            "gemma",
            tmp_path,
            config__json={"model_type": kind},
            tokenizer_config__json={
                "add_bos_token": True,
                "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
            },
        )
        words = models.read_tokenizer(tmp_path)
        for text in ("our  revels<end_of_turn>\n now", " <bos>ꙮ"):
            assert words.encode(text).tolist() == like.encode(text).tolist()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        ValueError,
        match="'add_bos_token' is absent, expected true or false: transformers 4 assumes",
    ):
        models.read_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="'add_prefix_space' is True, expected False or null"):
        models.read_tokenizer(copied("gemma", tmp_path, {"add_prefix_space": True}))
    with pytest.raises(
        ValueError, match="add_dummy_prefix is True, expected False for a GemmaTokenizer"
    ):
        models.read_tokenizer(copied("llama", tmp_path, {"tokenizer_class": "GemmaTokenizer"}))


@LIBRARY
def test_dummy_prefix_of_llama(tmp_path):
    legacy = models.read_tokenizer(HERE / "llama_legacy")
    plain = models.read_tokenizer(HERE / "llama")
    none = models.read_tokenizer(copied("llama", tmp_path, {"add_prefix_space": False}))
    pieces = lambda words, text: [
        words._tokenizer.id_to_token(token) for token in words.encode(text, special_tokens=False)
    ]
    assert pieces(plain, "a")[0][0] == pieces(legacy, "a")[0][0] == "▁" and pieces(none, "a") == [
        "a"
    ]
    # After a special token within the text, only the legacy form adds another space.
    assert (
        pieces(plain, "</s>a") == pieces(none, "</s>a") == ["</s>", "a"]
        and pieces(legacy, "</s>a")[1][0] == "▁"
    )
    assert (
        pieces(plain, "ꙮ")[-3:] == ["<0xEA>", "<0x99>", "<0xAE>"]
        and plain.decode(plain.encode("ꙮ")) == "ꙮ"
    )


@LIBRARY
def test_the_first_extra_token_of_t5_is_the_last_of_the_vocabulary(tmp_path):
    like = models.read_tokenizer(HERE / "t5")
    copied("t5", tmp_path, {"additional_special_tokens": [f"<extra_id_{i}>" for i in range(100)]})
    (tmp_path / "added_tokens.json").unlink()
    words = models.read_tokenizer(tmp_path)
    assert words.vocab_size == like.vocab_size == 520
    assert words.encode("<extra_id_0><extra_id_99>").tolist() == [519, 420, 1]
    assert like._tokenizer.token_to_id("<extra_id_0>") == 519


@LIBRARY
def test_numbers_of_fairseq():
    words = models.read_tokenizer(HERE / "xlm-roberta")
    numbers = [
        words._tokenizer.token_to_id(token) for token in ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    ]
    assert numbers == [0, 1, 2, 3, words.vocab_size - 1]


def test_clean_up(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers import models as kinds

    words = Tokenizer(kinds.WordLevel({"it": 0, "'s": 1, "?": 2}))
    words.save(str(tmp_path / "tokenizer.json"))
    for value, text in (False, "it 's ?"), (True, "it's?"):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"clean_up_tokenization_spaces": value})
        )
        assert models.read_tokenizer(tmp_path).decode([0, 1, 2]) == text


@pytest.mark.parametrize(
    ("change", "files", "text"),
    [
        (
            {"tokenizer_class": "CodeGenTokenizer"},
            {},
            "'tokenizer_class' is 'CodeGenTokenizer', expected one of GPT2Token",
        ),
        (
            {"tokenizer_class": "LlamaTokenizer"},
            {},
            "'tokenizer_class' is 'LlamaTokenizer', expected one of GPT2Tokenizer",
        ),
        ({"split_special_tokens": True}, {}, "'split_special_tokens' is True, expected False"),
        ({"add_prefix_space": 1}, {}, "'add_prefix_space' is 1, expected true or false or null"),
        ({"dropout": 0.1}, {}, "'dropout' is 0.1, which fnet does not know"),
        ({"eos_token": 3}, {}, "'eos_token' is 3, expected tokens"),
        (
            {"eos_token": {"content": "x", "strip": True}},
            {},
            "expected tokens, as strings or as objects with content and",
        ),
        (
            {"additional_special_tokens": "<a>"},
            {},
            "'additional_special_tokens' is '<a>', expected a list of tokens",
        ),
        (
            {"added_tokens_decoder": {"7": {"content": "<a>"}}},
            {},
            "the token '<a>' is said to have the number 7; by "
            "vocab.json and the tokens before it, it has 400",
        ),
        ({"added_tokens_decoder": {"x": {"content": "<a>"}}}, {}, "expected {number: token}"),
        ({}, {"added_tokens__json": {"<a>": "400"}}, "added_tokens.json: expected {token: number}"),
        (
            {},
            {"special_tokens_map__json": {"x_token": "a"}},
            "'x_token' is a field which fnet does not know",
        ),
        (
            {},
            {"vocab__json": {"a": 0, "b": 2}},
            "vocab.json: expected {token: number} with the numbers 0 to 1",
        ),
        (
            {},
            {"vocab__json": {"a": 0, "b": "1"}},
            "vocab.json: expected {token: number} with the numbers 0 to 1",
        ),
        ({}, {"vocab__json": "[1]"}, "vocab.json: expected a JSON object"),
        (
            {},
            {"merges__txt": "#version: 0.2\na b c\n"},
            "merges.txt: line 2 is 'a b c', expected two tokens of vocab.json",
        ),
        (
            {},
            {"merges__txt": "#version: 0.2\n\u0120 \U0001f600\n"},
            "expected two tokens of vocab.json that form a third",
        ),
    ],
)
def test_errors_of_byte_level_vocabularies(change, files, text, tmp_path):
    with pytest.raises(ValueError) as error:
        models.read_tokenizer(copied("gpt2", tmp_path, change, **files))
    assert text in str(error.value) and str(tmp_path) in str(error.value)


@LIBRARY
@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        (
            "llama",
            {"tokenizer_class": "BigBirdTokenizer"},
            "expected one of LlamaTokenizer, XLMRobertaTokenizer, Gemma",
        ),
        (
            "llama",
            {"add_bos_token": None},
            "'add_bos_token' is absent, expected true or false: transformers 4 assumes",
        ),
        (
            "llama",
            {"tokenizer_class": "T5Tokenizer", "add_bos_token": None, "add_eos_token": None},
            "model_type is 2, expected 1 for a T5Tokenizer",
        ),
        (
            "t5",
            {"tokenizer_class": "LlamaTokenizer", "extra_ids": None},
            "'extra_ids' is null, which fnet does not know",
        ),
        ("t5", {"eos_token": "<end>"}, "'eos_token' is '<end>', expected '</s>' for a T5Tokenizer"),
        ("t5", {"extra_ids": -1}, "'extra_ids' is -1, expected a number of tokens, up to 1000"),
        (
            "xlm-roberta",
            {"mask_token": "[MASK]"},
            "'mask_token' is '[MASK]', expected '<mask>' for a XLMRobertaTokenizer",
        ),
        (
            "xlm-roberta",
            {"sp_model_kwargs": {"alpha": 0.1}},
            "'sp_model_kwargs' is {'alpha': 0.1}, expected null or {}",
        ),
        (
            "xlm-roberta",
            {"add_eos_token": False},
            "'add_eos_token' is False, expected null or True",
        ),
    ],
)
def test_errors_of_sentencepiece_models(name, change, text, tmp_path):
    with pytest.raises(ValueError) as error:
        models.read_tokenizer(copied(name, tmp_path, change))
    assert text in str(error.value) and str(tmp_path) in str(error.value)


@LIBRARY
@pytest.mark.parametrize("name", sorted(PIECES))
def test_damaged_sentencepiece_models(name, tmp_path):
    copied(name, tmp_path)
    path = tmp_path / PIECES[name]
    whole = path.read_bytes()
    for raw in (
        b"",
        b"\xff" * 100,
        whole[: len(whole) // 2],
        whole[:40],
        whole + whole[:20],
        b"{}",
    ):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=r"SentencePiece model|expected|usable") as error:
            models.read_tokenizer(tmp_path)
        assert str(path) in str(error.value)


@LIBRARY
def test_other_normalizations_of_a_sentencepiece_model(tmp_path):
    from sentencepiece import sentencepiece_model_pb2

    path = copied("llama", tmp_path) / "tokenizer.model"
    raw = path.read_bytes()

    def fails(change, text):
        model = sentencepiece_model_pb2.ModelProto.FromString(raw)
        change(model)
        path.write_bytes(model.SerializeToString())
        with pytest.raises(ValueError) as error:
            models.read_tokenizer(tmp_path)
        assert text in str(error.value)

    fails(
        lambda model: setattr(model.normalizer_spec, "remove_extra_whitespaces", True),
        "remove_extra_whitespaces is True, expected False for a LlamaTokenizer",
    )
    fails(
        lambda model: setattr(model.normalizer_spec, "precompiled_charsmap", b"12345678"),
        "precompiled_charsmap is True, expected False",
    )
    fails(
        lambda model: setattr(model.trainer_spec, "byte_fallback", False),
        "byte_fallback is False, expected True",
    )
    fails(
        lambda model: setattr(model.pieces[-1], "score", 1.0),
        "expected pieces in the order of their scores",
    )
    fails(
        lambda model: setattr(model.pieces[-1], "piece", "<s>"), "expected distinct pieces, got 680"
    )


def test_without_sentencepiece(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"tokenizer\.model needs the packages sentencepiece and protobuf \(.*sentencepiece.*\): "
        r"pip install sentencepiece protobuf$",
    ):
        models.read_tokenizer(HERE / "llama")
