"""Calls of Llama's format, which are bare JSON objects: what is a call, and what is content."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser

from app.serving.parsers.deltas import calls_of
from app.serving.parsers.llama import LlamaToolParser
from tests.app.scripted_engine import Client
from tests.app.serving.streamed_answers import (
    FEW,
    JSON,
    PARAMETERS,
    STEPS,
    chat_body,
    check_chat,
    check_messages,
    check_responses,
    choices_of,
    messages_body,
    responses_body,
    statuses,
)

TAG = "<|python_tag|>"
CALL = '{"name": "f", "parameters": {"city": "Bad \\"Aib}"}}'
TYPED = '{"type": "function", "name": "g", "parameters": {"n": [1, {"a": null}]}}'
TERSE = '{"name":"g","arguments":{"city":"Ur"}}'
UNKNOWN = '{"name": "h", "parameters": {}}'
PERSON = '{"name":"Alice","age":3}'
PIECES = (
    *("Hi.", " if x < 3", "{", "<|python", "; ", ", ", "\n", " ", "München 🦆", '{"answer": 42}'),
    *(CALL, TYPED, TERSE, UNKNOWN, PERSON, TAG, TAG + UNKNOWN, '{"name": "f"', "}", '"', "\\"),
)
SCRIPTS = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)


class Request:
    """A request as far as the parser reads it."""

    tool_choice = "auto"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Answers that Llama's parser reads, with a tokenizer that has no token for its tag."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Llama3JsonToolParser, "vocab", {TAG: 1}, raising=False)
        yield Client(tool_call_parser="llama3_json")


def facts_of(client: Client, script: str, steps: list[int], **changes: Any) -> tuple[Any, Any]:
    """Content and calls of a chat's answer, the same whole and streamed."""
    client.engine.script, client.engine.steps = script, steps
    facts = check_chat(client, chat_body(400, True, **changes))
    return facts["content"], facts["calls"]


@given(script=SCRIPTS, limit=st.integers(1, 64), steps=STEPS, tools=st.booleans())
@FEW
def test_chat(client: Client, script: str, limit: int, steps: list[int], tools: bool) -> None:
    """Catches: a stream that does not add up to the whole answer."""
    client.engine.script, client.engine.steps = script, steps
    check_chat(client, chat_body(limit, tools, logprobs=True, top_logprobs=2))


@given(script=SCRIPTS, limit=st.integers(1, 64), steps=STEPS, tools=st.booleans())
@FEW
def test_responses(client: Client, script: str, limit: int, steps: list[int], tools: bool) -> None:
    """Catches: events that do not add up to the whole response."""
    client.engine.script, client.engine.steps = script, steps
    check_responses(client, responses_body(limit, tools))


@given(script=SCRIPTS, limit=st.integers(1, 64), steps=STEPS, tools=st.booleans())
@FEW
def test_messages(client: Client, script: str, limit: int, steps: list[int], tools: bool) -> None:
    """Catches: events that do not add up to the whole message."""
    client.engine.script, client.engine.steps = script, steps
    check_messages(client, messages_body(limit, tools))


@pytest.mark.parametrize("steps", [[1], [3], [400]])
@pytest.mark.parametrize(
    "script",
    [
        *('{"answer": 42}', '{"answer": 42', PERSON, UNKNOWN, f"As JSON: {PERSON}", "{}", "{", " "),
        *('{"name": "f"}', '{"name": "f", "age": 3}', '{"name": "f", "parameters": null}'),
        *('{"name": "f", "param', TAG, TAG + 'f.call(q="a")', f"```json\n{PERSON}\n```\n"),
    ],
)
def test_json_that_is_no_call_is_content(client: Client, script: str, steps: list[int]) -> None:
    """Catches: a stream without text for an answer that begins with a brace, and a call of a tool
    that does not exist."""
    assert facts_of(client, script, steps) == (script, [])


