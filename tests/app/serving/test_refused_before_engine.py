"""Requests that must not reach the engine core: what its worker raises for one ends all of them."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from app.llm import async_llm
from app.settings import load
from tests.app.serving.recording_core import CONTEXT, MESSAGES, Connect, RecordingCore, gateway

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
        core = RecordingCore()
        async with gateway(connect(core), **(given or {})) as post:
            prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
            response = await post(path, "one", **{"max_tokens": 4, **prompt, **body})
            error = response.json()["error"] if response.status_code != 200 else {}
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


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids"])
def test_a_longer_list_than_a_worker_holds_may_be_set_and_is_refused(
    connect: Connect, name: str
) -> None:
    """Catches: a setting of an operator that ends a start."""
    ids = range(1025)
    body = {name: {str(token): 1 for token in ids} if name == "logit_bias" else list(ids)}
    assert reached(connect, CHAT, {"max_token_list": "4096"}, **body) == (400, name, 0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"n": 3, "max_tokens": 50, "logprobs": True, "top_logprobs": 3}, "n"),
        (CHAT, {"n": 2, "max_tokens": None, "logprobs": True, "top_logprobs": 3}, "n"),
        (COMPLETIONS, {"n": 3, "max_tokens": 50, "logprobs": 3}, "n"),
        (COMPLETIONS, {"prompt": ["hi", "ho", "hu"], "max_tokens": 50, "logprobs": 3}, "prompt"),
        (COMPLETIONS, {"prompt": [[9] * 100] * 2, "max_tokens": 1, "echo": True, "logprobs": 3},
         "prompt"),
        (COMPLETIONS, {"prompt": [9] * 100, "n": 2, "max_tokens": 1, "echo": True, "logprobs": 3},
         "n"),
    ],
)  # fmt: skip
def test_more_log_probabilities_than_a_request_may_have(
    connect: Connect, path: str, stream: bool, body: dict[str, Any], param: str
) -> None:
    given = {"max_alternatives": "100", "max_logprobs": "3"}
    assert reached(connect, path, given, stream=stream, **body) == (400, param, 0)


@pytest.mark.parametrize(
    ("path", "body", "sequences"),
    [
        (CHAT, {"n": 2, "max_tokens": None, "logprobs": True, "top_logprobs": 5}, 2),
        (CHAT, {"max_tokens": None, "logprobs": True, "top_logprobs": 20}, 1),
        (COMPLETIONS, {"n": 2, "max_tokens": 100, "logprobs": 5}, 2),
        (COMPLETIONS, {"prompt": ["hi", "ho"], "max_tokens": 100, "logprobs": 5}, 2),
    ],
)
def test_as_many_log_probabilities_as_one_choice_can_have_are_served(
    connect: Connect, path: str, body: dict[str, Any], sequences: int
) -> None:
    """Catches: two choices without a limit of the output, which counts as the whole context."""
    given = {"max_alternatives": "100"}
    assert reached(connect, path, given, **body) == (200, None, sequences)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("repeats", ["return_token_ids", "echo"])
@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ({"prompt": [9] * 100, "n": 8}, (400, "n", 0)),
        ({"prompt": [[9] * 100] * 8}, (400, "prompt", 0)),
        ({"prompt": [9] * 100, "n": 1}, (200, None, 1)),
        ({"prompt": [9] * 10, "n": 3}, (200, None, 3)),
    ],
)
def test_more_repeats_of_a_prompt_than_an_answer_may_have(
    connect: Connect, repeats: str, stream: bool, body: dict[str, Any], answer: Any
) -> None:
    """Each choice holds the prompt's ids again: 4 million of them in 128 choices."""
    given = {"max_alternatives": "100", "max_logprobs": "3"}
    found = reached(connect, COMPLETIONS, given, stream=stream, max_tokens=1, **{repeats: True},
                    **body)  # fmt: skip
    assert found == answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("tokens", "alternatives", "answer"),
    [(40, 2, (400, "prompt", 0)), (40, 1, (200, None, 1)), (101, 0, (400, "prompt", 0))],
)
def test_a_prompt_has_no_more_log_probabilities_than_one_call_makes(
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
    tokens: int,
    alternatives: int,
    answer: Any,
) -> None:
    """vLLM makes all of them in one call on the event loop, for a request with one choice too."""
    monkeypatch.setattr(async_llm, "MAX_PROMPT_ALTERNATIVES", 100)
    body = {"prompt": [9] * tokens, "max_tokens": 1, "echo": True, "logprobs": alternatives}
    assert reached(connect, COMPLETIONS, stream=stream, **body) == answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "prompt", "body"),
    [
        (CHAT, "messages", {}),
        (CHAT, "messages", {"max_tokens": 2, "use_beam_search": True}),
        (COMPLETIONS, "prompt", {}),
        (COMPLETIONS, "prompt", {"max_tokens": 2, "use_beam_search": True}),
        (COMPLETIONS, "prompt", {"max_tokens": 0, "echo": True}),
        ("/v1/responses", "input", {}),
        ("/v1/messages", "messages", {"max_tokens": 2}),
    ],
)
def test_a_prompt_that_fills_the_context_is_too_long(
    connect: Connect, path: str, prompt: str, body: dict[str, Any], stream: bool
) -> None:
    """Catches: "max_tokens must be at least 1", though nobody has sent another limit."""

    streams = stream and "use_beam_search" not in body  # a search has none

    async def scenario() -> int:
        core = RecordingCore()
        refusals = 0
        async with gateway(connect(core)) as post:
            for words in range(CONTEXT - 60, CONTEXT + 3):
                text = " a" * words
                value = [{"role": "user", "content": text}] if prompt == "messages" else text
                given = {"model": "aerie-embedded", **body, prompt: value, "stream": streams}
                core.requests.clear()
                response = await post(path, "one", **given)
                if response.status_code == 200:
                    lengths = {len(request.prompt_token_ids or ()) for request in core.requests}
                    assert refusals == 0
                    continue
                if refusals == 0 and "use_beam_search" not in body:
                    assert lengths == {CONTEXT - 1}, "this one fills the context"
                refusals += 1
                error = response.json()["error"]
                assert response.status_code == 400
                assert re.search("maximum (context|model) length|max_model_len", error["message"])
                if path != "/v1/messages":
                    assert (error["param"], error["code"]) == (prompt, "context_length_exceeded")
        return refusals

    assert asyncio.run(scenario()) >= 3


@pytest.mark.parametrize("context", [32_768, 131_072])
def test_two_choices_with_five_alternatives_fit_any_context(context: int) -> None:
    limits = load({}, {}).limits
    assert limits.alternatives(context) >= 2 * context * (5 + 1)
    assert limits.alternatives(None) == limits.max_alternatives == limits.alternatives(1024)
