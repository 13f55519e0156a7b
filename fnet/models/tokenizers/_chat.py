"""Conversations: the chat template of a folder, and streamed answers."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fnet import layers as nn
from fnet._util import _missing
from fnet.models.generation._stream import pieces
from fnet.models.tokenizers import _tokenizer_config
from fnet.models.weights._config import read as read_json
from fnet.models.weights._files import SMALL, contents

_FILE, _FOLDER = "chat_template.jinja", "additional_chat_templates"
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same field of a message
# Appended to the message that is continued, to find its end in the text. Without the space, the
# template trimmed it. Plain ASCII, because templates print the parts of a message as Python and
# JSON do, with escapes.
_END = "end-of-the-message-to-continue-f39c1b "
# Arguments of transformers' apply_chat_template that are no variables of a template.
_NOT_VARIABLES = (
    "conversation",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "processor_kwargs",
)
# Classes of transformers without default special tokens: if bos_token or eos_token is absent, there
# is none.
_WITHOUT_TOKENS = (None, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")


class ChatTemplate:
    """The chat template of a model, which converts messages to the text format of its training.

        template = models.ChatTemplate.read(folder)
        text = template.render([{"role": "user", "content": "Hello"}], add_generation_prompt=True)

    Templates are programs in Jinja (`pip install 'jinja2>=3.1.6'`). They run in a sandbox without
    access to Python, files or the network, and with limits on iterations and on the lengths of
    texts. As in transformers, they may use loop controls, `raise_exception`, `strftime_now`,
    `tojson` and `{% generation %}`.

    Args:
        template: the template as a string, or several as {name: template}, of which `render`
            selects "default" or "tool_use".
        tokens: special tokens, which become variables of the template, such as bos_token="<s>".

    >>> template = ChatTemplate("{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}",
    ...                         bos_token="<s>")
    >>> template.render([{"role": "user", "content": "Hello"}])
    '<s>[user] Hello'
    """

    def __init__(self, template: str | Mapping[str, str], **tokens: str):
        named = {"default": template} if isinstance(template, str) else template
        if (
            not isinstance(named, Mapping)
            or not named
            or not all(isinstance(each, str) for pair in named.items() for each in pair)
        ):
            raise ValueError(
                f"ChatTemplate: expected a template or {{name: template}}, got {template!r:.200}"
            )
        self.templates, self.tokens = dict(named), tokens
        self._path, self._undefined = "ChatTemplate", ()

    @classmethod
    def read(cls, folder: str | os.PathLike) -> ChatTemplate:
        """Reads the chat template from a folder of weights.

        It comes from chat_template.jinja, with further named templates in the subfolder
        additional_chat_templates, or else from the field chat_template of tokenizer_config.json.
        Special tokens always come from tokenizer_config.json.

        Raises:
            FileNotFoundError: the folder has no chat template.
            ValueError: a file is damaged.
        """
        folder = Path(folder).expanduser()
        template = find(folder)
        if template is None:
            raise FileNotFoundError(
                f"{folder}: no chat template found; expected {_FILE}, or chat_template in "
                f"{_tokenizer_config.NAME}; models without one are not trained for conversations"
            )
        return template

    def render(
        self,
        messages: Sequence[Mapping],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping] | None = None,
        documents: Sequence[Mapping] | None = None,
        name: str | None = None,
        **variables: Any,
    ) -> str:
        """Converts a conversation to text.

        The text already contains the special tokens, so encode it with `special_tokens=False`.

        Args:
            messages: the conversation, a list of {"role": "user", "content": "..."}, with further
                fields if the template knows them. All values must have JSON types.
            add_generation_prompt: whether to append the text with which an answer begins.
            continue_final_message: whether the last message is the beginning of an answer, at whose
                end the text stops. The name of a field, such as "reasoning_content", continues that
                field instead of "content".
            tools: JSON schemas of functions that the model may call.
            documents: a list of {"title": ..., "text": ...}, from which the model may quote.
            name: the template to use. Default: "tool_use" if `tools` is not empty and there is a
                template of this name, otherwise "default".
            variables: other variables of the template, such as enable_thinking=False for Qwen3.

        Returns:
            The text.

        Raises:
            ValueError: the messages are not of the expected form, or the template rejects them,
                fails, exceeds a limit, or does not show the message to continue.
            TypeError: an argument of transformers' apply_chat_template that is no variable of a
                template, such as `tokenize` or `return_tensors`.
            ModuleNotFoundError: jinja2 is not installed.
        """
        if ours := sorted(set(variables) & set(_NOT_VARIABLES)):
            raise TypeError(
                f"ChatTemplate.render: {ours[0]!r} is an argument of transformers' "
                "apply_chat_template, not a variable of the template; render returns text, which "
                "tokenizer.encode(text, special_tokens=False) converts to tokens"
            )
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "chat: add_generation_prompt begins a new message and continue_final_message "
                "continues the last one; pass one of them"
            )
        for what, values in ("tools", tools), ("documents", documents):
            if not _are_objects(values):
                raise ValueError(f"chat: expected {what} as a list of dicts, got {values!r:.200}")
        messages = [_with_reasoning(message) for message in _checked(messages)]
        name, template = self._select(name, tools)
        continued = None
        if continue_final_message:
            field = "content" if continue_final_message is True else continue_final_message
            continued, messages[-1] = _marked(messages[-1], field, template)
        try:
            from fnet.models.tokenizers import _sandbox
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                _missing.message("chat templates need", "jinja2>=3.1.6")
            ) from None
        values = {
            **self.tokens,
            **_plain("variables", variables),
            "messages": messages,
            "tools": _plain("tools", tools),
            "documents": _plain("documents", documents),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        for token in self._undefined:
            if token in template and token not in values:
                raise ValueError(
                    f"{self._path}: the chat template uses {token}, which {_tokenizer_config.NAME} "
                    f"lacks; pass {token}=..."
                )
        where = self._path + (
            f", chat template {name!r}" if len(self.templates) > 1 else ", chat template"
        )
        try:
            text = _sandbox.render(template, values)
        except _sandbox.Rejected as error:
            raise ValueError(f"{where}: rejects these messages: {error}") from None
        except Exception as error:  # templates raise exceptions of any type
            line = f", line {error.lineno}" if hasattr(error, "lineno") else ""
            raise ValueError(f"{where}{line}: {type(error).__name__}: {error}") from None
        return text if continued is None else _cut(text, continued, where)

    def _select(self, name, tools):
        if name is None:
            name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            names = " or ".join(map(repr, self.templates))
            raise ValueError(
                f"{self._path}: there is no chat template {name!r}; expected name={names}"
            )
        return name, self.templates[name]


def find(folder: Path) -> ChatTemplate | None:
    """Returns the chat template of a folder, or None if there is none."""
    path = folder / _tokenizer_config.NAME
    config = read_json(path) if os.path.lexists(path) else {}
    held = config.get("chat_template")
    if isinstance(held, list):
        if not all(
            isinstance(each, dict)
            and isinstance(each.get("name"), str)
            and isinstance(each.get("template"), str)
            for each in held
        ):
            raise ValueError(
                f'{path}: expected [{{"name": ..., "template": ...}}] as chat_template'
            )
        held = {each["name"]: each["template"] for each in held}
    elif not isinstance(held, str | None):
        raise ValueError(f"{path}: expected a string or a list as chat_template, got {held!r:.80}")
    if (folder / _FILE).is_file():
        path, held = folder / _FILE, {"default": contents(folder / _FILE, most=SMALL)}
        held |= {
            file.stem: contents(file, most=SMALL)
            for file in sorted((folder / _FOLDER).glob("*.jinja"))
        }
    if not held:
        return None
    tokens = {name: _content(config.get(name)) for name in _tokenizer_config.TOKENS}
    template = ChatTemplate(
        held, **{name: token for name, token in tokens.items() if token is not None}
    )
    template._path = str(path)
    if config.get("tokenizer_class") not in _WITHOUT_TOKENS:
        template._undefined = tuple(
            name for name in ("bos_token", "eos_token") if name not in config
        )
    return template


def chat(
    model: nn.Layer,
    params: dict,
    tokenizer: Any,
    messages: Sequence[Mapping],
    key: jax.Array | None = None,
    *,
    max_tokens: int,
    template: ChatTemplate | None = None,
    variables: Mapping[str, Any] | None = None,
    stop: Sequence[str] = (),
    **options: Any,
) -> Iterator[str]:
    r"""Answers a conversation, and yields the answer in pieces while it is generated.

        model, params, _ = pretrained.load(folder)
        tokenizer = models.read_tokenizer(folder)
        messages = [{"role": "user", "content": "Who wrote The Tempest?"}]
        answer = ""
        for piece in models.chat(model, params, tokenizer, messages, max_tokens=200, temperature=0):
            print(piece, end="", flush=True)
            answer += piece
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "When?"}]

    The answer ends before the first token of `tokenizer.stop`. As in transformers, the string of a
    special token within a message is encoded as that token. Remove such strings from the messages
    of untrusted users, who could otherwise imitate another role, such as "system".

    Args:
        model, params: as for `generate`.
        tokenizer: the tokenizer that `models.read_tokenizer(folder)` returns.
        messages: the conversation, a list of {"role": "user", "content": "..."}.
        key: a `jax.random.key`, not needed for temperature 0.
        max_tokens: the maximum number of tokens of the answer.
        template: a `ChatTemplate`. Default: `tokenizer.chat_template`.
        variables: other arguments of `ChatTemplate.render`: `tools`, `documents`,
            `continue_final_message` (the answer then continues the last message), or variables of
            the template.
        stop: strings that end the answer, as for `stream_text`.
        options: `temperature` and other options of `generate`, except `samples` and `lengths`.

    Yields:
        The pieces of the answer, as strings.

    Raises:
        ValueError, TypeError: as for `generate` and `ChatTemplate.render`. Also ValueError if there
            is no chat template.

    >>> tokenizer = models.CharTokenizer("user: be or not to\n")
    >>> model = models.GPT(tokenizer.vocab_size, width=4, depth=1, heads=1, context=32)
    >>> params, _ = model.init(jax.random.key(0), jnp.zeros((1, 3), int))
    >>> template = models.ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    >>> messages = [{"role": "user", "content": "to be or not"}]
    >>> len("".join(models.chat(model, params, tokenizer, messages, template=template, max_tokens=5, temperature=0)))
    5
    """
    template = template or getattr(tokenizer, "chat_template", None)
    if template is None:
        raise ValueError(
            "chat: the tokenizer has no chat template; read it with models.read_tokenizer(folder) "
            "from a folder that has one, or pass template=models.ChatTemplate(...)"
        )
    variables = dict(variables or {})
    begins = not variables.get("continue_final_message", False)
    text = template.render(messages, **{"add_generation_prompt": begins, **variables})
    yield from pieces(
        "chat",
        model,
        params,
        tokenizer,
        encoded(tokenizer, text),
        key,
        stop,
        max_tokens=max_tokens,
        **options,
    )


def encoded(tokenizer, text: str) -> list[int]:
    """Converts a rendered chat template to tokens. The tokenizer adds no special tokens, such as
    <s>, to the text."""
    more = (
        {"special_tokens": False}
        if "special_tokens" in inspect.signature(tokenizer.encode).parameters
        else {}
    )
    return [int(token) for token in tokenizer.encode(text, **more)]


def _marked(message, field, template):
    """Returns (the text to continue, the message with `_END` after that text)."""
    begun = message.get(field) if isinstance(field, str) else None
    if begun is None:
        raise ValueError(
            f"chat: continue_final_message: the last message has no {field!r} to continue"
        )
    names = (
        [name for name in _REASONING if message.get(name) == begun]
        if field in _REASONING
        else [field]
    )
    if not any(name in template for name in names):
        raise ValueError(f"chat: continue_final_message: the template does not read {field!r}")
    if isinstance(begun, str):
        return begun, {**message, **{name: begun + _END for name in names}}
    last = (
        max(
            (
                i
                for i, part in enumerate(begun)
                if isinstance(part, dict) and isinstance(part.get("text"), str)
            ),
            default=None,
        )
        if isinstance(begun, list)
        else None
    )
    if last is None:
        raise ValueError(
            f"chat: continue_final_message: the last message has no text in {field!r} to continue"
        )
    parts = [
        {**part, "text": part["text"] + _END} if i == last else part for i, part in enumerate(begun)
    ]
    return begun[last]["text"], {**message, field: parts}


def _cut(text, begun, where):
    """Returns a rendered text up to the end of the message that is continued."""
    end = text.rfind(_END.strip())
    if end < 0 or begun.strip() not in text:
        raise ValueError(
            f"{where}: continue_final_message: the last message is not in the text as it is, so it "
            "cannot be continued"
        )
    return text[:end] if text.startswith(_END, end) else text[:end].rstrip()


def _are_objects(values) -> bool:
    return values is None or (
        isinstance(values, Sequence)
        and not isinstance(values, str)
        and all(isinstance(value, Mapping) for value in values)
    )


def _checked(messages):
    expected = 'expected messages [{"role": "user", "content": "..."}, ...]'
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"chat: {expected}, at least one; got {messages!r:.200}")
    for index, message in enumerate(messages):
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or len(message) < 2
        ):
            raise ValueError(f"chat: {expected}; message {index} is {message!r:.200}")
        if not isinstance(message.get("content"), str | list | tuple | None):
            raise ValueError(
                f"chat: expected a string as the content of message {index}, "
                f"got {message['content']!r:.200}"
            )
    return _plain("messages", [dict(message) for message in messages])


def _plain(name, value):
    """Returns a copy of `value` with only JSON types, because templates must not call methods of
    other objects."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"chat: expected JSON values in {name}: {error}") from None


def _with_reasoning(message):
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return (
        message
        if reasoning is None
        else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


def _content(token):
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
