"""Schemas, patterns and grammars that are refused: what is not supported by name, and what would
take too long in time."""

import json
import time

import pytest

pytest.importorskip("llguidance")

from fnet import models, serve

TOKENIZER = models.ByteTokenizer()
LEAF = {"type": "string"}


def nested(depth):
    schema = LEAF
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length):
    """Definitions each of which holds the next."""
    holds = lambda i: {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}}
    return {
        "$defs": {str(length): LEAF} | {str(i): holds(i) for i in range(length)},
        "$ref": "#/$defs/0",
    }


UNSUPPORTED = [
    ({"type": "array", "uniqueItems": True}, "#/uniqueItems: the keyword 'uniqueItems' is not"),
    ({"properties": {"a": {"not": {}}}}, "#/properties/a/not: the keyword 'not' is not supported"),
    ({"if": {}, "then": {}}, "'if' is not supported"),
    ({"type": "string", "minLenght": 3}, "'minLenght' is not supported; did you mean 'minLength'"),
    ({"x-guidance": {"lenient": True}}, "'x-guidance' is not supported"),
    ({"type": "string", "nullable": True}, "'nullable' is not supported"),
    ({"items": [LEAF]}, "#/items: expected a schema (a list of them is prefixItems)"),
    ({"type": "string", "format": "int32"}, "#/format: expected one of date-time"),
    ({"type": "text"}, "#/type: expected one or several of null, boolean"),
    (
        {"type": "integer", "exclusiveMinimum": True},
        "exclusiveMinimum: expected a number; got True",
    ),
    ({"minItems": -1}, "#/minItems: expected an integer of at least 0; got -1"),
    ({"type": "object", "minProperties": 2}, "'minProperties' is not supported above 1"),
    ({"type": "string", "pattern": "(?=a)b"}, "#/pattern: the pattern '(?=a)b': lookahead is not"),
    ({"type": "string", "pattern": "[[a]]"}, "escape '[', '&&'"),
    ({"patternProperties": {"(a)\\1": {}}}, "references to groups are not supported"),
    ({"$ref": "https://json-schema.org/schema"}, "(nothing is fetched); got 'https://json-s"),
    ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, "there is no schema at '#/$defs/b'"),
    ({"$ref": "#"}, "no finite value is valid"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "no finite value"),
    (False, "no finite value is valid"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3) is greater than maximum (2)"),
    ({"enum": []}, "#/enum: expected a list of values; got []"),
    ({"enum": ["\ud800"]}, "a string is no text"),
    ({"properties": [1]}, "#/properties: expected an object of schemas; got [1]"),
    ({"anyOf": {}}, "#/anyOf: expected a list of schemas; got {}"),
    ({"items": 3}, "#/items: expected a schema: an object, true or false; got 3"),
    ("{", "expected a JSON schema: Expecting property name"),
    ("3", "#: expected a schema: an object, true or false; got 3"),
]


@pytest.mark.parametrize("schema,message", UNSUPPORTED, ids=[m[-24:] for _, m in UNSUPPORTED])
def test_what_is_not_supported_is_named(schema, message):
    with pytest.raises(ValueError, match="json_schema: ") as caught:
        serve.json_schema(schema, TOKENIZER)
    assert message in str(caught.value)


def test_annotations_are_allowed_and_change_nothing():
    plain = serve.json_schema({"type": "object", "properties": {"title": LEAF}}, TOKENIZER)
    described = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/book",
        "title": "Book",
        "type": "object",
        "properties": {"title": {"title": "Title", "default": "", "examples": ["A"], **LEAF}},
    }
    assert serve.json_schema(json.dumps(described), TOKENIZER) is plain


