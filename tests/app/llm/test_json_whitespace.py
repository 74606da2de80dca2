"""A forced tool call comes to an end, whatever the model thinks of white space."""

from __future__ import annotations

import json
from typing import Any

import xgrammar

from app.llm.json_whitespace import bounded

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "json_schema"}},
    "required": ["type"],
}


def tag(**extra: Any) -> str:
    content = {"type": "json_schema", "json_schema": SCHEMA, **extra}
    called = {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}
    form = {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}, called]}
    return json.dumps({"type": "structural_tag", "format": form})


def accepts(structural_tag: str, text: str) -> bool:
    grammar = xgrammar.Grammar.from_structural_tag(structural_tag)
    tokens = xgrammar.TokenizerInfo([*map(chr, range(32, 127))])
    compiled = xgrammar.GrammarCompiler(tokens).compile_grammar(grammar)
    return bool(xgrammar.GrammarMatcher(compiled).accept_string(text))


def test_white_space_inside_a_tag_is_bounded() -> None:
    assert accepts(tag(), 'a<call>{   "type"')
    assert not accepts(bounded(tag()), 'a<call>{   "type"')
    assert accepts(bounded(tag()), 'a<call>{"type": "json_schema"}</call>')


def test_schemas_and_the_clients_own_bound_stay_as_they_are() -> None:
    made = json.loads(bounded(tag(max_whitespace_cnt=5)))
    content = made["format"]["elements"][1]["content"]
    assert content == {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 5}


def test_what_is_no_tag_is_left_to_the_check() -> None:
    assert bounded("{") == "{"
    assert json.loads(bounded("[]")) == []
