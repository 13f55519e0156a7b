"""What every request goes through, whatever its protocol: who may ask, and the body within limits."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from fnet.serve._options import Options

_OPEN = "/", "/v2/health/live", "/v2/health/ready"  # paths that need no token


class Refused(Exception):
    """A request that gets an error with this status, message and these headers."""

    def __init__(self, status: int, message: str, **headers: str):
        super().__init__(message)
        self.status, self.headers = status, headers


def plain(status: int, message: str, error: Exception) -> dict:
    """Returns the JSON of an error in the Open Inference Protocol."""
    return {"error": message}


def admit(request: Any, path: str, options: Options) -> None:
    """Raises `Refused` for a client that may not use the path."""
    if options.loopback:  # refuses web pages whose names resolve to this address
        host = request.headers.get("host", "").rsplit(":", 1)[0].strip("[]").lower()
        if host not in ("127.0.0.1", "::1", "localhost"):
            raise Refused(400, "this server answers to 127.0.0.1 and localhost alone")
    if options.token is not None and path not in _OPEN:
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {options.token}".encode()):
            raise Refused(
                401,
                "expected the header Authorization: Bearer TOKEN",
                **{"WWW-Authenticate": "Bearer"},
            )


async def read_body(request: Any, options: Options) -> bytes:
    """Returns the body of a request, or raises `Refused` if it is too large or too slow."""
    limit, seconds = options.max_body, options.read_timeout
    large = Refused(413, f"the body has more than {limit} bytes", Connection="close")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "compressed bodies are not supported", Connection="close")
    if int(request.headers.get("content-length", 0)) > limit:
        raise large
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise large
                parts.append(part)
    except TimeoutError:
        raise Refused(
            408, f"the body did not arrive within {seconds:g} seconds", Connection="close"
        ) from None
    return b"".join(parts)
