"""How much of a stream is held back as the possible beginning of a stop string. No vllm import."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def held_back(text: str, stops: Iterable[str]) -> int:
    """How many characters at the end of the text may become a stop string with what follows."""
    return max((_beginning(text, stop) for stop in stops), default=0)


def _beginning(text: str, stop: str) -> int:
    """Length of the longest end of the text that the stop string begins with, itself excluded."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


def hold_back_beginnings_only(detokenizer: Any) -> None:
    """Make a detokenizer of vLLM (vllm/v1/engine/detokenizer.py) hold back only what may be the
    beginning of a stop string.

    vLLM always holds back as many characters as the longest stop string has, less one: a stream
    then runs behind, and its pieces begin and end in the middle of words.
    """
    if not getattr(detokenizer, "stop_buffer_length", 0):
        return  # no stop strings, or they are part of the output
    take = detokenizer.get_next_output_text

    def get_next_output_text(finished: bool, delta: bool) -> str:
        detokenizer.stop_buffer_length = held_back(detokenizer.output_text, detokenizer.stop)
        text: str = take(finished, delta)
        return text

    detokenizer.get_next_output_text = get_next_output_text
