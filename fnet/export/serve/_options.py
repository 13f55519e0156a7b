"""The options of the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `serve.run`.

    Attributes:
        host, port: the address. Port 0 selects a free one.
        max_batch: rows that are computed together; programs are compiled for the powers of two up to it.
        max_delay: seconds for which a request waits for others to be computed with it.
        max_queue: requests that wait for a model; later ones get status 503.
        max_streams: texts that are generated at once; later ones get status 503.
        max_body: bytes of a request's body.
        max_connections: open connections; later ones get status 503.
        timeout: seconds for the computation of a request, its time in the queue included (status 504).
        read_timeout: seconds for the head, and for the body of a request.
        drain: seconds after SIGTERM in which clients with open connections learn that the server ends.
        token: if set, requests need the header "Authorization: Bearer TOKEN", except those for health and the page.
        pad: {size variable: sizes}. An input's axis of this size is padded with zeros to the next of these sizes, for
            models whose outputs do not depend on padding; this is tested at the start.
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
                raise ValueError(f"serve: {name}={getattr(self, name)}: expected more than 0 seconds")
        if self.max_delay < 0 or self.drain < 0 or not 0 <= self.port < 1 << 16:
            raise ValueError("serve: expected max_delay >= 0, drain >= 0 and a port from 0 to 65535, got "
                             f"{self.max_delay}, {self.drain} and {self.port}")
        if self.token is not None and (not self.token.isascii() or len(self.token) < 8):
            raise ValueError("serve: expected a token of at least 8 ASCII characters")
        for name, sizes in self.pad.items():
            if not sizes or min(sizes) < 1:
                raise ValueError(f"serve: pad {name}={sizes}: expected sizes of at least 1")

    @property
    def loopback(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")
