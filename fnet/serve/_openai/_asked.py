"""Requests for texts: from the JSON of a request to tokens and an answer to fill."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from fnet.serve._openai import _fields, _messages, _structured, _tools
from fnet.serve._openai._errors import Wrong
from fnet.serve._openai._language import Asked, Language
from fnet.serve._openai._responses import Answer, Chat, Completion

_MOST_PROMPTS = 128
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
# Values that change nothing, which the engine need not compute.
_NEUTRAL = {
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class Job(NamedTuple):
    """What a request asks of the engine, and the answer.

    Attributes:
        asked: the texts.
        answer: the answer to fill.
        streams: whether it is sent in events.
        counts: whether the last event has the number of tokens.
    """

    asked: list[Asked]
    answer: Answer
    streams: bool
    counts: bool


def chat(language: Language, body: Mapping[str, Any]) -> Job:
    """Reads a request for the next message of a conversation.

    Raises:
        Wrong: a field is not valid, or the model cannot do what it asks for.
    """
    found = _fields.read(_fields.CHAT, body)
    streams, counts = _streaming(found)
    tools = _tools.chosen(found["tools"], found["tool_choice"])
    template, source = language.template(bool(tools.shown))
    form = _tools.form(source) if tools.shown else None
    variables = _messages.variables(found, source)
    if tools.shown:
        variables["tools"] = tools.shown
    messages = _messages.conversation(found["messages"], source)
    prompt = language.rendered(template, messages, **variables)
    if found["top_logprobs"] is not None and not found["logprobs"]:
        raise Wrong("top_logprobs: expected logprobs as true, too", param="top_logprobs")
    alternatives = (found["top_logprobs"] or 0) if found["logprobs"] else None
    answer = Chat(
        found["model"],
        found["n"],
        language.token_bytes,
        alternatives,
        reader=form.reader if form else _tools.Plain,
        single=not found["parallel_tool_calls"],
    )
    limit = _most_tokens(found)
    mask = _structured.of_chat(language.tokenizer, found, tools, form)
    asked = _asked(language, found, prompt, limit, alternatives, "messages", mask)
    return Job([asked], answer, streams, counts)


def completion(language: Language, body: Mapping[str, Any]) -> Job:
    """Reads a request to continue texts.

    Raises:
        Wrong: a field is not valid.
    """
    found = _fields.read(_fields.COMPLETIONS, body)
    streams, counts = _streaming(found)
    alternatives, count = found["logprobs"], found["n"]
    if found["best_of"] not in (None, count):
        raise Wrong("best_of: this server returns all texts; expected n", param="best_of")
    if found["echo"] and alternatives is not None:
        raise Wrong(
            "echo: log-probabilities of a prompt are not computed; leave echo or logprobs out",
            param="echo",
        )
    try:
        prompts = _fields.token_lists(found["prompt"], _MOST_PROMPTS)
    except ValueError as error:
        raise Wrong(f"prompt: {error}", param="prompt") from None
    if len(prompts) * count > _fields.MOST_CHOICES:
        raise Wrong(
            f"n: {len(prompts)} prompts and n={count} are {len(prompts) * count} texts, expected "
            f"at most {_fields.MOST_CHOICES}",
            param="n",
        )
    mask = _structured.of_completion(language.tokenizer, found)
    asked = [
        _asked(
            language,
            found,
            language.tokens(prompt, "prompt"),
            found["max_tokens"],
            alternatives,
            "prompt",
            mask,
        )
        for prompt in prompts
    ]
    echoes = []
    if found["echo"]:
        for prompt in prompts:
            text = prompt if isinstance(prompt, str) else language.tokenizer.decode(prompt)
            echoes += [text] * count
    answer = Completion(
        found["model"],
        len(prompts) * count,
        language.token_bytes,
        alternatives,
        echoes=echoes,
    )
    return Job(asked, answer, streams, counts)


def _asked(language, found, prompt, limit, alternatives, param, mask) -> Asked:
    options = {name: found[name] for name in _SAMPLING}
    options |= {name: None for name, value in _NEUTRAL.items() if options[name] == value}
    options["max_tokens"] = language.room(prompt, limit, param)
    options["log_probs"] = alternatives or 0
    options["adapter"] = language.adapter(found["model"])
    if found["logit_bias"]:
        options["logit_bias"] = found["logit_bias"]
    if mask is not None:
        options["mask"] = mask
    seed = secrets.randbits(63) if found["seed"] is None else found["seed"] % (1 << 63)
    return Asked(prompt, found["n"], found["stop"], seed, options)


def _most_tokens(found) -> int | None:
    """Returns the limit of an answer, which has an old and a new name."""
    old, new = found["max_tokens"], found["max_completion_tokens"]
    if old is not None and new is not None and old != new:
        raise Wrong(
            f"max_completion_tokens={new} and max_tokens={old} contradict each other; the second "
            "is the old name of the first",
            param="max_tokens",
        )
    return old if new is None else new


def _streaming(found) -> tuple[bool, bool]:
    """Returns whether the answer is sent in events, and whether they count the tokens."""
    options = found["stream_options"]
    if options is not None and not found["stream"]:
        raise Wrong("stream_options: expected stream as true, too", param="stream_options")
    return found["stream"], bool(options and options["include_usage"])
