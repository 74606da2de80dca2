"""Valid requests to spoil, and the means to put any spoilt one on the wire."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from .gateway import MODEL
from .wire import JSON

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
VALID: dict[str, JSON] = {
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    COMPLETIONS: {"model": MODEL, "prompt": "hi", "max_tokens": 4},
    RESPONSES: {"model": MODEL, "input": "hi", "max_output_tokens": 4},
}
STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])


def greedy(prompt: object = "def read(", max_tokens: int = 16, **changes: object) -> JSON:
    """A completion of exactly so many tokens, each the most likely."""
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "ignore_eos": True}
    return {**body, "max_tokens": max_tokens, **changes}


class Raw(float):
    """A number that goes over the wire exactly as written, though `json` could not hold it."""

    def __new__(cls, text: str) -> Raw:
        made = super().__new__(cls, 0)
        made.text = text  # type: ignore[attr-defined]
        return made

    def __repr__(self) -> str:
        return str(self.text)  # type: ignore[attr-defined]


def encode(body: JSON) -> bytes:
    """JSON, with every `Raw` written out as it stands."""
    raws: list[Raw] = []

    def mark(value: Any) -> Any:
        if isinstance(value, Raw):
            raws.append(value)
            return f"@raw{len(raws) - 1}@"
        if isinstance(value, dict):
            return {k: mark(v) for k, v in value.items()}
        return [mark(v) for v in value] if isinstance(value, list) else value

    text = json.dumps(mark(body))
    for i, raw in enumerate(raws):
        text = text.replace(f'"@raw{i}@"', repr(raw))
    return text.encode()


def send(
    http: httpx.Client, path: str, changes: JSON, streaming: bool, drop: str | None = None
) -> httpx.Response:
    body = {**VALID[path], **changes, "stream": streaming}
    body.pop(drop or "", None)
    with http.stream(
        "POST", path, content=encode(body), headers={"content-type": "application/json"}
    ) as response:
        response.read()
    return response
