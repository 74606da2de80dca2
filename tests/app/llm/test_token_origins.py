"""Where each token of an answer comes from: exact, whole and streamed alike, and summing up to what
the engine counted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from app.declaration.request_checks import check_request
from app.errors import ApiError
from app.llm.token_origins import TokenLog
from tests.app.scripted_engine import Client
from tests.app.serving.streamed_answers import PARAMETERS
from tests.app.serving.test_whole_and_streamed import CALL

JSON = dict[str, Any]
PIECES = st.sampled_from(
    ("Hi.", " x", "München 🦆", "\n\n", "</end>", "<", "a b c", "👩‍🚀", '"usage":', "\\u0041", "é")
)
SCRIPTS = st.lists(PIECES, max_size=8).map("".join)
STEPS = st.lists(st.integers(1, 6), min_size=1, max_size=4)
STOPS = st.sampled_from([None, ["</end>"], [". x"], ["🦆\n\n<", "c"], ["n"]])
FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def client() -> Client:
    return Client(tool_call_parser="hermes")


def body(operation: str, **changes: Any) -> JSON:
    asked: JSON = {"max_tokens": 64, "speculation": {"tokens": True}, **changes}
    if operation == "chat":
        return {"messages": [{"role": "user", "content": "hi"}], **asked}
    return {"prompt": "hi", **asked}


def text_of(choice: JSON) -> str:
    if "text" in choice:
        return choice["text"]
    return (choice.get("message") or choice.get("delta"))["content"] or ""


def joined(chunks: list[JSON]) -> dict[int, JSON]:
    """Choice -> what its chunks add up to. Tokens never run ahead of the text."""
    choices: dict[int, JSON] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "tokens": [], "steps": []})
            whole["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            told = choice.get("speculation", {"tokens": [], "steps": []})
            whole["tokens"] += told["tokens"]
            whole["steps"] += told["steps"]
            said = "".join(token["text"] for token in whole["tokens"])
            assert whole["text"].startswith(said)
            assert all(token["step"] < len(whole["steps"]) for token in whole["tokens"])
    return choices


@given(
    operation=st.sampled_from(["chat", "completions"]),
    script=SCRIPTS,
    steps=STEPS,
    k=st.sampled_from([0, 1, 3, 5]),
    n=st.integers(1, 3),
    limit=st.integers(1, 64),
    stop=STOPS,
    included=st.booleans(),
)
@FEW
def test_tokens_add_up(
    client: Client,
    operation: str,
    script: str,
    steps: list[int],
    k: int,
    n: int,
    limit: int,
    stop: list[str] | None,
    included: bool,
) -> None:
    """Texts to the answer, drafted tokens and steps to the engine's counts, chunks to the whole."""
    client.engine.script, client.engine.steps, client.engine.k = script, steps if k else (1,), k
    asked = body(operation, n=n, max_tokens=limit, stop=stop, include_stop_str_in_output=included)
    whole = asyncio.run(client.answer(operation, asked))
    counts = client.engine.counts
    assert len(whole["choices"]) == n
    tokens_in_all = 0
    for choice in whole["choices"]:
        told = choice["speculation"]
        assert "".join(token["text"] for token in told["tokens"]) == text_of(choice)
        tokens_in_all += len(told["tokens"])
        engine = counts[choice["index"]]
        accepted = sum(step["accepted"] for step in told["steps"])
        assert accepted == sum(j * steps for j, steps in enumerate(engine.histogram))
        assert sum(step["drafted"] for step in told["steps"]) == engine.num_draft_tokens
        drafted = [token for token in told["tokens"] if token["origin"] != "target"]
        last = len(told["steps"]) - 1
        for number, step in enumerate(told["steps"]):
            positions = [t.get("position") for t in told["tokens"] if t["step"] == number]
            whole_step = [*range(1, step["accepted"] + 1), None]
            assert positions == whole_step[: len(positions)]
            assert number == last or positions == whole_step  # the end may cut the last step
        beyond_the_end = accepted - len(drafted)
        assert 0 <= beyond_the_end <= k
    assert tokens_in_all == whole["usage"]["completion_tokens"]
    streamed = joined(asyncio.run(client.events(operation, asked)))
    for choice in whole["choices"]:
        parts = streamed[choice["index"]]
        assert parts["text"] == text_of(choice)
        assert {name: parts[name] for name in ("tokens", "steps")} == choice["speculation"]


@given(script=SCRIPTS, steps=STEPS, limit=st.integers(1, 64), stop=STOPS)
@FEW
def test_metrics_are_vllms_and_end_every_answer(
    client: Client, script: str, steps: list[int], limit: int, stop: list[str] | None
) -> None:
    """Where a stop string ended the answer, too; as AIPerf checks them, per step on request."""
    client.engine.script, client.engine.steps, client.engine.k = script, steps, 4
    for operation in ("chat", "completions"):
        for asked in (
            body(operation, max_tokens=limit, stop=stop),
            body(operation, max_tokens=limit, stop=stop, speculation={}),
        ):
            detailed = bool(asked["speculation"])
            whole = asyncio.run(client.answer(operation, asked))
            figures = whole["metrics"]["speculative_decoding"]
            (engine,) = client.engine.counts
            assert figures["acceptance_histogram"] == engine.histogram
            assert len(figures["acceptance_histogram"]) == figures["num_spec_tokens"] + 1 == 5
            assert figures["num_draft_tokens"] == engine.num_draft_tokens
            assert figures["num_spec_steps"] == sum(engine.histogram)
            assert ("per_step_accepted" in figures) == (detailed and bool(sum(engine.histogram)))
            if "per_step_accepted" in figures:
                assert sum(figures["per_step_accepted"]) == figures["num_accepted_draft_tokens"]
                assert sum(figures["per_step_drafted"]) == figures["num_draft_tokens"]
                assert len(figures["per_step_drafted"]) == figures["num_spec_steps"]
            usage = {"stream_options": {"include_usage": True}}
            chunks = asyncio.run(client.events(operation, {**asked, **usage}))
            assert [c["metrics"] for c in chunks if "metrics" in c] == [whole["metrics"]]
            assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
            assert ("speculation" in whole["choices"][0]) == detailed


