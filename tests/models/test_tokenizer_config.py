"""tokenizer_config.json and tokenizer.json beside a vocabulary: used field by field, or an error."""

import json
import pathlib
import struct
import sys
import types

import pytest

from fnet import models

HELD = json.loads(
    (pathlib.Path(__file__).parents[1] / "reference" / "tokenizers.json").read_text(
        encoding="utf-8"
    )
)
WORDPIECE, LLAMA = HELD["wordpiece"], HELD["llama_bpe"]
UNCASED = {"do_lower_case": True, "model_max_length": 512}
CASED = {
    "clean_up_tokenization_spaces": True,
    "cls_token": "[CLS]",
    "do_lower_case": False,
    "mask_token": "[MASK]",
    "model_max_length": 512,
    "pad_token": "[PAD]",
    "sep_token": "[SEP]",
    "strip_accents": None,
    "tokenize_chinese_chars": True,
    "tokenizer_class": "BertTokenizer",
    "unk_token": "[UNK]",
}
MINILM = UNCASED | {
    "cls_token": "[CLS]",
    "do_basic_tokenize": True,
    "mask_token": "[MASK]",
    "name_or_path": "nreimers/MiniLM",
    "never_split": None,
    "pad_token": "[PAD]",
    "sep_token": "[SEP]",
    "strip_accents": None,
    "tokenize_chinese_chars": True,
    "tokenizer_class": "BertTokenizer",
    "unk_token": {"content": "[UNK]", "lstrip": False, "special": True},
    "added_tokens_decoder": {"0": {"content": "[PAD]", "special": True}},
}
GPT2 = {
    "model_max_length": 1024,
    "add_prefix_space": False,
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "unk_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
    "tokenizer_class": "GPT2Tokenizer",
    "add_bos_token": False,
    "errors": "replace",
    "pad_token": None,
}
LLAMA_2 = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "legacy": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 10**30,
    "pad_token": None,
    "padding_side": "right",
    "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizer",
    "unk_token": "<unk>",
    "use_default_system_prompt": False,
    "chat_template": "{{ bos_token }}",
    "added_tokens_decoder": {
        str(i): {"content": token} for i, token in enumerate(("<unk>", "<s>", "</s>"))
    },
}


def bert_json(vocabulary, **normalizer):
    return {
        "version": "1.0",
        "truncation": {"max_length": 128},
        "padding": None,
        "added_tokens": [{"id": 0, "content": "[PAD]", "special": True}],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        }
        | normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[CLS]"}},
                {"Sequence": {"id": "A"}},
                {"SpecialToken": {"id": "[SEP]"}},
            ],
        },
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {token: i for i, token in enumerate(vocabulary)},
        },
    }


def bert(folder, config=None, tokenizer=None, vocabulary=WORDPIECE["vocabulary"]):
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    for name, value in ("tokenizer_config.json", config), ("tokenizer.json", tokenizer):
        if value is not None:
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


@pytest.mark.parametrize(
    ("config", "tokenizer", "case"),
    [
        (CASED, None, "cased"),
        (UNCASED, None, "lower"),
        (MINILM, None, "lower"),
        ({}, None, "lower"),
        (None, bert_json(WORDPIECE["vocabulary"], lowercase=False), "cased"),
        (None, bert_json(WORDPIECE["vocabulary"]), "lower"),
        (CASED, bert_json(WORDPIECE["vocabulary"], lowercase=False), "cased"),
        (MINILM, bert_json(WORDPIECE["vocabulary"]), "lower"),
        (
            CASED,
            bert_json(WORDPIECE["vocabulary"], lowercase=False) | {"post_processor": None},
            "cased",
        ),
    ],
)
def test_case_is_what_the_files_say(config, tokenizer, case, tmp_path):
    words = models.read_tokenizer(bert(tmp_path, config, tokenizer))
    for text, tokens in zip(WORDPIECE["texts"], WORDPIECE[case]):
        assert words.encode(text).tolist() == tokens


