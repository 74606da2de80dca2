"""Check of tool calls: does the chat template show tools, and does a parser read the calls?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from app.doctor.report import Finding, ok, warn

CHECK = "tools"
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_TOOLS = re.compile(r"\btools\b")


def read(folder: Path) -> str:
    """The chat template in a model's folder; empty where there is none. Raises OSError and
    ValueError."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text("utf-8")
    config = folder / "tokenizer_config.json"
    found: Any = json.loads(config.read_text("utf-8")) if config.exists() else {}
    template = found.get("chat_template") if isinstance(found, dict) else None
    if isinstance(template, list):  # several by name; vLLM takes "tool_use" for tools
        named = [each for each in template if isinstance(each, dict)]
        template = "\n".join(str(each.get("template")) for each in named)
    return template if isinstance(template, str) else ""


def given(template: str) -> str:
    """The template that --chat-template names (a file) or is. Raises OSError and ValueError."""
    is_text = "{" in template or "\n" in template
    return template if is_text else Path(template).read_text("utf-8")


def check(template: str, parser: str | None, known_parser: str | None) -> Finding:
    """Check what tools need: a template that shows them, and a parser of the calls.

    `known_parser` is the parser that a preset of this model names.
    """
    if not template:
        return warn(CHECK, "the model has no chat template: chats are refused", _ANOTHER)
    shown = _TOOLS.search(_COMMENT.sub("", template)) is not None
    if shown and parser:
        return ok(CHECK, f"shown by the chat template, calls read by {parser}")
    if shown:
        remedy = f"--tool-call-parser {known_parser or 'NAME, the one of this model family'}"
        return warn(CHECK, "no --tool-call-parser: requests with tools are refused", remedy)
    if parser:
        detail = f"{parser} reads calls, but the chat template never shows the model a tool"
        return warn(CHECK, detail, _ANOTHER)
    return ok(CHECK, "none: the chat template shows the model no tools")


_ANOTHER = "--chat-template FILE with a template of this model that has `tools`"