def test_prompts_of_one_request_are_told_apart(client: Client) -> None:
    client.engine.script, client.engine.steps, client.engine.k = "one two three", (3, 2), 3
    asked = body("completions", prompt=["a", "b"], n=2)
    whole = asyncio.run(client.answer("completions", asked))
    streamed = joined(asyncio.run(client.events("completions", asked)))
    assert sorted(streamed) == [0, 1, 2, 3]
    for choice in whole["choices"]:
        assert streamed[choice["index"]]["tokens"] == choice["speculation"]["tokens"]
        assert "".join(t["text"] for t in choice["speculation"]["tokens"]) == "one two three"


@pytest.mark.parametrize("stop", [None, ["er"]])
def test_drafts_are_told_apart_by_source(client: Client, stop: list[str] | None) -> None:
    """In each step the accepted drafts have the origin of the source that drafted in it."""
    engine = client.engine
    engine.script, engine.steps, engine.k = "one two three four five six", (2,), 4
    engine.sources = ("head", "lookup", "grammar")
    try:
        whole = asyncio.run(client.answer("chat", body("chat", stop=stop)))
        streamed = joined(asyncio.run(client.events("chat", body("chat", stop=stop))))
    finally:
        engine.sources = ("head",)
    told = whole["choices"][0]["speculation"]
    assert {name: streamed[0][name] for name in ("tokens", "steps")} == told
    first, *later = told["steps"]
    assert first == {"drafted": 0, "accepted": 0}
    expected = ["lookup", "grammar", "head"] * len(later)
    assert [step["source"] for step in later] == expected[: len(later)]
    origins = {"lookup": "lookup", "grammar": "grammar", "head": "draft"}
    drafted = [token for token in told["tokens"] if token["origin"] != "target"]
    assert len(drafted) > 3
    for token in drafted:
        assert token["origin"] == origins[told["steps"][token["step"]]["source"]]
        assert token["position"] == 1


def test_a_tool_calls_tokens_are_told_though_its_markup_is_no_content(client: Client) -> None:
    """Chunks that the parser holds back lose nothing of what they would have told."""
    client.engine.script, client.engine.steps, client.engine.k = f"Hi. {CALL}", (4, 1), 3
    tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
    asked = body("chat", tools=tools)
    (choice,) = asyncio.run(client.answer("chat", asked))["choices"]
    assert "".join(token["text"] for token in choice["speculation"]["tokens"]) == f"Hi. {CALL}"
    told: list[JSON] = []
    for chunk in asyncio.run(client.events("chat", asked)):
        told += chunk["choices"][0].get("speculation", {}).get("tokens", [])
    assert told == choice["speculation"]["tokens"]


def test_nobody_is_told_unasked(client: Client) -> None:
    client.engine.script, client.engine.steps, client.engine.k = "Hi.", (2,), 3
    for operation in ("chat", "completions"):
        whole = asyncio.run(client.answer(operation, body(operation, speculation={"max_k": 2})))
        assert "speculation" not in whole["choices"][0]
        events = asyncio.run(client.events(operation, body(operation, speculation={})))
        assert not [e for e in events if "speculation" in e["choices"][0]]


def test_an_engine_with_a_drafter_of_vllms_own_tells_nobody(client: Client) -> None:
    """It sends its counts at the end alone: what it drafted would look like the target's."""
    from dataclasses import replace

    endpoint, models, facts = client.adapter.operations["chat"].check.args  # type: ignore[attr-defined]
    with pytest.raises(ApiError) as caught:
        check_request(
            body("chat"), endpoint, models[0], replace(facts, reports_token_origins=False)
        )
    assert caught.value.param == "speculation.tokens"


def test_text_is_held_back_with_its_token() -> None:
    """A token whose end might belong to a stop string is told with the rest of its text."""
    log = TokenLog()
    counts = RequestSpecDecodeMetrics.new(3)
    log.add_step(1, counts)
    log.add_text("a")
    assert log.take(1, "a", finished=False)["tokens"] == [
        {"text": "a", "step": 0, "origin": "target"}
    ]
    counts.observe(3, 1)
    log.add_step(2, counts)
    log.add_text("bcd")
    log.add_text("e")
    assert log.take(2, "bc", finished=False) == {"tokens": [], "steps": []}
    assert log.take(0, "de", finished=True) == {
        "tokens": [
            {"text": "bcd", "step": 1, "origin": "draft", "position": 1},
            {"text": "e", "step": 1, "origin": "target"},
        ],
        "steps": [{"drafted": 3, "accepted": 1, "source": "head"}],
    }
