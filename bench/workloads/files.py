"""Read published data sets, in the formats of their publication, from files that you have.

HumanEval: `HumanEval.jsonl` or `.jsonl.gz`, a `prompt` of code in each line.
MT-Bench: `question.jsonl`, `turns` in each line; the first turn is asked.
SPEED-Bench: `<subset>.jsonl`, `messages` in each line; the first user turn is asked.
Any other file of JSON lines with `prompt` or `messages` works too, and may have further fields of
the request in `extra_body`, such as a `response_format`. None of these sets is in this
repository, and SPEED-Bench's licence forbids redistributing its prompts.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.workloads.prompt import Prompt


class MalformedFile(ValueError):
    """A file is in none of the formats; the text says where and why."""


def read_file(file: Path, *, chat: bool = False) -> list[Prompt]:
    """All prompts of a file; `chat` sends plain prompts as a user's message.

    That changes acceptance: GPT-OSS-20B has a length of 3.65 with its chat template, and of 1.99 on
    the same text without it. Raises MalformedFile.
    """
    prompts = []
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompts.append(_prompt(row, chat))
        except ValueError as error:
            raise MalformedFile(f"{file}:{number}: {error}") from None
    if not prompts:
        raise MalformedFile(f"{file}: no prompts")
    return prompts


def _lines(file: Path) -> Iterator[str]:
    try:
        data = file.read_bytes()
        data = gzip.decompress(data) if file.suffix == ".gz" else data
        # Not splitlines(): the text of a line may hold U+2028 and other ends of lines as they are.
        yield from data.decode("utf-8").split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise MalformedFile(f"{file}: {error}") from None


def _prompt(row: Any, chat: bool) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError("not an object")
    extra_body = row.get("extra_body", {})
    if not isinstance(extra_body, dict):
        raise ValueError("extra_body is not an object")
    if isinstance(messages := row.get("messages"), list):
        return Prompt(messages=tuple(_until_answer(messages)), extra_body=extra_body)
    turns = row.get("turns")
    text = row.get("prompt")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        text, chat = turns[0], True
    if isinstance(text, str) and text:
        if chat:
            asked = ({"role": "user", "content": text},)
            return Prompt(messages=asked, extra_body=extra_body)
        return Prompt(text=text, extra_body=extra_body)
    raise ValueError(f"none of prompt, turns, messages, but {', '.join(sorted(row)) or 'nothing'}")


def _until_answer(messages: list[Any]) -> Iterator[dict[str, str]]:
    """System messages and the first user turn; later turns would need the answers before them."""
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError("a message needs a content of text")
        role = message.get("role", "user")
        if role not in ("system", "developer", "user"):
            raise ValueError(f"the first turn is of role {role!r}")
        yield {"role": role, "content": message["content"]}
        if role == "user":
            return
    raise ValueError("messages without a user's turn")
