"""Prompts of requests whose model may call no tool."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.app.scripted_engine import Client
from tests.app.serving.streamed_answers import JSON, messages_body

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
