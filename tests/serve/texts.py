"""A tiny language model as a folder of Hugging Face, an engine that says what it is told, and a
server in a thread of this process."""

import contextlib
import json
import threading
import time
from pathlib import Path

import jax
import pytest
import tokenizers

from fnet import models, serve
from fnet.models import pretrained

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
    "{% if tools %}{{ tools | tojson }} Answer with <tool_call>"
    '{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    "{% if style %}{{ style }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
END = "<|end|>"


def byte_level():
    """A byte-level tokenizer with 256 bytes, some words and special tokens."""
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END, "<|user|>", "<|assistant|>"],
        show_progress=False,
    )
    words.train_from_iterator(["the weather in the city", "hello hello there"], trainer)
    return words


def write_tokenizer(folder, template=CHAT):
    byte_level().save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_folder(folder, template=CHAT):
    """A folder as transformers writes it, with a model that was never trained."""
    model = models.Decoder(
        vocab_size=280, width=16, depth=1, heads=2, kv_heads=1, hidden=24, context=512
    )
    params, state = model.init(jax.random.key(0), model.example())
    pretrained.save(model, params, state, folder, names="huggingface")
    write_tokenizer(Path(folder), template)
    return model, params


class Said:
    """A request whose tokens are known, and how many come before it fails, if it does."""

    def __init__(self, prompt, tokens, options, wait, fails_after):
        self.prompt, self.tokens, self.options = prompt, tokens, options
        self.finish_reason, self.error = None, None
        self.cancelled = threading.Event()
        self._wait, self._fails_after = wait, fails_after
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        self._wait.wait(10)
        for count, token in enumerate(self.tokens[: self.options["max_tokens"]]):
            if self.cancelled.is_set():
                return
            if count == self._fails_after:
                self.finish_reason, self.error = "error", ValueError("bad")
                self.options["callback"](None)
                return
            tops = ((token, -0.5), (0, -float("inf")))[: self.options["log_probs"]]
            self.options["callback"](serve.Token(token, -0.5, tops))
        if self.cancelled.is_set():
            return
        self.finish_reason = "stop" if len(self.tokens) <= self.options["max_tokens"] else "length"
        self.options["callback"](None)

    def cancel(self):
        self.cancelled.set()
        self.finish_reason = self.finish_reason or "cancelled"

    def result(self):
        return serve.Finished(self.tokens, [], self.finish_reason, len(self.prompt), 3, 0.0, 0.0)


class Script:
    """An engine that says one text after another, again and again.

    Attributes:
        requests: what was asked for.
        may_speak: when it is cleared, texts wait.
        full: whether requests are refused.
        fails_after: the number of tokens after which texts fail, or None.
    """

    def __init__(self, tokenizer, *texts):
        self.said = [list(tokenizer.encode(text)) for text in texts]
        self.requests, self.may_speak = [], threading.Event()
        self.may_speak.set()
        self.full, self.fails_after = False, None

    def submit(self, prompt, **options):
        if self.full:
            raise serve.Full("3 requests wait; try again later")
        tokens = self.said[len(self.requests) % len(self.said)]
        tokens = [int(token) for token in tokens]
        request = Said(prompt, tokens, options, self.may_speak, self.fails_after)
        self.requests.append(request)
        return request

    def close(self):
        pass


@contextlib.contextmanager
def running(app):
    """The port of an application in a thread, when its programs are compiled."""
    uvicorn = pytest.importorskip("uvicorn")
    # Tests keep connections open, on machines that may be slow.
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="on", timeout_keep_alive=600)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    repository = app.state.server.repository
    try:
        until = time.monotonic() + 120
        while not (server.started and repository.ready) and time.monotonic() < until:
            assert repository.error is None, repository.error
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
