"""A prompt, and the request for its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.load.client import Job

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text to continue, or a conversation up to the assistant's turn."""

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.messages):
            raise ValueError("a prompt is a text or messages")

    def job(self, model: str, max_tokens: int, extra: dict[str, Any]) -> Job:
        """A request for an answer, streamed, with the server's token counts at its end. It is
        greedy, unless `extra`, further fields, has another temperature."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
        if self.messages:
            return Job.of(CHAT, {**body, "messages": list(self.messages)})
        return Job.of(COMPLETIONS, {**body, "prompt": self.text})
