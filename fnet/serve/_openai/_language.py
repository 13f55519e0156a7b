"""A language model behind the API: its engine, tokenizer and chat template, under its names."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fnet.models.tokenizers._chat import ChatTemplate, encoded
from fnet.models.tokenizers._pieces import token_bytes
from fnet.serve._batching import Full
from fnet.serve._openai._errors import Wrong

_DEFAULT = "default"


@dataclasses.dataclass(frozen=True)
class Asked:
    """A text that is asked for, one or several times.

    Attributes:
        prompt: its tokens.
        count: how many texts.
        stop: strings that end a text.
        seed: of the first text; each has one of its own.
        options: those of `Engine.submit`, without the seed.
    """

    prompt: list[int]
    count: int
    stop: tuple[str, ...]
    seed: int
    options: dict[str, Any]


class Language:
    """A language model.

    Attributes:
        name: the id of the model.
        adapters: the names of its adapters, which are ids of models, too.
        context: the maximum number of tokens of a prompt and its text.
        created: the time in seconds at which it was loaded.
    """

    def __init__(self, name: str, engine: Any, tokenizer: Any, context: int, adapters=()):
        self.name, self.engine, self.tokenizer = name, engine, tokenizer
        self.context, self.adapters = context, tuple(adapters)
        self.created = int(time.time())
        self.token_bytes = token_bytes(tokenizer)

    def adapter(self, model: str) -> str | None:
        return None if model == self.name else model

    def template(self, tools: bool) -> tuple[ChatTemplate, str]:
        """Returns the chat template, and its source for conversations with or without tools.

        Raises:
            Wrong: the model has none.
        """
        template = getattr(self.tokenizer, "chat_template", None)
        if template is None:
            raise Wrong(
                f"the model {self.name!r} has no chat template, so it is not made for "
                "conversations; send its text to /v1/completions",
                param="model",
            )
        name = "tool_use" if tools and "tool_use" in template.templates else _DEFAULT
        return template, template.templates.get(name, "")

    def rendered(self, template: ChatTemplate, messages: list, **variables: Any) -> list[int]:
        """Returns a conversation as tokens, at whose end an answer begins."""
        try:
            text = template.render(messages, add_generation_prompt=True, **variables)
            return encoded(self.tokenizer, text)
        except ValueError as error:
            raise Wrong(str(error), param="messages") from None

    def tokens(self, prompt: str | Sequence[int], param: str) -> list[int]:
        """Returns a prompt as tokens."""
        if not isinstance(prompt, str):
            return list(prompt)
        try:
            found = [int(token) for token in self.tokenizer.encode(prompt)]
        except ValueError as error:
            raise Wrong(f"{param}: {error}", param=param) from None
        if not found:
            raise Wrong(f"{param}: expected at least one token", param=param)
        return found

    def room(self, prompt: Sequence[int], asked: int | None, param: str) -> int:
        """Returns how many tokens are generated at most: those asked for, or as many as fit.

        Raises:
            Wrong: they do not fit.
        """
        left = self.context - len(prompt)
        if left < (asked or 1):
            raise Wrong(
                f"{param}: {len(prompt)} tokens and {asked or 'at least 1'} to generate are more "
                f"than this model's context of {self.context}",
                param=param,
                code="context_length_exceeded",
            )
        return left if asked is None else asked

    def submit(self, asked: Asked, index: int, callback: Callable[[Any], None]) -> Any:
        """Returns the engine's request for text `index`. `callback` gets its tokens, and None at the
        end.

        Raises:
            Wrong: the engine does not accept it, for example for a token that does not exist.
            Full: too many requests wait.
        """
        seed = asked.seed
        if index:
            words = np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)
            seed = int(words[0] >> np.uint64(1))
        try:
            return self.engine.submit(asked.prompt, seed=seed, callback=callback, **asked.options)
        except ValueError as error:
            raise Wrong(str(error).removeprefix("submit: ")) from None
        except Full:
            raise
        except RuntimeError:
            raise Wrong("the server ends", status=503) from None

    def warm(self) -> None:
        """Starts the engine, and compiles its programs for one text.

        Raises:
            RuntimeError: the model cannot be computed.
        """
        self.engine.start()
        for temperature in (0, 1):
            text = self.engine.submit([0], max_tokens=1, temperature=temperature).result()
            if text.finish_reason == "error":
                raise RuntimeError(f"serve: {self.name} cannot generate text: {text.error}")

    def close(self) -> None:
        """Finishes what runs and waits."""
        self.engine.close()
