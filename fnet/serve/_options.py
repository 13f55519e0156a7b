"""The options of the server."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `serve.run`.

    Attributes:
        host: the address to listen on. Default 127.0.0.1.
        port: the port; 0 selects a free one. Default 8000.
        max_batch: the maximum number of rows that are computed together. Programs are compiled for
            the powers of two up to it. The server proves and tests when it starts whether rows are
            independent, and computes the requests of other models one by one. If they are under
            conditions, such as finite numbers, it checks them for each batch, and computes the
            requests that break them one by one. Default 32.
        max_delay: the longest time in seconds that a request waits for others to join its batch.
            Default 0.002.
        max_queue: the maximum number of requests that wait for a model; more get status 503, and
            429 in OpenAI's API. Default 256.
        max_streams: the maximum number of texts that are generated at the same time; more get
            status 503. Default 8.
        max_body: the maximum size of the body of a request in bytes. Default 64 MiB.
        max_connections: the maximum number of open connections; requests on more get status 503.
            Default 512.
        timeout: the time in seconds for a request, including its wait in the queue, after which it
            gets status 504; for generated text, the time to its first token. Default 30.
        read_timeout: the time in seconds within which the head of a request must arrive, and again
            as long for its body. Default 10.
        drain: the time in seconds during which the server still accepts connections after SIGTERM,
            while its responses ask the clients to close theirs. Default 1.
        token: a secret of at least 8 ASCII characters, or None (the default). With one, requests
            need the header "Authorization: Bearer TOKEN" (in OpenAI's clients: api_key), except those
            for the health of the server and for its page.
        pad: sizes to which inputs are padded with zeros, {name of a size variable: sizes}. With
            `pad={"t": (64, 128)}`, an axis "t" of size 100 is padded to 128, the smallest
            sufficient size. This must not change the outputs: the server tests it when it starts,
            at sizes that need padding, and ends with an error if an output changes or the test
            shows nothing. Requests for whose lengths or mask it cannot prove that the padding
            reaches no output are computed unpadded and one by one. Default: no padding.
        slots: how many texts of a language model with a tokenizer are generated together, see
            `serve.Engine`. Default 8.
        context: the maximum number of tokens of a prompt and its answer together. Default None:
            that of the model, at most 1024.
        warm: texts of up to so many tokens, prompts included, find their programs compiled; the
            server answers when they are. Default 0: programs are compiled when a request needs
            them.
        dtype: the dtype to which the weights in folders are cast, such as "float32", which can be
            faster on a CPU than "bfloat16". Default None: the dtypes of the files.
        adapters: LoRA adapters for the one language model that is served from a folder, {name:
            folder}. Each is a model of its own in requests. Default: none.
        assume_independent_rows: whether to combine the requests of a model although its rows are
            not proved to be independent. What the proof says is then not asked; the test of rows
            at the start remains. If the assumption is wrong, clients see what others sent. Default
            False.

    >>> serve.Options(port=0, pad={"t": (64, 128)}).max_batch
    32
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 32
    max_delay: float = 0.002
    max_queue: int = 256
    max_streams: int = 8
    max_body: int = 64 << 20
    max_connections: int = 512
    timeout: float = 30.0
    read_timeout: float = 10.0
    drain: float = 1.0
    token: str | None = None
    pad: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    assume_independent_rows: bool = False
    slots: int = 8
    context: int | None = None
    warm: int = 0
    dtype: str | None = None
    adapters: Mapping[str, str | os.PathLike] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        counts = "max_batch", "max_queue", "max_streams", "max_body", "max_connections", "slots"
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"serve: {name}={getattr(self, name)}: expected at least 1")
        for name in ("timeout", "read_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"serve: {name}={getattr(self, name)}: expected more than 0 seconds"
                )
        if self.max_delay < 0 or self.drain < 0 or not 0 <= self.port < 1 << 16:
            raise ValueError(
                "serve: expected max_delay >= 0, drain >= 0 and a port from 0 to 65535, got "
                f"{self.max_delay}, {self.drain} and {self.port}"
            )
        if self.context is not None and self.context < 2:
            raise ValueError(
                f"serve: context={self.context}: expected at least 2, for a prompt and an answer"
            )
        if self.warm < 0:
            raise ValueError(f"serve: warm={self.warm}: expected a number of tokens, or 0")
        if self.token is not None and (not self.token.isascii() or len(self.token) < 8):
            raise ValueError("serve: expected a token of at least 8 ASCII characters")
        for name, sizes in self.pad.items():
            if not sizes or min(sizes) < 1:
                raise ValueError(f"serve: pad {name}={sizes}: expected sizes of at least 1")

    @property
    def loopback(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")
