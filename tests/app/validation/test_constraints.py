"""Schemas of requests, in every API: refused where the model would not be held to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string as accepts_text

from app.llm.async_llm import GatewayLLM
from app.validation.constraints import relax
from tests.app.serving.test_dialects import PATHS, STREAMING, TOOL_ANSWER, WITH_TOOLS, refusal, send
from tests.app.validation.schema_holders import HOLDERS, form, tag

Gateway = Callable[..., TestClient]
LOOSE = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 7}}}
KEYWORD = "properties.n.multipleOf"
JSON_SCHEMA = "response_format.json_schema"
FIRST_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": LOOSE, "end": "</a>"}],
    "triggers": ["<a>"],
}
FORMATS: list[tuple[str, dict[str, Any], str]] = [
    *((dialect, holder(LOOSE), place) for dialect, holder, place in HOLDERS),
    ("chat", {"response_format": tag(LOOSE)}, "response_format.format.json_schema"),
    ("chat", {"response_format": FIRST_TAG}, "response_format.structures[0].schema"),
    ("chat", {"structured_outputs": {"json": LOOSE}}, "structured_outputs.json"),
]


def tools(dialect: str, schema: Any, **more: Any) -> list[dict[str, Any]]:
    """One tool of the dialect; without a schema where there is none."""
    if dialect == "messages":
        return [{"name": "f", "input_schema": schema or {}, **more}]
    function = {"name": "f", **more} | ({} if schema is None else {"parameters": schema})
    if dialect == "responses":
        return [{"type": "function", **function}]
    return [{"type": "function", "function": function}]


FORCED: dict[str, Any] = {
    "chat": "required",
    "responses": "required",
    "messages": {"type": "any"},
}


@STREAMING
@pytest.mark.parametrize(("dialect", "fields", "place"), FORMATS)
def test_a_format_that_is_not_enforced_is_refused(
    gateway: Gateway, dialect: str, fields: dict[str, Any], place: str, streaming: bool
) -> None:
    message, param = refusal(send(gateway(), dialect, streaming, **fields), dialect)
    assert f"'{place}.{KEYWORD}'" in message
    assert param in (f"{place}.{KEYWORD}", None)


NAMED: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    *(
        (dialect, lambda held: {"response_format": form(json_schema=held)}, JSON_SCHEMA)
        for dialect in ("chat", "completions")
    ),
    ("responses", lambda held: {"text": {"format": form(**held)}}, "text.format"),
]
INCOMPLETE: list[tuple[dict[str, Any], str]] = [
    ({"name": "x"}, "schema"),
    ({"name": "x", "schema": None}, "schema"),
    ({"name": "x", "schema": 5}, "schema"),
    ({"name": "x", "schema": "{}"}, "schema"),
    ({"schema": {}}, "name"),
    ({"name": 5, "schema": {}}, "name"),
]


LACKING = [
    (dialect, format_of(held), f"{place}.{wrong}")
    for dialect, format_of, place in NAMED
    for held, wrong in INCOMPLETE
]
# Whose formats have no name, and no other type.
LACKING += [
    ("messages", {"output_config": {"format": {**form, **held}}}, "output_config.format.schema")
    for form in ({}, {"type": "json_schema"})
    for held in ({}, {"schema": None}, {"schema": 5}, {"schema": "{}"})
]


@pytest.mark.parametrize(("dialect", "fields", "place"), LACKING, ids=str)
def test_a_format_without_its_schema_is_refused_by_its_place(
    gateway: Gateway, dialect: str, fields: dict[str, Any], place: str
) -> None:
    message, param = refusal(send(gateway(), dialect, **fields), dialect)
    assert f"'{place}'" in message
    assert param in (place, None)
    assert "structured_outputs" not in message


@pytest.mark.parametrize("dialect", ["chat", "completions"])
@pytest.mark.parametrize("held", [{}, {"json_schema": 5}], ids=str)
def test_a_format_that_holds_nothing_is_refused_by_its_place(
    gateway: Gateway, dialect: str, held: dict[str, Any]
) -> None:
    _, param = refusal(send(gateway(), dialect, response_format=form(**held)), dialect)
    assert param == JSON_SCHEMA


FORM = form(json_schema={"name": "x", "schema": {}})
BESIDE: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat", {"response_format": FORM}, "response_format"),
    ("completions", {"response_format": FORM}, "response_format"),
    ("responses", {"text": {"format": {"type": "json_object"}}}, "text.format"),
]


@pytest.mark.parametrize(("dialect", "wanted", "place"), BESIDE)
@pytest.mark.parametrize("other", [{"regex": "a"}, {"json": {}}], ids=str)
def test_two_constraints_are_refused(
    gateway: Gateway, dialect: str, wanted: dict[str, Any], place: str, other: dict[str, Any]
) -> None:
    """With two schemas vLLM would take one of them, without a word."""
    response = send(gateway(), dialect, **wanted, structured_outputs=other)
    message, param = refusal(response, dialect)
    assert param == "structured_outputs"
    assert f"'{place}'" in message


def test_a_format_of_plain_text_is_no_constraint(gateway: Gateway) -> None:
    fields = {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}
    assert send(gateway(), "chat", **fields).is_success


@WITH_TOOLS
def test_a_strict_tool_that_is_not_enforced_is_refused(gateway: Gateway, dialect: str) -> None:
    client = gateway(tool_call_parser="hermes")
    message, _ = refusal(send(client, dialect, tools=tools(dialect, LOOSE, strict=True)), dialect)
    assert KEYWORD in message
    assert "tools[0]" in message


@WITH_TOOLS
def test_any_other_tool_is_held_to_what_can_be_enforced(gateway: Gateway, dialect: str) -> None:
    """Tools of other people's servers have schemas of every kind."""
    schema = {**LOOSE, "required": ["n"], "not": {"required": ["m"]}}
    accepts = arguments_of(gateway, dialect, schema)
    assert accepts('{"n": 8}')
    assert not accepts('{"n": "8"}')
    assert not accepts("{}")


