"""The options of the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `serve.run`.

    Attributes:
        host: the address to listen on. Default 127.0.0.1.
        port: the port to listen on. 0 selects a free port. Default 8000.
        max_batch: the maximum number of rows that are computed together. Programs are compiled for
            the powers of two up to `max_batch`. Only models whose rows are independent are batched:
            the server tests this when it starts, and computes the requests for other models one by
            one. Default 32.
        max_delay: the maximum time in seconds that a request waits for other requests to join its
            batch. Default 0.002.
        max_queue: the maximum number of requests that wait for a model. Requests that exceed
            `max_queue` get status 503. Default 256.
        max_streams: the maximum number of texts that are generated at the same time. Requests for
            more than `max_streams` texts at the same time get status 503. Default 8.
        max_body: the maximum size of the body of a request in bytes. Default 64 MiB.
        max_connections: the maximum number of open connections. Requests on connections that exceed
            `max_connections` get status 503. Default 512.
        timeout: the maximum time in seconds for a request, including its time in the queue. A
            request that takes longer than `timeout` gets status 504. Default 30.
        read_timeout: the maximum time in seconds until the head of a request has arrived. After the
            head, the body of the request must arrive within another `read_timeout` seconds. Default
            10.
        drain: the time in seconds during which the server still accepts connections after SIGTERM.
            During the time `drain`, the responses of the server ask the clients to close their
            connections. Default 1.
        token: a secret string of at least 8 characters, or None (the default). If a token is set,
            requests need the header "Authorization: Bearer TOKEN". Requests for the health of the
            server and for its page need no token.
        pad: the sizes to which inputs are padded, {name of a size variable: sizes}. A size variable
            is a name in a model's input shapes, such as "t" in ["b", "t"], that represents a size
            which can vary. If the size of an axis is the size variable `name`, the axis is padded
            with zeros to the smallest sufficient size in `pad[name]`. For example, with `pad={"t":
            (64, 128)}`, an axis "t" of size 100 is padded to 128. The padding must not change the
            outputs of the model. When the server starts, it tests this at sizes that need padding,
            and ends with an error if an output changes or if the test shows nothing. By default,
            inputs are not padded.

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

    def __post_init__(self):
        for name in ("max_batch", "max_queue", "max_streams", "max_body", "max_connections"):
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
        if self.token is not None and (not self.token.isascii() or len(self.token) < 8):
            raise ValueError("serve: expected a token of at least 8 ASCII characters")
        for name, sizes in self.pad.items():
            if not sizes or min(sizes) < 1:
                raise ValueError(f"serve: pad {name}={sizes}: expected sizes of at least 1")

    @property
    def loopback(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")
