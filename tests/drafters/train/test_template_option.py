"""Prompts are rendered as the server renders them, in every command that renders any."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from drafters.train import train_head
from drafters.train.evaluation import evaluate_head
from drafters.train.evaluation.evaluate_options import evaluate_parser
from drafters.train.prompts.open_turn import open_turn
from drafters.train.target import FrozenTarget
from drafters.train.template_option import template_kwargs
from drafters.train.train_options import train_parser

TEMPLATE = "{{ 'think' if enable_thinking else 'say' }} {{ messages[-1].content }} </s>"


@pytest.fixture
def prompts(target: FrozenTarget, tmp_path: Path) -> Path:
    target.tokenizer.chat_template = TEMPLATE
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    return file


@pytest.mark.parametrize(
    ("options", "rendered"),
    [([], "say hi </s>"), (["--chat-template-kwargs", '{"enable_thinking": 1}'], "think hi </s>")],
)
def test_prompts_are_rendered_as_asked(
    target: FrozenTarget, prompts: Path, tmp_path: Path, options: list[str], rendered: str
) -> None:
    common = ["--target", "t", "--prompts", str(prompts), *options]
    args = train_parser(None).parse_args(
        [*common, "--out", "o", "--max-length", "120", "--response-tokens", "60"]
    )
    (trained,) = train_head._prompts(target, tmp_path, args)
    args = evaluate_parser(None).parse_args([*common, "--tokens", "20"])
    ((evaluated,),) = evaluate_head._workloads(args, target, 5, print).values()
    assert trained == evaluated
    assert target.tokenizer.decode(trained) == rendered


def test_a_user_turn_begins_as_asked(target: FrozenTarget, prompts: Path) -> None:
    assert open_turn(target.tokenizer).prefix == "say "
    kwargs = {"enable_thinking": True}
    assert open_turn(target.tokenizer, template_kwargs=kwargs).prefix == "think "


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "not JSON"), ("[1]", "JSON object"), ('{"tools": []}', "tools is no argument")],
)
def test_what_is_no_argument_of_a_template_is_refused(text: str, reason: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=reason):
        template_kwargs(text)
