"""Grammars as masks: what random models write under them is valid, whatever the tokenizer, and they
choose among the allowed tokens as they would without a mask."""

import json
import re
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llguidance")

from fnet import models, serve
from fnet.serve._structured import _trial, _vocabulary

pytestmark = pytest.mark.usefixtures("quickly")
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "number"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
SHORT = {"type": "string", "maxLength": 6}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": 0, "maximum": 9},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["n", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS = {
    "nested objects": {
        "type": "object",
        "properties": {"a": POINT, "b": {"type": "object", "properties": {"c": POINT}}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "é", 3, None, True, {"a": [1, "b"]}]},
    "const": {"const": {"a": 'b\n"c\\'}},
    "at least three items": {"type": "array", "items": {"type": "boolean"}, "minItems": 3},
    "two to four items": {"type": "array", "items": SHORT, "minItems": 2, "maxItems": 4},
    "a tuple": {"type": "array", "prefixItems": [SHORT, POINT], "items": False, "minItems": 2},
    "bounded integer": {"type": "integer", "minimum": -17, "maximum": 203},
    "bounded number": {"type": "number", "exclusiveMinimum": 0.5, "maximum": 12.25},
    "open bounds": {"type": "integer", "exclusiveMinimum": 41},
    "multiples": {"type": "integer", "multipleOf": 7},
    "unicode": {"type": "string", "minLength": 2, "maxLength": 5},
    "a pattern": {"type": "string", "pattern": r"^[a-f]{2}-\d+é?$", "maxLength": 12},
    "part of a text": {"type": "string", "pattern": "ab", "maxLength": 8},
    "a date": {"type": "string", "format": "date"},
    "any of": {"anyOf": [POINT, {"type": "null"}, {"type": "array", "items": {"type": "null"}}]},
    "one of": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "v": {"type": "boolean"}},
                "required": ["kind", "v"],
                "additionalProperties": False,
            }
            for kind in ("cat", "dog")
        ]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        ],
        "maxProperties": 3,
        "required": ["b"],
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
    },
    "a reference to itself": TREE,
    "several types": {"type": ["null", "integer", "boolean"]},
    "a map": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
}
CHARACTERS = '{}[]":, \n0123456789.-+eEabcdfghiklnorstuvxyé\\_T'


def llama():
    """SentencePiece's tokens: bytes, and pieces of which some have the bytes of another."""
    named = [b"<0x%02X>" % byte for byte in range(256)]
    words = [b'{"', b'":', b" ", b"a", b'"', b"null", "é".encode(), b" true", b"12", b"ab", b"}"]
    return models.LlamaBPE([b"<unk>", b"<s>", b"</s>", *named, *words], [0.0] * (259 + len(words)))


def byte_level():
    pytest.importorskip("tokenizers")
    import tempfile

    from texts import write_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        from pathlib import Path

        write_tokenizer(Path(folder))
        return models.read_tokenizer(folder)


TOKENIZERS = {
    "characters": lambda: models.CharTokenizer(CHARACTERS),
    "bytes": models.ByteTokenizer,
    "byte-level BPE": byte_level,
    "SentencePiece": llama,
}


