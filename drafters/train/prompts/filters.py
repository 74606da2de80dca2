"""Filters of sampled turns: a prompt must be complete, printable and not a loop."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from drafters.train.prompts.sample import Sample

COMPLETION = "complete"  # the kind of openings that begin code
_FENCE = "```"
_REPEAT_WORDS = 4
_WORD = re.compile(r"\w+|[^\w\s]")
_SPECIAL = re.compile(r"<\|[^|<>\s]{1,40}\|>")
# Zero-width joiners and the like belong to scripts and emoji; other control characters do not.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffd\ud800-\udfff\ue000-\uf8ff]")


def complete_turn(sample: Sample) -> str | None:
    """The user's turn of a sample, or None if the length limit cut it off.

    Code to complete may be cut: it keeps its whole lines, as long as the limit fell inside the
    code that the opening began. A fence that the opening began is closed.
    """
    text = sample.text.strip()
    fenced = sample.opening.count(_FENCE) % 2 == 1
    open_fence = text.count(_FENCE) % 2 == 1
    if sample.finish == "length":
        in_code = open_fence if fenced else _FENCE not in text
        if sample.kind != COMPLETION or not in_code:
            return None
        text = text.rpartition("\n")[0].rstrip()
        if len(text) <= len(sample.opening.strip()):
            return None
    return f"{text}\n{_FENCE}" if fenced and open_fence else text


def is_printable(text: str, special_tokens: Collection[str]) -> bool:
    """Whether the text has no control characters, broken characters or special tokens' names."""
    if _CONTROL.search(text) or _SPECIAL.search(text):
        return False
    return not any(token in text for token in special_tokens)


def repeated_share(text: str) -> float:
    """The share of words and signs that lie in a sequence of four that the text had before."""
    words = _WORD.findall(text.casefold())
    seen: set[tuple[str, ...]] = set()
    repeated = [False] * len(words)
    for start in range(len(words) - _REPEAT_WORDS + 1):
        run = tuple(words[start : start + _REPEAT_WORDS])
        if run in seen:
            repeated[start : start + _REPEAT_WORDS] = [True] * _REPEAT_WORDS
        seen.add(run)
    return sum(repeated) / len(words) if words else 0.0


def special_token_names(tokenizer: Any) -> list[str]:
    """The text of every special token that a tokenizer has."""
    added = tokenizer.added_tokens_decoder.values()
    return sorted(
        {*tokenizer.all_special_tokens, *(str(token) for token in added if token.special)}
    )
