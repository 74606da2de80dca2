"""A prompt, and the request for its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.load.client import Job

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text to continue, or a conversation up to the assistant's turn.

    `extra_body` has further fields of the request, which constrain the answer: a JSON schema, or
    tools of which one has to be called. Such an answer ends by itself.
    """

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    extra_body: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.messages):
            raise ValueError("a prompt is a text or messages")

    def row(self) -> dict[str, Any]:
        """The prompt as an object of JSON, as `aerie bench prompts` prints it."""
        asked = {"messages": list(self.messages)} if self.messages else {"prompt": self.text}
        return {**asked, "extra_body": dict(self.extra_body)} if self.extra_body else asked

    def job(self, model: str, max_tokens: int, extra: Mapping[str, Any]) -> Job:
        """A request for an answer, streamed, with the server's token counts at its end.

        It is greedy, unless `extra`, further fields, has another temperature. `ignore_eos` is left
        out if the answer is constrained: there is nothing to generate past a constraint's end.
        """
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
            **self.extra_body,
        }
        if self.extra_body:
            body.pop("ignore_eos", None)
        if self.messages:
            return Job.of(CHAT, {**body, "messages": list(self.messages)})
        return Job.of(COMPLETIONS, {**body, "prompt": self.text})
