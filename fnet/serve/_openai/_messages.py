"""The messages of a conversation, from OpenAI's form to that of chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fnet.serve._openai._errors import Wrong
from fnet.serve._openai._fields import Field, Table, mapping, read, text

# Arguments of `ChatTemplate.render`, which fields of the request or nothing sets.
_OURS = {
    *("messages", "tools", "documents", "name"),
    *("add_generation_prompt", "continue_final_message"),
}
_ROLES = "system", "developer", "user", "assistant", "tool"
# Fields of a message by its role. What clients send back of an answer is null or empty.
_EMPTY = Field(lambda value: _nothing(value))
_ANSWER = {
    "tool_calls": Field(lambda value: value, ()),
    "reasoning_content": Field(text),
    "reasoning": Field(text),
    **dict.fromkeys(("refusal", "audio", "function_call", "annotations"), _EMPTY),
}


def conversation(messages: Any, template: str) -> list[dict[str, Any]]:
    """Returns the messages as the variables of a chat template.

    The parts of a content are joined, and the arguments of calls become objects, because templates
    print strings and objects. The role "developer" is "system" for a template that does not know
    it.

    Raises:
        Wrong: the messages are not of OpenAI's form, or have parts that are no text.
    """
    if not isinstance(messages, list) or not messages:
        raise Wrong("messages: expected a list of at least one message", param="messages")
    known = "developer" in template
    return [_message(f"messages[{i}]", each, known) for i, each in enumerate(messages)]


def _message(where: str, message: Any, developer: bool) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in _ROLES:
        raise Wrong(
            f"{where}: expected an object with a role among {', '.join(_ROLES)}; "
            f"got {message!r:.80}",
            param=where,
        )
    found = read(_table(role), message, f"{where}.")
    if role == "developer" and not developer:
        found["role"] = "system"
    calls = found.pop("tool_calls", ())
    if calls:
        found["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", c) for i, c in enumerate(calls)]
    if found["content"] is None:
        if role != "assistant" or not calls:
            raise Wrong(f"{where}.content: expected text", param=f"{where}.content")
        found["content"] = ""
    return {name: value for name, value in found.items() if value is not None}


def _table(role: str) -> Table:
    fields = {"role": Field(text), "content": Field(_content), "name": Field(text)}
    if role == "assistant":
        fields |= _ANSWER
    elif role == "tool":
        fields["tool_call_id"] = Field(text)
    return Table(fields, required=("role",))


def _content(value: Any) -> str:
    """Returns the text of a content."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("expected a string or a list of parts")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError("expected parts of the type 'text', the only one that is supported")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError('expected each part as {"type": "text", "text": ...}')
    return "".join(part["text"] for part in value)


def _nothing(value: Any) -> None:
    if value not in ([], {}):
        raise ValueError("expected null")


def _call(where: str, call: Any) -> dict[str, Any]:
    """Returns a call of an earlier answer, with its arguments as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    try:
        held = json.loads(function["arguments"])
        return {
            "id": text(call["id"]),
            "type": "function",
            "function": {"name": text(function["name"]), "arguments": mapping(held)},
        }
    except (KeyError, TypeError, ValueError, RecursionError):
        raise Wrong(
            f'{where}: expected {{"id": ..., "type": "function", "function": {{"name": ..., '
            f'"arguments": JSON of an object as a string}}}}, got {call!r:.200}',
            param=where,
        ) from None


def variables(asked: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Returns the further variables of a template that a request sets.

    Raises:
        Wrong: the template does not use one of them.
    """
    found = dict(asked["chat_template_kwargs"])
    if asked["reasoning_effort"] is not None:
        found["reasoning_effort"] = asked["reasoning_effort"]
    for name in found:
        if name in _OURS or not re.search(rf"\b{re.escape(name)}\b", template):
            raise Wrong(
                f"this model's chat template has no variable {name[:80]!r}; leave it out",
                param=name[:80] if name == "reasoning_effort" else "chat_template_kwargs",
            )
    return found