def test_case_of_other_alphabets_is_not_guessed(tmp_path):
    """A cased vocabulary without A to Z; lower case would make "Мир" an unknown word."""
    path = (
        bert(tmp_path, vocabulary=[*WORDPIECE["vocabulary"][:5], "Мир", "мир", "##а"]) / "vocab.txt"
    )
    with pytest.raises(
        ValueError,
        match=r"has no letters A to Z and the upper-case letters of 'Мир', so it does not",
    ):
        models.WordPiece.read(path)
    assert models.WordPiece.read(path, lowercase=False).encode("Мира").tolist()[1:-1] == [5, 7]
    models.WordPiece.read(
        bert(tmp_path, vocabulary=[*WORDPIECE["vocabulary"][:5], "мир", "##а"]) / "vocab.txt"
    )


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("said", [False, True])
def test_a_text_that_is_unknown_does_not_look_like_an_added_token(said, added, tmp_path):
    """In GPT-2, one token begins a text and stands for unknown words, such as the text that is
    tried."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<e>": 0, "to": 1, "be": 2}, unk_token="<e>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if added:
        words.post_processor = tokenizers.processors.TemplateProcessing(
            single="<e> $A", special_tokens=[("<e>", 0)]
        )
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<e>", "unk_token": "<e>", "add_bos_token": said})
    )
    if said != added:
        with pytest.raises(
            ValueError, match=f"tokenizer.json {'adds' if added else 'does not add'} the bos_token"
        ):
            models.read_tokenizer(tmp_path)
    else:
        assert models.read_tokenizer(tmp_path).encode("to be").tolist() == [0] * added + [1, 2]


def test_case_where_no_file_says_it(tmp_path):
    cased = [*WORDPIECE["vocabulary"], "The"]
    words = models.read_tokenizer(bert(tmp_path, vocabulary=cased))
    assert not words.lowercase and words.encode("The").tolist()[1] == len(cased) - 1
    assert models.WordPiece.read(tmp_path / "vocab.txt", lowercase=True).lowercase
    bert(tmp_path, {"model_max_length": 512}, vocabulary=cased)
    with pytest.raises(
        ValueError,
        match=r"tokenizer_config.json has no 'do_lower_case', i.e. true, but "
        r"vocab.txt has upper-case letters \('The'\); use WordPiece.read\(path, lowercase=...\)",
    ):
        models.read_tokenizer(tmp_path)
    assert models.WordPiece.read(tmp_path / "vocab.txt", lowercase=True).lowercase


def test_accents_and_chinese_characters(tmp_path):
    words = models.read_tokenizer(
        bert(tmp_path, CASED | {"strip_accents": True, "tokenize_chinese_chars": False})
    )
    assert words.words("Élan 中文") == ["Elan", "中文"]
    words = models.read_tokenizer(bert(tmp_path, UNCASED | {"strip_accents": False}))
    assert words.words("Élan 中文") == ["élan", "中", "文"]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (UNCASED | {"do_lower_case": "yes"}, "'do_lower_case' is 'yes', expected true or false$"),
        (UNCASED | {"strip_accents": 0}, "'strip_accents' is 0, expected true or false or null"),
        (
            UNCASED | {"tokenize_chinese_chars": None},
            "'tokenize_chinese_chars' is null, expected true or false",
        ),
        (UNCASED | {"do_basic_tokenize": False}, "'do_basic_tokenize' is False, expected True"),
        (UNCASED | {"never_split": ["x"]}, r"'never_split' is \['x'\], expected null"),
        (UNCASED | {"unk_token": "<unk>"}, r"'unk_token' is '<unk>', expected '\[UNK\]'"),
        (
            UNCASED | {"sep_token": {"content": "</s>"}},
            r"'sep_token' is \{'content': '</s>'\}, expected '\[SEP\]'",
        ),
        (UNCASED | {"sep_token": 3}, "'sep_token' is 3, expected tokens"),
        (
            UNCASED | {"tokenizer_class": "RobertaTokenizer"},
            "'tokenizer_class' is 'RobertaTokenizer', expected 'BertTok",
        ),
        (
            UNCASED | {"additional_special_tokens": ["[E1]"]},
            r"'additional_special_tokens' is \['\[E1\]'\], expected null",
        ),
        (
            UNCASED | {"added_tokens_decoder": {"9": {"content": "[E1]"}}},
            r"token '\[E1\]' is not one of BERT's own with "
            "the number 9",
        ),
        (
            UNCASED | {"added_tokens_decoder": {"7": {"content": "[PAD]"}}},
            r"token '\[PAD\]' is not one of BERT's own with",
        ),
        (UNCASED | {"added_tokens_decoder": [1]}, "expected {number: token}"),
        (UNCASED | {"do_stem": True}, "'do_stem' is True, which fnet does not know$"),
        ("[]", r"expected a JSON object, got \[\]"),
        ("{", "is not valid JSON"),
        (
            '{"do_lower_case": true, "do_lower_case": false}',
            "the field 'do_lower_case' appears more than once",
        ),
    ],
)
def test_other_configurations_of_bert(config, text, tmp_path):
    with pytest.raises(ValueError, match=text) as error:
        models.read_tokenizer(bert(tmp_path, config))
    assert str(error.value).startswith(str(tmp_path / "tokenizer_config.json")) and "\n" not in str(
        error.value
    )
    with pytest.raises(ValueError, match=text):
        models.WordPiece.read(tmp_path / "vocab.txt")


def changed(path, value):
    """The tokenizer.json of BERT with one other value."""
    tokenizer = bert_json(WORDPIECE["vocabulary"])
    *above, last = path.split("/")
    node = tokenizer
    for name in above:
        node = node[name]
    node[last] = value
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (
            changed("normalizer/lowercase", False),
            "contradict each other: lowercase is True and False; use WordPiece.read",
        ),
        (
            changed("normalizer/strip_accents", False),
            "contradict each other: strip_accents is None and False",
        ),
        (
            changed("normalizer/clean_text", False),
            "describe different tokenizers: 'normalizer.clean_text' is False",
        ),
        (changed("normalizer", None), "'normalizer.type' is None, expected 'BertNormalizer'"),
        (
            changed("normalizer", {"type": "BertNormalizer", "clean_text": True}),
            "is not a tokenizer.json of BERT: KeyError",
        ),
        (changed("normalizer", 3), "is not a tokenizer.json of BERT: AttributeError"),
        (
            changed("model/vocab", {"[PAD]": 0}),
            "describe different tokenizers: 'model.vocab' differs from vocab.txt",
        ),
        (changed("model/type", "BPE"), "'model.type' is 'BPE', expected 'WordPiece'"),
        (changed("model/max_input_chars_per_word", 200), "is 200, expected 100"),
        (changed("pre_tokenizer", {"type": "Whitespace"}), "'pre_tokenizer.type' is 'Whitespace'"),
        (
            changed("post_processor/single", [{"Sequence": {"id": "A"}}]),
            r"'post_processor.single' is \['A'\], expected",
        ),
        (
            changed("added_tokens", [{"id": 90, "content": "[E1]"}]),
            r"the added token '\[E1\]' is not one of BERT's own",
        ),
    ],
)
def test_a_tokenizer_json_beside_a_vocab_txt(tokenizer, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        models.read_tokenizer(bert(tmp_path, UNCASED, tokenizer))


# llama2.c's tokenizer.bin and characters.json.


def tokenizer_bin(folder):
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256))]
    pieces += [piece.encode() for piece in LLAMA["pieces"]]
    raw = struct.pack("<i", max(map(len, pieces)))
    for piece, score in zip(pieces, [0.0] * 259 + LLAMA["scores"]):
        raw += struct.pack("<fi", score, len(piece)) + piece
    (folder / "tokenizer.bin").write_bytes(raw)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, None),
        ({"pad_token": "</s>"}, None),
        ({"add_eos_token": True}, "'add_eos_token' is True, expected False or"),
        ({"add_bos_token": False}, "expected True or null"),
        ({"tokenizer_class": "GemmaTokenizer"}, "expected 'LlamaTok"),
        (
            {"added_tokens_decoder": {"32000": {"content": "<|im_end|>"}}},
            "is not one of Llama's own with the number 32000",
        ),
        ({"add_prefix_space": False}, "expected True or null"),
        ({"bos_token": "<bos>"}, "expected '<s>'"),
    ],
)
def test_llamas(change, text, tmp_path):
    tokenizer_bin(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(LLAMA_2 | change))
    if text is None:
        assert (
            models.read_tokenizer(tmp_path).encode(LLAMA["texts"][-1]).tolist()
            == LLAMA["tokens"][-1]
        )
    else:
        with pytest.raises(ValueError, match=text):
            models.read_tokenizer(tmp_path)


def test_characters(tmp_path):
    models.CharTokenizer("abc").write(tmp_path / "characters.json")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert models.read_tokenizer(tmp_path).vocab_size == 3
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(ValueError, match="'do_lower_case' is True, which fnet does not know"):
        models.read_tokenizer(tmp_path)


# tokenizer.json, through as much of the library as is used.


class Tokenizer:
    @classmethod
    def from_str(cls, text):
        made = cls()
        held = json.loads(text)
        made.tokens, made.begins = held["tokens"], held["begins"]
        return made

    def token_to_id(self, token):
        return self.tokens.get(token)

    def encode(self, text, add_special_tokens):
        assert add_special_tokens
        return types.SimpleNamespace(
            ids=[self.tokens[token] for token in self.begins] + [90 + len(text)],
            special_tokens_mask=[1] * len(self.begins) + [0],
        )

    def no_padding(self):
        self.padded = False

    def no_truncation(self):
        self.truncated = False


BYTE_LEVEL = {
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False}],
    },
    "normalizer": None,
    "tokens": {"<|endoftext|>": 7, "<|eot_id|>": 9},
    "begins": [],
}
SENTENCE = {
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]},
    "begins": ["<s>"],
    "pre_tokenizer": None,
    "tokens": {"<unk>": 0, "<s>": 1, "</s>": 2},
}


@pytest.mark.parametrize(
    ("tokenizer", "config", "outcome"),
    [
        (BYTE_LEVEL, GPT2, (7,)),
        (BYTE_LEVEL, GPT2 | {"eos_token": "<|eot_id|>"}, (7, 9)),
        (BYTE_LEVEL, GPT2 | {"eos_token": None}, (7,)),
        (SENTENCE, LLAMA_2, (2,)),
        (SENTENCE, {}, (2,)),
        (
            SENTENCE,
            LLAMA_2
            | {"add_prefix_space": True, "do_lower_case": False, "extra_special_tokens": {}},
            (2,),
        ),
        (
            BYTE_LEVEL,
            GPT2 | {"add_prefix_space": True},
            "'add_prefix_space' is True, expected False or null",
        ),
        (
            BYTE_LEVEL,
            GPT2 | {"add_bos_token": True},
            "'add_bos_token' is True, tokenizer.json does not add the bos_token",
        ),
        (
            SENTENCE,
            LLAMA_2 | {"add_bos_token": False},
            "'add_bos_token' is False, tokenizer.json adds the bos_token",
        ),
        (SENTENCE, LLAMA_2 | {"add_eos_token": True}, "tokenizer.json does not add the eos_token"),
        (
            SENTENCE,
            LLAMA_2 | {"add_prefix_space": False},
            "'add_prefix_space' is False, expected True",
        ),
        (
            BYTE_LEVEL,
            GPT2 | {"eos_token": "<eos>"},
            "'eos_token' is '<eos>', tokenizer.json has no token '<eos>'",
        ),
        (
            BYTE_LEVEL,
            GPT2 | {"additional_special_tokens": ["<a>"]},
            "tokenizer.json has no token '<a>'",
        ),
        (
            BYTE_LEVEL,
            GPT2 | {"extra_special_tokens": {"image": "<i>"}},
            "tokenizer.json has no token '<i>'",
        ),
        (
            BYTE_LEVEL,
            GPT2 | {"added_tokens_decoder": {"8": {"content": "<|eot_id|>"}}},
            "is not tokenizer.json's with the",
        ),
        (
            BYTE_LEVEL,
            GPT2 | {"do_lower_case": True},
            "'do_lower_case' is True, expected False or null",
        ),
        (
            BYTE_LEVEL,
            GPT2 | {"split_special_tokens": True},
            "'split_special_tokens' is True, expected False",
        ),
        (BYTE_LEVEL, GPT2 | {"auto_map": {}}, "'auto_map' is {}, which fnet does not know"),
    ],
)
def test_tokenizer_json(tokenizer, config, outcome, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=Tokenizer))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if isinstance(outcome, tuple):
        words = models.read_tokenizer(tmp_path)
        assert words.stop == outcome
        assert (
            not words._tokenizer.padded and not words._tokenizer.truncated
        )  # the file may ask for both
    else:
        with pytest.raises(ValueError, match=outcome) as error:
            models.read_tokenizer(tmp_path)
        assert str(error.value).startswith(str(tmp_path / "tokenizer_config.json"))