class Writer:
    """A model that was never trained, in an engine."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.end = tokenizer.vocab_size  # a token that the model has, and the tokenizer has not
        model = models.GPT(tokenizer.vocab_size + 2, 16, 1, 2, context=256)
        params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))
        self.model, self.params = model, jax.tree.map(lambda x: 2 * x if x.ndim > 1 else x, params)
        stop = (self.end, *tokenizer.stop)
        self.engine = serve.Engine(model, self.params, slots=8, stop=stop, prefix_cache=False)

    def texts(self, mask, count, **options):
        asked = {"max_tokens": 240, "mask": mask, **options}
        return self.engine.generate([[1, 2, 3]] * count, **asked)

    def words(self, mask, count, **options):
        """The texts that were finished, nearly all."""
        texts = self.texts(mask, count, **options)
        assert {text.finish_reason for text in texts} <= {"stop", "length"}
        ended = [self.tokenizer.decode(t.tokens) for t in texts if t.finish_reason == "stop"]
        assert len(ended) >= 0.6 * count - 1
        return ended


@pytest.fixture(scope="module")
def writers():
    made = {}

    def get(name):
        if name not in made:
            made[name] = Writer(TOKENIZERS[name]())
        return made[name]

    return get


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_a_random_model_writes_is_valid(writers, name):
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    for kind in ("characters", "byte-level BPE"):
        writer = writers(kind)
        for text in writer.words(serve.json_schema(SCHEMAS[name], writer.tokenizer), 5):
            validator.validate(json.loads(text))


PATTERNS = [
    r"\d{4}-\d{2}-\d{2}",
    r"(foo|bar)+x?",
    r"[^a-z\n]{1,5}\w{0,3}",
    r"é*(日本|ü){1,2}\.",
    r"^a.c$",
    r"\S\s?",
    r"[\]\[&-]{3}",
    "",
]


@pytest.mark.quick_cases("characters", "byte-level BPE")
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_patterns_match_from_beginning_to_end(writers, kind):
    writer, seen = writers(kind), set()
    for pattern in PATTERNS[:1] + PATTERNS[4:5] if kind == "characters" else PATTERNS:
        mask = serve.regex(pattern, writer.tokenizer)
        for text in writer.words(mask, 4):
            assert re.fullmatch(pattern, text, re.ASCII), (pattern, text)
            seen.add(text)
    assert len(seen) > 6


@pytest.mark.quick_cases("characters", "byte-level BPE")
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_choices_are_written_exactly(writers, kind):
    writer = writers(kind)
    options = ["true", "trust", "é", "a b"]
    found = writer.words(serve.choice(options, writer.tokenizer), 24)
    assert len(found) == 24 and set(found) <= set(options) and len(set(found)) > 1


def test_a_grammar_of_lark_balances_brackets(writers):
    writer = writers("byte-level BPE")
    grammar = 'start: "(" start ")" | leaf\nleaf: %json {"type": "boolean"}\n'
    for text in writer.words(serve.lark(grammar, writer.tokenizer), 8):
        depth = text.count("(")
        assert re.fullmatch(rf"\({{{depth}}}(true|false)\){{{depth}}}", text)


def test_a_text_that_is_cut_off_has_the_reason_length(writers):
    writer = writers("characters")
    [text] = writer.texts(serve.regex("[ab]{9}", writer.tokenizer), 1, max_tokens=4)
    assert text.finish_reason == "length" and len(text.tokens) == 4


def test_the_end_is_allowed_where_the_text_may_end_and_forced_where_it_must():
    tokenizer = models.CharTokenizer("abc")
    walk = serve.regex("ab?", tokenizer).walk(5, [3])
    assert walk.allowed([]).tolist() == [True, False, False, False, False]
    assert walk.allowed([0]).tolist() == [False, True, False, True, False]
    assert walk.allowed([0, 1]) is None
    # A stop token that is a letter ends no text too early.
    walk = serve.regex("a[ab]?", tokenizer).walk(5, [1])
    assert walk.allowed([]).tolist() == [True, False, False, False, False]
    assert walk.allowed([0]).tolist() == [True, True, False, False, False]


def test_tokens_that_the_model_lacks_are_left_out():
    tokenizer = models.CharTokenizer("abc")
    assert serve.regex("[abc]", tokenizer).walk(2, []).allowed([]).tolist() == [True, True]


def test_tokens_with_the_same_bytes_are_all_allowed():
    tokenizer = llama()
    row = serve.regex("a", tokenizer).allowed([])
    letter = 259 + 3
    assert np.flatnonzero(row).tolist() == [3 + ord("a"), letter]
    assert serve.regex("ab?", tokenizer).allowed([letter])[3 + ord("b")]


def test_parts_of_characters_are_allowed_up_to_whole_characters():
    tokenizer = models.ByteTokenizer()
    first, second = "é".encode()
    mask = serve.choice(["é", "à"], tokenizer)
    assert np.flatnonzero(mask.allowed([])).tolist() == [first]
    assert np.flatnonzero(mask.allowed([first])).tolist() == sorted("éà".encode()[1::2])
    assert mask.allowed([first, second]) is None


def test_special_tokens_are_no_text():
    tokenizer = byte_level()
    row = serve.regex(r"[^\n]{1,20}", tokenizer).allowed([])
    end = tokenizer.encode("<|end|>")
    assert len(end) == 1 and not row[end[0]]


def test_requests_share_a_grammar_and_each_follows_its_own_text(writers):
    writer = writers("characters")
    mask = serve.choice(["true", "nul"], writer.tokenizer)
    alone = [writer.texts(mask, 1, seed=seed)[0].tokens for seed in range(6)]
    assert [text.tokens for text in writer.texts(mask, 6)] == alone
    mixed = [
        writer.engine.submit([1, 2, 3], max_tokens=6, temperature=0, mask=each)
        for each in (mask, None, mask, None)
    ]
    free = writer.texts(None, 1, max_tokens=6, temperature=0)[0].tokens
    first, second, third, fourth = (request.result().tokens for request in mixed)
    assert first == third and second == fourth == free


def test_the_distribution_is_that_of_the_allowed_tokens(writers):
    """Chi-square against the probabilities of the model, divided by their sum over the mask."""
    writer, count, prompt = writers("characters"), 1200, [1, 2, 3]
    tokenizer = writer.tokenizer
    letters = np.sort(tokenizer.encode("abcdef"))
    texts = writer.texts(serve.regex("[a-f]", tokenizer), count, max_tokens=2)
    logits = np.asarray(writer.model(writer.params, jnp.asarray([prompt])), np.float64)[0, -1]
    logits -= np.log(np.exp(logits).sum())
    exact = np.exp(logits[letters]) / np.exp(logits[letters]).sum()
    tokens = np.array([text.tokens[0] for text in texts])
    seen = (tokens[:, None] == letters).sum(0)
    assert seen.sum() == count and {text.finish_reason for text in texts} == {"stop"}
    assert ((seen - count * exact) ** 2 / (count * exact)).sum() < 25.7  # 1e-4, 5 degrees
    reported = [text.log_probs[0] for text in texts]  # of the model, without the mask
    np.testing.assert_allclose(reported, logits[tokens], atol=1e-4)


def test_biases_are_added_to_the_logits(writers):
    writer, count = writers("characters"), 600
    bias = {5: 1.5, 9: -100, 11: 2.0}
    texts = writer.texts(None, count, max_tokens=1, logit_bias=bias)
    logits = np.asarray(writer.model(writer.params, jnp.asarray([[1, 2, 3]])), np.float64)[0, -1]
    biased = logits.copy()
    biased[list(bias)] += list(bias.values())
    exact = np.exp(biased) / np.exp(biased).sum()
    tokens = [text.tokens[0] if text.tokens else writer.end for text in texts]
    for token in (5, 9, 11):
        deviation = np.sqrt(exact[token] * (1 - exact[token]) / count)
        assert abs(tokens.count(token) / count - exact[token]) < 4 * deviation + 1e-9
    [text] = writer.texts(None, 1, max_tokens=5, temperature=0, logit_bias={7: 100})
    assert text.tokens == [7] * 5
    mask = serve.choice(["true"], writer.tokenizer)
    assert writer.words(mask, 1, logit_bias={7: 100}) == ["true"]
    for wrong, message in (
        ({-1: 1}, "a token of logit_bias must be an integer from 0 to"),
        ({1: 101}, "numbers from -100 to 100; got 101"),
        ({1: float("nan")}, "numbers from -100 to 100; got nan"),
        ([1], "must be a mapping"),
    ):
        with pytest.raises(ValueError, match=message):
            writer.engine.submit([1], max_tokens=1, logit_bias=wrong)


def test_a_vocabulary_that_cannot_write_a_text_is_named():
    tokenizer = models.CharTokenizer("abc")
    with pytest.raises(ValueError, match="regex: after 0 tokens, no token of the vocabulary"):
        serve.regex("z", tokenizer)
    gpt = models.GPT(3, 8, 1, 1, context=8)
    params, _ = gpt.init(jax.random.key(0), gpt.example())
    engine = serve.Engine(gpt, params, slots=1)
    request = engine.submit([1], max_tokens=4, mask=serve.regex("az", tokenizer))
    assert request.result().error.startswith("Stuck: after 1 tokens, no token of the vocabulary")


def test_tokenizers_that_join_tokens_in_their_own_way_are_refused():
    class Spaced(models.CharTokenizer):
        def decode(self, tokens):
            return " ".join(super(Spaced, self).decode([token]) for token in tokens)

    with pytest.raises(ValueError, match="Spaced joins tokens in a way of its own"):
        serve.choice(["a"], Spaced("ab"))


def test_grammars_are_compiled_once_and_a_bounded_number_is_kept(monkeypatch):
    tried = []
    monkeypatch.setattr(_trial, "check", tried.append)
    tokenizer = models.CharTokenizer("abc")
    masks = []

    def ask():
        masks.append(serve.regex("a{3}", tokenizer))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tried) == 1 and all(mask is masks[0] for mask in masks)
    for count in range(100):
        serve.regex(f"b{{{count}}}a", tokenizer)
    kept = _vocabulary.vocabulary(tokenizer)._compiled
    assert len(kept) == _vocabulary._KEPT
    serve.regex("a{3}", tokenizer)
    assert len(tried) == 102
    monkeypatch.setattr(_trial, "check", lambda text: tried.append(text) or "no")
    for _ in range(2):
        with pytest.raises(ValueError, match="regex: no"):
            serve.regex("c", tokenizer)
    assert len(tried) == 103  # what failed is known, too


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModuleNotFoundError, match="pip install llguidance"):
        serve.choice(["a"], models.CharTokenizer("a"))