@pytest.mark.parametrize(
    "pattern,message",
    [
        ("a++", "possessive repetitions are not supported"),
        ("(?<!a)b", "lookbehind is not supported"),
        ("(?>a)", "an atomic group is not supported"),
        ("[a&&b]", "escape '[', '&&', '--' and '~~' in the class [a&&b]"),
        ("a(b", "unclosed group"),
        (r"\bword", "lookarounds not supported"),
        ("a$b", "lookarounds not supported"),
        ("\ud800", "expected a text that UTF-8 can hold"),
        (3, "expected a text, got 3"),
    ],
)
def test_patterns_that_cannot_be_followed_are_refused(pattern, message):
    with pytest.raises(ValueError, match="regex: ") as caught:
        serve.regex(pattern, TOKENIZER)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "kind,value,message",
    [
        (serve.choice, "yes", "choice: expected a list of texts, none of them empty; got 'yes'"),
        (serve.choice, [], "choice: expected a list of texts, none of them empty; got []"),
        (serve.choice, ["a", ""], "none of them empty"),
        (serve.choice, 3, "none of them empty; got 3"),
        (serve.lark, 'begin: "a"', "lark: no start rule found"),
        (serve.lark, 'start: "a" other', "other"),
        (serve.lark, '%llguidance {"no_forcing": false}\nstart: "a"', "leave %llguidance out"),
        (serve.lark, 'start: a\na[max_tokens=3]: "a"', "the rule 'a': the option max_tokens is"),
        (serve.lark, 'start: %json {"uniqueItems": true}', "'uniqueItems' is not supported"),
        (serve.lark, "start: %json nothing", "%json: expected a JSON schema"),
        (serve.lark, "start: start", "no t"),
    ],
)
def test_choices_and_grammars_that_are_wrong_are_refused(kind, value, message):
    with pytest.raises(ValueError) as caught:
        kind(value, TOKENIZER)
    assert message in str(caught.value)


REPEATED = "".join(f"(a{{{count}}}|b){{1,90}}" for count in range(200))
HOSTILE = {
    "deep": (serve.json_schema, nested(500)),
    "deep text": (serve.json_schema, '{"items":' * 9000 + "{}" + "}" * 9000),
    "a chain of references": (serve.json_schema, chain(1900)),
    "large": (serve.json_schema, {"enum": ["x" * 100] * 2000}),
    "many schemas": (serve.json_schema, {"anyOf": [LEAF] * 3000}),
    "exponential": (
        serve.json_schema,
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in "ab"]} for i in range(40)]},
    ),
    "optional properties": (
        serve.json_schema,
        {"type": "object", "properties": {f"p{i}": LEAF for i in range(1900)}},
    ),
    "a multiple": (serve.json_schema, {"type": "integer", "multipleOf": 10_000_019}),
    "multiples": (
        serve.json_schema,
        {"allOf": [{"type": "integer", "multipleOf": n} for n in (101, 103, 107, 109)]},
    ),
    "a cycle of allOf": (
        serve.json_schema,
        {"$defs": {c: {"allOf": [{"$ref": f"#/$defs/{d}"}]} for c, d in ("ab", "ba")}}
        | {"$ref": "#/$defs/a"},
    ),
    "many characters": (serve.regex, "a" * 200_000),
    "groups": (serve.regex, "(" * 5000 + ")" * 5000),
    "optional parts": (serve.regex, "[ab]?" * 5000),
    "rules": (serve.lark, "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(1500))),
    "brackets": (serve.lark, "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "choices": (serve.choice, [f"{i}" for i in range(100_000)]),
}


@pytest.mark.quick_cases("deep", "a chain of references", "a multiple", "optional parts")
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_too_large_is_refused_in_time(name):
    kind, value = HOSTILE[name]
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"{kind.__name__}: "):
        kind(value, TOKENIZER)
    assert time.monotonic() - began < 25  # 2 seconds of a processor that others may use


@pytest.mark.parametrize(
    "kind,value",
    [
        (serve.json_schema, {"type": "array", "items": LEAF, "minItems": 10**9}),
        (serve.json_schema, {"type": "string", "minLength": 10**8, "maxLength": 10**9}),
        (serve.json_schema, {"type": "string", "pattern": "^(a+)+$"}),
        (serve.regex, "(a|aa)*b|(a|b)*a(a|b){200}"),
        (serve.regex, "((a{1000}){1000}){1000}"),
        (serve.regex, REPEATED),
    ],
)
def test_what_looks_hostile_costs_little_for_each_token(kind, value):
    walk, tokens, slowest = kind(value, TOKENIZER).walk(256, ()), [], 0.0
    for step in range(60):
        began = time.thread_time()
        row = walk.allowed(tokens)
        slowest = max(slowest, time.thread_time() - began)
        if row is None:
            break
        allowed = row.nonzero()[0]
        tokens.append(int(allowed[-1 - step % min(2, len(allowed))]))
    assert slowest < 1
