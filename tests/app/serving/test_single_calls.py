"""Turns of several calls, for a chat template that takes one call a turn."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.errors import ApiError
from app.serving.single_calls import with_single_calls
from tests.app.scripted_engine import Client

JSON = dict[str, Any]
MANY = """
{%- for m in messages %}[{{ m.role }} {{ m.content or '' }}
{%- for call in m.tool_calls or () %} {{ call.function.name }}{{ call.function.arguments }}
{%- endfor %}]{% endfor %}"""
ONE = (
    """
{%- for m in messages if m.tool_calls and m.tool_calls|length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endfor %}"""
    + MANY
)
NONE = "{% for m in messages if m.tool_calls %}{{ raise_exception('no') }}{% endfor %}" + MANY
USER = {"role": "user", "content": "hi"}


def served(folder: Path, template: str) -> Client:
    file = folder / "template.jinja"
    file.write_text(template)
    client = Client(tool_call_parser="hermes", chat_template=str(file))
    client.adapter._try_template()
    return client


def call(number: int) -> JSON:
    function = {"name": "f", "arguments": f'{{"n": {number}}}'}
    return {"id": f"call_{number}", "type": "function", "function": function}


def result(number: int) -> JSON:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": f"r{number}"}


CHAT = {
    "messages": [
        USER,
        {"role": "assistant", "content": "Two.", "tool_calls": [call(1), call(2)]},
        *(result(2), result(1), USER),
    ],
    "max_tokens": 4,
}
RESPONSES = {
    "input": [
        USER,
        *(
            {
                "type": "function_call",
                "call_id": f"call_{n}",
                "name": "f",
                "arguments": f'{{"n":{n}}}',
            }
            for n in (1, 2)
        ),
        *(
            {"type": "function_call_output", "call_id": f"call_{n}", "output": f"r{n}"}
            for n in (2, 1)
        ),
    ],
    "max_output_tokens": 4,
}
MESSAGES = {
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": f"call_{n}", "name": "f", "input": {"n": n}}
                for n in (1, 2)
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": f"call_{n}", "content": f"r{n}"}
                for n in (2, 1)
            ],
        },
    ],
    "max_tokens": 4,
}


def prompt_of(client: Client, operation: str, body: JSON) -> str:
    client.engine.script = "Hi."
    asyncio.run(client.answer(operation, body))
    return client.engine.prompts[-1]


@pytest.mark.parametrize(
    ("operation", "body"), [("chat", CHAT), ("responses", RESPONSES), ("messages", MESSAGES)]
)
def test_a_turn_of_two_calls_is_rendered(tmp_path: Path, operation: str, body: JSON) -> None:
    """Catches: an answer of two calls that cannot be sent back."""
    prompt = prompt_of(served(tmp_path, ONE), operation, body)
    places = [prompt.index(part) for part in ("'n': 1", "r1", "'n': 2", "r2")]
    assert places == sorted(places), prompt
    assert prompt.count("[assistant") == 2
    assert prompt.count("Two.") == (operation == "chat")


def test_a_template_that_takes_several_calls_gets_them(tmp_path: Path) -> None:
    """Catches: turns that are split without need, which changes what the model was trained on."""
    prompt = prompt_of(served(tmp_path, MANY), "chat", CHAT)
    assert prompt.count("[assistant") == 1
    assert prompt.index("r2") < prompt.index("r1")


def test_a_template_that_takes_no_call_still_refuses_them(tmp_path: Path) -> None:
    """Catches: a template whose own error is hidden."""
    client = served(tmp_path, NONE)
    assert not client.adapter.renderer.single_calls
    with pytest.raises(ApiError) as refused:
        prompt_of(client, "chat", CHAT)
    assert refused.value.status == 400


def test_results_stay_in_their_turn() -> None:
    """Catches: a result that is lost, or that goes to a call of another turn with the same id."""
    turn = {"role": "assistant", "tool_calls": [call(1), call(2)]}
    messages = [turn, result(1), result(7), USER, result(2), turn, result(2)]
    first, second = ({**turn, "tool_calls": [call(1)]}, [call(2)])
    other = {"role": "assistant", "content": None, "tool_calls": second}
    assert with_single_calls(messages) == [
        *(first, result(1), other, result(7), USER, result(2)),
        *(first, other, result(2)),
    ]
