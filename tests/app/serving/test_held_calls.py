"""Calls that no grammar holds are refused where a request demands one, and named in the docs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from vllm.tool_parsers import ToolParserManager
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts_text

from app.declaration.held_calls import CallGrammar
from app.errors import ApiError
from app.serving.parsers import call_grammar as module
from app.serving.parsers.call_grammar import call_grammar
from app.validation.constraints import relax
from tests.app.serving.test_dialects import (
    CHOICES,
    SCHEMA,
    TOOL_ANSWER,
    TOOLS,
    WITH_TOOLS,
    refusal,
    send,
)

Gateway = Callable[..., TestClient]
PAGE = Path(__file__).resolve().parents[3] / "docs/structured-output.md"
JSON = {"type": "json_object"}
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "chat": ({"response_format": JSON}, "response_format"),
    "responses": ({"text": {"format": JSON}}, "text.format"),
    "messages": (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.format",
    ),
}


@WITH_TOOLS
@pytest.mark.parametrize("parser", ["gemma4", "pythonic", "hermes"])
def test_a_call_is_forced_or_refused(gateway: Gateway, dialect: str, parser: str) -> None:
    """Catches: a 200 without the call, with a parser that can force none."""
    client = gateway(tool_call_parser=parser)
    for choice in CHOICES[dialect]:
        given = {"tools": TOOLS[dialect], "tool_choice": choice}
        if parser == "gemma4" and choice in CHOICES[dialect][2:]:
            message, param = refusal(send(client, dialect, **given), dialect)
            assert "'tool_choice'" in message and "'gemma4'" in message
            assert param in ("tool_choice", None)
        else:
            assert send(client, dialect, **given).is_success


@WITH_TOOLS
@pytest.mark.parametrize("parser", ["gemma4", "pythonic", "hermes"])
def test_a_format_leaves_calls_possible_or_is_refused(
    gateway: Gateway, dialect: str, parser: str
) -> None:
    """Catches: tools that no answer can call, since all of it is held to the format."""
    client = gateway(tool_call_parser=parser)
    fields, place = FORMATS[dialect]
    response = send(client, dialect, tools=TOOLS[dialect], **fields)
    if parser == "hermes":
        assert response.is_success, response.text
    else:
        message, param = refusal(response, dialect)
        assert f"'{place}'" in message and f"'{parser}'" in message
        assert param in (place, None)
    none = {"type": "none"} if dialect == "messages" else "none"
    assert send(client, dialect, tools=TOOLS[dialect], tool_choice=none, **fields).is_success
    assert send(client, dialect, **fields).is_success


@WITH_TOOLS
def test_a_strict_tool_leaves_calls_possible_beside_a_format_at_every_level(
    gateway: Gateway, dialect: str
) -> None:
    """Catches: with --tool-strict-level auto, tools that no answer can call."""
    fields, place = FORMATS[dialect]
    strict = strict_tools(dialect)
    for level in ("auto", "function", "parameter"):
        client = gateway(tool_call_parser="hermes", tool_strict_level=level)
        given = {"tools": TOOLS[dialect], **fields}
        if level == "auto":
            message, param = refusal(send(client, dialect, **given), dialect)
            assert f"'{place}'" in message and "--tool-strict-level" in message
            assert param in (place, None)
        else:
            assert calls_fit(client, dialect, given)
        assert calls_fit(client, dialect, {**given, "tools": strict})
        none = {"type": "none"} if dialect == "messages" else "none"
        assert send(client, dialect, **given, tool_choice=none).is_success
        assert send(client, dialect, tools=TOOLS[dialect]).is_success


@WITH_TOOLS
def test_calls_are_possible_beside_a_format_that_xgrammar_does_not_take_as_it_was_sent(
    gateway: Gateway, dialect: str
) -> None:
    """Catches: calls that are left out of the grammar for a length beside a format of text."""
    email = {"type": "string", "format": "email", "maxLength": 99}
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "email": email}}
    held = {"name": "x", "schema": schema}
    fields: dict[str, dict[str, Any]] = {
        "chat": {"response_format": {"type": "json_schema", "json_schema": held}},
        "responses": {"text": {"format": {"type": "json_schema", **held}}},
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }
    client = gateway(tool_call_parser="hermes")
    assert calls_fit(client, dialect, {"tools": TOOLS[dialect], **fields[dialect]})


def strict_tools(dialect: str) -> list[dict[str, Any]]:
    (tool,) = TOOLS[dialect]
    if dialect == "chat":
        return [{**tool, "function": {**tool["function"], "strict": True}}]
    return [{**tool, "strict": True}]


def calls_fit(client: TestClient, dialect: str, given: dict[str, Any]) -> bool:
    """Whether the engine's grammar takes a call, and JSON, for the answer to a request."""
    response = send(client, dialect, **given)
    assert response.status_code == 200, response.text
    constraint = client.app.state.engine.llm.sampling.structured_outputs  # type: ignore[attr-defined]
    relax(constraint)
    if constraint.structural_tag is None:
        return False
    grammar = Grammar.from_structural_tag(constraint.structural_tag)
    return all(accepts_text(grammar, text) for text in (TOOL_ANSWER, '{"n": 7}'))


