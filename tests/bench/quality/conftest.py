"""Fixture: a gateway with scripted chat answers, log-probabilities and counters."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

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

    def get(self, path: str) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "stub"}]})
        if path == "/metrics" and self.has_metrics:
            names = ("drafts", "draft_tokens", "accepted_tokens")
            lines = [f"vllm:spec_decode_num_{name}_total {self.drafts}" for name in names]
            return 200, "\n".join([*lines, ""])
        return 404, "{}"

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
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
        return 200, json.dumps({"choices": [choice], "prompt_token_ids": PROMPT_TOKENS})


def _named(scores: dict[int, float]) -> list[dict[str, Any]]:
    return [{"token": f"token_id:{token}", "logprob": value} for token, value in scores.items()]


@pytest.fixture
def gateway() -> Iterator[StubGateway]:
    stub = StubGateway()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(*stub.get(self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(*stub.post(self.path, json.loads(body)))

        def _send(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield stub
    server.shutdown()
    server.server_close()
    thread.join()
