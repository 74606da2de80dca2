"""What a stream adds up to is the whole answer, in every dialect and wherever the limit cuts."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.app.scripted_engine import Client
from tests.app.serving.streamed_answers import (
    FEW,
    STEPS,
    both,
    chat_body,
    check_chat,
    check_messages,
    check_responses,
    choices_of,
    messages_body,
    responses_body,
    statuses,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Bad Aibling"}}\n</tool_call>'
TERSE = '<tool_call>{"name":"g","arguments":{"city":"Ur","n":[1,{"a":null}]}}</tool_call>'
PIECES = (
    *("Hi.", " if x < 3", "<", "<tool", "\n", " ", "München 🦆", '{"name": "f"}', "</tool_call>"),
    *(CALL, TERSE, "<tool_call>{}</tool_call>", '<tool_call>{"name": "f"}</tool_call>'),
    '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>',
)
SCRIPTS = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)


@pytest.fixture(scope="module")
def client() -> Client:
    return Client(tool_call_parser="hermes")


@given(script=SCRIPTS, limit=st.integers(1, 64), steps=STEPS, tools=st.booleans())
@FEW
def test_chat(client: Client, script: str, limit: int, steps: list[int], tools: bool) -> None:
    client.engine.script, client.engine.steps = script, steps
    check_chat(client, chat_body(limit, tools, logprobs=True, top_logprobs=2))


@given(script=SCRIPTS, limit=st.integers(1, 64), steps=STEPS, tools=st.booleans())
@FEW
def test_responses(client: Client, script: str, limit: int, steps: list[int], tools: bool) -> None:
    client.engine.script, client.engine.steps = script, steps
    check_responses(client, responses_body(limit, tools))


@given(script=SCRIPTS, limit=st.integers(1, 64), steps=STEPS, tools=st.booleans())
@FEW
def test_messages(client: Client, script: str, limit: int, steps: list[int], tools: bool) -> None:
    client.engine.script, client.engine.steps = script, steps
    check_messages(client, messages_body(limit, tools))


def test_an_empty_message_has_a_block_of_empty_text(client: Client) -> None:
    """Catches: a stream without a block, of which Anthropic's client makes no text."""
    client.engine.script = ""
    whole, events = both(client, "messages", messages_body(4, False))
    assert whole["content"] == [{"type": "text", "text": ""}]
    check_messages(client, messages_body(4, False))
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["content_block"] for event in starts] == whole["content"]
    assert [event["type"] for event in events] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


def test_messages_with_reasoning() -> None:
    client = Client(reasoning_parser="qwen3")
    client.engine.script = "<think>Hm.</think>Hi."
    whole = check_messages(client, messages_body(64, False))
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]


@pytest.mark.parametrize("limit", [8, 16, 64])
def test_responses_with_reasoning(limit: int) -> None:
    client = Client(reasoning_parser="qwen3", tool_call_parser="hermes")
    client.engine.script = "<think>Hm so.</think>Hi." + CALL
    check_responses(client, responses_body(limit, True))


@given(script=SCRIPTS, limit=st.integers(1, 64), steps=STEPS)
@FEW
def test_completions(client: Client, script: str, limit: int, steps: list[int]) -> None:
    client.engine.script, client.engine.steps = script, steps
    body = {"prompt": "hi", "max_tokens": limit, "logprobs": 2}
    whole, chunks = both(client, "completions", body, stream_options={"include_usage": True})
    choice = whole["choices"][0]
    parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        added = [x for part in parts if part["logprobs"] for x in part["logprobs"][name]]
        assert added == choice["logprobs"][name]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize(("choice", "stride"), [("auto", 1), ("required", 7), ("named", 7)])
def test_every_limit_through_two_calls(client: Client, choice: str, stride: int) -> None:
    """Complete calls are kept, the cut one is as far as it came, and no markup is content."""
    client.engine.script, client.engine.steps = CALL + "\n" + TERSE, (3,)
    length = len(client.engine.tokens())
    chat, flat, anthropic = choices_of(choice)
    for limit in range(length, 0, -stride):
        facts = check_chat(client, chat_body(limit, True, tool_choice=chat))
        assert facts["content"] == ""
        assert "".join(arguments for _, arguments in facts["calls"]) in (
            '{"city": "Bad Aibling"}' + '{"city":"Ur","n":[1,{"a":null}]}'
        )
        ended = "stop" if choice == "named" else "tool_calls"
        assert facts["finish_reason"] == ("length" if limit < length else ended)
        items = check_responses(client, responses_body(limit, True, tool_choice=flat))["output"]
        assert all(item["type"] == "function_call" for item in items)
        statuses = ["completed"] * len(items)
        if limit < length and items:
            statuses[-1] = "incomplete"
        assert [item["status"] for item in items] == statuses
        blocks = check_messages(client, messages_body(limit, True, tool_choice=anthropic))
        assert blocks["stop_reason"] == ("max_tokens" if limit < length else "tool_use")


@pytest.mark.parametrize("length", range(1, len("<tool_call>")))
@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_forced_call_that_is_cut_within_its_tag_is_no_content(
    client: Client, choice: str, length: int
) -> None:
    """As a tokenizer without a token for the tag has it cut."""
    client.engine.script, client.engine.steps = "<tool_call>"[:length], (1,)
    chat, flat, anthropic = choices_of(choice)
    assert check_chat(client, chat_body(64, True, tool_choice=chat))["content"] == ""
    assert check_responses(client, responses_body(64, True, tool_choice=flat))["output"] == []
    blocks = check_messages(client, messages_body(64, True, tool_choice=anthropic))["content"]
    assert not [block for block in blocks if block.get("text")]
    # A model that need not call anything may have meant it.
    free = check_chat(client, chat_body(64, True, tool_choice="auto"))
    assert free["content"] == "<tool_call>"[:length]


