"""JSON schemas, read strictly: every keyword is understood, or an error that names it.

The keywords are those of draft 2020-12 that llguidance implements; it would pass over others without
a word.
"""

from __future__ import annotations

import json
import math
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fnet._util._nearest import did_you_mean
from fnet.serve._structured import _pattern

LONGEST = 100_000  # characters of a schema as JSON
_DEEPEST = 64  # objects in one another
_MOST = 2_000  # schemas in a schema
_TYPES = "null", "boolean", "integer", "number", "string", "array", "object"
_FORMATS = (
    *("date-time", "time", "date", "duration", "email"),
    *("hostname", "ipv4", "ipv6", "uuid", "uri"),
)
# What says nothing about valid values. `discriminator` (OpenAPI) tells readers where to look.
_ANNOTATIONS = frozenset(
    {
        *("$schema", "$comment", "title", "description", "default", "examples"),
        *("deprecated", "readOnly", "writeOnly", "discriminator"),
    }
)
# Between values; without a limit, a model could write spaces for ever.
_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}


def checked(schema: Any) -> str:
    """Returns a schema as JSON, without its annotations.

    Args:
        schema: a mapping, a boolean, or its JSON.

    Raises:
        ValueError: it is not valid, has a keyword that is not supported, refers to what is not in
            it, is too large, or has no finite value.
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        value = json.loads(text) if len(text) <= LONGEST else None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON schema: {error}") from None
    if len(text) > LONGEST:
        raise ValueError(f"expected at most {LONGEST:,} characters, got {len(text):,}")
    if isinstance(value, bool):
        value = {"anyOf": [value]}
    reader = _Reader()
    value = reader.schema(value, "#", 0)
    reader.check_references()
    value["x-guidance"] = _OPTIONS
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a string is no text: {error}") from None
    return text


class _Reader:
    """Reads a schema, whose parts are named by JSON pointers such as "#/properties/a"."""

    def __init__(self):
        self._schemas: dict[str, Any] = {}
        self._references: list[tuple[str, str]] = []  # where, to what

    def schema(self, value: Any, where: str, depth: int) -> Any:
        """Returns a schema without its annotations."""
        if isinstance(value, bool):
            self._schemas[where] = value
            return value
        if not isinstance(value, dict):
            raise _wrong(where, "a schema: an object, true or false", value)
        if depth > _DEEPEST or len(self._schemas) > _MOST:
            raise ValueError(
                f"expected at most {_MOST:,} schemas, and {_DEEPEST} in one another; got more at "
                f"{where:.200}"
            )
        result: dict[str, Any] = {}
        self._schemas[where] = result
        for name, each in value.items():
            if name in _ANNOTATIONS or (name == "$id" and not depth):
                continue
            if name == "uniqueItems" and each is False:
                continue
            result[name] = self._keyword(name, each, f"{where}/{_escaped(name)}", depth + 1)
        _check_counts(result, where)
        return result

    def _keyword(self, name: str, value: Any, where: str, depth: int) -> Any:
        if name in ("items", "additionalProperties"):
            if isinstance(value, list):
                raise _wrong(where, "a schema (a list of them is prefixItems)", value)
            return self.schema(value, where, depth)
        if name in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if not isinstance(value, list) or not value:
                raise _wrong(where, "a list of schemas", value)
            return [self.schema(each, f"{where}/{i}", depth) for i, each in enumerate(value)]
        if name in ("properties", "patternProperties", "$defs", "definitions"):
            if not isinstance(value, dict):
                raise _wrong(where, "an object of schemas", value)
            return {
                key: self.schema(each, f"{where}/{_escaped(key)}", depth)
                for key, each in value.items()
                if name != "patternProperties" or _is_pattern(key, where)
            }
        if name == "$ref":
            self._references.append((where, _target(where, value)))
            return value
        if name not in _VALUES:
            known = (*_VALUES, "properties", "items", "additionalProperties", "anyOf", "$ref")
            raise ValueError(
                f"{where:.200}: the keyword {name[:80]!r} is not supported; "
                + (did_you_mean(name, known) or "leave it out")
            )
        fits, expected = _VALUES[name]
        if not fits(value):
            raise _wrong(where, expected, value)
        if name == "pattern":
            _is_pattern(value, where)
        return value

    def check_references(self) -> None:
        """Raises ValueError for a reference to what is not there, or a schema without a finite
        value."""
        for where, target in self._references:
            if target not in self._schemas:
                raise ValueError(
                    f"{where:.200}: there is no schema at {target[:200]!r}; references lead to "
                    "places in this schema, such as '#/$defs/name'"
                )
        if "#" not in _with_values(self._schemas):
            raise ValueError("no finite value is valid: it is false, or references lead back to it")


def _with_values(schemas: Mapping[str, Any]) -> set[str]:
    """Returns the schemas that have a finite value as far as references decide."""
    alive: set[str] = set()
    readers: dict[str, list[str]] = {}
    for where, schema in schemas.items():
        for part in _parts(schema, where):
            readers.setdefault(part, []).append(where)
    pending = list(schemas)
    while pending:
        where = pending.pop()
        if where not in alive and _is_alive(schemas[where], where, alive):
            alive.add(where)
            pending += readers.get(where, ())
    return alive


def _parts(schema: Any, where: str) -> Iterable[str]:
    """Yields the schemas on which a value of this one may depend."""
    if isinstance(schema, bool):
        return
    if "$ref" in schema:
        yield _target(where, schema["$ref"])
    for name in ("allOf", "anyOf", "oneOf", "prefixItems"):
        yield from (f"{where}/{name}/{i}" for i in range(len(schema.get(name, ()))))
    yield from (f"{where}/properties/{_escaped(key)}" for key in schema.get("properties", ()))
    yield from (f"{where}/{name}" for name in ("items", "additionalProperties") if name in schema)


def _is_alive(schema: Any, where: str, alive: set[str]) -> bool:
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and _target(where, schema["$ref"]) not in alive:
        return False
    branches = {
        name: [f"{where}/{name}/{i}" in alive for i in range(len(schema.get(name, ())))]
        for name in ("allOf", "anyOf", "oneOf")
    }
    if not all(branches["allOf"]) or not all(
        any(branches[name]) for name in ("anyOf", "oneOf") if name in schema
    ):
        return False
    types = schema.get("type", "null")
    if "const" in schema or "enum" in schema:
        return True
    return any(
        {"object": _has_object, "array": _has_array}.get(kind, _always)(schema, where, alive)
        for kind in ([types] if isinstance(types, str) else types)
    )


def _always(schema: Mapping[str, Any], where: str, alive: set[str]) -> bool:
    return True


def _has_object(schema: Mapping[str, Any], where: str, alive: set[str]) -> bool:
    there, other = schema.get("properties", {}), f"{where}/additionalProperties"
    return all(
        f"{where}/properties/{_escaped(key)}" in alive
        if key in there
        else other in alive or "additionalProperties" not in schema or "patternProperties" in schema
        for key in schema.get("required", ())
    )


def _has_array(schema: Mapping[str, Any], where: str, alive: set[str]) -> bool:
    least, first = schema.get("minItems", 0), len(schema.get("prefixItems", ()))
    if not all(f"{where}/prefixItems/{i}" in alive for i in range(min(least, first))):
        return False
    return least <= first or "items" not in schema or f"{where}/items" in alive


def _check_counts(schema: Mapping[str, Any], where: str) -> None:
    least = schema.get("minProperties", 0)
    if least > max(1, len(set(schema.get("required", ())))):
        # A key that comes twice would count twice.
        raise ValueError(
            f"{where:.200}: the keyword 'minProperties' is not supported above 1 and the number "
            f"of required properties; got {least}"
        )


def _is_pattern(pattern: Any, where: str) -> bool:
    try:
        _pattern.check(pattern)
    except ValueError as error:
        raise ValueError(f"{where:.200}: {error}") from None
    return True


def _target(where: str, reference: Any) -> str:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _wrong(
            where, "a place in this schema, such as '#/$defs/name' (nothing is fetched)", reference
        )
    return urllib.parse.unquote(reference)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _wrong(where: str, expected: str, value: Any) -> ValueError:
    return ValueError(f"{where:.200}: expected {expected}; got {value!r:.80}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_types(value: Any) -> bool:
    several = value if isinstance(value, list) else [value]
    return bool(several) and all(isinstance(each, str) and each in _TYPES for each in several)


_COUNT = _is_count, "an integer of at least 0"
_NUMBER = _is_number, "a number"
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_are_types, f"one or several of {', '.join(_TYPES)}"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "const": (lambda value: True, "a value"),
    "required": (_are_names, "a list of names"),
    "pattern": (lambda value: isinstance(value, str), "a regular expression"),
    "format": (lambda value: value in _FORMATS, f"one of {', '.join(_FORMATS)}"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a positive number"),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _COUNT),
    **dict.fromkeys(("minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
}
