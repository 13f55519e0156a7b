"""Structured output: from the fields of a request to the grammar of its text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from fnet.serve._openai._errors import Wrong
from fnet.serve._openai._fields import Field, Table, flag, mapping, read, text
from fnet.serve._openai._tools import Chosen, Form
from fnet.serve._structured import _grammar
from fnet.serve._structured._grammar import Grammar
from fnet.serve._structured._vocabulary import Vocabulary, vocabulary

_OBJECT = {"type": "object"}
_ANSWER = "answer"  # the rule of a text that is no call of a tool
_SCHEMA = Table(
    {"name": Field(text), "schema": Field(lambda value: value, True), "strict": Field(flag)},
    frozenset({"description"}),
    ("name",),
)
# The names of vLLM, in `extra_body={"structured_outputs": {...}}`.
_KINDS: dict[str, Callable[[Any, str], str]] = {
    "json": _grammar.json_rule,
    "json_object": lambda value, name: _grammar.json_rule(_OBJECT, name),
    "regex": _grammar.regex_rule,
    "choice": _grammar.choice_rule,
    "grammar": lambda value, name: _grammar.lark_rules(value),
}


def asks(body: Mapping[str, Any]) -> bool:
    """Whether a request may need a grammar, which takes time to compile."""
    if body.get("response_format") or body.get("structured_outputs"):
        return True
    tools = body.get("tools")
    if body.get("tool_choice") not in (None, "auto", "none"):
        return bool(tools)
    return isinstance(tools, list) and any(_is_strict(tool) for tool in tools)


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and bool(function.get("strict"))


def of_completion(tokenizer: Any, found: Mapping[str, Any]) -> Grammar | None:
    """Returns the grammar of a text that continues a prompt, or None.

    Raises:
        Wrong: it is not valid.
    """
    asked = found["structured_outputs"]
    if not asked:
        return None
    return _compiled(tokenizer, "structured_outputs", lambda _: _outputs(asked, "start"))


def of_chat(
    tokenizer: Any, found: Mapping[str, Any], tools: Chosen, form: Form | None
) -> Grammar | None:
    """Returns the grammar of the next message of a conversation, or None.

    Args:
        tokenizer: that of the model.
        found: the fields of the request.
        tools: what the model may or must call.
        form: how it writes calls, if there are tools.

    Raises:
        Wrong: the schema, the pattern or the parameters of a tool are not valid.
    """
    formats = {name: found[name] for name in ("response_format", "structured_outputs")}
    given = [name for name, value in formats.items() if value]
    if len(given) == 2:
        raise Wrong("structured_outputs: expected no response_format, too", param=given[1])
    param = given[0] if given else "tools"
    calls = form is not None and (tools.required or tools.strict or bool(given))
    name = _ANSWER if calls else "start"
    answer = ""
    if given == ["response_format"]:
        answer = _format(formats[param], name)
    elif given and calls and "grammar" in formats[param]:
        raise Wrong("structured_outputs: a grammar and tools do not go together", param=param)
    elif given:
        answer = _of(param, lambda: _outputs(formats[param], name))
    if not answer and not (calls and (tools.required or tools.strict)):
        return None
    if not calls:
        return _compiled(tokenizer, param, lambda _: answer)
    several = found["parallel_tool_calls"]
    return _compiled(
        tokenizer, param, lambda known: _calls(form, tools, several, answer, known.names)
    )


def _compiled(tokenizer: Any, param: str, rules: Callable[[Vocabulary], str]) -> Grammar:
    def compile() -> Grammar:
        known = vocabulary(tokenizer)
        return _grammar.compiled(rules(known), known)

    return _of(param, compile)


def _of(param: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (ValueError, ModuleNotFoundError) as error:
        raise Wrong(f"{param}: {error}", param=param) from None


def _format(value: Mapping[str, Any], name: str) -> str:
    """Returns the rules of a response_format, or "" for text."""
    kind = value.get("type")
    if kind == "json_schema" and set(value) == {"type", "json_schema"}:
        where = "response_format.json_schema"
        asked = read(_SCHEMA, _of(where, lambda: mapping(value["json_schema"])), f"{where}.")
        return _of(f"{where}.schema", lambda: _grammar.json_rule(asked["schema"], name))
    if kind == "json_object" and set(value) == {"type"}:
        return _grammar.json_rule(_OBJECT, name)
    if kind == "text" and set(value) == {"type"}:
        return ""
    raise Wrong(
        'response_format: expected {"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}; '
        f"got {value!r:.80}",
        param="response_format",
    )


def _outputs(value: Mapping[str, Any], name: str) -> str:
    """Returns the rules of the field structured_outputs."""
    asked = [kind for kind in value if value[kind] is not None]
    if len(asked) != 1 or asked[0] not in _KINDS:
        raise ValueError(f"expected one of {', '.join(_KINDS)}; got {', '.join(asked):.80}")
    return _KINDS[asked[0]](value[asked[0]], name)


def _calls(form: Form, tools: Chosen, several: bool, answer: str, names: Mapping[str, int]) -> str:
    """Returns the rules of a message that has or may have calls of tools.

    Args:
        form: how calls are written.
        tools: what may or must be called.
        several: whether there may be several calls.
        answer: the rules of a text without calls, or "" if any text is right.
        names: special tokens.
    """
    rules = ["SPACE: /[ \\n\\r\\t]{1,16}/", 'space: SPACE | ""']
    for index, function in enumerate(tools.callable):
        parameters = function.get("parameters") if function.get("strict") else None
        schema = _OBJECT if parameters is None else parameters
        rules.append(_grammar.json_rule(schema, f"arguments_{index}").rstrip())
        name = _grammar.quoted(json.dumps(function["name"], ensure_ascii=False))
        rules.append(
            f'call_{index}: "{{" space "\\"name\\"" space ":" space {name} space "," space '
            f'"\\"{form.key}\\"" space ":" space arguments_{index} space "}}"'
        )
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools.callable))))
    begin, end = _grammar.quoted(form.begin), _grammar.quoted(form.end)
    if form.begin:
        rules.append(f"rest: space call space {end}")
        rules.append(f"calls: {begin} rest" + (f" (space {begin} rest)*" if several else ""))
    elif form.list_begin:
        mark = names.get(form.list_begin)
        first = f"<[{mark}]>" if mark is not None else _grammar.quoted(form.list_begin)
        more = ' ("," space call space)*' if several else ""
        rules.append(f'calls: {first} space "[" space call space{more} "]"')
    else:
        rules.append("calls: call" + (' (space ";" space call)*' if several else ""))
    if tools.required:
        rules.append("start: calls")
    elif answer:
        rules += [answer.rstrip(), f"start: calls | {_ANSWER}"]
    elif form.begin:
        # A lazy terminal ends with the first tag.
        rules.append(f"opened[lazy]: /(?s:.*){form.begin}/")
        rules.append("TEXT: /(?s:.*)/")
        rules.append(f"start: {'(opened rest)*' if several else '(opened rest)?'} text")
        rules.append("text: TEXT")
    else:
        rules.append(r"TEXT: /([^\[{ \n\r\t](?s:.*))?/")
        rules.append("start: calls | text\ntext: TEXT")
    return "\n".join(rules) + "\n"