@pytest.mark.parametrize("steps", [[1], [3], [400]])
@pytest.mark.parametrize(
    ("script", "content", "calls"),
    [
        (CALL, "", [("f", '{"city": "Bad \\"Aib}"}')]),
        (TERSE, "", [("g", '{"city":"Ur"}')]),
        ("\n\n" + TYPED, "", [("g", '{"n": [1, {"a": null}]}')]),
        (f"Let me check. {TERSE}", "Let me check. ", [("g", '{"city":"Ur"}')]),
        (f"{PERSON}\n{TERSE} Done.", f"{PERSON}\n", [("g", '{"city":"Ur"}')]),
        (f"{TERSE}; {TERSE}", "", [("g", '{"city":"Ur"}')] * 2),
        (f"{TERSE}, {TERSE}\n{TERSE}", "", [("g", '{"city":"Ur"}')] * 3),
        (f"{TAG}{TERSE}", "", [("g", '{"city":"Ur"}')]),
        (f"{TAG}{UNKNOWN}", "", [("h", "{}")]),
        ('{"name": "f", "parameters": {"city": "Ba', "", [("f", '{"city": "Ba')]),
        ('{"name": "f", "parameters": {"a": "\\', "", [("f", '{"a": "\\')]),
        (TERSE.removesuffix("}") + ";" + TERSE, "", [("g", '{"city":"Ur"}')] * 2),
        (
            CALL.replace("Bad", TERSE.replace('"', '\\"')),
            "",
            [("f", '{"city": "' + TERSE.replace('"', '\\"') + ' \\"Aib}"}')],
        ),
    ],
)
def test_calls_are_found_wherever_they_are(
    client: Client, script: str, steps: list[int], content: str, calls: list[Any]
) -> None:
    """Catches: a call that is streamed as text or not at all, and text before a call that is
    lost in the whole answer."""
    assert facts_of(client, script, steps) == (content, calls)


@pytest.mark.parametrize("choice", ["required", "named"])
def test_the_start_of_a_forced_call_that_is_cut_is_no_content(client: Client, choice: str) -> None:
    """Catches: the markup of a call as text."""
    for length in range(1, CALL.index("{", 1)):
        script = CALL[:length]
        content, calls = facts_of(client, script, [1], tool_choice=choices_of(choice)[0])
        assert (content, calls) == ("", [])


def test_without_a_choice_no_call_is_read(client: Client) -> None:
    """Catches: calls where `tool_choice` is "none"."""
    assert facts_of(client, CALL, [2], tool_choice="none") == (CALL, [])


