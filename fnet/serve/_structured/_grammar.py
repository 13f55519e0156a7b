"""Grammar: what a text must be, as a mask for `Engine.submit`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from fnet.serve._structured import _pattern, _schema, _trial
from fnet.serve._structured._vocabulary import Vocabulary, library, vocabulary
from fnet.serve._structured._walk import Walk

_LONGEST = 100_000  # characters of a pattern, the choices, or a grammar
_RULES = 1_000  # of a grammar
# The model decides into which tokens a text is divided that the grammar prescribes.
_HEAD = '%llguidance {"no_forcing": true}\n'
_RULE = re.compile(r"^\s*[?!]?([a-z_]\w*)\s*(\[[^\]\n]*\])?\s*(\{|:)", re.IGNORECASE | re.MULTILINE)
_PLACE = re.compile(r"^error: |^at \d+\(\d+\): |failed to compile JSON schema: ")
_LIMIT = re.compile("fuel|max is|too large|too many|panic")
# Options of rules that need an engine to forget tokens, to count them, or to change its temperature.
_OPTIONS = re.compile(r"\b(stop|stop_capture|suffix|max_tokens|temperature)\b")


class Grammar:
    """What a text must be. `json_schema`, `regex`, `choice` and `lark` return it.

    Pass it as `mask` to `Engine.submit`; any number of requests may share one. Where the text may
    end, the stop tokens are allowed. A text to which nothing can be added ends with "stop".

    Attributes:
        text: the grammar in llguidance's form of Lark.

    >>> word = serve.choice(["yes", "no"], models.CharTokenizer("nosey"))
    >>> word.allowed([]).tolist()                                    # e n o s y
    [False, True, False, False, True]
    >>> word.allowed([1]).tolist(), word.allowed([1, 2])
    ([False, False, True, False, False], None)
    """

    def __init__(self, text: str, vocabulary: Vocabulary, matcher: Any):
        self.text, self._vocabulary, self._matcher = text, vocabulary, matcher

    def allowed(self, tokens: Sequence[int]) -> np.ndarray | None:
        """Returns the tokens of the tokenizer that may follow, booleans [vocab_size], or None if the
        text is complete and nothing may follow.

        Raises:
            ValueError: the tokens are no beginning of such a text.
        """
        return self.walk(self._vocabulary.size, self._vocabulary.special).allowed(tokens)

    def walk(self, vocab_size: int, stop: Collection[int]) -> Walk:
        """Returns a mask for one text, which asks for the same tokens in less time, if each call has
        the tokens of the call before it, and more.

        Args:
            vocab_size: the number of tokens of the model.
            stop: tokens that end the text.
        """
        return Walk(self._matcher.deep_copy(), self._vocabulary, vocab_size, stop)


def json_schema(schema: Any, tokenizer: Any) -> Grammar:
    """Returns the grammar of the JSON that a schema describes.

    Properties come in the order of the schema. Keywords are those of draft 2020-12, without those
    that a grammar cannot hold, such as uniqueItems, not and if; a keyword that is not supported is
    an error, and so is one that is not known. Annotations, such as title, are allowed.

    Args:
        schema: a mapping, its JSON, or True for any JSON. For a class of pydantic, its
            `model_json_schema()`.
        tokenizer: that of the model, from `models.read_tokenizer`.

    Raises:
        ValueError: the schema is not valid, or not supported, has no value, or takes more than
            2 seconds to compile. Or the tokenizer does not join tokens as they are.
        ModuleNotFoundError: llguidance is not installed.

    >>> schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 1}
    >>> serve.json_schema(schema, models.CharTokenizer('[]aeflrstu')).allowed([0]).tolist()
    [False, True, False, False, True, False, False, False, True, False]
    """
    return _grammar("json_schema", schema, tokenizer, json_rule)


def regex(pattern: str, tokenizer: Any) -> Grammar:
    r"""Returns the grammar of the texts that a regular expression matches from beginning to end.

    The syntax is that of Python's `re`, without lookahead, lookbehind, references to groups and
    possessive repetitions; \d, \w and \s have ASCII characters only.

    Args:
        pattern: the regular expression.
        tokenizer: that of the model.

    Raises:
        ValueError, ModuleNotFoundError: as for `json_schema`.

    >>> serve.regex("[ab]{2}c", models.CharTokenizer("abc")).allowed([0, 1]).tolist()
    [False, False, True]
    """
    return _grammar("regex", pattern, tokenizer, regex_rule)


def choice(options: Iterable[str], tokenizer: Any) -> Grammar:
    """Returns the grammar of a text that is one of several.

    Args:
        options: the texts, none of them empty.
        tokenizer: that of the model.

    Raises:
        ValueError, ModuleNotFoundError: as for `json_schema`.

    >>> serve.choice(["ab", "ba"], models.CharTokenizer("ab")).allowed([1]).tolist()
    [True, False]
    """
    return _grammar("choice", options, tokenizer, choice_rule)


def lark(grammar: str, tokenizer: Any) -> Grammar:
    """Returns a context-free grammar in the form of Lark, as llguidance reads it.

    The rule `start` is the text. Names in capitals are terminals, which are regular expressions.
    `%json {...}` in a rule is a JSON schema.

    Args:
        grammar: the rules.
        tokenizer: that of the model.

    Raises:
        ValueError, ModuleNotFoundError: as for `json_schema`.

    Source: the syntax is described in llguidance's docs/syntax.md.

    >>> pairs = serve.lark('start: "(" start ")" | "x"', models.CharTokenizer("()x"))
    >>> pairs.allowed([0, 2]).tolist()
    [False, True, False]
    """
    return _grammar("lark", grammar, tokenizer, lark_rules)


def _grammar(kind: str, value: Any, tokenizer: Any, rules: Callable[[Any], str]) -> Grammar:
    known = vocabulary(tokenizer)
    try:
        text = rules(value)
        return compiled(text, known)
    except ValueError as error:
        raise ValueError(f"{kind}: {error}") from None


def compiled(text: str, vocabulary: Vocabulary) -> Grammar:
    """Returns a grammar in the form of Lark, compiled or kept.

    Raises:
        ValueError: llguidance cannot use it.
    """
    return vocabulary.compiled(text, lambda text: _compile(text, vocabulary))


def _compile(text: str, vocabulary: Vocabulary) -> Grammar:
    llguidance = library()
    form = llguidance.LLMatcher.grammar_from_lark(_HEAD + text)
    error = _trial.check(form)
    if error is None:
        limits = llguidance.LLParserLimits(**_trial.LIMITS)
        matcher = llguidance.LLMatcher(vocabulary.tokens, form, log_level=0, limits=limits)
        error = matcher.get_error() or None
    if error is not None:
        raise ValueError(_reason(error))
    grammar = Grammar(text, vocabulary, matcher)
    grammar.allowed([])
    return grammar


def _reason(error: str) -> str:
    """Returns what an error of llguidance says, without its notes for developers."""
    if "NoExtension" in error:
        return "no text is valid"
    if _LIMIT.search(error):
        return "it is too complex; simplify it"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("error: ")), lines[0])
    return f"{_PLACE.sub('', said):.300}"


def json_rule(schema: Any, name: str = "start") -> str:
    return f"{name}: %json {_schema.checked(schema)}\n"


def regex_rule(pattern: Any, name: str = "start") -> str:
    _check_text(pattern)
    return f"{name}: {_pattern.terminal(pattern)}\n"


def choice_rule(options: Any, name: str = "start") -> str:
    texts = list(options) if isinstance(options, Iterable) else []
    if isinstance(options, str) or not texts or not all(texts):
        raise ValueError(f"expected a list of texts, none of them empty; got {options!r:.80}")
    for text in texts:
        _check_text(text)
    _check_text("".join(texts))
    # One terminal: of rules, llguidance follows 2,000 at once.
    alternatives = " | ".join(quoted(text) for text in dict.fromkeys(texts))
    return f"{name}: {name.upper()}_CHOICE\n{name.upper()}_CHOICE: {alternatives}\n"


def lark_rules(grammar: Any) -> str:
    _check_text(grammar)
    if "%llguidance" in grammar:
        raise ValueError("options of llguidance are set by fnet; leave %llguidance out")
    rules = list(_RULE.finditer(grammar))
    if len(rules) > _RULES:
        raise ValueError(f"expected at most {_RULES:,} rules, got {len(rules):,}")
    for rule in rules:
        if option := _OPTIONS.search(rule[2] or ""):
            raise ValueError(f"the rule {rule[1]!r}: the option {option[0]} is not supported")
    first, *parts = grammar.split("%json")
    return first + "".join(map(_with_schema, parts))


def _with_schema(part: str) -> str:
    """Checks the schema with which the text after %json begins."""
    try:
        rest = part.lstrip()
        schema, end = json.JSONDecoder().raw_decode(rest)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"%json: expected a JSON schema: {error}") from None
    return f"%json {_schema.checked(schema)}{rest[end:]}"


def quoted(text: str) -> str:
    """Returns a text as a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"expected a text, got {text!r:.80}")
    if len(text) > _LONGEST:
        raise ValueError(f"expected at most {_LONGEST:,} characters, got {len(text):,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"expected a text that UTF-8 can hold: {error}") from None
