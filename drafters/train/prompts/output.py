"""Prompts as JSON lines for `aerie train`, and the user's text of such prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from drafters.train.data.examples import Example
from drafters.train.prompts.selection import SelectedPrompt


def write_prompts(file: Path, prompts: Iterable[SelectedPrompt]) -> None:
    """Write the file atomically: a reader sees the old one or the whole new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".tmp")
    with unfinished.open("w", encoding="utf-8") as stream:
        for prompt in prompts:
            messages = [{"role": "user", "content": prompt.text}]
            line = {"messages": messages, "kind": prompt.kind}
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(unfinished, file)


def user_text(example: Example) -> str:
    """The text of a prompt's user turns, or the whole of a plain prompt."""
    if example.messages is None:
        return example.prompt or ""
    return "\n".join(item["content"] for item in example.messages if item["role"] == "user")