@WITH_TOOLS
def test_tools_without_parameters_take_an_empty_object(gateway: Gateway, dialect: str) -> None:
    accepts = arguments_of(gateway, dialect, None)
    assert accepts("{}")
    for other in ("5", '"text"', "[]", "null", '{"n": 1}'):
        assert not accepts(other), other


def arguments_of(gateway: Gateway, dialect: str, schema: Any) -> Callable[[str], bool]:
    """Whether the engine's grammar takes a text for a forced call's arguments."""
    client = gateway(tool_call_parser="hermes", answer=TOOL_ANSWER)
    response = send(client, dialect, tools=tools(dialect, schema), tool_choice=FORCED[dialect])
    assert response.status_code == 200, response.text
    constraint = client.app.state.engine.llm.sampling.structured_outputs  # type: ignore[attr-defined]
    relax(constraint)
    grammar = Grammar.from_structural_tag(constraint.structural_tag)

    def accepts(arguments: str) -> bool:
        call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        return bool(accepts_text(grammar, call))

    return accepts


def test_who_wants_no_more_than_a_hint_gets_what_can_be_enforced(gateway: Gateway) -> None:
    client = gateway()
    schema = {"name": "x", "strict": False, "schema": {**LOOSE, "required": ["n"]}}
    assert send(client, "chat", response_format=form(json_schema=schema)).status_code == 200
    constraint = client.app.state.engine.llm.sampling.structured_outputs  # type: ignore[attr-defined]
    relax(constraint)
    grammar = Grammar.from_json_schema(constraint.json)
    assert accepts_text(grammar, '{"n": 8}')
    assert not accepts_text(grammar, '{"n": "8"}')


def test_the_engine_is_given_schemas_in_their_enforceable_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[SamplingParams] = []

    async def outputs() -> Any:
        return
        yield

    def generate(self: Any, prompt: Any, params: SamplingParams, *_: Any, **__: Any) -> Any:
        given.append(params)
        return outputs()

    monkeypatch.setattr(AsyncLLM, "generate", generate)
    llm = object.__new__(GatewayLLM)
    bounded = SimpleNamespace(disable_any_whitespace=True)
    llm.vllm_config = SimpleNamespace(structured_outputs_config=bounded)  # type: ignore[assignment]
    for constraint in (
        StructuredOutputsParams(json={"minimum": 3}),
        StructuredOutputsParams(json='{"minimum": 3}'),
        StructuredOutputsParams(
            structural_tag='{"format": {"type": "json_schema", "json_schema": {"minimum": 3}}}'
        ),
    ):
        llm.generate("hi", SamplingParams(structured_outputs=constraint), "r")
    meant = {"minimum": 3, "type": "number"}
    first, second, third = (params.structured_outputs for params in given)
    assert first is not None and json.loads(str(first.json)) == meant
    assert second is not None and json.loads(str(second.json)) == meant
    assert third is not None
    assert json.loads(third.structural_tag or "")["format"]["json_schema"] == meant


@pytest.mark.parametrize("dialect", sorted(PATHS))
def test_what_is_no_schema_is_left_to_the_checks_that_say_so(
    gateway: Gateway, dialect: str
) -> None:
    for value in (5, "x", [], {"format": 5}, {"type": "json_schema", "json_schema": 5}):
        for field in ("response_format", "text", "output_config", "structured_outputs", "tools"):
            response = send(gateway(), dialect, **{field: value})
            assert response.status_code in (200, 400), response.text
