"""Calls of tools: what a request says about them, and how they are found in generated text.

A chat template tells the model how to write a call, and only the model knows what it learned. So
calls are read for the forms that are known by their templates, and refused for others.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from fnet.serve._openai._errors import Wrong
from fnet.serve._openai._text import overlap

_MOST = 128  # tools of a request
_LETTERS = string.ascii_letters + string.digits
_BEGIN, _END = "<tool_call>", "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"
_LLAMA = "dictionary of argument name and its value"
_FORMS = "JSON in <tool_call> (Hermes, Qwen), bare JSON (Llama 3) and a JSON list (Mistral)"


class Call(NamedTuple):
    """A call of a tool, with its arguments as JSON."""

    name: str
    arguments: str

    def content(self, index: int | None = None) -> dict:
        """Returns the JSON of the call; with an index, that of an event."""
        # Templates of Mistral demand 9 letters and digits.
        identity = "".join(secrets.choice(_LETTERS) for _ in range(9))
        function = {"name": self.name, "arguments": self.arguments}
        place = {} if index is None else {"index": index}
        return {**place, "id": identity, "type": "function", "function": function}


class Reader(Protocol):
    """Divides generated text into content and calls."""

    def add(self, text: str) -> tuple[str, list[Call]]:
        """Adds text, and returns the content and the calls that are complete."""

    def end(self) -> tuple[str, list[Call]]:
        """Returns the rest."""


class Plain:
    """All of the text is content."""

    def add(self, text: str) -> tuple[str, list[Call]]:
        return text, []

    def end(self) -> tuple[str, list[Call]]:
        return "", []


class Tagged:
    """Calls are JSON objects in <tool_call> and </tool_call>, between or after content.

    What is in the tags and no call stays content, so that nothing of the answer is lost.
    """

    def __init__(self):
        self._held, self._inside, self._called = "", False, False

    def add(self, text: str) -> tuple[str, list[Call]]:
        self._held += text
        content, calls = "", []
        while (parts := self._held.partition(_END if self._inside else _BEGIN))[1]:
            before, _, self._held = parts
            if self._inside:
                found = _calls([_json(before)])
                calls += found
                content += "" if found else f"{_BEGIN}{before}{_END}"
                self._called = bool(found)
            else:
                content += self._outside(before).rstrip()
            self._inside = not self._inside
        if not self._inside:
            content += self._safe()
        return content, calls

    def end(self) -> tuple[str, list[Call]]:
        rest, self._held = self._held, ""
        return (f"{_BEGIN}{rest}" if self._inside else self._outside(rest)), []

    def _safe(self) -> str:
        """Returns the content that neither a tag nor the end of the answer can change: space before
        a call is no content."""
        keep = len(self._held) - overlap(self._held, _BEGIN)
        content = self._held[:keep].rstrip()
        self._held = self._held[len(content) :]
        return self._outside(content)

    def _outside(self, text: str) -> str:
        text = text.lstrip() if self._called else text
        self._called = self._called and not text
        return text


class Whole:
    """The whole answer is one or several calls as JSON, or it is all content."""

    def __init__(self):
        self._held, self._content = "", False

    def add(self, text: str) -> tuple[str, list[Call]]:
        if self._content:
            return text, []
        self._held += text
        start = self._held.lstrip()
        if not start or start[0] in "{[":
            return "", []
        self._content = True
        return self._held, []

    def end(self) -> tuple[str, list[Call]]:
        if self._content:
            return "", []
        calls = _calls(_values(self._held.strip().removeprefix(_MISTRAL)))
        return ("", calls) if calls else (self._held, [])


def reader(template: str) -> type[Tagged] | type[Whole]:
    """Returns how the calls of a model with this chat template are read.

    Raises:
        Wrong: the template has no tools, or calls of a form that is not known.
    """
    if "tools" not in template:
        raise Wrong("this model's chat template has no tools; leave them out", param="tools")
    other = any(mark in template for mark in ("<function=", "<arg_key>", "[ARGS]"))
    if not other and _BEGIN in template and "arguments" in template:
        return Tagged
    if not other and (_LLAMA in template or _MISTRAL in template):
        return Whole
    raise Wrong(
        "the calls that this model's chat template asks for are of no known form, so they cannot "
        f"be read; known are {_FORMS}. Leave the tools out, or send tool_choice 'none'",
        param="tools",
    )


def chosen(tools: Any, choice: Any) -> list[dict] | None:
    """Returns the tools to show to the model, or None.

    Raises:
        Wrong: they are not valid, or the choice needs what this server does not do.
    """
    tools = checked(tools)
    if choice is None or choice == "auto":
        return tools
    if choice == "none":
        return None
    if not tools:
        raise Wrong("tool_choice: expected tools, too", param="tool_choice")
    if choice == "required" or isinstance(choice, dict):
        raise Wrong(
            "tool_choice: a call cannot be forced, because structured output is not supported yet; "
            "expected 'auto' or 'none'",
            param="tool_choice",
        )
    raise Wrong(f"tool_choice: expected 'auto' or 'none', got {choice!r:.80}", param="tool_choice")


def checked(tools: Any) -> list[dict] | None:
    """Returns the tools, or raises `Wrong` if they are not OpenAI's."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or len(tools) > _MOST:
        raise Wrong(f"tools: expected a list of at most {_MOST}", param="tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or tool.get("type") != "function"
            or not isinstance(function.get("name"), str)
            or set(tool) > {"type", "function"}
            or not set(function) <= {"name", "description", "parameters", "strict"}
        ):
            raise Wrong(
                f'tools[{index}]: expected {{"type": "function", "function": {{"name": ..., '
                f'"description": ..., "parameters": ...}}}}, got {tool!r:.200}',
                param="tools",
            )
        if function.get("strict"):
            raise Wrong(
                f"tools[{index}]: strict arguments need structured output, which is not supported "
                "yet; leave strict out",
                param="tools",
            )
    return [_without_strict(tool) for tool in tools]


def _without_strict(tool):
    function = {name: value for name, value in tool["function"].items() if name != "strict"}
    return {"type": "function", "function": function}


def _calls(values: Sequence[Any]) -> list[Call]:
    """Returns values as calls, or [] if one of them is none."""
    found = []
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return []
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(arguments, dict):
            return []
        found.append(Call(value["name"], json.dumps(arguments, ensure_ascii=False)))
    return found


def _values(text: str) -> list[Any]:
    """Returns the JSON values of a text, which may be in a list or separated by semicolons."""
    found, decoder, rest = [], json.JSONDecoder(), text.strip()
    try:
        while rest:
            value, end = decoder.raw_decode(rest)
            found += value if isinstance(value, list) else [value]
            rest = rest[end:].lstrip("; \n")
    except (ValueError, RecursionError):
        return []
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