def test_a_custom_tool_is_called(client: Client) -> None:
    """Catches: calls of Responses' custom tools taken for content."""
    client.engine.script, client.engine.steps = '{"name": "f", "parameters": {"input": "ls"}}', [2]
    tools = [{"type": "custom", "name": "f", "description": "d"}]
    [item] = check_responses(client, responses_body(200, False, tools=tools))["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "f", "ls")


def test_a_response_s_cut_call_is_incomplete(client: Client) -> None:
    """Catches: a cut call that says it is completed."""
    client.engine.script, client.engine.steps = f"{TERSE}; {CALL}", [2]
    length = len(client.engine.tokens())
    whole = check_responses(client, responses_body(length - 4, True))
    assert statuses(whole) == ["completed", "incomplete"]


def test_a_delta_has_one_entry_for_each_call(client: Client) -> None:
    """Catches: name and arguments of a call as two entries, of which clients drop one."""
    client.engine.script, client.engine.steps = f"{TERSE}; {CALL}", [400]
    chunks = asyncio.run(client.events("chat", chat_body(400, True)))
    for chunk in chunks:
        calls = chunk["choices"][0]["delta"].get("tool_calls") or []
        assert len({call["index"] for call in calls}) == len(calls)


def test_content_is_sent_as_it_comes(client: Client) -> None:
    """Catches: text that is held back until the answer ends because it has braces in it."""
    parser = LlamaToolParser(client.engine.tokenizer, [])
    request, text, sent = Request(), "", ""
    for word in ["{", '"name": ', '"Al', "ice", '", "age"', ": 3}", " Hi"]:
        text += word
        delta = parser.extract_tool_calls_streaming("", text, word, (), (), (), request)
        sent += (delta.content or "") if delta else ""
        assert text.startswith(sent)
        assert len(text) - len(sent) < 10
    assert sent == text


def test_text_is_searched_once(client: Client) -> None:
    """Catches: a delta for which the whole answer is searched again: time grows as its square."""
    parser: Any = LlamaToolParser(client.engine.tokenizer, [])
    pattern, searched = parser._call_start, 0

    class Counting:
        def search(self, text: str, start: int, **options: Any) -> Any:
            nonlocal searched
            searched += len(text) - start
            return pattern.search(text, start, **options)

    parser._call_start = Counting()
    arguments = '{"a":"' + "x" * 2000 + '"}'
    script = "Hi { there. " * 200 + f'{TAG}{{"name":"f","parameters":{arguments}}}'
    deltas: list[DeltaMessage] = []
    for end in range(3, len(script) + 3, 3):
        delta = parser.extract_tool_calls_streaming("", script[:end], "", (), (), (), Request())
        deltas += [delta] if delta else []
    assert calls_of(deltas)[0].arguments == arguments
    assert searched < 3 * len(script)


def grammar(client: Client, operation: str, body: JSON, patch: pytest.MonkeyPatch) -> Any:
    """The grammar to which the answer to a body is held, if there is one."""
    sampling: list[Any] = []
    generate = client.engine.generate

    def recorded(prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        sampling.append(params)
        return generate(prompt, params, *args, **kwargs)

    with patch.context() as context:
        context.setattr(client.engine, "generate", recorded)
        client.engine.script = "Hi."
        asyncio.run(client.answer(operation, body))
    return sampling[0].structured_outputs


BODIES = {"chat": chat_body, "responses": responses_body, "messages": messages_body}


@pytest.mark.parametrize("operation", BODIES)
def test_what_may_be_text_is_held_to_no_grammar(
    client: Client, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: ordinary JSON with a name in it, such as `{"name": "Alice"}`, that the grammar of
    calls makes a call of a tool."""
    body = BODIES[operation](4, True)
    assert grammar(client, operation, body, monkeypatch) is None
    once = {**body, "parallel_tool_calls": False}
    if operation != "messages":
        assert grammar(client, operation, once, monkeypatch) is None


@pytest.mark.parametrize("operation", BODIES)
@pytest.mark.parametrize("choice", ["required", "named"])
def test_forced_calls_are_held_to_their_grammar(
    client: Client, operation: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a call that is demanded and need not come."""
    demanded = dict(zip(BODIES, choices_of(choice), strict=True))[operation]
    body = {**BODIES[operation](4, True), "tool_choice": demanded}
    assert "city" in grammar(client, operation, body, monkeypatch).structural_tag


def test_strict_tools_are_held_to_their_grammar(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: `strict: true` of a tool without effect."""
    body = chat_body(4, True)
    schema = {**PARAMETERS, "required": ["city"], "additionalProperties": False}
    body["tools"][1]["function"] |= {"strict": True, "parameters": schema}
    assert "triggers" in grammar(client, "chat", body, monkeypatch).structural_tag


def test_a_format_is_kept_beside_tools(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a `response_format` that tools which may be called put out of force."""
    body = {**chat_body(4, True), "response_format": {"type": "json_object"}}
    assert grammar(client, "chat", body, monkeypatch) is not None


def test_tags_keep_their_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: arguments that no schema holds where calls cannot be mistaken for text."""
    client = Client(tool_call_parser="hermes")
    tag = grammar(client, "chat", chat_body(4, True), monkeypatch).structural_tag
    assert "<tool_call>" in tag
