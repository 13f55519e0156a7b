"""The fields of requests, each read strictly: one is used, known to have no effect, or an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fnet._util._nearest import did_you_mean
from fnet.serve._openai._errors import Wrong

MOST_CHOICES = 128
_STOPS = 16  # stop strings of a request; OpenAI allows 4
_MOST_BIASES = 1024  # tokens of a request
_LONGEST = 1000  # characters of a stop string, which the text is searched for after each token


class Field(NamedTuple):
    """How a field is read: `read(value)` returns the value to use, or raises ValueError with what
    was expected. An absent field and null are `default`."""

    read: Callable[[Any], Any]
    default: Any = None


class Table(NamedTuple):
    """The fields of one kind of request.

    Attributes:
        fields: those that are used.
        irrelevant: those that have no effect on the answer, such as a name for the user.
        required: the fields without which there is no request.
    """

    fields: Mapping[str, Field]
    irrelevant: frozenset[str] = frozenset()
    required: tuple[str, ...] = ("model",)


def read(table: Table, body: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Returns the values of all fields of a request.

    Args:
        table: the known fields.
        body: the JSON object.
        where: the path of the object in the request, such as "stream_options.", for errors.

    Raises:
        Wrong: a field is not known, is missing, or has a value that is not valid.
    """
    for name in body:
        if name not in table.fields and name not in table.irrelevant:
            meant = did_you_mean(name, table.fields)
            raise Wrong(
                f"unknown field {where}{name[:80]!r}; "
                + (meant or f"expected {', '.join(table.fields)}"),
                param=f"{where}{name}"[:80],
                code="unknown_parameter",
            )
    for name in table.required:
        if body.get(name) is None:
            raise Wrong(f"the field {where}{name} is missing", param=f"{where}{name}")
    return {name: _value(f"{where}{name}", field, body) for name, field in table.fields.items()}


def _value(path: str, field: Field, body: Mapping[str, Any]) -> Any:
    value = body.get(path.rsplit(".", 1)[-1])
    if value is None:
        return field.default
    try:
        return field.read(value)
    except ValueError as error:
        raise Wrong(f"{path}: {error}; got {_shown(value)}", param=path) from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def integer(low: int, high: int) -> Callable[[Any], int]:
    def read(value):
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"expected an integer from {low} to {high}")
        return value

    return read


def number(low: float, high: float) -> Callable[[Any], float]:
    def read(value):
        if type(value) not in (int, float) or not low <= value <= high or math.isnan(value):
            raise ValueError(f"expected a number from {low:g} to {high:g}")
        return float(value)

    return read


def flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("expected true or false")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a string")
    return value


def mapping(value: Any) -> dict:
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    return value


def biases(value: Any) -> dict[int, float]:
    """Reads an object from tokens, which JSON makes strings, to numbers that are added to logits."""
    read_bias = number(-100, 100)
    if not isinstance(value, dict) or len(value) > _MOST_BIASES:
        raise ValueError(f"expected an object of at most {_MOST_BIASES} tokens")
    if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in value):
        raise ValueError('expected tokens as names, such as {"50256": -100}')
    return {int(token): read_bias(bias) for token, bias in value.items()}


def only(*values: Any, why: str) -> Field:
    """A field of OpenAI's API whose other values this server refuses."""

    def read(value):
        if not any(type(value) is type(each) and value == each for each in values):
            raise ValueError(why)

    return Field(read)


def stops(value: Any) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else value
    if (
        not isinstance(found, tuple | list)
        or len(found) > _STOPS
        or not all(isinstance(each, str) and 0 < len(each) <= _LONGEST for each in found)
    ):
        raise ValueError(
            f"expected a string or at most {_STOPS} strings, each of 1 to {_LONGEST} characters"
        )
    return tuple(found)


def _stream_options(value: Any) -> dict:
    return read(_STREAM_OPTIONS, mapping(value), "stream_options.")


