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


class Form(NamedTuple):
    """How a model writes calls.

    Attributes:
        reader: how they are read.
        key: the name of the arguments in the JSON of a call.
        begin, end: what comes before and after a call.
        list_begin: what comes before a list of calls, if they are in one.
    """

    reader: type[Tagged] | type[Whole]
    key: str
    begin: str = ""
    end: str = ""
    list_begin: str = ""


def form(template: str) -> Form:
    """Returns how a model with this chat template writes calls.

    Raises:
        Wrong: the template has no tools, or calls of a form that is not known.
    """
    if "tools" not in template:
        raise Wrong("this model's chat template has no tools; leave them out", param="tools")
    other = any(mark in template for mark in ("<function=", "<arg_key>", "[ARGS]"))
    if not other and _BEGIN in template and "arguments" in template:
        return Form(Tagged, "arguments", _BEGIN, _END)
    if not other and _MISTRAL in template:
        return Form(Whole, "arguments", list_begin=_MISTRAL)
    if not other and _LLAMA in template:
        return Form(Whole, "parameters")
    raise Wrong(
        "the calls that this model's chat template asks for are of no known form, so they cannot "
        f"be read; known are {_FORMS}. Leave the tools out, or send tool_choice 'none'",
        param="tools",
    )


class Chosen(NamedTuple):
    """The tools of a request.

    Attributes:
        shown: those that the model sees, or None.
        callable: the functions that it may call.
        required: whether it must call one.
    """

    shown: list[dict] | None = None
    callable: tuple[dict, ...] = ()
    required: bool = False

    @property
    def strict(self) -> bool:
        """Whether the arguments of a function must be as its schema demands."""
        return any(function.get("strict") for function in self.callable)


def chosen(tools: Any, choice: Any) -> Chosen:
    """Returns the tools of a request.

    Raises:
        Wrong: they are not valid, or the choice is none.
    """
    functions = checked(tools)
    if choice == "none":
        return Chosen()
    if not functions:
        if choice not in (None, "auto"):
            raise Wrong("tool_choice: expected tools, too", param="tool_choice")
        return Chosen()
    shown = [_without_strict(function) for function in functions]
    if choice in (None, "auto", "required"):
        return Chosen(shown, tuple(functions), choice == "required")
    name = _named(choice)
    named = tuple(each for each in functions if each["name"] == name)
    if not named:
        known = ", ".join(each["name"] for each in functions)
        raise Wrong(
            "tool_choice: expected 'auto', 'none', 'required', or "
            f'{{"type": "function", "function": {{"name": one of {known:.200}}}}}; '
            f"got {choice!r:.80}",
            param="tool_choice",
        )
    return Chosen(shown, named, True)


def _named(choice: Any) -> Any:
    """Returns the name of the function that must be called, or None."""
    if not isinstance(choice, dict) or set(choice) != {"type", "function"}:
        return None
    function = choice["function"]
    if choice["type"] != "function" or not isinstance(function, dict) or set(function) != {"name"}:
        return None
    return function["name"]


def checked(tools: Any) -> list[dict]:
    """Returns the functions, or raises `Wrong` if they are not OpenAI's."""
    if tools is None or tools == []:
        return []
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
    return [tool["function"] for tool in tools]


def _without_strict(function):
    shown = {name: value for name, value in function.items() if name != "strict"}
    return {"type": "function", "function": shown}


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