def test_a_call_begins_with_empty_arguments(client: Client) -> None:
    client.engine.script, client.engine.steps = CALL, (1,)
    chunks = asyncio.run(client.events("chat", chat_body(64, True)))
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls") or ()]
    assert calls[0]["function"] == {"name": "f", "arguments": ""}
    joined = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(joined) == {"city": "Bad Aibling"}


@pytest.mark.parametrize("steps", [[200], [7], [5, 1]])
def test_a_chunk_has_text_or_calls_and_each_call_once(client: Client, steps: list[int]) -> None:
    """Catches: chunks with both, in which clients that look for text first lose the call's name;
    two entries of one call, of which older versions of openai-python drop the second."""
    client.engine.script, client.engine.steps = f"Hi there.{CALL}{TERSE}", steps
    body = chat_body(200, True, logprobs=True, stream_options={"include_usage": True})
    chunks = [c for c in asyncio.run(client.events("chat", body)) if c["choices"]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert not [delta for delta in deltas if delta.get("content") and delta.get("tool_calls")]
    for delta in deltas:
        indices = [call["index"] for call in delta.get("tool_calls", ())]
        assert len(set(indices)) == len(indices)
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hi there."
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert (ends[-1], set(ends[:-1])) == ("tool_calls", {None})
    assert {frozenset(chunk) for chunk in chunks} == {frozenset(chunks[0])}
    check_chat(client, chat_body(200, True, logprobs=True))


def test_reasoning_is_in_no_chunk_with_calls() -> None:
    """Catches: a call that a client which looks for reasoning first loses."""
    client = Client(reasoning_parser="qwen3", tool_call_parser="hermes")
    client.engine.script, client.engine.steps = f"<think>Hm.</think>{CALL}", [200]
    chunks = asyncio.run(client.events("chat", chat_body(200, True)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [sorted(delta) for delta in deltas[1:]] == [["reasoning"], ["tool_calls"]]


def test_what_is_no_call_stays_content(client: Client) -> None:
    client.engine.script, client.engine.steps = f"<tool_call>no</tool_call>{CALL}", (2,)
    facts = check_chat(client, chat_body(200, True))
    assert facts["content"] == "<tool_call>no</tool_call>"
    assert facts["calls"] == [("f", '{"city": "Bad Aibling"}')]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_call_that_a_stop_string_cut_is_no_call_to_make(client: Client, choice: str) -> None:
    client.engine.script, client.engine.steps = TERSE + CALL, (2,)
    chat, flat, anthropic = choices_of(choice)
    facts = check_chat(client, chat_body(200, True, tool_choice=chat, stop=["Aib"]))
    assert facts["finish_reason"] == "stop"
    assert facts["calls"][1] == ("f", '{"city": "Bad')
    blocks = check_messages(
        client, messages_body(200, True, tool_choice=anthropic, stop_sequences=["Aib"])
    )
    assert (blocks["stop_reason"], blocks["stop_sequence"]) == ("stop_sequence", "Aib")
    body = responses_body(200, True, tool_choice=flat, stop=["Aib"])
    assert statuses(check_responses(client, body)) == ["completed", "incomplete"]
    # Behind the arguments of the last call, a stop string cuts none.
    behind = check_chat(client, chat_body(200, True, tool_choice=chat, stop=["\n</tool"]))
    assert behind["finish_reason"] == "tool_calls"
    body = responses_body(200, True, tool_choice=flat, stop=["\n</tool"])
    assert statuses(check_responses(client, body)) == ["completed", "completed"]


def test_nor_is_one_that_a_stop_token_cut(client: Client) -> None:
    client.engine.script, client.engine.steps = TERSE + CALL, (2,)
    decode = client.engine.tokenizer.decode
    stop = [token for token in client.engine.tokens() if decode(token) == "Bad"]
    assert stop
    facts = check_chat(client, chat_body(200, True, stop_token_ids=stop))
    assert (facts["finish_reason"], facts["calls"][1]) == ("stop", ("f", '{"city": "'))
    whole = check_responses(client, responses_body(200, True, stop_token_ids=stop))
    assert statuses(whole) == ["completed", "incomplete"]


@pytest.mark.parametrize("ended", ["", "{", '{"city": "Bad Aib', '{"city": "Bad Aibling"'])
def test_a_response_s_call_that_the_model_left_unfinished_is_incomplete(
    client: Client, ended: str
) -> None:
    client.engine.script, client.engine.steps = CALL.partition('{"city"')[0] + ended, (2,)
    whole = check_responses(client, responses_body(200, True))
    assert [item["arguments"] for item in whole["output"]] == [ended]
    assert statuses(whole) == ["incomplete" if ended else "completed"]


def test_of_a_custom_tool_s_call_that_is_cut_the_input_is_as_far_as_it_came(client: Client) -> None:
    """Catches: the JSON around it, and in a stream both."""
    text = "rm -r /tmp/a"
    script = CALL.replace('{"city": "Bad Aibling"}', json.dumps({"input": text}))
    client.engine.script, client.engine.steps = script, (3,)
    tools = [{"type": "custom", "name": "f", "description": "d"}]
    inputs = set()
    for limit in range(1, len(client.engine.tokens())):
        for item in check_responses(client, responses_body(limit, False, tools=tools))["output"]:
            assert item["status"] == "incomplete"
            inputs.add(item["input"])
    whole = check_responses(client, responses_body(200, False, tools=tools, stop=["/tmp"]))
    assert [(item["input"], item["status"]) for item in whole["output"]] == [
        ("rm -r", "incomplete")
    ]
    assert "" in inputs and text in inputs
    assert all(text.startswith(each) for each in inputs)
