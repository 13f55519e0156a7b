"""Errors in the form that OpenAI's clients read."""

from __future__ import annotations

from fnet.serve._requests import Refused

_CODES = {401: "invalid_api_key", 404: "not_found", 429: "rate_limit_exceeded"}


class Wrong(Refused):
    """A request that is refused: its status and message, and the field that is wrong.

    Attributes:
        param: the name of the field, or None.
        code: a word for programs, such as "model_not_found", or None.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400
    ):
        super().__init__(status, message)
        self.param, self.code = param, code


def content(status: int, message: str, error: Exception | None = None) -> dict:
    """Returns the JSON of an error."""
    kind = "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 500:
        kind = "server_error"
    code = getattr(error, "code", None) if isinstance(error, Wrong) else None
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": error.param if isinstance(error, Wrong) else None,
            "code": code or _CODES.get(status),
        }
    }
