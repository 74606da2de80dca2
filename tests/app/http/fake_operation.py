"""An engine whose operations do what the body says: wait, stream, fail, or answer at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from app.errors import ApiError
from app.llm.first_token import FirstToken
from app.request_usage import count_tokenized, current_usage
from app.validation.output_limit import OutputLimit
from tests.app.phased_engine import PhasedEngine

PATH = "/v1/completions"


@dataclass
class FakeOperation:
    """Stands for vLLM: enters one sequence, and answers when the test says so."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    most_running: int = 0
    aborted: int = 0
    usages: list[Any] = field(default_factory=list)
    output_limit: OutputLimit = field(default_factory=lambda: OutputLimit(("max_tokens",)))

    async def __call__(self, payload: dict[str, Any], size: int = 0) -> SimpleNamespace:
        usage = current_usage()
        assert usage is not None
        self.usages.append((usage.priority, usage.max_k))
        if payload.get("break"):
            raise KeyError("a defect")
        if payload.get("tokenized") is not None:
            return await count_tokenized(self.answer, lambda *_: payload["tokenized"])(payload)
        stats = SimpleNamespace(
            first_token_ts=0.0, queued_ts=1.0, scheduled_ts=1.0, last_token_ts=0.0
        )
        used = payload.get("used")
        if used is not None:
            stats.first_token_ts, stats.last_token_ts = 2.0, 3.0
        drafts = SimpleNamespace(histogram=[1, 3], num_draft_tokens=12)
        usage.enter(
            SimpleNamespace(
                request_id="1",
                prompt_len=10,
                request_index=0,
                stats=stats,
                detokenizer=SimpleNamespace(num_output_tokens=lambda: used or 0),
                spec_decode_metrics=drafts,
                num_cached_tokens=0,
            ),
            {"1"},
        )
        error = ValueError("bad grammar") if payload.get("fail_late") else None
        if error is not None or payload.get("stream"):
            return SimpleNamespace(answer=self.events(payload), first=FirstToken(True, error))
        return await self.answer(payload)

    async def answer(self, payload: dict[str, Any]) -> SimpleNamespace:
        async with self.engine():
            if payload.get("wait"):
                await self.go.wait()
        answer = {"id": "resp_1", "output": []} if "input" in payload else {"ok": True}
        return SimpleNamespace(answer=answer, first=FirstToken(True))

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[None]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            yield
        except BaseException:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def events(self, payload: dict[str, Any]) -> AsyncGenerator[str, None]:
        async with self.engine():
            yield "data: 1\n\n"
            if payload.get("wait"):
                await self.go.wait()
            yield "data: [DONE]\n\n"

    def failure(self, error: BaseException, *rest: Any) -> ApiError:
        return ApiError(400, str(error), param="stop")

    def event(self, error: ApiError, sequence_number: int) -> str:
        return f"data: {json.dumps(error.envelope())}\n\n"


class FakeEngine(PhasedEngine):
    """Ready while its phase says so, with a FakeOperation for every endpoint."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.fake = FakeOperation()
        self.load.capacity = 8

    def operation(self, name: str) -> Any:
        return self.fake if self.ready else super().operation(name)


def scope_of_post(**headers: str) -> dict[str, Any]:
    """The ASGI scope of a POST of JSON to PATH: no client of httpx vanishes."""
    given = {"content-type": "application/json", **headers}
    return {
        "type": "http", "method": "POST", "path": PATH, "raw_path": b"", "query_string": b"",
        "http_version": "1.1", "scheme": "http", "server": ("t", 1), "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }  # fmt: skip
