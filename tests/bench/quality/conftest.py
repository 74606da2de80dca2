"""Fixture: a gateway with scripted chat answers, log-probabilities and counters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.http_server import Handler, serving

PROMPT_TOKENS = [1, 2, 3]


@dataclass
class StubGateway:
    """What the gateway says. Answers are found by a piece of the user's message."""

    url: str = ""
    drafted: dict[str, tuple[str, list[int]]] = field(default_factory=dict)  # text, tokens
    plain: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    # Place in an answer -> log-probabilities there; if none are given its token is certain.
    scores: dict[int, dict[int, float]] = field(default_factory=dict)
    drafts_per_answer: int = 4
    has_metrics: bool = True
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # path, body
    drafts: int = 0

    def get(self, path: str) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, b'{"data": [{"id": "stub"}]}'
        if path == "/metrics" and self.has_metrics:
            names = ("drafts", "draft_tokens", "accepted_tokens")
            lines = [f"vllm:spec_decode_num_{name}_total {self.drafts}\n" for name in names]
            return 200, "".join(lines).encode()
        return 404, b"{}"

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        self.bodies.append((path, body))
        drafts = body.get("speculation", {}).get("enabled", True)
        answers = self.drafted if drafts else self.plain
        self.drafts += self.drafts_per_answer if drafts else 0
        asked = body["messages"][-1]["content"]
        text, tokens = next(answer for piece, answer in answers.items() if piece in asked)
        choice: dict[str, Any] = {
            "message": {"content": text}, "token_ids": tokens, "finish_reason": "stop",
        }  # fmt: skip
        if body.get("logprobs"):
            scores = [self.scores.get(place, {token: 0.0}) for place, token in enumerate(tokens)]
            choice["logprobs"] = {"content": [{"top_logprobs": _named(each)} for each in scores]}
        answer = {"choices": [choice], "prompt_token_ids": PROMPT_TOKENS}
        return 200, json.dumps(answer).encode()


def _named(scores: dict[int, float]) -> list[dict[str, Any]]:
    return [{"token": f"token_id:{token}", "logprob": value} for token, value in scores.items()]


@pytest.fixture
def gateway() -> Iterator[StubGateway]:
    stub = StubGateway()

    class Answers(Handler):
        def do_GET(self) -> None:
            self.answer(*stub.get(self.path))

        def do_POST(self) -> None:
            self.answer(*stub.post(self.path, self.body()))

    with serving(Answers) as stub.url:
        yield stub
