"""Requests that must not reach the engine core: what its worker raises for one ends all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.app.serving.test_engine_requests import MESSAGES, Connect, config, connect, gateway

__all__ = ["config", "connect"]  # fixtures
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The embedded model's end tokens count, too.
STOP_IDS = {"stop_token_ids": list(range(10, 138)), "min_tokens": 1}
LONG_WORDS = {"bad_words": [f"{number} xyzzy plugh {number}" * 6 for number in range(50)]}
LAST_SEED = {"seed": 2**63 - 1, "n": 2}


def reached(
    connect: Connect, path: str, given: dict[str, str] | None = None, **body: Any
) -> tuple[int, str | None, int]:
    """(status, param, requests in the engine core) of a request, with the `given` settings."""

    async def scenario() -> tuple[int, str | None, int]:
        adapter, core = connect()
        async with gateway(adapter, **(given or {})) as post:
            prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
            response = await post(path, "one", **{"max_tokens": 4, **prompt, **body})
            error = response.json().get("error", {})
            return response.status_code, error.get("param"), len(core.requests)

    return asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (STOP_IDS, "stop_token_ids"),
        ({**STOP_IDS, "n": 3}, "stop_token_ids"),
        (LONG_WORDS, "bad_words"),
        (LAST_SEED, "seed"),
    ],
)
def test_what_no_worker_holds_is_a_400(
    connect: Connect, path: str, stream: bool, body: dict[str, Any], param: str
) -> None:
    assert reached(connect, path, stream=stream, **body) == (400, param, 0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"stop_token_ids": list(range(10, 110)), "min_tokens": 1}, 1),
        ({"stop_token_ids": list(range(10, 138))}, 1),
        ({"bad_words": ["xyzzy", "plugh"]}, 1),
        ({"seed": 2**63 - 2, "n": 2}, 2),
    ],
)
def test_what_it_holds_is_served(
    connect: Connect, path: str, body: dict[str, Any], sequences: int
) -> None:
    assert reached(connect, path, **body) == (200, None, sequences)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"n": 3, "max_tokens": 10, "logprobs": True, "top_logprobs": 3}, "n"),
        (CHAT, {"n": 2, "max_tokens": None, "logprobs": True, "top_logprobs": 0}, "n"),
        (COMPLETIONS, {"n": 3, "max_tokens": 10, "logprobs": 3}, "n"),
        (COMPLETIONS, {"prompt": ["hi", "ho", "hu"], "max_tokens": 10, "logprobs": 3}, "prompt"),
        (COMPLETIONS, {"prompt": [[9] * 50] * 2, "max_tokens": 1, "echo": True, "logprobs": 0},
         "prompt"),
    ],
)  # fmt: skip
def test_more_log_probabilities_than_a_request_may_have(
    connect: Connect, path: str, stream: bool, body: dict[str, Any], param: str
) -> None:
    given = {"max_alternatives": "100"}
    assert reached(connect, path, given, stream=stream, **body) == (400, param, 0)
