"""What counts the tokens of a prompt leaves nothing behind that an answer would rely on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from vllm.renderers.base import BaseRenderer

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "counts"),
    [
        ("/v1/messages", {**MESSAGES, "max_tokens": 4}, False),
        ("/v1/messages/count_tokens", MESSAGES, True),
        ("/v1/responses", {"input": "hi"}, False),
        ("/v1/responses/input_tokens", {"input": "hi"}, True),
        ("/tokenize", MESSAGES, True),
    ],
)
def test_media_of_a_count_stay_out_of_the_cache(
    gateway: Callable[..., TestClient],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    counts: bool,
) -> None:
    """The gateway's cache of media mirrors the engine's: what is in it is not sent again."""
    skipped: list[bool] = []
    render = BaseRenderer.render_chat_async

    async def watched(self: Any, *args: Any, skip_mm_cache: bool = False, **kwargs: Any) -> Any:
        skipped.append(skip_mm_cache)
        return await render(self, *args, skip_mm_cache=skip_mm_cache, **kwargs)

    monkeypatch.setattr(BaseRenderer, "render_chat_async", watched)
    response = gateway().post(path, json={"model": "fake", **body})
    assert response.status_code == 200, response.text
    assert skipped == [counts]