def test_strict_tools_are_taken_with_every_parser(gateway: Gateway) -> None:
    """SDKs send `strict` by default."""
    tools = [{**TOOLS["responses"][0], "strict": True}]
    assert send(gateway(tool_call_parser="gemma4"), "responses", tools=tools).is_success


@pytest.mark.parametrize(
    ("constraint", "refused"),
    [
        ({"json": SCHEMA}, True),
        ({"choice": ["a", "b"]}, True),
        ({"grammar": 'root ::= "call"'}, False),
        ({"structural_tag": "{}"}, False),
    ],
)
def test_a_grammar_of_the_client_may_have_calls(constraint: Any, refused: bool) -> None:
    grammar = CallGrammar("p", beside_formats=False)
    payload = {"tools": TOOLS["chat"], "structured_outputs": constraint}
    if not refused:
        grammar.check(payload, is_response=False)
        return
    with pytest.raises(ApiError) as caught:
        grammar.check(payload, is_response=False)
    assert caught.value.param == "structured_outputs"


def test_mistrals_grammar_is_for_chats_with_its_own_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parser = ToolParserManager.get_tool_parser("mistral")
    forced = {"tools": TOOLS["chat"], "tool_choice": "required"}
    formatted = {"tools": TOOLS["chat"], "response_format": JSON}
    plain = call_grammar("mistral", parser, object(), "auto")
    monkeypatch.setattr(module, "is_mistral_tokenizer", lambda tokenizer: True)
    own = call_grammar("mistral", parser, SimpleNamespace(supports_grammar=True), "auto")
    old = call_grammar("mistral", parser, SimpleNamespace(supports_grammar=False), "auto")
    own.check(formatted, is_response=False)
    for grammar in (plain, own, old):
        grammar.check(forced, is_response=False)
        for payload in (forced, formatted):
            with pytest.raises(ApiError):
                grammar.check(payload, is_response=True)
    for grammar in (plain, old):
        with pytest.raises(ApiError):
            grammar.check(formatted, is_response=False)


def test_the_page_names_the_parsers_that_do_not_hold_calls() -> None:
    rows: dict[str, set[str]] = {"yes": set(), "no": set()}
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] in rows:
            rows[cells[1]] |= {name.strip(" `") for name in cells[0].split(",")}
    found: dict[str, set[str]] = {"yes": set(), "no": set()}
    for name in ToolParserManager.list_registered():
        grammar = call_grammar(name, ToolParserManager.get_tool_parser(name), None, "parameter")
        if not (grammar.beside_formats and grammar.forces) and grammar.in_responses:
            found["yes" if grammar.forces else "no"].add(name)
    cohere = {"cohere_command3", "cohere_command4"}  # the page says what they do hold
    assert rows["yes"] == found["yes"] - {"hf"}, "vLLM itself refuses what that one cannot hold"
    assert rows["no"] == found["no"] - cohere