_STREAM_OPTIONS = Table(
    {"include_usage": Field(flag, False)}, frozenset({"include_obfuscation"}), ()
)
_GENERATION = {
    "model": Field(text),
    "temperature": Field(number(0, 2), 1.0),
    "top_p": Field(number(0, 1)),
    "n": Field(integer(1, MOST_CHOICES), 1),
    "seed": Field(integer(-(1 << 63), (1 << 63) - 1)),
    "stop": Field(stops, ()),
    "presence_penalty": Field(number(-2, 2)),
    "frequency_penalty": Field(number(-2, 2)),
    "stream": Field(flag, False),
    "stream_options": Field(_stream_options),
    "max_tokens": Field(integer(1, 1 << 30)),
    # Not in OpenAI's API, but in that of other servers of open models, under the same names.
    "top_k": Field(integer(1, 1 << 30)),
    "min_p": Field(number(0, 1)),
    "repetition_penalty": Field(number(1e-3, 1e3)),
    "logit_bias": Field(biases),
    "structured_outputs": Field(mapping),
}
# Names of users and caches, and where OpenAI runs and keeps a request: the text is the same.
_IRRELEVANT = frozenset({"user", "metadata", "safety_identifier"}) | frozenset(
    f"prompt_cache_{name}" for name in ("key", "options", "retention")
)

CHAT = Table(
    {
        **_GENERATION,
        "messages": Field(lambda value: value),
        "max_completion_tokens": Field(integer(1, 1 << 30)),
        "logprobs": Field(flag, False),
        "top_logprobs": Field(integer(0, 20)),
        "tools": Field(lambda value: value),
        "tool_choice": Field(lambda value: value),
        "parallel_tool_calls": Field(flag, True),
        "reasoning_effort": Field(text),
        "chat_template_kwargs": Field(mapping, {}),
        "response_format": Field(mapping),
        "modalities": only(["text"], why="this server generates text; expected ['text']"),
        "store": only(False, why="this server keeps nothing; expected false"),
        "service_tier": only("auto", "default", why="expected 'auto' or 'default'"),
        "verbosity": only("medium", why="no model here has a verbosity; leave the field out"),
        **{
            name: only(why=f"{what}; leave the field out")
            for name, what in {
                "audio": "this server generates text",
                "prediction": "predicted outputs are not supported",
                "web_search_options": "this server searches nothing",
                "moderation": "this server has no moderation",
                "functions": "functions have been replaced by tools",
                "function_call": "functions have been replaced by tools",
            }.items()
        },
    },
    _IRRELEVANT,
    ("model", "messages"),
)
COMPLETIONS = Table(
    {
        **_GENERATION,
        "prompt": Field(lambda value: value),
        "max_tokens": Field(integer(1, 1 << 30), 16),
        "logprobs": Field(integer(0, 20)),
        "echo": Field(flag, False),
        "best_of": Field(integer(1, MOST_CHOICES)),
        "suffix": only("", why="text before a suffix is not supported; leave the field out"),
    },
    _IRRELEVANT,
    ("model", "prompt"),
)
EMBEDDINGS = Table(
    {
        "model": Field(text),
        "input": Field(lambda value: value),
        "encoding_format": Field(text, "float"),
        "dimensions": Field(integer(1, 1 << 20)),
    },
    frozenset({"user"}),
    ("model", "input"),
)


def token_lists(value: Any, most: int) -> list[str | list[int]]:
    """Reads a prompt or an input: a string, a list of strings, of tokens, or of lists of tokens.

    Raises:
        ValueError: it is none of these, is empty, or has more than `most` texts.
    """
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        value = [value]
    texts = value if isinstance(value, list) else [value]
    if not 0 < len(texts) <= most or not all(_is_text(each) for each in texts):
        raise ValueError(
            f"expected a string, a list of tokens, or at most {most} of either, none of them empty"
        )
    return texts


def _is_text(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    return isinstance(value, str) and value != ""
