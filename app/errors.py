"""The gateway's errors: one tree, one envelope.

AerieError
├── SettingsError   start-up: a setting is unknown or invalid       (exit code 2)
├── StartupError    the engine cannot do what was asked             (exit code 1)
├── EngineLostError the engine died too often                       (exit code 3)
└── ApiError        a request: has a status and OpenAI's envelope
"""

from __future__ import annotations

import re
from typing import Any

# Words that an error message quotes from a request; longer ones are cut.
_LONG_WORD = re.compile(r"\S{101,}")
MAX_MESSAGE = 2000
# Header of an error that the same request would get again. OpenAI's and Anthropic's clients would
# otherwise repeat whatever has a status of 408, 409, 429 or above 499, twice.
NO_RETRY = {"x-should-retry": "false"}


class AerieError(Exception):
    """Base of every error this project raises for the outside world."""


class SettingsError(AerieError):
    """A setting is unknown or invalid; `key` names it."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key


class StartupError(AerieError):
    """The engine did not come up as asked; the message is for the operator."""


class EngineLostError(AerieError):
    """The engine died more often than `max_restarts` allows; the message is for the operator."""


class ApiError(AerieError):
    """A request that ends with an error response.

    `param` names the offending field as OpenAI writes it, `messages[0].role`, and `code` is
    one of OpenAI's machine-readable strings or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        message = _LONG_WORD.sub(lambda word: shorten(word[0]), message)
        self.message = shorten(message, MAX_MESSAGE)
        super().__init__(self.message)
        self.status = status
        self.param = None if param is None else shorten(param, 200)
        self.code = code
        self.headers = headers

    @property
    def type(self) -> str:
        """OpenAI's error class for this status."""
        return error_type(self.status)

    def envelope(self) -> dict[str, Any]:
        """The one JSON shape of every error, streamed or not."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def shorten(text: str, limit: int = 100) -> str:
    """The text; only its first `limit` characters and dots if it is longer."""
    return text if len(text) <= limit else f"{text[:limit]}..."


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_type(status: int) -> str:
    """HTTP status -> OpenAI's `error.type`."""
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")
