"""Prompts of requests whose model may call no tool."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.app.scripted_engine import Client
from tests.app.serving.streamed_answers import JSON, chat_body, messages_body, responses_body

TEMPLATE = """
{%- if tools is not none %}Respond with a call of one of {{ tools }}.{% endif %}
{%- for message in messages %}{{ message.content }}{% endfor %}"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Client:
    """A model whose template asks for calls as Llama's does: also for an empty list of tools."""
    return Client(tool_call_parser="hermes", chat_template=template(tmp_path_factory))


def template(folders: pytest.TempPathFactory) -> str:
    path: Path = folders.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def prompt_of(client: Client, operation: str, body: JSON) -> str:
    client.engine.script = "Hi."
    asyncio.run(client.answer(operation, body))
    return client.engine.prompts[-1]


def count_of(client: Client, body: JSON) -> int:
    body = {name: value for name, value in body.items() if name != "max_tokens"}
    count: int = asyncio.run(client.answer("count_tokens", body))["input_tokens"]
    return count


def test_an_empty_list_of_anthropics_tools_is_none(client: Client) -> None:
    """Catches: a prompt that asks for a call where the request has no tools."""
    plain = messages_body(4, False)
    empty = {**plain, "tools": []}
    assert prompt_of(client, "messages", empty) == prompt_of(client, "messages", plain) == "hi"
    assert count_of(client, empty) == count_of(client, plain)
    assert "Respond" in prompt_of(client, "messages", messages_body(4, True))


BODIES = {
    "chat": (chat_body, "none"),
    "responses": (responses_body, "none"),
    "messages": (messages_body, {"type": "none"}),
}


@pytest.mark.parametrize("operation", BODIES)
def test_tools_that_may_not_be_called_are_not_named(client: Client, operation: str) -> None:
    """Catches: a model that is asked for calls, and writes one as the text of its answer."""
    body, choice = BODIES[operation]
    assert prompt_of(client, operation, {**body(4, True), "tool_choice": choice}) == "hi"
    assert "Respond" in prompt_of(client, operation, body(4, True))


@pytest.mark.parametrize("parser", ["hermes", None])
def test_tools_are_counted_unless_they_may_not_be_called(
    tmp_path_factory: pytest.TempPathFactory, parser: str | None
) -> None:
    """Catches: a count that is not that of the prompt, also where nobody reads calls."""
    client = Client(tool_call_parser=parser, chat_template=template(tmp_path_factory))
    plain, tools = messages_body(4, False), messages_body(4, True)
    many = count_of(client, tools)
    assert many > count_of(client, plain) + 20
    assert count_of(client, {**tools, "tool_choice": {"type": "any"}}) == many
    assert count_of(client, {**tools, "tool_choice": {"type": "none"}}) == count_of(client, plain)
