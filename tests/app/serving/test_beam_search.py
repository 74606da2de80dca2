"""What a beam search is charged for, what the gateway keeps of it, and what it answers.

vLLM's own search runs, which sends every beam to the engine again at each step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from vllm.renderers import renderer_from_config
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from app.llm.steps import StepWatch
from app.request_usage import RequestUsage, current_usage
from tests.app.serving.recording_core import MESSAGES, Connect, RecordingCore, gateway, one_token

BEAMS, STEPS = 3, 5


class SearchedCore(RecordingCore):
    """Answers each request with one token and its alternatives; none of them ends the text."""

    def __init__(self, fails_at: int = 0, tops: Sequence[int] = (5,)) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.tops = tops  # the most probable token at each step; the last one from there on
        self.first = 0  # tokens of the prompt
        self.kept: list[int] = []  # sequences that the HTTP request has, at each of the engine's
        self.usage: RequestUsage | None = None

    def answer(self, request: EngineCoreRequest) -> EngineCoreOutput:
        self.usage = current_usage()
        assert self.usage is not None
        self.kept.append(len(self.usage.sequences))
        if len(self.requests) == self.fails_at:
            raise RuntimeError("a defect")
        length = len(request.prompt_token_ids or ())
        self.first = self.first or length
        return one_token(request, self.tops[min(length - self.first, len(self.tops) - 1)])


def charged(kind: str) -> float:
    labels = {"tenant": "one", "kind": kind}
    return REGISTRY.get_sample_value("aerie_tenant_tokens_total", labels) or 0.0


def answered(
    connect: Connect,
    core: SearchedCore,
    path: str,
    settings: dict[str, str] | None = None,
    **body: Any,
) -> httpx.Response:
    """The response to a beam search."""

    async def scenario() -> httpx.Response:
        adapter = connect(core, settings, stat_loggers=[lambda *_: StepWatch()])
        async with gateway(adapter) as post:
            limits = {"n": BEAMS, "max_tokens": STEPS, "use_beam_search": True}
            response: httpx.Response = await post(path, "one", **limits | body)
            return response

    return asyncio.run(scenario())


def search(
    connect: Connect, core: SearchedCore, path: str, **body: Any
) -> tuple[int, float, float]:
    """(status, prompt tokens, output tokens) of one request."""
    before = charged("prompt"), charged("output")
    status = answered(connect, core, path, **body).status_code
    return status, charged("prompt") - before[0], charged("output") - before[1]


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, 1),
        ("/v1/completions", {"prompt": "def area(width, height):"}, 1),
        ("/v1/completions", {"prompt": ["hi", "def area(width, height):"]}, 2),
    ],
)
def test_the_prompt_is_charged_once_and_no_ended_beam_is_kept(
    connect: Connect, path: str, body: dict[str, Any], prompts: int
) -> None:
    core = SearchedCore()
    status, prompt, output = search(connect, core, path, **body)
    assert status == 200
    lengths = [len(request.prompt_token_ids or ()) for request in core.requests]
    assert len(lengths) == prompts * (1 + BEAMS * (STEPS - 1)), "the search ran to its end"
    assert prompt == sum(lengths[:prompts])
    assert output == len(lengths), "a token of each beam at each step"
    assert max(core.kept) <= prompts * BEAMS
    assert core.usage is not None
    assert core.usage.sequences == []


def test_a_search_that_fails_is_charged_for_what_it_did(connect: Connect) -> None:
    core = SearchedCore(fails_at=3)
    body = {"prompt": "def area(width, height):"}
    status, prompt, output = search(connect, core, "/v1/completions", **body)
    assert status == 500
    assert prompt == len(core.requests[0].prompt_token_ids or ())
    assert 1 <= output <= len(core.requests)


def told(choice: dict[str, Any]) -> list[tuple[str, float]]:
    """Token and log probability at each position of a choice, in either API."""
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        return [(entry["token"], entry["logprob"]) for entry in logprobs["content"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
        ("/v1/completions", {"prompt": "def area(width, height):", "logprobs": 2}),
    ],
)
def test_log_probabilities_are_those_of_each_beams_own_tokens(
    connect: Connect, path: str, body: dict[str, Any]
) -> None:
    response = answered(
        connect, SearchedCore(), path,
        **body, return_token_ids=True, return_tokens_as_token_ids=True,
    )  # fmt: skip
    choices = response.json()["choices"]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == BEAMS
    for choice in choices:
        assert [token for token, _ in told(choice)] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]
        for (_, probability), token in zip(told(choice), choice["token_ids"], strict=True):
            assert probability == (-0.5 if token == 5 else -0.5 - (token - 9))


@pytest.mark.parametrize("shown", [False, True], ids=["hidden", "shown"])
def test_the_token_that_ends_a_beam_has_no_log_probability(
    config: Any, connect: Connect, shown: bool
) -> None:
    end = renderer_from_config(config).get_tokenizer().eos_token_id
    response = answered(
        connect, SearchedCore(tops=[5, 5, end]), "/v1/completions",
        prompt="def area(width, height):", logprobs=2, max_tokens=STEPS, length_penalty=0.0,
        include_stop_str_in_output=shown, return_tokens_as_token_ids=True,
    )  # fmt: skip
    best = response.json()["choices"][0]
    assert best["finish_reason"] == "stop"
    assert [token for token, _ in told(best)] == ["token_id:5"] * 2


def test_a_call_is_read_out_of_a_beams_text(config: Any, connect: Connect) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tokens = renderer_from_config(config).get_tokenizer().encode(text, add_special_tokens=False)
    response = answered(
        connect, SearchedCore(tops=tokens), "/v1/chat/completions",
        settings={"tool_call_parser": "hermes"}, messages=MESSAGES, max_tokens=len(tokens),
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    )  # fmt: skip
    assert response.status_code == 200, response.text
    best = response.json()["choices"][0]
    assert best["finish_reason"] in ("tool_calls", "length")
    (call,) = best["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_a_parameter_that_the_search_would_ignore_is_refused(connect: Connect) -> None:
    core = SearchedCore()
    response = answered(
        connect, core, "/v1/chat/completions",
        messages=MESSAGES, stop="end", response_format={"type": "json_object"},
    )  # fmt: skip
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "use_beam_search")
    assert "'response_format', 'stop'" in error["message"]
    assert core.requests == []


@pytest.mark.parametrize("body", [{"logprobs": 2}, {"max_tokens": 0}, {}])
def test_a_search_echoes_no_prompt(connect: Connect, body: dict[str, Any]) -> None:
    """Catches: a 500 after the whole search, and one choice of two."""
    core = SearchedCore()
    response = answered(connect, core, "/v1/completions", prompt="hi", echo=True, **body)
    assert response.status_code == 400, response.text
    assert "'echo'" in response.json()["error"]["message"]
    assert core.requests == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("penalty", "status"), [(1000, 400), (-1000.0, 400), (1e308, 400), (10, 200), (-10.0, 200)]
)
def test_a_length_penalty_is_one_that_the_search_can_take(
    connect: Connect, path: str, penalty: float, status: int
) -> None:
    core = SearchedCore()
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": [9] * 100}
    response = answered(connect, core, path, **prompt, length_penalty=penalty)
    assert response.status_code == status, response.text
    if status == 400:
        assert response.json()["error"]["param"] == "length_penalty"
        assert core.requests == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("most", "status"), [(BEAMS * STEPS - 1, 400), (BEAMS * STEPS, 200)])
def test_a_search_whose_ended_texts_would_fill_the_memory_is_refused(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, path: str, most: int, status: int
) -> None:
    """vLLM keeps each beam that has ended, with all of its tokens: up to one a beam and step."""
    monkeypatch.setattr("app.serving.classes.beam_search.MAX_BEAM_TOKENS", most)
    core = SearchedCore()
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "hi"}
    response = answered(connect, core, path, **prompt)
    assert response.status_code == status, response.text
    assert bool(core.requests) is (status == 200)
    if status == 400:
        error = response.json()["error"]
        assert error["param"] == "max_tokens"
        assert "'use_beam_search'" in error["message"]


def test_beams_repeat_no_more_of_a_prompt_than_choices_do(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RequestUsage, "repeats_too_much", True)
    core = SearchedCore()
    body = {"prompt": "hi", "return_token_ids": True}
    response = answered(connect, core, "/v1/completions", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert core.requests == []
