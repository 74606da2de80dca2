"""Whether a model is shown tools and its calls are read, said before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from app.doctor import chat_template
from app.doctor.models import Checkpoint
from app.doctor.pair import _check_tools, check_models
from app.settings import load

SHOWS = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages }}"
HIDES = "{# no tools here #}{{ messages }}"


@pytest.mark.parametrize(
    ("template", "parser", "known", "status", "words"),
    [
        (SHOWS, "hermes", None, "ok", "read by hermes"),
        (SHOWS, None, None, "warn", "no --tool-call-parser"),
        (SHOWS, None, "openai", "warn", "no --tool-call-parser"),
        (HIDES, "hermes", None, "warn", "never shows"),
        (HIDES, None, None, "ok", "no tools"),
        ("", None, None, "warn", "no chat template"),
    ],
)
def test_tools_need_a_template_and_a_parser(
    template: str, parser: str | None, known: str | None, status: str, words: str
) -> None:
    finding = chat_template.check(template, parser, known)
    assert (finding.status, finding.check) == (status, "tools")
    assert words in finding.detail
    if known:
        assert finding.remedy == f"--tool-call-parser {known}"


def test_templates_are_read_where_models_keep_them(tmp_path: Path) -> None:
    assert chat_template.read(tmp_path) == ""
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": SHOWS}))
    assert chat_template.read(tmp_path) == SHOWS
    several = [{"name": "default", "template": HIDES}, {"name": "tool_use", "template": SHOWS}]
    config.write_text(json.dumps({"chat_template": several}))
    assert SHOWS in chat_template.read(tmp_path)
    config.write_text(json.dumps({"chat_template": [3, {"template": SHOWS}]}))
    assert chat_template.read(tmp_path) == SHOWS
    (tmp_path / "chat_template.jinja").write_text(HIDES)
    assert chat_template.read(tmp_path) == HIDES


def status(**settings: str) -> str | None:
    """What is said of tools of the embedded model."""
    findings = check_models(load({"k": "0", **settings}, {}, preset="embedded"))[0]
    return next((each.status for each in findings if each.check == "tools"), None)


def test_the_models_own_template_counts_unless_another_is_given(tmp_path: Path) -> None:
    other = tmp_path / "template.jinja"
    other.write_text(HIDES)
    assert status() == "ok"
    assert status(chat_template=str(other)) == "warn"
    assert status(chat_template=HIDES) == "warn"
    assert status(chat_template=str(tmp_path / "none")) == "FAIL"


def test_gpt_oss_needs_no_parser_to_be_named() -> None:
    """Catches: a warning that requests with tools are refused, of a model whose own parser service
    takes by default."""
    target = Checkpoint("folder", {"model_type": "gpt_oss"}, chat_template=SHOWS)
    [finding] = _check_tools(load({"k": "0", "model": "folder"}, {}), target)
    assert (finding.status, finding.detail[-6:]) == ("ok", "openai")
    [finding] = _check_tools(load({"k": "0", "model": "folder"}, {}), replace(target, config={}))
    assert finding.status == "warn"
